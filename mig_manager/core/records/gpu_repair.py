"""Repairs of GPUs by a reset: which may begin, which wait, and how each ended.

A repair is a request of the agent itself, with the right to evict that the owner gives it
(``--repair reset``). It is kept in the record of the node's request. So a restart neither forgets
a repair under way nor shortens the pause after it.

Only ``GPU_RESET`` is repaired, and a GPU that answers ``NVML_ERROR_RESET_REQUIRED``: the driver
runs no new work before the reset (``nvml.h``). ``DRAIN_AND_RESET`` is not, because running
processes are not affected. GPUs with NVLink are reset alone since Ampere, the first architecture
with MIG. On an NVSwitch system of Ampere this takes Fabric Manager; else ``nvidia-smi`` refuses
and names the others (``nvidia-smi(1)``, ``--gpu-reset``).
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from mig_manager.core import messages, model, timing
from mig_manager.core.files import json_text
from mig_manager.core.objects import node_object, pod_object, well_known

_PAUSES = timing.Backoff(first_s=900.0, max_s=86400.0, factor=4.0)
_FORGET_AFTER_S = 86400.0
"""After the pause: a GPU without a fault for so long starts with the shortest pause again."""
_STANDARD_TAINT = "nvidia.com/gpu"
_OF_KUBERNETES = "node.kubernetes.io/"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuRepairs:
    """The repairs of one GPU."""

    gpu: str  # its UUID
    count: int
    next_s: float  # Unix time before which no other begins
    is_open: bool = False  # whether one is under way
    problem: str = ""  # why the last counted one failed; empty: it did not

    def to_data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "gpu": self.gpu,
            "attempts": self.count,
            "next": int(self.next_s),
            "open": self.is_open,
            "problem": self.problem,
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> "GpuRepairs":
        """Parse plain data; see ``json_text.decoding`` for its exceptions."""
        return GpuRepairs(
            gpu=json_text.string(data, "gpu"),
            count=int(data["attempts"]),
            next_s=float(int(data["next"])),
            is_open=data["open"] is True,
            problem=json_text.string(data, "problem"),
        )


Repairs = tuple[GpuRepairs, ...]


def open_gpus(repairs: Repairs) -> frozenset[str]:
    """Return the UUIDs of the GPUs under repair."""
    return frozenset(each.gpu for each in repairs if each.is_open)


def begin(repairs: Repairs, uuids: Iterable[str], now_s: float) -> Repairs:
    """Begin the repair of GPUs; forget repairs that are long past."""
    by_gpu = {each.gpu: each for each in repairs if now_s - each.next_s < _FORGET_AFTER_S}
    for uuid in uuids:
        last = by_gpu.get(uuid) or GpuRepairs(gpu=uuid, count=0, next_s=now_s)
        next_s = now_s + _PAUSES.delay_s(last.count)
        by_gpu[uuid] = dataclasses.replace(last, count=last.count + 1, next_s=next_s, is_open=True)
    return tuple(by_gpu.values())


def postpone(repairs: Repairs, now_s: float) -> Repairs:
    """End the repairs under way uncounted: they have not failed, and others may begin at once."""
    return tuple(
        dataclasses.replace(each, is_open=False, count=each.count - 1, next_s=now_s)
        if each.is_open
        else each
        for each in repairs
    )


def end(repairs: Repairs, problem: Callable[[str], str] = lambda _uuid: "") -> Repairs:
    """End the repairs under way; ``problem`` returns why a GPU's repair failed."""
    return tuple(
        dataclasses.replace(each, is_open=False, problem=problem(each.gpu))
        if each.is_open
        else each
        for each in repairs
    )


def is_possible(gpu: model.Gpu) -> bool:
    """Return whether a reset ends the fault of a GPU, and is possible."""
    return gpu.recovers_by_reset and not why_impossible(gpu)


def why_impossible(gpu: model.Gpu) -> str:
    """Return why a GPU cannot be reset, or not alone, as part of a sentence; empty if it can."""
    if gpu.virtualization is not model.Virtualization.NONE:
        return "a GPU that is shared with or passed through to virtual machines"
    if gpu.architecture is model.Architecture.OTHER:
        return "whether GPUs of this product can be reset alone is not known"
    return ""


def why_paused(gpu: model.Gpu, repairs: Repairs, clock: timing.Clock) -> str:
    """Return why no repair may begin yet; empty if one may.

    A time further away than the longest pause is from a clock that was wrong, and counts as past.
    """
    last = next((each for each in repairs if each.gpu == gpu.uuid), None)
    now_s = clock.unix_s()
    if last is None or not 0 < last.next_s - now_s <= _PAUSES.max_s:
        return ""
    until = clock.now_iso(after_s=last.next_s - now_s)
    result = f"failed: {last.problem}" if last.problem else "has ended"
    return f"repair {last.count} {result}; another begins at {until} at the earliest"


def why_cordoned(view: node_object.NodeView) -> str:
    """Return that the node is cordoned, as part of a sentence; empty: it is not."""
    return "the node is cordoned" if view.is_unschedulable else ""


def why_left_to_others(
    view: node_object.NodeView,
    pods: Collection[pod_object.Pod],
    own_taints: Collection[str],
    tainted_devices: Collection[str],
) -> str:
    """Return which other program takes care of the node, as part of a sentence; empty: none.

    A taint that a GPU pod names and tolerates says where the node belongs, and is no sign of a
    repair. Kubernetes' own taints never say that.
    """
    if why := why_cordoned(view):
        return why
    tolerated = {
        key
        for pod in pods
        if pod.gpu_resources or pod.may_claim
        for key in pod.tolerated
        if not key.startswith(_OF_KUBERNETES)
    }
    expected_taints = {well_known.RECONFIGURING_TAINT, _STANDARD_TAINT, *own_taints, *tolerated}
    if foreign := sorted(view.closing_taints - expected_taints):
        return f"the node has a taint of another program: {messages.list_names(foreign)}"
    if tainted_devices:
        return (
            f"the DRA driver has tainted devices: {messages.list_names(sorted(tainted_devices))}"
        )
    return ""
