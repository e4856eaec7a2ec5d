"""What a survey of the GPUs returns, and the capture of it, which identifies no machine.

A capture keeps what is the same for every GPU of a product and driver. UUIDs, PCI addresses and
process ids stay out: GPUs are numbered in their order, and rules about UUIDs are true or false.
"""

import dataclasses
import enum
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mig_manager.core import model
from mig_manager.core.acceptance import meanings

if TYPE_CHECKING:
    from mig_manager.core.answers import captures

SUCCESS = "SUCCESS"
_GPU_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MIG_UUID = re.compile(_GPU_UUID.pattern.replace("GPU", "MIG"))
_UUID_LIKE = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
_CHANGES = "changes the GPU"
_NEEDS_INSTANCE = "needs a GPU instance"
_NEEDS_DEVICE = "needs a MIG device"
NOT_CALLED: Mapping[str, str] = {
    "nvmlComputeInstanceDestroy": _CHANGES,
    "nvmlComputeInstanceGetInfo_v2": _NEEDS_DEVICE,
    "nvmlDeviceCreateGpuInstance": _CHANGES,
    "nvmlDeviceCreateGpuInstanceWithPlacement": _CHANGES,
    "nvmlDeviceSetMigMode": _CHANGES,
    "nvmlGpuInstanceCreateComputeInstance": _CHANGES,
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement": _CHANGES,
    "nvmlGpuInstanceDestroy": _CHANGES,
    "nvmlGpuInstanceGetComputeInstanceById": _NEEDS_DEVICE,
    "nvmlGpuInstanceGetComputeInstancePossiblePlacements": _NEEDS_INSTANCE,
    "nvmlGpuInstanceGetComputeInstanceProfileInfo": _NEEDS_INSTANCE,
    "nvmlGpuInstanceGetComputeInstances": _NEEDS_INSTANCE,
    "nvmlGpuInstanceGetInfo": _NEEDS_INSTANCE,
    "nvmlSystemGetProcessName": "needs a process that uses a GPU",
}
"""Why a survey may not call a function that the adapter uses."""
_MAX_LETTERS = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE


class SurveyedCall(NamedTuple):
    """A call of an NVML function."""

    function: str
    answer: str  # ``SUCCESS``, or an error without its prefix ``NVML_ERROR_``
    seconds: float


class Probe(NamedTuple):
    """A call with an unusual argument, whose answer the adapter relies on."""

    call: str
    answer: str
    is_handled: bool  # whether the adapter expects this answer, among others


