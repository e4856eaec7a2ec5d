"""The partitioner's decisions as values: limits, changes to request, and pods not served."""

import collections
import dataclasses
import datetime as dt
from collections.abc import Mapping

from mig_manager.core import model, steps
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.decision import waiting

PREPARE_FOR_S = 60.0
ROOM_TIMEOUT_S = 300.0
"""How long room is kept for a pod that the scheduler does not place, how long the pod then gets
none on that node, and when to repeat a request that an agent failed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionerLimits:
    """Limits of the partitioner; seconds."""

    max_unavailable: str = "10%"
    """Nodes under change at once: a number, or a percentage of opted-in nodes, at least one."""
    cooldown_s: float | None = None
    """How long a node rests after a change; None: as long as the change took, 5 to 60 s."""
    reserved: Mapping[model.Profile, int] = dataclasses.field(default_factory=dict)
    """Devices of a profile, in use or idle, that a change keeps on every node that has them."""
    merge_back_after_s: float = 0.0
    """Time without demand before idle instances return to the base layout; 0: never."""
    prepare_for_s: float = PREPARE_FOR_S
    """Devices are kept ready for pods that likely arrive within this time; 0: none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """A layout to request of one node."""

    node: str
    version: str  # ``resourceVersion`` of the node: the write's precondition
    layout: str  # the text of the annotation ``mig-manager.io/layout``
    content_hash: str  # hash of the layout, as in the agent's status
    pods: tuple[demand.PendingPod, ...]
    """The pods that it makes room for; none: it prepares for likely pods, merges back, replaces
    a failed request, or destroys idle instances of GPUs on hold."""
    desired: Mapping[str, model.DesiredGpu]  # by UUID of the GPU, what the layout requests
    plan: steps.Plan  # from the node's present GPUs to the desired ones
    why: str  # a sentence
    likely: tuple[demand.Needs, ...] = ()  # the needs of the likely pods that it prepares for

    @property
    def created(self) -> Mapping[model.Profile, int]:
        """The GPU instances that it creates."""
        return collections.Counter(step.profile for step in self.plan.of(steps.CreateGpuInstance))

    @property
    def destroyed(self) -> Mapping[model.Profile, int]:
        """The GPU instances that it destroys."""
        return collections.Counter(step.profile for step in self.plan.of(steps.DestroyGpuInstance))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unmet:
    """A pod that no opted-in node could serve, even if idle."""

    pod: demand.PendingPod
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPod:
    """A pod that a node could serve, and that must wait."""

    pod: demand.PendingPod
    reason: waiting.WaitReason
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IgnoredRooms:
    """Rooms for a pod that the scheduler did not use within ``ROOM_TIMEOUT_S``."""

    count: int
    since: dt.datetime  # when the last of them began


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HoldRecord:
    """The GPUs on hold for a pod, between decisions."""

    since: dt.datetime  # when its first hold began
    gpus: frozenset[tuple[str, str]]  # node, UUID; empty: none is on hold now


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitioningDecision:
    """The changes to request, and the pods that they do not serve."""

    changes: tuple[NodeChange, ...] = ()
    unmet: tuple[Unmet, ...] = ()
    waiting: tuple[WaitingPod, ...] = ()
    room_since: Mapping[str, Mapping[str, dt.datetime]] = dataclasses.field(default_factory=dict)
    """For the next ``History``; without the room that the changes make."""
    gpu_holds: Mapping[str, HoldRecord] = dataclasses.field(default_factory=dict)
    """By UID of a pending pod."""
    ignored: Mapping[str, IgnoredRooms] = dataclasses.field(default_factory=dict)
    """By UID of a pending pod."""
