"""Decide which nodes to repartition so that pending pods find the MIG devices they ask for.

Pure: nodes and pods in, the layouts to request out. An instance in use is never touched, a GPU
whose use is unknown is never named. The agent has the last word (``disruption: none``).
"""

import dataclasses
import datetime as dt
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from mig_manager.core import model
from mig_manager.core.fleet import demand
from mig_manager.core.node import cluster


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the partitioner may do; seconds."""

    max_unavailable: str = "1"
    """Nodes under change at once: a number, or a percentage of the opted-in ones, at least one."""
    cooldown_s: float = 60.0  # between two changes of a node
    reserved: Mapping[model.Profile, int] = dataclasses.field(default_factory=dict)
    """Devices of each profile that a change leaves on every node, in use or idle, if it has them
    before."""
    merge_back_after_s: float = 0.0
    """How long a node is without demand before its idle instances return to the base layout; 0:
    never."""
    patience_s: float = 300.0
    """How long room is kept for a pod that the scheduler does not place, and for how long after
    that it gets none on the same node."""
    hold_after_s: float = 600.0
    """How long the first pod in order waits before other pods get no new room on one GPU that can
    serve it once idle."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedNode:
    """A node with MIG devices, or one that is opted in, as the API shows it."""

    name: str
    version: str  # ``resourceVersion``
    labels: Mapping[str, str]
    taints: tuple[demand.Taint, ...]
    is_cordoned: bool
    allocatable: demand.Amounts
    taken: demand.Amounts = ()  # by the pods bound to it; see ``with_pods``
    is_opted_in: bool
    unusable: str = ""
    """Why it cannot be repartitioned now, whatever pods ask for; empty if it can."""
    is_changing: bool = False  # counts against the budget
    gpus: tuple[model.Gpu, ...] = ()  # with known use, MIG enabled and no pending mode
    in_use: Mapping[str, frozenset[model.Placement]] = dataclasses.field(default_factory=dict)
    """By UUID of ``gpus``."""
    changed_at: dt.datetime | None = None  # end of its agent's last run


class Wait(enum.Enum):
    """Why a pod waits; the values are a public contract."""

    SCHEDULER = "scheduler"  # a node has what it asks for, or is being changed for it
    CHANGING = "changing"  # nodes that could have room are under change, or in their cooldown
    LIMITED = "limited"  # by the budget of nodes under change
    IN_USE = "in-use"  # what it asks for is in use by others
    NOT_SCHEDULED = "not-scheduled"  # it had room, and the scheduler did not place it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A layout to request of one node."""

    node: str
    version: str  # ``resourceVersion`` of the node as it was seen: the write's precondition
    layout: str  # the text of the annotation ``mig-manager.io/layout``
    pods: tuple[demand.Pending, ...]  # that it makes room for; none: a merge back
    created: Mapping[model.Profile, int]
    destroyed: Mapping[model.Profile, int]
    why: str  # a sentence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unmet:
    """A pod that no opted-in node could serve, even if everything on it were idle."""

    pod: demand.Pending
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A pod that a node could serve, and that must wait."""

    pod: demand.Pending
    reason: Wait
    message: str
    node: str = ""  # that has room for it already, or had; empty for none


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, and what cannot be done."""

    changes: tuple[Change, ...] = ()
    unmet: tuple[Unmet, ...] = ()
    waiting: tuple[Waiting, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a process remembers between decisions; see ``remember``. A new one is empty."""

    changed_at: Mapping[str, dt.datetime] = dataclasses.field(default_factory=dict)
    """By node: when the last change of it was requested."""
    demand_at: Mapping[str, dt.datetime] = dataclasses.field(default_factory=dict)
    """By node: when a pod last asked for a device there, or this process first saw the node."""
    given: Mapping[str, Mapping[str, dt.datetime]] = dataclasses.field(default_factory=dict)
    """By UID of a pod that is still pending, by node: since when the node has room for it."""


def parse_node(item: Mapping[str, Any]) -> PartitionedNode | None:
    """Parse a Node object; None if it neither has MIG devices nor is opted in.

    Raises ClusterError: It is malformed.
    """
    raise NotImplementedError


def with_pods(
    nodes: Iterable[PartitionedNode], bound: Iterable[demand.Bound]
) -> tuple[PartitionedNode, ...]:
    """Return the nodes with what these pods take on them."""
    raise NotImplementedError


def decide(
    nodes: Iterable[PartitionedNode],
    pending: Iterable[demand.Pending],
    limits: Limits,
    *,
    now: dt.datetime,
    history: History,
    base: Mapping[str, Mapping[str, model.DesiredGpu]] | None = None,
) -> Decision:
    """Decide which nodes to repartition for these pods.

    ``nodes`` are with their pods (``with_pods``). ``base`` has, by node and UUID, what to merge
    idle instances back to. The order of nodes and pods does not matter.
    """
    raise NotImplementedError


def remember(
    history: History,
    nodes: Iterable[PartitionedNode],
    pending: Iterable[demand.Pending],
    decision: Decision,
    *,
    now: dt.datetime,
) -> History:
    """Return the history after a decision, with only the changes that were really requested.

    Nodes that are gone and pods that are not pending any more are forgotten.
    """
    raise NotImplementedError


def is_opted_in(labels: Mapping[str, str]) -> bool:
    """Return whether a node's label lets the partitioner change it."""
    return labels.get(cluster.PARTITIONING_LABEL) == cluster.ON_DEMAND
