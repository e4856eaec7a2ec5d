"""Simulate a cluster whose nodes the partitioner's real decision repartitions, event by event.

Nothing takes time but what is named in ``Times``. The scheduler retries every pending pod at each
event, in order, and lets later pods pass. It does not know GPUs, and kubelet gives a pod any idle
device of the profile. The agent refuses a change that would destroy an instance in use.
"""

import collections
import dataclasses
import datetime as dt
import enum
import functools
import heapq
import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.catalogue import hardware
from mig_manager.core import model, profile_name, timing
from mig_manager.core.fleet import demand, partitioned, partitioning
from mig_manager.core.layout import config
from mig_manager.core.layout import layouts as layouts_of
from mig_manager.core.node import resources
from mig_manager.core.planner import planner
from testkit import day

_SLICES = 7
_EPOCH = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class Scheduler(enum.Enum):
    """How the scheduler ranks the nodes that have a pod's devices; ties are drawn."""

    SPREAD = "spread"  # LeastAllocated, the default: least CPU first, as many as compute slices
    PACKED = "packed"  # MostAllocated over ``nvidia.com/mig-*``


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long things take; seconds."""

    begin_s: float = 0.5  # from a request to the agent's taint
    change_s: float = 10.0  # from the taint until new devices can be scheduled
    quiet_s: float = 2.0
    longest_wait_s: float = 15.0
    recheck_s: float = 5.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A MIG device of a node."""

    profile: str
    uuid: str  # of its GPU
    placement: model.Placement


class _Kind(enum.Enum):
    """An event, with the pod or the node that it is about; an end with both."""

    ARRIVE = "arrive"
    END = "end"
    BEGIN = "begin"  # of a change
    FINISH = "finish"


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Node:
    name: str
    gpus: tuple[model.Gpu, ...]
    idle: dict[str, list[Device]] = dataclasses.field(default_factory=dict)
    used: dict[str, list[Device]] = dataclasses.field(default_factory=dict)  # by pod
    total: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    is_closed: bool = False
    requested_at: dt.datetime | None = None
    started_at: dt.datetime | None = None
    finished_at: dt.datetime | None = None
    refused: str = ""
    version: int = 0
    known: partitioned.PartitionedNode | None = None
    """What it publishes now; None: it must be built again."""

    def list_idle(self) -> None:
        """Find the idle devices again after a change."""
        in_use = {
            (each.uuid, each.placement) for devices in self.used.values() for each in devices
        }
        self.idle, self.total = collections.defaultdict(list), collections.Counter()
        for gpu in self.gpus:
            for gi in gpu.gpu_instances:
                device = Device(profile=str(gi.profile), uuid=gpu.uuid, placement=gi.placement)
                self.total[device.profile] += 1
                if (device.uuid, device.placement) not in in_use:
                    self.idle[device.profile].append(device)
        self.known = None

    def publish(self) -> partitioned.PartitionedNode:
        """Return the node as the partitioner sees it."""
        if self.known is None:
            in_use: dict[str, set[model.Placement]] = {gpu.uuid: set() for gpu in self.gpus}
            allocated: collections.Counter[str] = collections.Counter()
            for devices in self.used.values():
                for each in devices:
                    in_use[each.uuid].add(each.placement)
                    allocated[_resource(each.profile)] += 1
            is_changing = self.is_closed or self.requested_at is not None
            self.version += 1
            self.known = partitioned.PartitionedNode(
                name=self.name,
                version=str(self.version),
                labels={},
                taints=(),
                allocatable=demand.to_amounts(
                    {_resource(name): count for name, count in self.total.items()} | {"pods": 999}
                ),
                allocated=demand.to_amounts(allocated | {"pods": len(self.used)}),
                is_opted_in=True,
                unusable="its agent works on layout custom" if is_changing else "",
                is_changing=is_changing,
                requested_at=self.requested_at,
                started_at=self.started_at,
                gpus=self.gpus,
                in_use={uuid: frozenset(spans) for uuid, spans in in_use.items()},
                finished_at=self.finished_at,
                refused=self.refused,
                was_in_use=bool(self.refused),
            )
        return self.known


@dataclasses.dataclass(slots=True, kw_only=True)
class Result:
    """What became of the pods and nodes."""

    waits: dict[str, float | None]
    changes: int = 0
    refused: int = 0  # changes, because an instance was in use
    destroyed: int = 0  # idle instances
    closed_s: float = 0.0  # by all nodes together
    decisions: int = 0
    lost: int = 0
    """Instances in use that a change destroyed: always 0."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes and their scheduler."""

    layouts: Sequence[day.Counts]
    """Of the GPUs at first, node by node."""
    scheduler: Scheduler
    seed: int  # of what the scheduler and kubelet choose at random
    product: str = day.PRODUCT
    times: Times = dataclasses.field(default_factory=Times)


