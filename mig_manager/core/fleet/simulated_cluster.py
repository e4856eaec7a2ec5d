"""Simulate a cluster whose nodes the partitioner's real decision repartitions, event by event.

Nothing takes time but what is named in ``Times``. The scheduler retries every pending pod at each
event, by priority and age, and lets later pods pass. It does not know GPUs, and kubelet gives a
pod any idle device of the profile. The agent refuses a change that would destroy an instance in
use. Pods not in the simulation take nothing, and no pod preempts another.
"""

import bisect
import collections
import dataclasses
import datetime as dt
import enum
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from mig_manager.core import model, timing
from mig_manager.core.fleet import (
    arrivals,
    decisions,
    demand,
    exclusions,
    node_index,
    node_sets,
    partitioned,
    partitioning,
    past_decisions,
)
from mig_manager.core.node import resources
from mig_manager.core.planner import planner

_SLICES = 7


class Scheduler(enum.Enum):
    """How the scheduler ranks the nodes that have a pod's devices; ties are drawn."""

    SPREAD = "spread"  # LeastAllocated, the default: least CPU first, as many as compute slices
    PACKED = "packed"  # MostAllocated over ``nvidia.com/mig-*``


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long things take; seconds."""

    begin_s: float = 0.5  # from a request to the agent's taint
    change_s: float = 5.0  # from the taint until new devices can be scheduled, on a real kubelet
    quiet_s: float = 2.0
    longest_wait_s: float = 15.0
    recheck_s: float = 5.0
    longest_recheck_s: float = 5.0
    """Rechecks without a result double their pause up to this."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A pod, and when and how long it runs; seconds since the begin of the simulation."""

    pod: demand.Pending
    at_s: float  # of its creation
    run_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes and their scheduler."""

    nodes: Sequence[partitioned.PartitionedNode]  # without pods
    scheduler: Scheduler
    seed: int  # of what the scheduler and kubelet choose at random
    begin: dt.datetime
    times: Times = dataclasses.field(default_factory=Times)
    base: Mapping[str, Mapping[str, model.DesiredGpu]] = dataclasses.field(default_factory=dict)
    """By node and UUID, the state to which idle instances are merged back."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Result:
    """What became of the pods and nodes."""

    waits: dict[str, float | None]
    """By UID: from a pod's creation to its binding; None: it is not bound by the end."""
    changes: int = 0
    refused: int = 0  # changes, because an instance was in use
    destroyed: int = 0  # idle instances
    tainted_s: float = 0.0  # all nodes together
    decisions: int = 0
    lost: int = 0
    """Instances in use that a change destroyed: always 0."""
    unmet: dict[str, str] = dataclasses.field(default_factory=dict)
    """By UID: why no node could serve the pod at the last decision about it."""
    end_s: float  # the time that was reached


def simulate(
    jobs: Iterable[Job],
    cluster: Cluster,
    *,
    end_s: float,
    limits: decisions.PartitionerLimits | None,
    proceed: Callable[[float], bool] = lambda _: True,
) -> Result:
    """Simulate the jobs on a cluster; without ``limits`` its layouts stay.

    ``proceed`` is called with the time of every event, and returns False to stop there.
    """
    return _Run(jobs, cluster, end_s, limits).result(proceed)


def changed(
    gpus: tuple[model.Gpu, ...], goals: Mapping[str, model.DesiredGpu]
) -> tuple[tuple[model.Gpu, ...], set[tuple[str, model.Placement]]]:
    """Return the GPUs after a change, and the instances that it destroys."""
    after, kept = {}, set()
    for plan in planner.plan(gpus, goals).gpus:
        kept |= {(plan.gpu_uuid, target.placement) for target in plan.target if target.kept}
        after[plan.gpu_uuid] = tuple(
            model.GpuInstance(
                instance_id=number,
                profile=target.profile,
                profile_id=target.profile_id,
                placement=target.placement,
                compute_instances=tuple(
                    model.ComputeInstance(
                        instance_id=inside,
                        profile=each.profile,
                        placement=each.placement,
                        uuid=f"MIG-{plan.gpu_uuid}-{number}-{inside}",
                    )
                    for inside, each in enumerate(target.compute_instances)
                ),
            )
            for number, target in enumerate(plan.target)
        )
    gone = {
        (gpu.uuid, gi.placement) for gpu in gpus if gpu.uuid in after for gi in gpu.gpu_instances
    }
    result = tuple(
        dataclasses.replace(gpu, gpu_instances=after.get(gpu.uuid, gpu.gpu_instances))
        for gpu in gpus
    )
    return result, gone - kept


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """A MIG device of a node."""

    resource: str
    uuid: str  # of its GPU
    placement: model.Placement


