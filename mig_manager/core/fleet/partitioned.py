"""A node as the partitioner sees it: its GPUs, what is in use, why it cannot be changed now."""

import collections
import dataclasses
import datetime as dt
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mig_manager import errors
from mig_manager.core import messages, model
from mig_manager.core.fleet import demand, slots
from mig_manager.core.fleet import nodes as fleet_nodes
from mig_manager.core.layout import layouts
from mig_manager.core.node import cluster, resources
from mig_manager.core.records import capacity, gpu_codec

_MIXED = "mixed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedNode:
    """A node with MIG devices, or one that is opted in, as the API shows it."""

    name: str
    version: str  # ``resourceVersion``
    labels: Mapping[str, str]
    taints: tuple[demand.Taint, ...]  # that keep pods off; a cordon is one
    is_ready: bool = True
    allocatable: demand.Amounts
    taken: demand.Amounts = ()  # by the pods bound to it; see ``with_pods``
    is_opted_in: bool
    unusable: str = ""
    """Why it cannot be repartitioned now, whatever pods ask for; empty if it can."""
    is_changing: bool = False  # whether its agent works, or is to work, on a request
    asked_at: dt.datetime | None = None
    """When something was requested that its agent has not responded to; None: it has, or the
    time is unknown."""
    began_at: dt.datetime | None = None  # when its agent began the last run
    is_published: bool = True  # whether its GPUs are known
    gpus: tuple[model.Gpu, ...] = ()  # with MIG enabled and no pending mode
    in_use: Mapping[str, frozenset[model.Placement]] = dataclasses.field(default_factory=dict)
    """By UUID; a GPU whose use is unknown is missing."""
    changed_at: dt.datetime | None = None  # end of its agent's last run
    refused: str = ""  # content hash of the custom layout that its agent has failed at last
    was_in_use: bool = False  # whether it failed because of an instance in use, which may end

    @property
    def left(self) -> "collections.Counter[str]":
        """What the scheduler can still give to pods."""
        left = collections.Counter(dict(self.allocatable))
        left.subtract(dict(self.taken))
        return left


def parse(item: Mapping[str, Any]) -> PartitionedNode | None:
    """Parse a Node object; None if it neither has MIG devices nor is opted in.

    Raises ClusterError: It is malformed.
    """
    node = fleet_nodes.parse(item)
    is_opted_in = node.view.labels.get(cluster.PARTITIONING_LABEL) == cluster.ON_DEMAND
    with cluster.as_cluster_error(f"node {node.name}"):
        allocatable = demand.amounts((item.get("status") or {}).get("allocatable"))
        taints = demand.parse_taints(item.get("spec") or {})
    if not (is_opted_in or any(resources.is_mig(name) for name, _ in allocatable)):
        return None
    every = _gpus(node.gpus) or ()
    known = _use(node.view.annotations.get(cluster.CAPACITY_ANNOTATION), every)
    published = node.status
    has_failed = published is not None and published.state is model.State.FAILED
    is_custom = published is not None and published.config == cluster.CUSTOM_LAYOUT
    changing = why_changing(node)
    return PartitionedNode(
        name=node.name,
        version=node.version,
        labels=node.view.labels,
        taints=taints,
        is_ready=node.is_ready,
        allocatable=allocatable,
        is_opted_in=is_opted_in,
        unusable=changing
        or why_retrying(node)
        or next(_why_unusable(node, every, known, dict(allocatable)), ""),
        is_changing=bool(changing),
        asked_at=None if node.has_responded else node.requested_at,
        began_at=published.started_at if published else None,
        is_published=bool(every),
        gpus=tuple(gpu for gpu in every if _is_divisible(gpu)),
        in_use=known or {},
        changed_at=published.finished_at if published else None,
        refused=published.config_hash if published and has_failed and is_custom else "",
        was_in_use=published is not None and published.reason == errors.Reason.IN_USE.value,
    )


