"""Decide which nodes to repartition so that pending pods get the MIG devices they request.

No change touches an instance in use or a GPU whose use is unknown. The agent checks again before
it acts (``disruption: none``).

Pods are served by priority, then by age. Idle instances that serve a pod stay for it. For the
other pods the decision chooses nodes one by one. It prefers the node that serves the first pod in
order, then the node that serves most pods, then the node that destroys the fewest instances.

For a large pod that no change can serve, the decision holds GPUs (``holds``): they get no new
instances for pods behind it.
"""

import collections
import dataclasses
import datetime as dt
import math
from collections.abc import Iterable, Mapping

from mig_manager import errors
from mig_manager.core import messages, model, steps
from mig_manager.core.fleet import (
    batch,
    demand,
    holds,
    node_index,
    node_room,
    node_sets,
    offers,
    partitioned,
    rollout,
    waiting,
)
from mig_manager.core.layout import custom_layouts
from mig_manager.core.node import resources
from mig_manager.core.planner import planner

_MOST_CHANGES = 8
"""In one decision: every change considers all nodes, and a leader must renew its Lease."""
_SILENCE_S = 300.0
_LONGEST_RUN_S = 3600.0  # The deadlines of a run end well before.
_MOST_UNUSED = 2
"""Rooms that a pod does not use before the partitioner waits longer and longer between them."""
_MOST_DOUBLINGS = 8
_LEAST_REST_S = 5.0
_LONGEST_REST_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionerLimits:
    """Limits of the partitioner; seconds."""

    max_unavailable: str = "10%"
    """Nodes under change at once: a number, or a percentage of opted-in nodes, at least one."""
    cooldown_s: float | None = None
    """How long a node rests after a change; None: as long as the change took (``rest_s``)."""
    reserved: Mapping[model.Profile, int] = dataclasses.field(default_factory=dict)
    """Devices of a profile, in use or idle, that a change keeps on every node that has them."""
    merge_back_after_s: float = 0.0
    """Time without demand before idle instances return to the base layout; 0: never."""
    room_timeout_s: float = 300.0
    """How long room is kept for a pod that the scheduler does not place, how long the pod then
    gets none on that node, and when to repeat a request that an agent failed."""
    hold_after_s: float = 600.0
    """How long a pod waits without room before GPUs are on hold for it in a busy cluster."""
    hold_timeout_s: float = 1800.0
    """How long GPUs are on hold for one pod, and how long it then gets none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A layout to request of one node."""

    node: str
    version: str  # ``resourceVersion`` of the node: the write's precondition
    layout: str  # the text of the annotation ``mig-manager.io/layout``
    content_hash: str  # of the layout, as in the agent's status
    pods: tuple[demand.Pending, ...]
    """The pods that it makes room for; none: it merges back, withdraws a refused request, or
    destroys idle instances of GPUs on hold."""
    created: Mapping[model.Profile, int]
    destroyed: Mapping[model.Profile, int]
    why: str  # a sentence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unmet:
    """A pod that no opted-in node could serve, even if idle."""

    pod: demand.Pending
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A pod that a node could serve, and that must wait."""

    pod: demand.Pending
    reason: waiting.Wait
    message: str
    node: str = ""  # has room for it, or is being changed for it; empty for none


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """Rooms for a pod that the scheduler did not use within ``room_timeout_s``."""

    count: int
    since: dt.datetime  # when the last of them began


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitioningDecision:
    """The changes to request, and the pods that they do not serve."""

    changes: tuple[Change, ...] = ()
    unmet: tuple[Unmet, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    room_since: Mapping[str, Mapping[str, dt.datetime]] = dataclasses.field(default_factory=dict)
    """For the next ``History``; without the room that the changes make."""
    gpu_holds: Mapping[str, holds.HoldRecord] = dataclasses.field(default_factory=dict)
    """By UID of a pending pod."""
    unused: Mapping[str, Unused] = dataclasses.field(default_factory=dict)
    """By UID of a pending pod."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The memory of a process between decisions; see ``remember``."""

    changed_at: Mapping[str, dt.datetime] = dataclasses.field(default_factory=dict)
    """By node: time of this process's last request."""
    requested: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By node: the content hash of the last layout that this process requested."""
    demand_at: Mapping[str, dt.datetime] = dataclasses.field(default_factory=dict)
    """By node: time of the last demand for its devices, or when this process first saw it."""
    room_since: Mapping[str, Mapping[str, dt.datetime]] = dataclasses.field(default_factory=dict)
    """By UID of a pending pod, by node: since when the node has room for it."""
    gpu_holds: Mapping[str, holds.HoldRecord] = dataclasses.field(default_factory=dict)
    """By UID of a pending pod: the GPUs on hold for it."""
    unused: Mapping[str, Unused] = dataclasses.field(default_factory=dict)
    """By UID of a pending pod."""
    allocated: Mapping[str, demand.Amounts] = dataclasses.field(default_factory=dict)
    """By node: the MIG devices that its pods requested at the last decision."""


def decide(  # noqa: PLR0913 - what a decision depends on
    nodes: Iterable[partitioned.PartitionedNode],
    pending: Iterable[demand.Pending],
    limits: PartitionerLimits,
    *,
    now: dt.datetime,
    history: History,
    base: Mapping[str, Mapping[str, model.DesiredGpu]] | None = None,
    cache: node_index.NodeCache | None = None,
) -> PartitioningDecision:
    """Decide which nodes to repartition for these pods.

    Args:
        nodes: With their pods (``with_pods``), and times by the clock of ``now`` (``Sightings``).
        pending: In any order.
        limits: The limits of the partitioner.
        now: The present time.
        history: Of the last decision.
        base: By node and UUID, the state to which idle instances are merged back.
        cache: Of the last decision; nodes whose GPUs and pods are the same are not examined again.
    """
    pods = batch.Batch(nodes, pending, limits.reserved, cache)
    decider = _Decider(pods, limits, now, history)
    decider.leave_to_scheduler()
    decider.make_room()
    decider.withdraw()
    decider.merge_back(base or {})
    return decider.decision()


def rest_s(
    node: partitioned.PartitionedNode,
    limits: PartitionerLimits,
    history: History,
    *,
    now: dt.datetime,
) -> float:
    """Return how long a node must still rest after any change; 0 if it need not.

    By default it rests as long as the change took, between 5 and 60 s: a node that is quick to
    change costs its pods little. A longer change must not keep pods waiting for as long again.
    """
    cooldown_s = limits.cooldown_s
    if cooldown_s is None:
        cooldown_s = min(_LONGEST_REST_S, max(_LEAST_REST_S, node.took_s))
    changed_at = (node.finished_at, history.changed_at.get(node.name))
    ages_s = [(now - each).total_seconds() for each in changed_at if each]
    return max(0.0, cooldown_s - min(ages_s, default=cooldown_s))


def remember(
    history: History,
    nodes: Iterable[partitioned.PartitionedNode],
    pending: Iterable[demand.Pending],
    decision: PartitioningDecision,
    *,
    now: dt.datetime,
) -> History:
    """Return the history after a decision; forget missing nodes and pods that are not pending.

    ``decision`` has only the changes that were requested.
    """
    uids = {pod.uid for pod in pending}
    room_since = {uid: dict(since) for uid, since in decision.room_since.items() if uid in uids}
    for change in decision.changes:
        for pod in change.pods:
            room_since.setdefault(pod.uid, {})[change.node] = now
    with_demand = {name for since in room_since.values() for name in since}
    allocated = {
        node.name: tuple(item for item in node.allocated if resources.is_mig(item[0]))
        for node in nodes
    }
    changed = {change.node: now for change in decision.changes}
    requested = {change.node: change.content_hash for change in decision.changes}
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
        demand_at={
            name: history.demand_at.get(name, now)
            if name not in with_demand and history.allocated.get(name) == amounts
            else now
            for name, amounts in allocated.items()
        },
        room_since=room_since,
        unused={uid: unused for uid, unused in decision.unused.items() if uid in uids},
        gpu_holds={uid: record for uid, record in decision.gpu_holds.items() if uid in uids},
        allocated=allocated,
    )


class _Decider:
    """Makes one decision."""

    def __init__(
        self, pods: batch.Batch, limits: PartitionerLimits, now: dt.datetime, history: History
    ) -> None:
        self._batch = pods
        self._limits = limits
        self._now = now
        self._history = history
        self._nodes = {node.name: node for node in pods.nodes}
        own = self._own = [node for node in pods.nodes if node.is_opted_in]
        most = rollout.RolloutLimits(max_unavailable=limits.max_unavailable).most(len(own))
        self._budget = min(_MOST_CHANGES, most - sum(map(self._is_counted, own)))
        self._remaining = list(range(len(pods.pods)))
        self._changes: list[Change] = []
        self._waiting: list[Waiting] = []
        self._room_since: dict[str, dict[str, dt.datetime]] = {}
        self._nominated: set[str] = set()
        self._unused = dict(history.unused)
        self._refused = self._refusals()
        """By rank of a pod: nodes where the scheduler did not place it."""
        self._still_refused: set[str] = set()
        """Nodes for which this decision would repeat a refused request too early."""
        self._gpu_holds: Mapping[str, holds.HoldRecord] = {}
        self._causes = waiting.Causes(pods, self._why_not_now)

    def decision(self) -> PartitioningDecision:
        """Return the decision, with the reasons why the remaining pods are not served."""
        unmet: list[Unmet] = []
        for rank in self._remaining:
            pod = self._batch.pods[rank]
            if self._is_backed_off(rank):
                message = "it did not use room on several nodes, and gets none for a while"
                not_scheduled = waiting.Wait.NOT_SCHEDULED
                self._waiting.append(Waiting(pod=pod, reason=not_scheduled, message=message))
                continue
            reason, message = self._causes.why(rank, self._refused.get(rank, 0))
            if reason is None:
                unmet.append(Unmet(pod=pod, message=message))
            else:
                self._waiting.append(Waiting(pod=pod, reason=reason, message=message))
        return PartitioningDecision(
            changes=tuple(self._changes),
            unmet=tuple(unmet),
            waiting=tuple(self._waiting),
            room_since=self._room_since,
            gpu_holds=self._gpu_holds,
            unused=self._unused,
        )

    def _is_counted(self, node: partitioned.PartitionedNode) -> bool:
        """Return whether a node counts against the budget: its agent works, or soon will.

        An agent that has been silent for long must not keep all other nodes from a change.
        """
        since, longest_s = node.requested_at, _SILENCE_S
        if since is None:
            since, longest_s = node.started_at, _LONGEST_RUN_S
        is_silent = since and (self._now - since).total_seconds() > longest_s
        return node.is_changing and not is_silent

    # -- pods that need no change --------------------------------------------------------------

    def leave_to_scheduler(self) -> None:
        """Keep room for pods on nodes that have it, or are being changed for them."""
        self._remaining = [rank for rank in self._remaining if not self._keep_room(rank)]
        self._batch.end_claims()

    def _keep_room(self, rank: int) -> bool:
        pod, group = self._batch.pods[rank], self._batch.group[rank]
        since = self._history.room_since.get(pod.uid, {})
        nominated = self._nodes.get(pod.nominated)
        if nominated and not self._is_refused(rank, nominated):
            self._nominated.add(nominated.name)
            known = since.get(nominated.name)
            when = known if known and self._is_recent(known) else self._now
            message = f"the scheduler preempts pods on node {nominated.name} for it"
            self._wait_at(rank, nominated, when, message)
            return True
        for name, when in since.items():
            node = self._nodes.get(name)
            if node and node.is_changing and self._is_recent(when):
                message = f"node {name} is being changed for it"
                self._wait_at(rank, node, when, message)
                return True
        for node in self._batch.hosts(group, since):
            if self._is_refused(rank, node):
                continue
            self._batch.claim(group, node)
            known = since.get(node.name)
            when = known if known and self._is_recent(known) else self._now
            message = f"node {node.name} has room: the scheduler will place the pod"
            self._wait_at(rank, node, when, message)
            return True
        return False

    def _wait_at(
        self, rank: int, node: partitioned.PartitionedNode, since: dt.datetime, message: str
    ) -> None:
        pod = self._batch.pods[rank]
        self._room_since.setdefault(pod.uid, {})[node.name] = since
        self._waiting.append(
            Waiting(pod=pod, reason=waiting.Wait.SCHEDULER, message=message, node=node.name)
        )

    def _is_refused(self, rank: int, node: partitioned.PartitionedNode) -> bool:
        return bool(self._refused.get(rank, 0) >> self._batch.index.position[node.name] & 1)

    def _is_backed_off(self, rank: int) -> bool:
        """Return whether a pod gets no new room for now, because it did not use several rooms."""
        unused = self._unused.get(self._batch.pods[rank].uid)
        if unused is None or unused.count < _MOST_UNUSED:
            return False
        pause_s = self._limits.room_timeout_s * (1 << min(unused.count, _MOST_DOUBLINGS))
        return self._now - unused.since < dt.timedelta(seconds=pause_s)

    def _is_recent(self, since: dt.datetime) -> bool:
        return (self._now - since).total_seconds() <= self._limits.room_timeout_s

    def _refusals(self) -> dict[int, int]:
        """Return the nodes where the scheduler did not place pods; remember these."""
        refused: dict[int, int] = {}
        for rank, pod in enumerate(self._batch.pods):
            for name, since in self._history.room_since.get(pod.uid, {}).items():
                age_s = (self._now - since).total_seconds()
                if self._limits.room_timeout_s < age_s <= 2 * self._limits.room_timeout_s:
                    before = self._unused.get(pod.uid)
                    if before is None or since > before.since:
                        count = before.count + 1 if before else 1
                        self._unused[pod.uid] = Unused(count=count, since=since)
                    self._room_since.setdefault(pod.uid, {})[name] = since
                    if name in self._nodes:
                        position = self._batch.index.position[name]
                        refused[rank] = refused.get(rank, 0) | 1 << position
        return refused

    # -- changes -------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Choose nodes one by one as long as a change serves a pod."""
        index, search = self._batch.index, offers.Offers(self._batch)
        candidates = node_sets.of(
            index.position[node.name] for node in self._own if not self._why_not_now(node)[1]
        )
        ranks = [rank for rank in self._remaining if not self._is_backed_off(rank)]
        holding, skipped = self._holds(ranks), dict(self._refused)
        while self._budget > 0 and ranks and candidates:
            best = search.best(candidates, ranks, refused=skipped, holding=holding)
            if best is None:
                break
            position = index.position[best.node.name]
            search.forget(best.pods)
            pods = tuple(self._batch.pods[rank] for rank in best.pods)
            best.room.drain(_early(holding, best.node))
            wanted = self._wanted(best.node, best.room)
            count = "1 pod" if len(pods) == 1 else f"{len(pods)} pods"
            if self._change(best.node, wanted, pods, f"room for {count}"):
                served = {*best.pods}
                self._remaining = [rank for rank in self._remaining if rank not in served]
                ranks = [rank for rank in ranks if rank not in served]
            elif best.node.name in self._still_refused:
                # The node may still serve the pods behind the first.
                skipped[best.pods[0]] = skipped.get(best.pods[0], 0) | 1 << position
                continue
            candidates &= ~(1 << position)
        for node in {hold.node: self._nodes[hold.node] for hold in holding}.values():
            is_free = self._budget > 0 and candidates >> index.position[node.name] & 1
            room = self._batch.room(node)
            if is_free and room.drain(_early(holding, node)):
                self._change(node, self._wanted(node, room), (), "on hold for a larger pod")

    def _wanted(
        self, node: partitioned.PartitionedNode, room: node_room.NodeRoom
    ) -> dict[str, model.DesiredGpu]:
        """Return all GPUs as a change leaves them: a reboot destroys what a layout omits."""
        return self._batch.present(node) | {
            gpu.uuid: batch.desired(gpu, state.fixed, room.ways[gpu.index].content)
            for gpu, state in self._batch.states(node)
            if gpu.index in room.ways
        }

    def _change(
        self,
        node: partitioned.PartitionedNode,
        wanted: Mapping[str, model.DesiredGpu],
        pods: tuple[demand.Pending, ...],
        why: str,
        *,
        is_withdrawal: bool = False,
    ) -> bool:
        """Add a change, unless its agent's last run failed this layout.

        Instances that were in use then can be idle now, so the request is repeated after
        ``room_timeout_s``. Its text differs, because the agent ignores an equal annotation.
        """
        try:
            plan = planner.plan(node.gpus, wanted)
        except errors.LayoutError:
            return False
        document = custom_layouts.written(wanted)
        is_safe = not any(
            isinstance(step, steps.DestroyGpuInstance)
            and step.placement in node.in_use[step.gpu_uuid]
            for step in plan.steps
        )
        if document.content_hash == node.refused:
            finished_at = node.finished_at if node.was_in_use else None
            if finished_at is None or self._is_recent(finished_at):
                self._still_refused.add(node.name)
                return False
            document = custom_layouts.written(wanted, addition=f"after {finished_at}")
        if plan.is_empty is not is_withdrawal or not is_safe:
            return False
        self._budget -= 1
        gpus = messages.ranges(gpu.gpu_index for gpu in plan.gpus)
        where = f" on GPU {', '.join(gpus)}" if gpus else ""
        created = (s.profile for s in plan.steps if isinstance(s, steps.CreateGpuInstance))
        destroyed = (s.profile for s in plan.steps if isinstance(s, steps.DestroyGpuInstance))
        self._changes.append(
            Change(
                node=node.name,
                version=node.version,
                layout=document.text,
                content_hash=document.content_hash,
                pods=pods,
                created=dict(collections.Counter(created)),
                destroyed=dict(collections.Counter(destroyed)),
                why=f"{why}{where}",
            )
        )
        return True

    def _holds(self, ranks: Iterable[int]) -> tuple[holds.Hold, ...]:
        """Return the GPUs to hold for pods that have waited without room."""
        position, own = self._batch.index.position, self._own
        ready = node_sets.of(position[node.name] for node in own if not node.unusable)
        changing = node_sets.of(position[node.name] for node in own if node.is_changing)
        times = holds.HoldTimes(
            now=self._now,
            after_s=self._limits.hold_after_s,
            timeout_s=self._limits.hold_timeout_s,
        )
        chosen = holds.Holds(self._batch, ready | changing, self._history.gpu_holds, times)
        result = chosen.choose(ranks, ready)
        self._gpu_holds = chosen.records
        return result

    def _why_not_now(self, node: partitioned.PartitionedNode) -> waiting.Cause:
        """Return why a node cannot be changed now; empty if it can."""
        wait = waiting.Wait
        if any(change.node == node.name for change in self._changes):
            return wait.CHANGING, "it is being changed for other pods"
        if node.unusable:
            return wait.CHANGING if node.is_changing else wait.UNUSABLE, node.unusable
        if remaining_s := rest_s(node, self._limits, self._history, now=self._now):
            return wait.CHANGING, f"it rests after a change for {math.ceil(remaining_s)} s more"
        if node.name in self._nominated:
            return wait.CHANGING, "the scheduler preempts pods on it"
        if node.name in self._still_refused:
            return wait.UNUSABLE, "its agent failed the layout for it"
        return None, ""

    def withdraw(self) -> None:
        """Replace refused requests of this process that no pod needs.

        Otherwise the node counts as failed, until a later agent serves an obsolete request.
        """
        changed = {change.node for change in self._changes}
        for node in self._own:
            is_stale = node.refused and node.refused == self._history.requested.get(node.name)
            if not is_stale or node.name in changed | self._still_refused:
                continue
            if self._budget > 0 and not self._why_not_now(node)[1]:
                why = "no pod needs the request that its agent failed"
                self._change(node, self._batch.present(node), (), why, is_withdrawal=True)

    # -- idle instances without demand ---------------------------------------------------------

    def merge_back(self, base: Mapping[str, Mapping[str, model.DesiredGpu]]) -> None:
        """Return idle instances to the base layout on nodes without demand for long."""
        changed = {change.node for change in self._changes}
        for node in self._own if self._limits.merge_back_after_s else ():
            since = self._history.demand_at.get(node.name)
            is_due = since and (
                (self._now - since).total_seconds() >= self._limits.merge_back_after_s
            )
            is_busy = node.name in changed or self._batch.is_claimed(node)
            if self._budget <= 0 or not is_due or is_busy or self._why_not_now(node)[1]:
                continue
            wanted = self._batch.merged(node, base.get(node.name, {}))
            if self._batch.keeps_reserved(node, wanted):
                self._change(node, wanted, (), "no pod has requested its idle instances")


def _early(holding: Iterable[holds.Hold], node: partitioned.PartitionedNode) -> set[int]:
    """Return the GPUs of a node whose idle instances a change destroys."""
    own = (hold.indices for hold in holding if hold.is_early and hold.node == node.name)
    return {index for indices in own for index in indices}