def simulate(
    jobs: Iterable[day.Job],
    cluster: Cluster,
    *,
    end_s: float,
    limits: partitioning.PartitionerLimits | None,
) -> Result:
    """Simulate the jobs on a cluster; without ``limits`` its layouts stay."""
    return _Run(jobs, cluster, end_s, limits).result()


def spread(mix: Mapping[day.Counts, int]) -> list[day.Counts]:
    """Return the layouts of all GPUs so that each node has a part of each."""
    gpus = [counts for counts, number in mix.items() for _ in range(number)]
    nodes = len(gpus) // day.GPUS_EACH
    return [counts for number in range(nodes) for counts in gpus[number::nodes]]


def _nodes(layouts: Sequence[day.Counts], product: str) -> list[_Node]:
    nodes: list[_Node] = []
    for first in range(0, len(layouts), day.GPUS_EACH):
        gpus = tuple(
            _gpu(product, index, counts)
            for index, counts in enumerate(layouts[first : first + day.GPUS_EACH])
        )
        node = _Node(name=f"node-{len(nodes):04}", gpus=gpus)
        node.list_idle()
        nodes.append(node)
    return nodes


@functools.cache
def _gpu(product: str, index: int, counts: day.Counts) -> model.Gpu:
    bare = hardware.template(hardware.find(product), index)
    on = dataclasses.replace(
        bare, current_mode=model.MigMode.ENABLED, pending_mode=model.MigMode.ENABLED
    )
    goal = model.DesiredGpu.of(
        model.MigMode.ENABLED, {profile_name.parse(name): count for name, count in counts}, {}
    )
    return _changed((on,), {on.uuid: goal})[0][0]


