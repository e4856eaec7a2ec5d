"""What a process remembers of its decisions, and the cooldown of a node after a change."""

import collections
import dataclasses
import datetime as dt
from collections.abc import Collection, Iterable, Mapping

from mig_manager.core.node.devices import resources
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.decision import decisions, holds
from mig_manager.core.partitioning.nodes import partitioned_nodes

_MIN_REST_S = 5.0
_MAX_REST_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The memory of a process between decisions; see ``remember``."""

    changed_at: Mapping[str, dt.datetime] = dataclasses.field(default_factory=dict)
    """By node: time of this process's last request."""
    requested: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By node: the content hash of the last layout that this process requested."""
    failed: Mapping[str, Mapping[str, dt.datetime]] = dataclasses.field(default_factory=dict)
    """By node, by content hash: when its agent failed a layout, since it last applied one."""
    demand_at: Mapping[str, dt.datetime] = dataclasses.field(default_factory=dict)
    """By node: time of the last demand for its devices, or when this process first saw it."""
    room_since: Mapping[str, Mapping[str, dt.datetime]] = dataclasses.field(default_factory=dict)
    """By UID of a pending pod, by node: since when the node has room for it."""
    nominated_at: Mapping[str, dt.datetime] = dataclasses.field(default_factory=dict)
    """By node: since when the scheduler preempts pods on it for a ``demand.NominatedPod``."""
    gpu_holds: Mapping[str, holds.HoldRecord] = dataclasses.field(default_factory=dict)
    """By UID of a pending pod: the GPUs on hold for it."""
    ignored: Mapping[str, decisions.IgnoredRooms] = dataclasses.field(default_factory=dict)
    """By UID of a pending pod."""
    prepared: Mapping[str, tuple[demand.Needs, ...]] = dataclasses.field(default_factory=dict)
    """By node: the needs of the likely pods for which it is being changed."""
    allocated: Mapping[str, demand.Amounts] = dataclasses.field(default_factory=dict)
    """By node: the MIG devices that its pods requested at the last decision."""


def remember(
    history: History,
    nodes: Collection[partitioned_nodes.PartitionedNode],
    pending: Iterable[demand.Pending],
    decision: decisions.PartitioningDecision,
    *,
    now: dt.datetime,
    uncertain: Iterable[decisions.NodeChange] = (),
) -> History:
    """Return the history after a decision; forget missing nodes and pods that are not pending.

    ``decision`` has only the changes that were requested; ``uncertain`` ones may have been.
    """
    uids = {pod.uid for pod in pending}
    room_since = {uid: dict(since) for uid, since in decision.room_since.items() if uid in uids}
    for change in (*decision.changes, *uncertain):
        for pod in change.pods:
            room_since.setdefault(pod.uid, {})[change.node] = now
    with_demand = {name for since in room_since.values() for name in since}
    with_demand |= {name for hold in decision.gpu_holds.values() for name, _ in hold.gpus}
    allocated = {
        node.name: tuple(item for item in node.pods.allocated if resources.is_mig(item[0]))
        for node in nodes
    }
    changed = {change.node: now for change in decision.changes}
    requested = {change.node: change.content_hash for change in decision.changes}
    prepared = {
        node.name: history.prepared[node.name]
        for node in nodes
        if node.name in history.prepared and _is_being_changed(node, history, now)
    }
    return History(
        changed_at={
            name: when
            for name, when in {**history.changed_at, **changed}.items()
            if name in allocated
        },
        requested={
            name: content_hash
            for name, content_hash in {**history.requested, **requested}.items()
            if name in allocated
        },
        failed={node.name: _failures(node, history, now) for node in nodes},
        demand_at={
            name: history.demand_at.get(name, now)
            if name not in with_demand and history.allocated.get(name) == amounts
            else now
            for name, amounts in allocated.items()
        },
        room_since=room_since,
        nominated_at={
            node.name: history.nominated_at.get(node.name, now)
            for node in nodes
            if node.pods.is_nominated
        },
        ignored={uid: rooms for uid, rooms in decision.ignored.items() if uid in uids},
        gpu_holds={uid: record for uid, record in decision.gpu_holds.items() if uid in uids},
        prepared=prepared | {each.node: each.likely for each in decision.changes if each.likely},
        allocated=allocated,
    )


def _failures(
    node: partitioned_nodes.PartitionedNode, history: History, now: dt.datetime
) -> Mapping[str, dt.datetime]:
    """Return the recent failures of a node's agent since it last applied a layout."""
    if not (node.agent.failed_hash or _is_being_changed(node, history, now)):
        return {}
    before = history.failed.get(node.name, {})
    failures = {key: at for key, at in before.items() if decisions.is_recent(at, now=now)}
    if node.agent.failed_hash and node.times.finished_at:
        failures[node.agent.failed_hash] = node.times.finished_at
    return failures


def unprepared_pods(
    history: History,
    nodes: Iterable[partitioned_nodes.PartitionedNode],
    expected: Iterable[demand.Pending],
    *,
    now: dt.datetime,
) -> tuple[demand.Pending, ...]:
    """Return the expected pods for which no node is being changed."""
    coming = collections.Counter(
        needs
        for node in nodes
        if _is_being_changed(node, history, now)
        for needs in history.prepared.get(node.name, ())
    )
    missing: list[demand.Pending] = []
    for pod in expected:
        if coming[pod.needs] > 0:
            coming[pod.needs] -= 1
        else:
            missing.append(pod)
    return tuple(missing)


def _is_being_changed(
    node: partitioned_nodes.PartitionedNode, history: History, now: dt.datetime
) -> bool:
    """Return whether a node's agent works on a request, or may not have noticed it yet."""
    changed_at = history.changed_at.get(node.name)
    is_new = changed_at is not None and (now - changed_at).total_seconds() < _MIN_REST_S
    return node.is_changing or is_new


def cooldown_left_s(
    node: partitioned_nodes.PartitionedNode,
    limits: decisions.PartitionerLimits,
    history: History,
    *,
    now: dt.datetime,
) -> float:
    """Return how much of a node's cooldown after any change is left; 0 if it has ended.

    By default the cooldown is as long as the change took, between 5 and 60 s: a node that is quick
    to change costs its pods little. A longer change must not keep pods waiting for as long again.
    """
    cooldown_s = limits.cooldown_s
    if cooldown_s is None:
        cooldown_s = min(_MAX_REST_S, max(_MIN_REST_S, node.agent.took_s))
    changed_at = (node.times.finished_at, history.changed_at.get(node.name))
    ages_s = [max(0.0, (now - each).total_seconds()) for each in changed_at if each]
    return max(0.0, cooldown_s - min(ages_s, default=cooldown_s))