class Fabric(enum.Enum):
    """How far a GPU has registered with the NVSwitch fabric (``nvmlGpuFabricState_t``)."""

    NONE = "none"
    NOT_STARTED = "not-started"
    IN_PROGRESS = "in-progress"
    COMPLETED = "completed"
    FAILED = "failed"  # completed with an error, or a state that is unknown here


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFacts:
    """Facts of a GPU-instance profile that ``model.GpuInstanceProfile`` leaves out."""

    slices: int
    copy_engines: int
    compute: (
        tuple[tuple[model.ComputeInstanceProfile, tuple[model.Placement, ...] | None], ...] | None
    ) = None
    """Compute-instance profiles with their placements; None: no GPU instance lists them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedGpu:
    """One GPU."""

    gpu: model.Gpu | model.UnreachableGpu
    earlier_uuid: str = ""  # in the session before
    is_found_by_address: bool = False
    fabric: Fabric = Fabric.NONE
    facts: Mapping[int, ProfileFacts] = dataclasses.field(default_factory=dict)  # by enum index
    mig_devices: tuple[tuple[int, int], ...] = ()
    """Ids of GPU instance and compute instance, in the driver's order."""
    probes: tuple[Probe, ...] = ()
    calls: tuple[SurveyedCall, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All GPUs of a machine."""

    driver_version: str
    nvml_version: str
    gpus: tuple[SurveyedGpu, ...]
    calls: tuple[SurveyedCall, ...]  # that concern no GPU

    def latencies(self, later: Iterable[SurveyedCall] = ()) -> "list[captures.Latency]":
        """Return the time of each function, also of later calls; of successful ones if any."""
        by_function: dict[str, list[SurveyedCall]] = {}
        every = (*self.calls, *(call for gpu in self.gpus for call in gpu.calls))
        for call in (*every, *later):
            by_function.setdefault(call.function, []).append(call)
        rows: list[captures.Latency] = []
        for function, calls in sorted(by_function.items()):
            good = [call.seconds for call in calls if call.answer == SUCCESS]
            seconds = good or [call.seconds for call in calls]
            rows.append(
                {
                    "function": function,
                    "calls": len(calls),
                    "median_ms": round(statistics.median(seconds) * 1000, 3),
                    "longest_ms": round(max(seconds) * 1000, 3),
                }
            )
        return rows


def capture(survey: Survey) -> "list[captures.CapturedGpu]":
    """Return the GPUs as plain data that identify no machine."""
    uuids = [each.gpu.uuid for each in survey.gpus]
    return [_capture_gpu(each, uuids) for each in survey.gpus]


def answers_of(calls: Iterable[SurveyedCall]) -> dict[str, list[str]]:
    """Return the different answers of each function."""
    by_function: dict[str, set[str]] = {}
    for call in calls:
        by_function.setdefault(call.function, set()).add(call.answer)
    return {function: sorted(each) for function, each in sorted(by_function.items())}


def plain(text: str) -> str:
    """Return a name from the driver without what could identify a machine."""
    return _UUID_LIKE.sub("[removed]", text)[:_MAX_LETTERS]


def _capture_unreachable(
    gpu: model.UnreachableGpu, functions: dict[str, list[str]]
) -> "captures.CapturedGpu":
    return {
        "name": plain(gpu.name),
        "unreachable": gpu.reason.value,
        "architecture": model.Architecture.OTHER.value,
        "pci_device_id": f"0x{gpu.pci_device_id or 0:08X}",
        "memory_mib": 0,
        "mig_mode": None,
        "pending_mig_mode": None,
        "mode_change_needs_reset": False,
        "virtualization": model.Virtualization.NONE.value,
        "fabric": None,
        "profiles": None,
        "instances": [],
        "rules": {},
        "answers": [],
        "functions": functions,
    }


def _capture_gpu(each: SurveyedGpu, uuids: Sequence[str]) -> "captures.CapturedGpu":
    gpu = each.gpu
    if isinstance(gpu, model.UnreachableGpu):
        return _capture_unreachable(gpu, answers_of(each.calls))
    return {
        "name": plain(gpu.name),
        "unreachable": None,
        "architecture": gpu.architecture.value,
        "pci_device_id": f"0x{gpu.pci_device_id:08X}",
        "memory_mib": gpu.memory_mib,
        "mig_mode": gpu.current_mode.value if gpu.current_mode else None,
        "pending_mig_mode": gpu.pending_mode.value if gpu.pending_mode else None,
        "mode_change_needs_reset": gpu.mode_change_needs_reset,
        "virtualization": gpu.virtualization.value,
        "fabric": None
        if each.fabric is Fabric.NONE
        else {"state": each.fabric.value, "consequence": meanings.FABRIC[each.fabric.value]},
        "profiles": None
        if gpu.profiles is None
        else [_profile(row, each.facts[row.enum_index]) for row in gpu.profiles],
        "instances": [
            {
                "profile": str(gi.profile),
                "id": gi.instance_id,
                "placement": str(gi.placement),
                "compute_instances": [
                    {"profile": str(ci.profile), "id": ci.instance_id}
                    for ci in gi.compute_instances
                ],
            }
            for gi in gpu.gpu_instances
        ],
        "rules": _rules(each, gpu, uuids),
        "answers": [
            {"call": probe.call, "answer": probe.answer, "is_handled": probe.is_handled}
            for probe in each.probes
        ],
        "functions": answers_of(each.calls),
    }


def _profile(row: model.GpuInstanceProfile, facts: ProfileFacts) -> "captures.CapturedProfile":
    return {
        "name": str(row.profile),
        "enum": row.enum_index,
        "id": row.profile_id,
        "slices": facts.slices,
        "memory_mib": row.memory_mib,
        "multiprocessors": row.multiprocessors,
        "max_instances": row.max_instances,
        "engines": [facts.copy_engines, *row.engines.counts],
        "placements": list(map(str, row.placements)),
        "compute_profiles": None
        if facts.compute is None
        else [_compute(each, spans) for each, spans in facts.compute],
    }


def with_compute_profiles(
    gpu: "captures.CapturedGpu", rows: Mapping[int, Sequence[model.ComputeInstanceProfile]]
) -> "captures.CapturedGpu":
    """Return a GPU with compute-instance profiles that it did not list; ``rows`` has its enums."""
    if gpu["profiles"] is None:
        return gpu
    return {
        **gpu,
        "profiles": [
            {
                **row,
                "compute_profiles": row["compute_profiles"]
                or [_compute(each, None) for each in rows.get(row["enum"], ())]
                or None,
            }
            for row in gpu["profiles"]
        ],
    }


def _compute(
    row: model.ComputeInstanceProfile, spans: Sequence[model.Placement] | None
) -> "captures.CapturedComputeProfile":
    return {
        "id": row.profile_id,
        "slices": row.slices,
        "multiprocessors": row.multiprocessors,
        "max_instances": row.max_instances,
        "placements": None if spans is None else list(map(str, spans)),
    }


def _rules(each: SurveyedGpu, gpu: model.Gpu, uuids: Sequence[str]) -> dict[str, bool]:
    """Return whether the GPU follows the rules that mig-manager relies on, as far as it shows."""
    mig = gpu.mig_uuids
    rules = {
        "the UUID of a GPU has NVIDIA's form": bool(_GPU_UUID.fullmatch(gpu.uuid)),
        "no two GPUs have the same UUID": uuids.count(gpu.uuid) == 1,
        "the UUID of a GPU is the same in two sessions": gpu.uuid == each.earlier_uuid,
        "a GPU is found by its PCI address": each.is_found_by_address,
    }
    if gpu.devices:
        rules |= {
            "the UUIDs of MIG devices have NVIDIA's form": len(mig) == len(gpu.devices)
            and all(map(_MIG_UUID.fullmatch, mig)),
            "no two MIG devices have the same UUID": len(set(mig)) == len(mig),
            "MIG devices are in the order of their instances": list(each.mig_devices)
            == sorted(each.mig_devices),
        }
    return rules