def _changed(
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
    changed = tuple(
        dataclasses.replace(gpu, gpu_instances=after.get(gpu.uuid, gpu.gpu_instances))
        for gpu in gpus
    )
    return changed, gone - kept


@functools.cache
def _resource(profile: str) -> str:
    return resources.of_profile(profile_name.parse(profile)) or ""


class _Run:
    """One simulation."""

    def __init__(
        self,
        jobs: Iterable[day.Job],
        cluster: Cluster,
        end_s: float,
        limits: partitioning.PartitionerLimits | None,
    ) -> None:
        self._jobs = {job.name: job for job in jobs}
        self._nodes = {node.name: node for node in _nodes(cluster.layouts, cluster.product)}
        self._end_s = end_s
        self._scheduler = cluster.scheduler
        self._limits = limits
        self._times = times = cluster.times
        self._draw = random.Random(cluster.seed)  # noqa: S311 - a bench, no secret
        sizes = day.sizes(cluster.product)
        self._compute = {name: size.compute for name, size in sizes.items()}
        self._taken: collections.Counter[str] = collections.Counter()
        """By node: the compute slices of its pods."""
        self._pending: list[day.Job] = []
        self._events: list[tuple[float, int, _Kind, tuple[str, ...]]] = []
        self._sequence = itertools.count()
        self._burst = timing.Burst(quiet_s=times.quiet_s, longest_s=times.longest_wait_s)
        self._recheck_s = math.inf
        self._history = partitioning.History()
        self._requests: dict[str, partitioning.Change] = {}
        self._result = Result(waits={})
        self._now_s = 0.0

    def result(self) -> Result:
        """Run to the end."""
        for job in self._jobs.values():
            self._add(job.at_s, _Kind.ARRIVE, job.name)
        while True:
            decide_s = self._next_decision_s()
            event_s = self._events[0][0] if self._events else math.inf
            if min(decide_s, event_s) > self._end_s:
                break
            self._now_s = min(decide_s, event_s)
            if self._limits is not None and decide_s <= event_s:
                self._decide(self._limits)
            else:
                self._handle(*heapq.heappop(self._events)[2:])
        waits = self._result.waits
        self._result.waits = {name: waits.get(name) for name in self._jobs}
        return self._result

    def _handle(self, kind: _Kind, names: tuple[str, ...]) -> None:
        match kind:
            case _Kind.ARRIVE:
                self._pending.append(self._jobs[names[0]])
            case _Kind.END:
                self._end_pod(*names)
            case _Kind.BEGIN:
                self._begin(self._nodes[names[0]])
            case _Kind.FINISH:
                self._finish(self._nodes[names[0]])
        self._schedule()
        # A change of a node counts as a change of demand.
        if self._pending and (kind is not _Kind.ARRIVE or self._pending[-1].name == names[0]):
            self._burst.add(self._now_s)

    def _add(self, at_s: float, kind: _Kind, *names: str) -> None:
        heapq.heappush(self._events, (at_s, next(self._sequence), kind, names))

    # -- pods ----------------------------------------------------------------------------------

    def _schedule(self) -> None:
        failed: set[tuple[str, int]] = set()
        still = []
        for job in self._pending:
            kind = job.profile, job.count
            node = None if kind in failed else self._choose(job)
            if node is None:
                failed.add(kind)
                still.append(job)
                continue
            idle = node.idle[job.profile]
            node.used[job.name] = [
                idle.pop(self._draw.randrange(len(idle))) for _ in range(job.count)
            ]
            node.known = None
            self._taken[node.name] += job.count * self._compute[job.profile]
            self._result.waits[job.name] = self._now_s - job.at_s
            self._add(self._now_s + job.run_s, _Kind.END, job.name, node.name)
        self._pending = still

    def _choose(self, job: day.Job) -> _Node | None:
        able = [
            node
            for node in self._nodes.values()
            if not node.is_closed and len(node.idle.get(job.profile, ())) >= job.count
        ]
        if not able:
            return None
        scores = [self._score(node, job) for node in able]
        best = max(scores)
        return self._draw.choice([n for n, s in zip(able, scores, strict=True) if s == best])

    def _score(self, node: _Node, job: day.Job) -> int:
        """Return a score of 0 to 100, as of the plugin NodeResourcesFit."""
        match self._scheduler:
            case Scheduler.SPREAD:
                need = job.count * self._compute[job.profile]
                slices = _SLICES * len(node.gpus)
                return 100 * (slices - self._taken[node.name] - need) // slices
            case Scheduler.PACKED:
                total = node.total[job.profile]
                used = total - len(node.idle[job.profile]) + job.count
                return 100 * used // total

    def _end_pod(self, pod: str, name: str) -> None:
        node = self._nodes[name]
        for device in node.used.pop(pod):
            node.idle[device.profile].append(device)
        node.known = None
        job = self._jobs[pod]
        self._taken[name] -= job.count * self._compute[job.profile]

    # -- nodes ---------------------------------------------------------------------------------

    def _begin(self, node: _Node) -> None:
        """Let the agent check the use of the instances, and taint the node."""
        change = self._requests[node.name]
        node.started_at, node.requested_at = _time(self._now_s), None
        node.known = None
        _, gone = _changed(node.gpus, self._goals(node, change))
        in_use = {(each.uuid, each.placement) for used in node.used.values() for each in used}
        if gone & in_use:
            node.refused, node.finished_at = change.content_hash, _time(self._now_s)
            self._result.refused += 1
            return
        node.is_closed = True
        self._add(self._now_s + self._times.change_s, _Kind.FINISH, node.name)

    def _finish(self, node: _Node) -> None:
        node.gpus, gone = _changed(node.gpus, self._goals(node, self._requests[node.name]))
        in_use = {(each.uuid, each.placement) for used in node.used.values() for each in used}
        self._result.lost += len(gone & in_use)
        self._result.destroyed += len(gone)
        self._result.changes += 1
        self._result.closed_s += self._times.change_s
        node.is_closed, node.refused, node.finished_at = False, "", _time(self._now_s)
        node.list_idle()

    def _goals(self, node: _Node, change: partitioning.Change) -> dict[str, model.DesiredGpu]:
        (layout,) = config.parse(change.layout, source="annotation").layouts.values()
        return layouts_of.select(layout, node.gpus)

    # -- the partitioner -----------------------------------------------------------------------

    def _next_decision_s(self) -> float:
        if self._limits is None:
            return math.inf
        ends_in_s = self._burst.ends_in_s(self._now_s)
        return self._recheck_s if ends_in_s is None else self._now_s + ends_in_s

    def _decide(self, limits: partitioning.PartitionerLimits) -> None:
        self._burst.clear()
        now = _time(self._now_s)
        nodes = [node.publish() for node in self._nodes.values()]
        pending = [_pending(job) for job in self._pending]
        decision = partitioning.decide(nodes, pending, limits, now=now, history=self._history)
        self._history = partitioning.remember(self._history, nodes, pending, decision, now=now)
        for change in decision.changes:
            node = self._nodes[change.node]
            node.requested_at, node.known = now, None
            self._requests[node.name] = change
            self._add(self._now_s + self._times.begin_s, _Kind.BEGIN, node.name)
        self._result.decisions += 1
        self._recheck_s = self._now_s + self._times.recheck_s if pending else math.inf


def _pending(job: day.Job) -> demand.Pending:
    return demand.Pending(
        namespace="day",
        name=job.name,
        uid=job.name,
        needs=demand.Needs(
            amounts=demand.to_amounts({_resource(job.profile): job.count, "pods": 1})
        ),
        created_at=_time(job.at_s),
    )


def _time(seconds: float) -> dt.datetime:
    return _EPOCH + dt.timedelta(seconds=seconds)
