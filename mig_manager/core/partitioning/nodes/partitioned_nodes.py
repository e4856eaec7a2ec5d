"""A node for the partitioner: its GPUs, instances in use, and why it cannot be changed now."""

import collections
import dataclasses
import datetime as dt
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mig_manager import errors, reasons
from mig_manager.core import messages, model
from mig_manager.core.fleet import fleet_nodes, slots
from mig_manager.core.layout import custom_layouts, gpu_selectors
from mig_manager.core.node.devices import claims, resources, strategies
from mig_manager.core.objects import api_values, well_known
from mig_manager.core.partitioning import demand
from mig_manager.core.records import run_status

_UNREACHABLE = reasons.Reason.GPU_UNREACHABLE.value
_REPEATABLE = (reasons.Reason.IN_USE.value, reasons.Reason.DRIFTED.value)
"""An instance in use can be idle later, and a layout from which the GPUs drifted was active."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """Facts about a node from its pods, collected by ``node_requests``."""

    allocated: demand.Amounts = ()  # requests of the pods bound to it
    has_lost_agent: bool = False  # whether its agent's pod is gone or not ready
    is_nominated: bool = False
    """Whether the scheduler preempts pods on it for a ``demand.NominatedPod``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of a node: as reported, or of ``own_clock``."""

    requested_at: dt.datetime | None = None
    """Time of a request that its agent has not responded to; None: none, or time unknown."""
    started_at: dt.datetime | None = None  # start of its agent's last run
    finished_at: dt.datetime | None = None  # end of that run
    unready_at: dt.datetime | None = None
    """Since when it, or its agent, is not ready; only ``own_clock`` knows it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """The devices and other resources of a node that pods can get.

    ``claimed_nodes`` completes it on a node with a DRA driver.
    """

    allocatable: demand.Amounts
    devices: demand.Amounts = ()  # MIG devices of all its GPUs, by resource
    mismatch: str = ""  # why pods cannot get exactly the devices of its instances
    claimable: frozenset[str] | None = None
    """MIG resources that a DRA driver serves; None: a device plugin serves any."""
    claimed: demand.Amounts = ()  # devices in ResourceClaims, by resource


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """The change that a node's agent works on, and its last run."""

    changing: str = ""  # why it has not finished with a request; empty if it has
    is_closed: bool = False  # whether it keeps pods off the node for a change
    is_rebooting: bool = False  # whether it has rebooted the node for a change
    took_s: float = 0.0  # the last run, by the agent's clock
    content_hash: str = ""  # content hash of that run's layout
    failed_hash: str = ""
    """Content hash of the custom layout, if that run failed. For an invalid layout, which no
    partitioner writes, it is the hash of the annotation."""
    is_own_failure: bool = False  # whether a partitioner requested the failed layout
    is_repeatable: bool = False  # whether the same layout may succeed later
    is_retried: bool = False  # whether the agent retries the failed layout


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedNode:
    """A node that has MIG devices or is opted in."""

    name: str
    version: str  # ``resourceVersion``
    labels: Mapping[str, str]
    taints: tuple[demand.Taint, ...]  # as ``demand.parse_taints``
    is_ready: bool = True
    is_opted_in: bool
    blocked: str = ""  # why it cannot be repartitioned as it is; empty if it can
    avoided: str = ""  # why this process leaves it alone for a while
    is_published: bool = True  # whether its GPUs are known
    gpus: tuple[model.Gpu, ...] = ()  # with MIG enabled and no pending mode
    in_use: Mapping[str, frozenset[model.Placement]] = dataclasses.field(default_factory=dict)
    """By UUID; a GPU whose use is unknown, or that needs recovery from a fault, is missing."""
    supply: Supply
    agent: AgentState = dataclasses.field(default_factory=AgentState)
    pods: PodFacts = dataclasses.field(default_factory=PodFacts)
    times: Times = dataclasses.field(default_factory=Times)

    @property
    def is_changing(self) -> bool:
        """Whether its agent has not finished with a request."""
        return bool(self.agent.changing)

    @property
    def is_program_change(self) -> bool:
        """Whether it is changing for a program's layout, not for a person's request."""
        return (
            self.is_changing
            and self.labels.get(well_known.CONFIG_LABEL) == well_known.CUSTOM_LAYOUT
        )

    @property
    def unusable(self) -> str:
        """Why it cannot be repartitioned now; empty if it can."""
        lost = "its agent's pod is not ready" if self.pods.has_lost_agent else ""
        return self.agent.changing or self.blocked or self.supply.mismatch or lost or self.avoided

    @property
    def available(self) -> "collections.Counter[str]":
        """Allocatable resources that no bound pod requests."""
        available = collections.Counter(dict(self.supply.allocatable))
        available.subtract(dict(self.pods.allocated))
        return available