def with_pods(
    nodes: Iterable[PartitionedNode], bound: Iterable[demand.Bound]
) -> tuple[PartitionedNode, ...]:
    """Return the nodes with what these pods take on them."""
    taken: dict[str, collections.Counter[str]] = {}
    for pod in bound:
        taken.setdefault(pod.node_name, collections.Counter()).update(dict(pod.amounts))
    return tuple(
        dataclasses.replace(node, taken=demand.to_amounts(taken.get(node.name, {})))
        for node in nodes
    )


def why_changing(node: fleet_nodes.Node) -> str:
    """Say why an agent is not at rest; empty if it is."""
    if node.state in (model.State.PENDING.value, model.State.REBOOTING.value):
        return f"its agent works on layout {node.requested}"
    if not (node.is_finished or why_retrying(node)):
        return f"its agent has not reported on layout {node.requested}"
    if slots.is_disrupted(node.view):
        return "a change of it was interrupted"
    return ""


def why_retrying(node: fleet_nodes.Node) -> str:
    """Say that an agent will retry what it has failed; empty if it will not."""
    is_retried = node.answer is not None and node.answer.is_retried
    return f"its agent retries layout {node.requested}" if is_retried else ""


def _gpus(text: str | None) -> model.ObservedGpus | None:
    try:
        return None if text is None else gpu_codec.from_json(text)
    except ValueError:
        return None


def _is_divisible(gpu: model.Gpu) -> bool:
    """Return whether a GPU's instances can be changed: MIG is on, stays on, and is its own."""
    return (
        gpu.current_mode is model.MigMode.ENABLED
        and not gpu.has_pending_mode
        and gpu.virtualization is not model.Virtualization.VGPU
        and layouts.parse_identity(gpu.uuid) == gpu.uuid
    )


def _use(
    text: str | None, gpus: Iterable[model.Gpu]
) -> dict[str, frozenset[model.Placement]] | None:
    """Return what is in use, by UUID; None if it cannot be read."""
    try:
        published = capacity.from_json(text or "")
    except ValueError:
        return None
    found = {}
    for gpu in gpus:
        in_use = published.on(gpu.uuid)
        # Spans that the GPU lacks are of another moment.
        if in_use is not None and in_use <= {gi.placement for gi in gpu.gpu_instances}:
            found[gpu.uuid] = in_use
    return found


def _why_unusable(
    node: fleet_nodes.Node,
    gpus: Iterable[model.Gpu],
    in_use: Mapping[str, object] | None,
    allocatable: Mapping[str, int],
) -> Iterator[str]:
    if not node.is_ready:
        yield "it is not ready"
    if node.view.is_unschedulable:
        yield "it is cordoned"
    if not gpus:
        yield "its agent has published no GPUs that can be read"
    if node.takes_custom is False:
        yield "its agent takes no custom layouts (--custom-layouts)"
    if in_use is None:
        yield "its agent has not published which instances are in use"
    if node.strategy not in ("", _MIXED):
        yield f"its device plugin has MIG strategy {node.strategy}, not {_MIXED}"
    counts = _devices(gpus)
    differing = sorted(
        name
        for name in {*counts, *filter(resources.is_mig, allocatable)}
        if counts.get(name, 0) != allocatable.get(name, 0)
    )
    if differing:
        yield f"its kubelet does not offer the published instances: {messages.listed(differing)}"
    if not any(_is_divisible(gpu) for gpu in gpus):
        yield "none of its GPUs has MIG enabled"
    elif not any(gpu.uuid in (in_use or ()) for gpu in gpus if _is_divisible(gpu)):
        yield "which of its instances are in use is unknown"


def _devices(gpus: Iterable[model.Gpu]) -> dict[str, int]:
    """Count the devices of each MIG resource with strategy mixed."""
    names = (
        resources.of_profile(device.profile)
        for gpu in gpus
        if gpu.current_mode is model.MigMode.ENABLED
        for device in gpu.devices
    )
    return collections.Counter(name for name in names if name)
