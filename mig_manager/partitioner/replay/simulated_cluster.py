"""Simulate a cluster whose nodes the partitioner's real decision repartitions, event by event.

Nothing takes time but what is named in ``SimulatedTimes``. The scheduler retries every pending pod
at each event, by priority and age, and lets later pods pass. It does not know GPUs. Pods not in
the simulation take nothing, and no pod preempts another.
"""

import bisect
import dataclasses
import datetime as dt
import enum
import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from mig_manager.core import model, timing
from mig_manager.core.partitioning import decider, demand
from mig_manager.core.partitioning.batch import arrivals
from mig_manager.core.partitioning.decision import decisions, situations
from mig_manager.core.partitioning.nodes import (
    exclusions,
    node_index,
    node_sets,
    partitioned_nodes,
)
from mig_manager.partitioner.replay import simulated_node


class Scheduler(enum.Enum):
    """How the scheduler ranks the nodes that have a pod's devices; ties are drawn."""

    SPREAD = "spread"  # LeastAllocated, the default: least CPU first, as many as compute slices
    PACKED = "packed"  # MostAllocated over ``nvidia.com/mig-*``


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTimes:
    """How long things take; seconds."""

    begin_s: float = 0.5  # from a request to the agent's taint
    change_s: float = 5.0  # from the taint until new devices can be scheduled, on a real kubelet
    quiet_s: float = 2.0
    longest_wait_s: float = 15.0
    recheck_s: float = 5.0
    max_recheck_s: float = 5.0  # rechecks without a result double their pause up to this


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPod:
    """A pod, and when and how long it runs; seconds since the begin of the simulation."""

    pod: demand.PendingPod
    at_s: float  # when it is created
    run_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCluster:
    """Nodes and their scheduler."""

    nodes: Sequence[partitioned_nodes.PartitionedNode]  # without pods
    scheduler: Scheduler
    seed: int  # for what the scheduler and kubelet choose at random
    begin: dt.datetime
    times: SimulatedTimes = dataclasses.field(default_factory=SimulatedTimes)
    base: Mapping[str, Mapping[str, model.DesiredGpu]] = dataclasses.field(default_factory=dict)
    """By node and UUID, the state to which idle instances are merged back."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The waits and ends of the pods, and the changes of the nodes."""

    waits: Mapping[str, float | None]
    """By UID: from a pod's creation to its binding; None: it is not bound by the end."""
    changes: int = 0
    refused: int = 0  # changes, because an instance was in use
    destroyed: int = 0  # idle instances
    tainted_s: float = 0.0  # all nodes together
    decisions: int = 0
    lost: int = 0  # instances in use that a change destroyed: always 0
    unmet: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By UID: why no node could serve the pod at the last decision about it."""
    end_s: float  # the time that was reached


def simulate(
    jobs: Iterable[SimulatedPod],
    cluster: SimulatedCluster,
    *,
    end_s: float,
    limits: decisions.PartitionerLimits | None,
    proceed: Callable[[float], bool] = lambda _: True,
) -> SimulationResult:
    """Simulate the jobs on a cluster; without ``limits`` its layouts stay.

    ``proceed`` is called with the time of every event, and returns False to stop there.
    """
    return _Run(jobs, cluster, end_s, limits).result(proceed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Queue:
    """The pending pods with equal needs, and where they may run."""

    needs: demand.Needs
    nodes: tuple[simulated_node.SimulatedNode, ...]
    jobs: list[tuple[tuple[int, float, int], SimulatedPod]] = dataclasses.field(
        default_factory=list
    )
    """The first in order first: by priority, then by age."""


class _Run:
    """One simulation."""

    def __init__(
        self,
        jobs: Iterable[SimulatedPod],
        cluster: SimulatedCluster,
        end_s: float,
        limits: decisions.PartitionerLimits | None,
    ) -> None:
        self._cluster = cluster
        self._limits = limits
        self._is_preparing = limits is not None and limits.prepare_for_s > 0
        self._nodes = {
            origin.name: simulated_node.SimulatedNode(origin) for origin in cluster.nodes
        }
        self._exclusions = exclusions.Exclusions(cluster.nodes)
        self._queues: dict[demand.Needs, _Queue] = {}
        self._pending: dict[str, SimulatedPod] = {}
        self._draw = random.Random(cluster.seed)  # noqa: S311 - no secret
        self._events: list[tuple[float, int, functools.partial[None]]] = []
        self._sequence = itertools.count()
        self._burst = timing.Burst(
            quiet_s=cluster.times.quiet_s, max_s=cluster.times.longest_wait_s
        )
        self._recheck_s = math.inf
        self._pause_s = cluster.times.recheck_s
        self._history = situations.History()
        self._cache = node_index.NodeCache()
        self._arrivals = arrivals.Arrivals()
        self._waits: dict[str, float | None] = {}
        self._unmet: dict[str, str] = {}
        self._result = SimulationResult(waits={}, end_s=end_s)
        self._now_s = 0.0
        for job in {job.pod.uid: job for job in jobs}.values():
            self._waits[job.pod.uid] = None
            self._add(job.at_s, self._arrive, job)

    def result(self, proceed: Callable[[float], bool]) -> SimulationResult:
        """Run to the end, or until ``proceed`` returns False."""
        while True:
            decide_s = self._next_decision_s()
            event_s = self._events[0][0] if self._events else math.inf
            if min(decide_s, event_s) > self._result.end_s:
                break
            self._now_s = min(decide_s, event_s)
            if not proceed(self._now_s):
                self._result = dataclasses.replace(self._result, end_s=self._now_s)
                break
            if self._limits is not None and decide_s <= event_s:
                self._decide(self._limits)
            else:
                heapq.heappop(self._events)[2]()
        return dataclasses.replace(self._result, waits=self._waits, unmet=self._unmet)

    def _add(self, at_s: float, act: Callable[..., None], *about: object) -> None:
        event = (at_s, next(self._sequence), functools.partial(act, *about))
        heapq.heappush(self._events, event)

    def _time(self) -> dt.datetime:
        return self._cluster.begin + dt.timedelta(seconds=self._now_s)

    # -- pods ----------------------------------------------------------------------------------

    def _arrive(self, job: SimulatedPod) -> None:
        rank = -job.pod.priority, job.at_s, next(self._sequence)
        bisect.insort(self._queue(job.pod.needs).jobs, (rank, job), key=lambda each: each[0])
        self._pending[job.pod.uid] = job
        self._arrivals.add(job.pod.needs, self._now_s)
        self._schedule()
        if job.pod.uid in self._pending:
            self._burst.add(self._now_s)
        elif self._is_preparing:
            self._burst.begin(self._now_s)

    def _queue(self, needs: demand.Needs) -> _Queue:
        if needs not in self._queues:
            excluded = node_sets.union(self._exclusions.of(needs).values())
            self._queues[needs] = _Queue(
                needs=needs,
                nodes=tuple(
                    node
                    for position, node in enumerate(self._nodes.values())
                    if position not in excluded
                ),
            )
        return self._queues[needs]

    def _schedule(self) -> None:
        """Place pending pods in order; a pod that does not fit keeps back only its equals."""
        heads = [(queue.jobs[0][0], queue) for queue in self._queues.values() if queue.jobs]
        heapq.heapify(heads)
        while heads:
            _, queue = heapq.heappop(heads)
            if node := self._choose(queue):
                self._place(queue.jobs.pop(0)[1], node)
                if queue.jobs:
                    heapq.heappush(heads, (queue.jobs[0][0], queue))

    def _choose(self, queue: _Queue) -> simulated_node.SimulatedNode | None:
        needs = queue.needs
        able = [node for node in queue.nodes if node.has_room(needs)]
        if not able:
            return None
        is_packed = self._cluster.scheduler is Scheduler.PACKED
        scores = [node.score(needs, is_packed=is_packed) for node in able]
        best = max(scores)
        return self._draw.choice([n for n, s in zip(able, scores, strict=True) if s == best])

    def _place(self, job: SimulatedPod, node: simulated_node.SimulatedNode) -> None:
        uid = job.pod.uid
        node.bind(job.pod, self._draw)
        del self._pending[uid]
        self._waits[uid] = self._now_s - job.at_s
        self._add(self._now_s + job.run_s, self._end, job.pod, node)

    def _end(self, pod: demand.PendingPod, node: simulated_node.SimulatedNode) -> None:
        node.end(pod)
        self._react()

    def _react(self) -> None:
        """Schedule after devices have become free, and decide soon."""
        self._schedule()
        if self._pending or self._is_preparing:
            self._burst.begin(self._now_s)

    # -- nodes ---------------------------------------------------------------------------------

    def _begin(self, node: simulated_node.SimulatedNode, change: decisions.NodeChange) -> None:
        if node.begin(change, now=self._time()):
            at_s = self._now_s + self._cluster.times.change_s
            self._add(at_s, self._finish, node, change)
        else:
            self._result = dataclasses.replace(self._result, refused=self._result.refused + 1)
        self._react()

    def _finish(self, node: simulated_node.SimulatedNode, change: decisions.NodeChange) -> None:
        destroyed, lost = node.change(change, now=self._time())
        before = self._result
        self._result = dataclasses.replace(
            before,
            destroyed=before.destroyed + destroyed,
            lost=before.lost + lost,
            changes=before.changes + 1,
            tainted_s=before.tainted_s + self._cluster.times.change_s,
        )
        self._react()

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
        nodes = [node.as_published() for node in self._nodes.values()]
        pending = [job.pod for job in self._pending.values()]
        situation = situations.Situation(
            index=node_index.NodeIndex(nodes, self._cache),
            limits=limits,
            now=now,
            history=self._history,
        )
        likely = self._arrivals.expected_pods(self._now_s, limits.prepare_for_s, situation.index)
        decision = decider.decide(situation, pending, base=self._cluster.base, expected=likely)
        self._history = situation.after(decision)
        for change in decision.changes:
            node = self._nodes[change.node]
            node.request(now=now)
            self._add(self._now_s + self._cluster.times.begin_s, self._begin, node, change)
        self._result = dataclasses.replace(self._result, decisions=self._result.decisions + 1)
        self._unmet |= {each.pod.uid: each.message for each in decision.unmet}
        is_idle = is_recheck and not decision.changes
        times = self._cluster.times
        longer_s = min(2 * self._pause_s, times.max_recheck_s)
        self._pause_s = longer_s if is_idle else times.recheck_s
        has_more = bool(pending or likely or limits.merge_back_after_s)
        self._recheck_s = self._now_s + self._pause_s if has_more else math.inf