def parse(item: Mapping[str, Any]) -> PartitionedNode | None:
    """Parse a Node object; None if it neither has MIG devices nor is opted in.

    Raises:
        ClusterError: It is malformed.
    """
    node = fleet_nodes.parse(item)
    is_opted_in = node.view.labels.get(well_known.PARTITIONING_LABEL) == well_known.ON_DEMAND
    with api_values.as_cluster_error(f"node {node.name}"):
        allocatable = demand.amounts((item.get("status") or {}).get("allocatable"))
        taints = demand.parse_taints(item.get("spec") or {})
    has_devices = any(resources.is_mig(name) for name, _ in allocatable)
    has_driver = node.view.labels.get(claims.DEPLOY_LABEL) == "true"
    if not (is_opted_in or has_devices or has_driver):
        return None
    gpus = fleet_nodes.published_gpus(node)[0] or ()
    use, _ = fleet_nodes.published_use(node, gpus)
    faulty = {gpu.uuid for gpu in gpus if gpu.needs_recovery}
    in_use = (
        {uuid: used for uuid, used in use.in_use.items() if uuid not in faulty} if use else None
    )
    published = node.status
    is_retried = node.current_status is not None and node.current_status.is_retried
    devices = collections.Counter(
        name for gpu in gpus for _, name, span in resources.devices(gpu) if span
    )
    # A program's layout names every GPU, so one without the unreachable GPU frees the others.
    is_replaceable = node.requested == well_known.CUSTOM_LAYOUT and (
        published is not None and published.reason == _UNREACHABLE
    )
    is_blocked = is_retried and not is_replaceable
    failed_hash = _failed_hash(node)
    is_custom = bool(failed_hash) and node.requested == well_known.CUSTOM_LAYOUT
    custom = custom_layouts.CustomRequest.of(node.view).text if is_custom else None
    retrying = f"its agent retries layout {node.requested}" if is_blocked else ""
    return PartitionedNode(
        name=node.name,
        version=node.version,
        labels=node.view.labels,
        taints=taints,
        is_ready=node.is_ready,
        is_opted_in=is_opted_in,
        blocked=retrying or next(_why_blocked(node, gpus, in_use), ""),
        is_published=bool(gpus),
        gpus=tuple(gpu for gpu in gpus if _is_divisible(gpu)),
        in_use=in_use or {},
        supply=Supply(
            allocatable=allocatable,
            devices=demand.to_amounts(devices),
            mismatch=why_differing(devices, dict(allocatable), "kubelet's resources"),
        ),
        agent=AgentState(
            changing=_why_changing(node, is_retried=is_retried),
            is_closed=node.state in run_status.UNDER_WAY or slots.is_disrupted(node.view),
            is_rebooting=node.state == run_status.State.REBOOTING.value,
            took_s=_took_s(published),
            content_hash=published.content_hash if published else "",
            failed_hash=failed_hash,
            is_own_failure=custom is not None and custom_layouts.is_marked(custom),
            is_repeatable=published is not None and published.reason in _REPEATABLE,
            is_retried=is_retried,
        ),
        times=Times(
            requested_at=None if node.has_responded else node.requested_at,
            started_at=published.started_at if published else None,
            finished_at=published.finished_at if published else None,
        ),
    )


def _failed_hash(node: fleet_nodes.FleetNode) -> str:
    """Return the ``failed_hash`` of a node's agent; empty if its last run did not fail."""
    published, custom = node.status, custom_layouts.CustomRequest.of(node.view)
    has_failed = published is not None and published.state is run_status.State.FAILED
    if published is None or not has_failed or published.layout != well_known.CUSTOM_LAYOUT:
        return ""
    if published.content_hash:
        return published.content_hash
    # The agent failed before it had read the layout.
    try:
        return custom.layout()[0].content_hash
    except errors.MigManagerError:
        return custom.annotation_hash


def _took_s(published: run_status.PublishedStatus | None) -> float:
    """Return the duration of an agent's last run; 0 if it is unknown or the clock was set."""
    if published is None or published.started_at is None or published.finished_at is None:
        return 0.0
    return max(0.0, (published.finished_at - published.started_at).total_seconds())


def _why_changing(node: fleet_nodes.FleetNode, *, is_retried: bool) -> str:
    """Return why an agent has not finished; empty if it has."""
    if node.state in run_status.UNDER_WAY:
        return f"its agent works on layout {node.requested}"
    if not (node.is_finished or is_retried):
        return f"its agent has not reported on layout {node.requested}"
    if slots.is_disrupted(node.view):
        return "a change of it was interrupted"
    return ""


def _is_divisible(gpu: model.Gpu) -> bool:
    """Return whether a GPU's instances can be changed: MIG is on, stays on, and no vGPU."""
    return (
        gpu.current_mode is model.MigMode.ENABLED
        and not gpu.has_pending_mode
        and gpu.virtualization is not model.Virtualization.VGPU
        and gpu_selectors.parse_identity(gpu.uuid) == gpu.uuid
    )


def _why_blocked(
    node: fleet_nodes.FleetNode,
    gpus: Collection[model.Gpu],
    in_use: Mapping[str, object] | None,
) -> Iterator[str]:
    if not node.is_ready:
        yield "it is not ready"
    if node.view.is_unschedulable:
        yield "it is cordoned"
    if not gpus:
        yield "its agent has published no valid GPUs"
    if node.listed.takes_custom is False:
        yield "its agent takes no custom layouts (--custom-layouts)"
    if in_use is None:
        yield "its agent has not published which instances are in use"
    strategy = strategies.from_labels(node.view.labels)
    if strategy not in (None, strategies.Strategy.MIXED):
        yield f"its device plugin has MIG strategy {strategy.value}, not mixed"
    divisible = [gpu for gpu in gpus if _is_divisible(gpu)]
    if not divisible:
        yield "none of its GPUs has MIG enabled"
    elif all(gpu.needs_recovery for gpu in divisible):
        yield "its GPUs with MIG need recovery from a fault"
    elif not any(gpu.uuid in (in_use or ()) for gpu in divisible):
        yield "which of its instances are in use is unknown"


def why_differing(devices: Mapping[str, int], offer: Mapping[str, int], what: str) -> str:
    """Return why the devices that pods can get differ from the instances; empty if they match."""
    differing = sorted(
        name
        for name in {*devices, *filter(resources.is_mig, offer)}
        if devices.get(name, 0) != offer.get(name, 0)
    )
    return (
        f"{what} differ from the instances: {messages.list_names(differing)}" if differing else ""
    )
