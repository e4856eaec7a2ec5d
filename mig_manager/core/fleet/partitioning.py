"""Decide which nodes to repartition so that pending pods find the MIG devices they ask for.

Nodes and pods in, the layouts to request out. An instance in use is never touched, a GPU whose
use is unknown is never named. The agent has the last word (``disruption: none``).

Pods are served by priority, then by age. Idle instances that serve a pod as they are stay for it.
For the others one node after the other is chosen: the one that serves the first pod that any node
can serve, then the one that serves most pods, then the one that destroys the fewest instances.

No pod waits for ever behind others. A small pod that is older than a large one is served first. A
large pod for which no GPU is idle enough cannot stop the scheduler from placing small pods on
instances that exist, but after ``hold_after_s`` as many GPUs as it needs get no new instances for
pods behind it.
"""

import collections
import dataclasses
import datetime as dt
import math
from collections.abc import Iterable, Iterator, Mapping

from mig_manager import errors
from mig_manager.core import messages, model, steps
from mig_manager.core.fleet import batch, demand, partitioned, rollout, sightings, waiting
from mig_manager.core.layout import custom
from mig_manager.core.node import resources
from mig_manager.core.planner import planner

PartitionedNode = partitioned.PartitionedNode
parse_node = partitioned.parse
with_pods = partitioned.with_pods
Sightings = sightings.Sightings
Wait = waiting.Wait
_MOST_CHANGES = 8  # of one decision; the next one follows soon
_SILENCE_S = 300.0
_LONGEST_RUN_S = 3600.0  # The deadlines of a run end well before.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionerLimits:
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
    room_timeout_s: float = 300.0
    """How long room is kept for a pod that the scheduler does not place, and for how long after
    that it gets none on the same node; also when to ask an agent again for what it failed."""
    hold_after_s: float = 600.0
    """How long the first pod in order waits before other pods get no new room on the GPUs that
    can serve it once idle."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A layout to request of one node."""

    node: str
    version: str  # ``resourceVersion`` of the node as it was seen: the write's precondition
    layout: str  # the text of the annotation ``mig-manager.io/layout``
    content_hash: str  # of the layout, as in the agent's status
    pods: tuple[demand.Pending, ...]
    """Those that it makes room for; none: a merge back, or a refused request is withdrawn."""
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
class PartitioningDecision:
    """What to do, and what cannot be done."""

    changes: tuple[Change, ...] = ()
    unmet: tuple[Unmet, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    room_since: Mapping[str, Mapping[str, dt.datetime]] = dataclasses.field(default_factory=dict)
    """For the next ``History``, without what the changes give."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a process remembers between decisions; see ``remember``. A new one is empty."""

    changed_at: Mapping[str, dt.datetime] = dataclasses.field(default_factory=dict)
    """By node: when the last change of it was requested."""
    requested: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By node: the content hash of the last layout that this process requested."""
    demand_at: Mapping[str, dt.datetime] = dataclasses.field(default_factory=dict)
    """By node: when a pod last asked for a device there, or this process first saw the node."""
    room_since: Mapping[str, Mapping[str, dt.datetime]] = dataclasses.field(default_factory=dict)
    """By UID of a pod that is still pending, by node: since when the node has room for it."""
    taken: Mapping[str, demand.Amounts] = dataclasses.field(default_factory=dict)
    """By node: the MIG devices that its pods took at the last decision."""


def decide(
    nodes: Iterable[PartitionedNode],
    pending: Iterable[demand.Pending],
    limits: PartitionerLimits,
    *,
    now: dt.datetime,
    history: History,
    base: Mapping[str, Mapping[str, model.DesiredGpu]] | None = None,
) -> PartitioningDecision:
    """Decide which nodes to repartition for these pods.

    ``nodes`` have their pods (``with_pods``), and times by the clock of ``now`` (``Sightings``).
    ``base`` has, by node and UUID, what to merge idle instances back to. The order of nodes and
    pods does not matter.
    """
    decider = _Decider(batch.Batch(nodes, pending, limits.reserved), limits, now, history)
    decider.leave_to_scheduler()
    decider.make_room()
    decider.withdraw()
    decider.merge_back(base or {})
    return decider.decision()


def remember(
    history: History,
    nodes: Iterable[PartitionedNode],
    pending: Iterable[demand.Pending],
    decision: PartitioningDecision,
    *,
    now: dt.datetime,
) -> History:
    """Return the history after a decision, with only the changes that were really requested.

    Nodes that are gone and pods that are not pending any more are forgotten.
    """
    waiting = {pod.uid for pod in pending}
    room_since = {uid: dict(since) for uid, since in decision.room_since.items() if uid in waiting}
    for change in decision.changes:
        for pod in change.pods:
            room_since.setdefault(pod.uid, {})[change.node] = now
    asked = {name for since in room_since.values() for name in since}
    taken = {
        node.name: tuple(item for item in node.taken if resources.is_mig(item[0]))
        for node in nodes
    }
    changed = {change.node: now for change in decision.changes}
    requested = {change.node: change.content_hash for change in decision.changes}
    return History(
        changed_at={
            name: when for name, when in {**history.changed_at, **changed}.items() if name in taken
        },
        requested={
            name: each
            for name, each in {**history.requested, **requested}.items()
            if name in taken
        },
        demand_at={
            name: history.demand_at.get(name, now)
            if name not in asked and history.taken.get(name) == amounts
            else now
            for name, amounts in taken.items()
        },
        room_since=room_since,
        taken=taken,
    )


class _Decider:
    """One decision in the making."""

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
        # Each change costs a look at all nodes, and a leader has to renew its Lease meanwhile.
        self._budget = min(_MOST_CHANGES, most - sum(map(self._counts, own)))
        self._remaining = list(range(len(pods.pods)))
        self._changes: list[Change] = []
        self._waiting: list[Waiting] = []
        self._room_since: dict[str, dict[str, dt.datetime]] = {}
        self._refused = frozenset(self._refusals())
        self._passed = self._refused
        """Pairs as in ``Batch.offer``."""
        self._alike: dict[str, object] = {}
        self._wanted_again: set[str] = set()
        """Nodes whose refused request would be made again."""
        self._causes = waiting.Causes(pods, self._why_not_now)

    def decision(self) -> PartitioningDecision:
        """Return the decision, with the reasons of all pods that are not served."""
        unmet: list[Unmet] = []
        for rank in self._remaining:
            pod = self._batch.pods[rank]
            refused = frozenset(name for uid, name in self._refused if uid == pod.uid)
            reason, message = self._causes.why(rank, refused)
            if reason is None:
                unmet.append(Unmet(pod=pod, message=message))
            else:
                self._waiting.append(Waiting(pod=pod, reason=reason, message=message))
        return PartitioningDecision(
            changes=tuple(self._changes),
            unmet=tuple(unmet),
            waiting=tuple(self._waiting),
            room_since=self._room_since,
        )

    def _counts(self, node: PartitionedNode) -> bool:
        """Return whether a node counts against the budget: its agent works, or soon will.

        One that has been silent for long would keep all other nodes from a change.
        """
        since, longest_s = node.asked_at, _SILENCE_S
        if since is None:
            since, longest_s = node.began_at, _LONGEST_RUN_S
        is_silent = since and (self._now - since).total_seconds() > longest_s
        return node.is_changing and not is_silent

    # -- pods that need no change --------------------------------------------------------------

    def leave_to_scheduler(self) -> None:
        """Keep what nodes have for pods, and wait for changes that were made for them."""
        self._remaining = [rank for rank in self._remaining if not self._is_left(rank)]

    def _is_left(self, rank: int) -> bool:
        pod, group = self._batch.pods[rank], self._batch.group[rank]
        since = self._history.room_since.get(pod.uid, {})
        for name, when in since.items():
            node = self._nodes.get(name)
            if node and node.is_changing and self._keeps_room(when):
                message = f"node {name} is being changed for it"
                self._wait_at(rank, node, when, message)
                return True
        for node in sorted(
            self._batch.nodes, key=lambda node: (node.name not in since, node.is_opted_in)
        ):
            if (pod.uid, node.name) in self._refused or not self._batch.has_room(group, node):
                continue
            self._batch.claim(group, node)
            kept = since.get(node.name)
            when = kept if kept and self._keeps_room(kept) else self._now
            message = f"node {node.name} has what it asks for: the scheduler is to place it"
            self._wait_at(rank, node, when, message)
            return True
        return False

    def _wait_at(self, rank: int, node: PartitionedNode, since: dt.datetime, message: str) -> None:
        pod = self._batch.pods[rank]
        self._room_since.setdefault(pod.uid, {})[node.name] = since
        self._waiting.append(
            Waiting(pod=pod, reason=Wait.SCHEDULER, message=message, node=node.name)
        )

    def _keeps_room(self, since: dt.datetime) -> bool:
        return (self._now - since).total_seconds() <= self._limits.room_timeout_s

    def _refusals(self) -> Iterator[tuple[str, str]]:
        """Yield pods with the nodes that had room for them in vain, and note those."""
        for pod in self._batch.pods:
            for name, since in self._history.room_since.get(pod.uid, {}).items():
                age_s = (self._now - since).total_seconds()
                if self._limits.room_timeout_s < age_s <= 2 * self._limits.room_timeout_s:
                    self._room_since.setdefault(pod.uid, {})[name] = since
                    yield pod.uid, name

    # -- changes -------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Choose one node after the other, as long as any serves a pod."""
        candidates = [node for node in self._own if not self._why_not_now(node)[1]]
        self._alike = {node.name: self._batch.alike(node, self._refused) for node in candidates}
        hold = self._hold()
        known: dict[object, batch.Offer | None] = {}
        while self._budget > 0 and self._remaining and candidates:
            offers = [self._offer(node, hold, known) for node in candidates]
            best = min(filter(None, offers), key=lambda offer: offer.rank, default=None)
            if best is None:
                return
            candidates.remove(best.node)
            known = {
                key: offer
                for key, offer in known.items()
                if offer is None or not {*offer.pods} & {*best.pods}
            }
            pods = tuple(self._batch.pods[rank] for rank in best.pods)
            # All GPUs, also those that stay: a reboot destroys what the layout does not name.
            wanted = self._batch.present(best.node)
            wanted |= {
                gpu.uuid: batch.desired(gpu, state.fixed, best.room.ways[gpu.index].content)
                for gpu, state in self._batch.states(best.node)
                if gpu.index in best.room.ways
            }
            if self._change(best.node, wanted, pods, f"room for {waiting.pods(len(pods))}"):
                self._remaining = [rank for rank in self._remaining if rank not in best.pods]
            elif best.node.name in self._wanted_again:
                # Its agent has failed that: the node may still serve the pods behind the first.
                self._passed |= {(pods[0].uid, best.node.name)}
                self._alike[best.node.name] = self._batch.alike(best.node, self._passed)
                candidates.append(best.node)

    def _offer(
        self,
        node: PartitionedNode,
        hold: batch.Hold | None,
        known: dict[object, batch.Offer | None],
    ) -> batch.Offer | None:
        """Return a node's offer; ``known`` has those that are still right, of nodes alike."""
        key = self._alike[node.name], hold is not None and hold.node == node.name
        if key not in known:
            known[key] = self._batch.offer(node, self._remaining, hold=hold, refused=self._passed)
        offer = known[key]
        return offer and dataclasses.replace(offer, node=node)

    def _change(
        self,
        node: PartitionedNode,
        wanted: Mapping[str, model.DesiredGpu],
        pods: tuple[demand.Pending, ...],
        why: str,
        *,
        is_withdrawal: bool = False,
    ) -> bool:
        """Add a change, unless its agent has failed this very layout at last.

        What was in use then may be idle again: after ``room_timeout_s`` it is requested again,
        in another text, or the annotation would be the same and the agent would not notice.
        """
        try:
            plan = planner.plan(node.gpus, wanted)
        except errors.LayoutError:
            return False
        document = custom.written(wanted)
        is_safe = not any(
            isinstance(step, steps.DestroyGpuInstance)
            and step.placement in node.in_use[step.gpu_uuid]
            for step in plan.steps
        )
        if document.content_hash == node.refused:
            ended_at = node.changed_at if node.was_in_use else None
            if ended_at is None or self._keeps_room(ended_at):
                self._wanted_again.add(node.name)
                return False
            document = custom.written(wanted, addition=f"after {ended_at}")
        if plan.is_empty is not is_withdrawal or not is_safe:
            return False
        self._budget -= 1
        gpus = messages.ranges(gpu.gpu_index for gpu in plan.gpus)
        where = f" on GPU {', '.join(gpus)}" if gpus else ""
        created = (s.profile for s in plan.steps if isinstance(s, steps.CreateGpuInstance))
        ended = (s.profile for s in plan.steps if isinstance(s, steps.DestroyGpuInstance))
        self._changes.append(
            Change(
                node=node.name,
                version=node.version,
                layout=document.text,
                content_hash=document.content_hash,
                pods=pods,
                created=dict(collections.Counter(created)),
                destroyed=dict(collections.Counter(ended)),
                why=f"{why}{where}",
            )
        )
        return True

    def _hold(self) -> batch.Hold | None:
        """Return the GPUs to hold for the first pod that has waited long and has no room."""
        usable = [node for node in self._own if not node.unusable]
        blocked: set[int] = set()
        for rank in self._remaining:
            pod, group = self._batch.pods[rank], self._batch.group[rank]
            if group in blocked:
                continue
            blocked.add(group)
            age_s = (self._now - pod.created_at).total_seconds() if pod.created_at else 0.0
            able = [node for node in usable if not self._causes.why_never(group, node)]
            if age_s < self._limits.hold_after_s or not able:
                continue
            if not any(self._batch.offer(node, [rank]) for node in able):
                return self._batch.hold_for(rank, able)
        return None

    def _why_not_now(self, node: PartitionedNode) -> tuple[Wait | None, str]:
        """Say why a node cannot be changed now; empty if it can."""
        if any(change.node == node.name for change in self._changes):
            return Wait.CHANGING, "it is being changed for other pods"
        if node.unusable:
            return Wait.CHANGING if node.is_changing else Wait.UNUSABLE, node.unusable
        if self._idle_s(node) < self._limits.cooldown_s:
            return Wait.CHANGING, f"it was changed less than {self._limits.cooldown_s:g} s ago"
        if node.name in self._wanted_again:
            return Wait.UNUSABLE, "its agent has failed the layout for it"
        return None, ""

    def _idle_s(self, node: PartitionedNode) -> float:
        """Return the time since the last change of a node; inf if none is known."""
        times = filter(None, (node.changed_at, self._history.changed_at.get(node.name)))
        return min(((self._now - each).total_seconds() for each in times), default=math.inf)

    def withdraw(self) -> None:
        """Replace requests of this process that were refused and that no pod needs any more.

        A later agent would serve them, and until then the node would count as failed.
        """
        changed = {change.node for change in self._changes}
        for node in self._own:
            is_stale = node.refused and node.refused == self._history.requested.get(node.name)
            if not is_stale or node.name in changed | self._wanted_again:
                continue
            if self._budget > 0 and not self._why_not_now(node)[1]:
                why = "the request that it refused is not needed any more"
                self._change(node, self._batch.present(node), (), why, is_withdrawal=True)

    # -- idle instances without demand ---------------------------------------------------------

    def merge_back(self, base: Mapping[str, Mapping[str, model.DesiredGpu]]) -> None:
        """Return idle instances to the base layout where nothing has been asked for long."""
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
                self._change(node, wanted, (), "no pod has asked for its idle instances")
