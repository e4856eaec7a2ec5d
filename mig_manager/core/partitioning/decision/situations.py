"""What a decision depends on beside its pods, and what the next one must know of it."""

import collections
import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping

from mig_manager.core.node.devices import resources
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.decision import decisions
from mig_manager.core.partitioning.nodes import node_index, partitioned_nodes

_MIN_REST_S = 5.0
_MAX_REST_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequest:
    """A layout that this process requested of a node."""

    at: dt.datetime
    content_hash: str
    likely: tuple[demand.Needs, ...] = ()
    """The needs of the likely pods for which the node is being changed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The memory of a process between decisions; see ``Situation.after``."""

    requests: Mapping[str, LayoutRequest] = dataclasses.field(default_factory=dict)
    """By node: the last request."""
    failed: Mapping[str, Mapping[str, dt.datetime]] = dataclasses.field(default_factory=dict)
    """By node, by content hash: when its agent failed a layout, since it last applied one."""
    demand_at: Mapping[str, dt.datetime] = dataclasses.field(default_factory=dict)
    """By node: time of the last demand for its devices, or when this process first saw it."""
    room_since: Mapping[str, Mapping[str, dt.datetime]] = dataclasses.field(default_factory=dict)
    """By UID of a pending pod, by node: since when the node has room for it."""
    nominated_at: Mapping[str, dt.datetime] = dataclasses.field(default_factory=dict)
    """By node: since when the scheduler preempts pods on it for a ``demand.NominatedPod``."""
    gpu_holds: Mapping[str, decisions.HoldRecord] = dataclasses.field(default_factory=dict)
    """By UID of a pending pod: the GPUs on hold for it."""
    ignored: Mapping[str, decisions.IgnoredRooms] = dataclasses.field(default_factory=dict)
    """By UID of a pending pod."""
    allocated: Mapping[str, demand.Amounts] = dataclasses.field(default_factory=dict)
    """By node: the MIG devices that its pods requested at the last decision."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The nodes, the limits, the time and the past of one decision."""

    index: node_index.NodeIndex  # with times by the clock of ``now``
    limits: decisions.PartitionerLimits
    now: dt.datetime
    history: History = dataclasses.field(default_factory=History)

    def age_s(self, since: dt.datetime) -> float:
        """Return the time since then."""
        return (self.now - since).total_seconds()

    def is_recent(self, since: dt.datetime) -> bool:
        """Return whether room since then is kept."""
        return self.age_s(since) <= decisions.ROOM_TIMEOUT_S

    def cooldown_left_s(self, node: partitioned_nodes.PartitionedNode) -> float:
        """Return how much of a node's cooldown after any change is left; 0 if it has ended.

        By default the cooldown is as long as the change took, between 5 and 60 s: a node that is
        quick to change costs its pods little. A longer change must not keep pods waiting for as
        long again.
        """
        cooldown_s = self.limits.cooldown_s
        if cooldown_s is None:
            cooldown_s = min(_MAX_REST_S, max(_MIN_REST_S, node.agent.took_s))
        request = self.history.requests.get(node.name)
        changed_at = (node.times.finished_at, request and request.at)
        ages_s = [max(0.0, self.age_s(each)) for each in changed_at if each]
        return max(0.0, cooldown_s - min(ages_s, default=cooldown_s))

    def unprepared_pods(
        self, expected: Iterable[demand.PendingPod]
    ) -> tuple[demand.PendingPod, ...]:
        """Return the expected pods for which no node is being changed."""
        requests = self.history.requests
        coming = collections.Counter(
            needs
            for node in self.index.nodes
            if node.name in requests and self._is_being_changed(node)
            for needs in requests[node.name].likely
        )
        missing: list[demand.PendingPod] = []
        for pod in expected:
            if coming[pod.needs] > 0:
                coming[pod.needs] -= 1
            else:
                missing.append(pod)
        return tuple(missing)

    def after(
        self,
        decision: decisions.PartitioningDecision,
        *,
        uncertain: Iterable[decisions.NodeChange] = (),
    ) -> History:
        """Return the history after a decision, without missing nodes.

        ``decision`` has only the changes that were requested; ``uncertain`` ones may have been.
        """
        nodes, now, before = self.index.nodes, self.now, self.history
        room_since = {uid: dict(since) for uid, since in decision.room_since.items()}
        for change in (*decision.changes, *uncertain):
            for pod in change.pods:
                room_since.setdefault(pod.uid, {})[change.node] = now
        with_demand = {name for since in room_since.values() for name in since}
        with_demand |= {name for hold in decision.gpu_holds.values() for name, _ in hold.gpus}
        allocated = {
            node.name: tuple(item for item in node.pods.allocated if resources.is_mig(item[0]))
            for node in nodes
        }
        requests = {
            each.node: LayoutRequest(at=now, content_hash=each.content_hash, likely=each.likely)
            for each in decision.changes
        }
        return History(
            requests=self._earlier_requests() | requests,
            failed={node.name: self.failures(node) for node in nodes},
            demand_at={
                name: before.demand_at.get(name, now)
                if name not in with_demand and before.allocated.get(name) == amounts
                else now
                for name, amounts in allocated.items()
            },
            room_since=room_since,
            nominated_at={
                node.name: before.nominated_at.get(node.name, now)
                for node in nodes
                if node.pods.is_nominated
            },
            gpu_holds=decision.gpu_holds,
            ignored=decision.ignored,
            allocated=allocated,
        )

    def _earlier_requests(self) -> dict[str, LayoutRequest]:
        """Return the last requests; one whose change has ended prepares for no pod."""
        requests = self.history.requests
        return {
            node.name: requests[node.name]
            if self._is_being_changed(node)
            else dataclasses.replace(requests[node.name], likely=())
            for node in self.index.nodes
            if node.name in requests
        }

    def failures(self, node: partitioned_nodes.PartitionedNode) -> Mapping[str, dt.datetime]:
        """Return when a node's agent failed the layouts that are not repeated yet.

        The last one is repeated after ``ROOM_TIMEOUT_S``, the one before after twice as long, and
        so on: however many layouts fail one after the other, another one comes before they repeat.
        Empty if the agent has applied a layout since.
        """
        if not (node.agent.failed_hash or self._is_being_changed(node)):
            return {}
        failures = dict(self.history.failed.get(node.name, {}))
        if node.agent.failed_hash and node.times.finished_at:
            failures[node.agent.failed_hash] = node.times.finished_at
        last_first = sorted(failures.items(), key=lambda each: each[1], reverse=True)
        return {
            content_hash: at
            for number, (content_hash, at) in enumerate(last_first, 1)
            if self.age_s(at) <= number * decisions.ROOM_TIMEOUT_S
        }

    def _is_being_changed(self, node: partitioned_nodes.PartitionedNode) -> bool:
        """Return whether a node's agent works on a request, or may not have noticed it yet."""
        request = self.history.requests.get(node.name)
        is_new = request is not None and self.age_s(request.at) < _MIN_REST_S
        return node.is_changing or is_new
