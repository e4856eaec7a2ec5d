"""Simulate which fixed layouts would have served past pods best.

Pods arrive at their creation and run as long as they ran. They are placed in the order of arrival,
on the first node with all their devices idle; a pod without a node does not block others. The
simulation ignores CPU, memory and other resources, priority and preemption, pod affinity, and the
cost of layout changes. A pod that has not ended runs until the last time in the file. A list of
pods lacks deleted pods.
"""

import collections
import dataclasses
import datetime as dt
import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mig_manager.core import model, profile_name, timestamps
from mig_manager.core.fleet import demand, partitioned
from mig_manager.core.layout import generator, layouts, served
from mig_manager.core.node import api_values, resources

NOW = "as they are"
BEST = "best mix found"
_PARTS = 8  # of the GPUs of a kind; every part has one layout
_PASSES = 2

Devices = collections.Counter[model.Profile]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A past pod that requested MIG devices."""

    key: str
    needs: demand.Needs
    arrival: dt.datetime
    end: dt.datetime | None  # None: not ended
    start: dt.datetime | None  # None: not started


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result of a mix of layouts; seconds."""

    name: str
    served: int  # pods that got their devices
    waited_s: float  # by all pods, served or not
    gpus: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Number of GPUs by their devices, in words."""

    @property
    def rank(self) -> tuple[int, float]:
        """Lower is better."""
        return -self.served, self.waited_s


def parse_job(item: Mapping[str, Any]) -> Job | None:
    """Parse a Pod object; None if it requested no MIG device, ClusterError if malformed."""
    with api_values.as_cluster_error("a pod"):
        metadata, status = item["metadata"], item.get("status") or {}
        needs = demand.parse_needs(item["spec"])
        arrival = timestamps.parse(metadata.get("creationTimestamp"))
        if arrival is None or not needs.profiles:
            return None
        ends = [
            timestamps.parse(((each.get("state") or {}).get("terminated") or {}).get("finishedAt"))
            for each in status.get("containerStatuses") or ()
        ]
        has_ended = status.get("phase") in ("Succeeded", "Failed")
        return Job(
            key=f"{metadata['namespace']}/{metadata['name']}",
            needs=needs,
            arrival=arrival,
            start=timestamps.parse(status.get("startTime")),
            end=max(filter(None, ends), default=None) if has_ended else None,
        )


def compare(
    nodes: Sequence[partitioned.PartitionedNode], jobs: Iterable[Job]
) -> tuple[Score, ...]:
    """Return the scores of present layouts, generated layouts and a best mix, best first."""
    trial = _Trial(nodes, jobs)
    scores = [trial.score(NOW, [_content(gpu) for _, gpu in trial.gpus])]
    names = dict.fromkeys(name for made in trial.generated for name in made)
    for name in names:
        contents = [
            made[name] if name in made else _content(gpu)
            for made, (_, gpu) in zip(trial.generated, trial.gpus, strict=True)
        ]
        scores.append(trial.score(name, contents))
    scores.append(trial.best())
    return tuple(sorted(scores, key=lambda score: score.rank))


class _Trial:
    """The GPUs and the jobs of one comparison."""

    def __init__(self, nodes: Sequence[partitioned.PartitionedNode], jobs: Iterable[Job]) -> None:
        ordered = sorted(nodes, key=lambda node: node.name)
        self.nodes = [node for node in ordered if node.gpus]
        self.gpus = [(node, gpu) for node in self.nodes for gpu in node.gpus]
        self.jobs = sorted(jobs, key=lambda job: (job.arrival, job.key))
        times = [t for job in self.jobs for t in (job.arrival, job.start, job.end) if t]
        self._end = max(times, default=dt.datetime.min.replace(tzinfo=dt.UTC))
        by_gpu = {node.name: _generated(node) for node in self.nodes}
        self.generated = [by_gpu[node.name][gpu.uuid] for node, gpu in self.gpus]
        groups = {needs: number for number, needs in enumerate({j.needs: 0 for j in self.jobs})}
        self._group = [groups[job.needs] for job in self.jobs]
        self._wanted = [collections.Counter(needs.profiles) for needs in groups]
        self._hosts = [
            {
                node.name: None
                for node in self.nodes
                if not demand.why_excluded(needs, node.name, node.labels, node.taints)
            }
            for needs in groups
        ]

    def score(self, name: str, contents: Sequence[Devices]) -> Score:
        """Run the jobs on GPUs with these devices."""
        idle: dict[str, Devices] = {node.name: collections.Counter() for node in self.nodes}
        for (node, _), content in zip(self.gpus, contents, strict=True):
            idle[node.name].update(content)
        count, waited_s = 0, 0.0
        waiting: list[int] = []  # positions of jobs
        ends: list[tuple[dt.datetime, int, str]] = []
        arrivals = collections.deque(range(len(self.jobs)))
        while arrivals or ends:
            if ends and (not arrivals or ends[0][0] <= self.jobs[arrivals[0]].arrival):
                now, finished, name_of_node = heapq.heappop(ends)
                idle[name_of_node].update(self._wanted[self._group[finished]])
                candidates, waiting, names = waiting, [], (name_of_node,)
            else:
                candidates, names = [arrivals.popleft()], None
                now = self.jobs[candidates[0]].arrival
            failed: set[int] = set()
            for position in candidates:
                group = self._group[position]
                host = None if group in failed else self._place(group, names, idle)
                if host is None:
                    failed.add(group)
                    waiting.append(position)
                    continue
                idle[host].subtract(self._wanted[group])
                count += 1
                job = self.jobs[position]
                waited_s += (now - job.arrival).total_seconds()
                duration = (job.end or self._end) - (job.start or job.arrival)
                heapq.heappush(ends, (now + max(duration, dt.timedelta()), position, host))
        waited_s += sum(
            (self._end - self.jobs[position].arrival).total_seconds() for position in waiting
        )
        counts = collections.Counter(map(profile_name.counted, contents))
        return Score(name=name, served=count, waited_s=waited_s, gpus=dict(counts))

    def best(self) -> Score:
        """Search the layouts of parts of the GPUs, part by part."""
        requested = {profile for job in self.jobs for profile in job.needs.profiles}
        menus = [_menu(gpu, requested) for _, gpu in self.gpus]
        parts: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for number, menu in enumerate(menus):
            kind = tuple(map(profile_name.counted, menu))
            parts.setdefault((number % _PARTS, kind), []).append(number)
        contents = [menu[0] if menu else collections.Counter() for menu in menus]
        best = self.score(BEST, contents)
        for _, members in itertools.product(range(_PASSES), parts.values()):
            for content in menus[members[0]]:
                tried = list(contents)
                for number in members:
                    tried[number] = content
                score = self.score(BEST, tried)
                if score.rank < best.rank:
                    best, contents = score, tried
        return best

    def _place(
        self, group: int, names: Iterable[str] | None, idle: Mapping[str, Devices]
    ) -> str | None:
        """Return the first node with idle devices for a job; ``names`` None: of all nodes."""
        hosts = self._hosts[group]
        for name in hosts if names is None else names:
            has = idle[name]
            if name in hosts and all(has[p] >= n for p, n in self._wanted[group].items()):
                return name
        return None


def _generated(node: partitioned.PartitionedNode) -> dict[str, dict[str, Devices]]:
    """Return the devices in every generated layout with MIG, by UUID and name."""
    devices: dict[str, dict[str, Devices]] = {gpu.uuid: {} for gpu in node.gpus}
    for name, layout in served.generated(node.gpus).items():
        for uuid, goal in layouts.select(layout, node.gpus).items():
            if goal.counts:
                devices[uuid][name] = collections.Counter(goal.counts)
    return devices


def _menu(gpu: model.Gpu, requested: Collection[model.Profile]) -> list[Devices]:
    """Return the maximal sets of requested devices that fit a GPU."""
    specs = [spec for spec in gpu.profiles or () if spec.profile in requested]
    return [collections.Counter(dict(counts)) for counts in generator.maximal(specs)]


def _content(gpu: model.Gpu) -> Devices:
    return collections.Counter(
        device.profile for device in gpu.devices if resources.of_profile(device.profile)
    )