class _EventKind(enum.Enum):
    """An event, with the pod or the node that it is about; an end with both."""

    ARRIVE = "arrive"
    END = "end"
    BEGIN = "begin"  # of a change
    FINISH = "finish"


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Node:
    origin: partitioned.PartitionedNode
    gpus: tuple[model.Gpu, ...]
    others: dict[str, int]
    """Allocatable resources other than MIG devices."""
    taken: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Resources that its pods request."""
    idle: dict[str, list[_Device]] = dataclasses.field(default_factory=dict)
    used: dict[str, list[_Device]] = dataclasses.field(default_factory=dict)  # by pod
    total: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    slices: int = 0  # compute slices of its pods
    is_closed: bool = False
    requested_at: dt.datetime | None = None
    started_at: dt.datetime | None = None
    finished_at: dt.datetime | None = None
    failed_hash: str = ""
    version: int = 0
    known: partitioned.PartitionedNode | None = None
    """What it publishes now; None: it must be built again."""

    def in_use(self) -> set[tuple[str, model.Placement]]:
        """Return the instances that pods use, with the UUIDs of their GPUs."""
        return {(each.uuid, each.placement) for used in self.used.values() for each in used}

    def list_idle(self) -> None:
        """Find the idle devices again after a change."""
        in_use = self.in_use()
        self.idle, self.total = {}, collections.Counter()
        for gpu in self.gpus:
            for gi in gpu.gpu_instances:
                for ci in gi.compute_instances:
                    resource = resources.of_profile(ci.profile)
                    if not resource:
                        continue
                    self.total[resource] += 1
                    idle = self.idle.setdefault(resource, [])
                    if (gpu.uuid, gi.placement) not in in_use:
                        idle.append(
                            _Device(resource=resource, uuid=gpu.uuid, placement=gi.placement)
                        )
        self.known = None

    def has_room(self, demanded: "_Demand") -> bool:
        """Return whether a pod fits now."""
        return (
            not self.is_closed
            and all(len(self.idle.get(name, ())) >= n for name, n in demanded.devices)
            and all(
                self.others.get(name, 0) - self.taken[name] >= n for name, n in demanded.others
            )
        )

    def score(self, demanded: "_Demand", scheduler: Scheduler) -> int:
        """Return a score of 0 to 100, as of the plugin NodeResourcesFit."""
        match scheduler:
            case Scheduler.SPREAD:
                slices = _SLICES * len(self.gpus)
                return 100 * (slices - self.slices - demanded.slices) // slices
            case Scheduler.PACKED:
                used = [
                    100 * (self.total[name] - len(self.idle[name]) + n) // self.total[name]
                    for name, n in demanded.devices
                ]
                return sum(used) // len(used)

    def publish(self) -> partitioned.PartitionedNode:
        """Return the node as the partitioner sees it."""
        if self.known is None:
            in_use: dict[str, set[model.Placement]] = {gpu.uuid: set() for gpu in self.gpus}
            for uuid, span in self.in_use():
                in_use[uuid].add(span)
            is_changing = self.is_closed or self.requested_at is not None
            self.version += 1
            self.known = dataclasses.replace(
                self.origin,
                version=str(self.version),
                allocatable=demand.to_amounts(self.others | self.total),
                allocated=demand.to_amounts(self.taken),
                unusable="its agent works on layout custom"
                if is_changing
                else self.origin.unusable,
                is_changing=is_changing,
                requested_at=self.requested_at,
                started_at=self.started_at,
                gpus=self.gpus,
                in_use={uuid: frozenset(spans) for uuid, spans in in_use.items()},
                finished_at=self.finished_at,
                took_s=(self.finished_at - self.started_at).total_seconds()
                if self.finished_at and self.started_at
                else 0.0,
                failed_hash=self.failed_hash,
                is_repeatable=bool(self.failed_hash),
            )
        return self.known


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Demand:
    """What pods with equal needs request, and where they may run."""

    devices: demand.Amounts
    others: demand.Amounts
    slices: int  # compute slices
    nodes: tuple[_Node, ...]
    queue: list[tuple[tuple[int, float, int], Job]] = dataclasses.field(default_factory=list)
    """Pending pods, the first in order first: by priority, then by age."""


class _Run:
    """One simulation."""

    def __init__(
        self,
        jobs: Iterable[Job],
        cluster: Cluster,
        end_s: float,
        limits: decisions.PartitionerLimits | None,
    ) -> None:
        self._jobs = {job.pod.uid: job for job in jobs}
        self._nodes = {origin.name: _node(origin) for origin in cluster.nodes}
        excluded = exclusions.Exclusions(cluster.nodes)
        self._demands = {
            needs: self._demand_of(needs, node_sets.union(excluded.of(needs).values()))
            for needs in {job.pod.needs: None for job in self._jobs.values()}
        }
        self._demand = {uid: self._demands[job.pod.needs] for uid, job in self._jobs.items()}
        self._end_s = end_s
        self._begin = cluster.begin
        self._base = cluster.base
        self._scheduler = cluster.scheduler
        self._limits = limits
        self._times = times = cluster.times
        self._draw = random.Random(cluster.seed)  # noqa: S311 - no secret
        self._pending: dict[str, Job] = {}
        self._events: list[tuple[float, int, _EventKind, tuple[str, ...]]] = []
        self._sequence = itertools.count()
        self._burst = timing.Burst(quiet_s=times.quiet_s, longest_s=times.longest_wait_s)
        self._recheck_s = math.inf
        self._pause_s = times.recheck_s
        self._history = past_decisions.History()
        self._cache = node_index.NodeCache()
        self._arrivals = arrivals.Arrivals()
        self._is_preparing = limits is not None and limits.prepare_for_s > 0
        self._requests: dict[str, decisions.Change] = {}
        self._result = Result(waits={}, end_s=end_s)
        self._now_s = 0.0

    def result(self, proceed: Callable[[float], bool]) -> Result:
        """Run to the end, or until ``proceed`` returns False."""
        for uid, job in self._jobs.items():
            self._add(job.at_s, _EventKind.ARRIVE, uid)
        while True:
            decide_s = self._next_decision_s()
            event_s = self._events[0][0] if self._events else math.inf
            if min(decide_s, event_s) > self._end_s:
                break
            self._now_s = min(decide_s, event_s)
            if not proceed(self._now_s):
                self._result.end_s = self._now_s
                break
            if self._limits is not None and decide_s <= event_s:
                self._decide(self._limits)
            else:
                self._handle(*heapq.heappop(self._events)[2:])
        waits = self._result.waits
        self._result.waits = {uid: waits.get(uid) for uid in self._jobs}
        return self._result

    def _handle(self, kind: _EventKind, names: tuple[str, ...]) -> None:
        match kind:
            case _EventKind.ARRIVE:
                self._enqueue(self._jobs[names[0]])
            case _EventKind.END:
                self._end_pod(*names)
            case _EventKind.BEGIN:
                self._begin_change(self._nodes[names[0]])
            case _EventKind.FINISH:
                self._finish_change(self._nodes[names[0]])
        self._schedule()
        if kind is not _EventKind.ARRIVE:
            if self._pending or self._is_preparing:
                self._burst.begin(self._now_s)
        elif names[0] not in self._result.waits:
            self._burst.add(self._now_s)
        elif self._is_preparing:
            self._burst.begin(self._now_s)

    def _add(self, at_s: float, kind: _EventKind, *names: str) -> None:
        heapq.heappush(self._events, (at_s, next(self._sequence), kind, names))

    def _time(self) -> dt.datetime:
        return self._begin + dt.timedelta(seconds=self._now_s)

    # -- pods ----------------------------------------------------------------------------------

    def _demand_of(self, needs: demand.Needs, excluded: int) -> _Demand:
        return _Demand(
            devices=tuple(each for each in needs.amounts if resources.is_mig(each[0])),
            others=needs.others,
            slices=sum(profile.gpu_slices * n for profile, n in needs.profiles.items()),
            nodes=tuple(
                node
                for position, node in enumerate(self._nodes.values())
                if not excluded >> position & 1
            ),
        )

    def _enqueue(self, job: Job) -> None:
        rank = -job.pod.priority, job.at_s, next(self._sequence)
        bisect.insort(self._demand[job.pod.uid].queue, (rank, job), key=lambda each: each[0])
        self._pending[job.pod.uid] = job
        self._arrivals.add(job.pod.needs, self._now_s)

    def _schedule(self) -> None:
        """Place pending pods in order; a pod that does not fit keeps back only its equals."""
        heads = [
            (demanded.queue[0][0], demanded)
            for demanded in self._demands.values()
            if demanded.queue
        ]
        heapq.heapify(heads)
        while heads:
            _, demanded = heapq.heappop(heads)
            node = self._choose(demanded)
            if node is None:
                continue
            self._place(demanded.queue.pop(0)[1], demanded, node)
            if demanded.queue:
                heapq.heappush(heads, (demanded.queue[0][0], demanded))

    def _place(self, job: Job, demanded: _Demand, node: _Node) -> None:
        uid = job.pod.uid
        node.used[uid] = [
            idle.pop(self._draw.randrange(len(idle)))
            for name, count in demanded.devices
            for idle in itertools.repeat(node.idle[name], count)
        ]
        node.taken.update(dict(job.pod.needs.amounts))
        node.slices += demanded.slices
        node.known = None
        del self._pending[uid]
        self._result.waits[uid] = self._now_s - job.at_s
        self._add(self._now_s + job.run_s, _EventKind.END, uid, node.origin.name)

    def _choose(self, demanded: _Demand) -> _Node | None:
        able = [node for node in demanded.nodes if node.has_room(demanded)]
        if not able:
            return None
        scores = [node.score(demanded, self._scheduler) for node in able]
        best = max(scores)
        return self._draw.choice([n for n, s in zip(able, scores, strict=True) if s == best])

    def _end_pod(self, uid: str, name: str) -> None:
        node = self._nodes[name]
        for device in node.used.pop(uid):
            node.idle[device.resource].append(device)
        node.taken.subtract(dict(self._jobs[uid].pod.needs.amounts))
        node.slices -= self._demand[uid].slices
        node.known = None

    # -- nodes ---------------------------------------------------------------------------------

    def _begin_change(self, node: _Node) -> None:
        """Let the agent check the use of the instances, and taint the node."""
        change = self._requests[node.origin.name]
        node.started_at, node.requested_at = self._time(), None
        node.known = None
        _, gone = changed(node.gpus, change.goals)
        if gone & node.in_use():
            node.failed_hash, node.finished_at = change.content_hash, self._time()
            self._result.refused += 1
            return
        node.is_closed = True
        self._add(self._now_s + self._times.change_s, _EventKind.FINISH, node.origin.name)

    def _finish_change(self, node: _Node) -> None:
        node.gpus, gone = changed(node.gpus, self._requests[node.origin.name].goals)
        self._result.lost += len(gone & node.in_use())
        self._result.destroyed += len(gone)
        self._result.changes += 1
        self._result.tainted_s += self._times.change_s
        node.is_closed, node.failed_hash, node.finished_at = False, "", self._time()
        node.list_idle()

    # -- the partitioner -----------------------------------------------------------------------

    def _next_decision_s(self) -> float:
        if self._limits is None:
            return math.inf
        ends_in_s = self._burst.ends_in_s(self._now_s)
        return self._recheck_s if ends_in_s is None else self._now_s + ends_in_s

    def _decide(self, limits: decisions.PartitionerLimits) -> None:
        is_recheck = self._burst.ends_in_s(self._now_s) is None
        self._burst.clear()
        now = self._time()
        nodes = [node.publish() for node in self._nodes.values()]
        pending = [job.pod for job in self._pending.values()]
        likely = self._arrivals.expected(self._now_s, limits.prepare_for_s)
        decision = partitioning.decide(
            nodes,
            pending,
            limits,
            now=now,
            history=self._history,
            cache=self._cache,
            base=self._base,
            expected=likely,
        )
        self._history = past_decisions.remember(self._history, nodes, pending, decision, now=now)
        for change in decision.changes:
            node = self._nodes[change.node]
            node.requested_at, node.known = now, None
            self._requests[change.node] = change
            self._add(self._now_s + self._times.begin_s, _EventKind.BEGIN, change.node)
        self._result.decisions += 1
        self._result.unmet |= {each.pod.uid: each.message for each in decision.unmet}
        is_idle = is_recheck and not decision.changes
        longer_s = min(2 * self._pause_s, self._times.longest_recheck_s)
        self._pause_s = longer_s if is_idle else self._times.recheck_s
        has_more = bool(pending or likely or limits.merge_back_after_s)
        self._recheck_s = self._now_s + self._pause_s if has_more else math.inf


def _node(origin: partitioned.PartitionedNode) -> _Node:
    others = {name: count for name, count in origin.allocatable if not resources.is_mig(name)}
    node = _Node(origin=origin, gpus=origin.gpus, others=others)
    node.list_idle()
    return node
