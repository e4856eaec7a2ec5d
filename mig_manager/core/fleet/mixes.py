"""Which fixed layouts would have served the pods of the past best: a simulation without I/O.

Pods arrive when they were created and run as long as they ran. They are placed in the order of
arrival, each on the first node that has all its devices idle, and a pod that finds none lets
others pass. Ignored: CPU, memory and other resources, priority and preemption, pod affinity, and
what a change of layout costs. A pod that has not ended runs until the last time in the file. Pods
that were deleted are not in a list of pods.
"""

import collections
import dataclasses
import datetime as dt
import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mig_manager.core import messages, model, picture
from mig_manager.core.fleet import demand, partitioned
from mig_manager.core.layout import config, generator, served
from mig_manager.core.node import cluster, resources

NOW = "as they are"
BEST = "best mix found"
_PARTS = 8  # into which the GPUs of a kind are divided: each part has one layout
_PASSES = 2

Devices = collections.Counter[model.Profile]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A pod of the past that asked for MIG devices."""

    key: str
    needs: demand.Needs
    arrival: dt.datetime
    end: dt.datetime | None  # None: it has not ended
    start: dt.datetime | None  # None: it has not started


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How pods fared with a mix of layouts; seconds."""

    name: str
    served: int  # pods that got their devices
    waited_s: float  # together, those that were never served too
    gpus: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How many GPUs have which devices, in words."""

    @property
    def rank(self) -> tuple[int, float]:
        """Lower is better."""
        return -self.served, self.waited_s


def parse_job(item: Mapping[str, Any]) -> Job | None:
    """Parse a Pod object; None if it asked for no MIG device. Raises ClusterError: malformed."""
    with cluster.as_cluster_error("a pod"):
        metadata, status = item["metadata"], item.get("status") or {}
        needs = demand.parse_needs(item["spec"])
        arrival = messages.parse_time(metadata.get("creationTimestamp"))
        if arrival is None or not needs.profiles:
            return None
        ends = [
            messages.parse_time(
                ((each.get("state") or {}).get("terminated") or {}).get("finishedAt")
            )
            for each in status.get("containerStatuses") or ()
        ]
        has_ended = status.get("phase") in ("Succeeded", "Failed")
        return Job(
            key=f"{metadata['namespace']}/{metadata['name']}",
            needs=needs,
            arrival=arrival,
            start=messages.parse_time(status.get("startTime")),
            end=max(filter(None, ends), default=None) if has_ended else None,
        )


def compare(
    nodes: Sequence[partitioned.PartitionedNode], jobs: Iterable[Job]
) -> tuple[Score, ...]:
    """Return the scores of the present layouts, the generated ones and a best mix, best first."""
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
        """Let the jobs run on GPUs with these devices."""
        idle: dict[str, Devices] = {node.name: collections.Counter() for node in self.nodes}
        for (node, _), content in zip(self.gpus, contents, strict=True):
            idle[node.name].update(content)
        count, waited_s = 0, 0.0
        waiting: list[int] = []  # positions of jobs
        ends: list[tuple[dt.datetime, int, str]] = []
        arrivals = collections.deque(range(len(self.jobs)))
        while arrivals or ends:
            if ends and (not arrivals or ends[0][0] <= self.jobs[arrivals[0]].arrival):
                now, ended, place = heapq.heappop(ends)
                idle[place].update(self._wanted[self._group[ended]])
                candidates, waiting, names = waiting, [], (place,)
            else:
                candidates, names = [arrivals.popleft()], None
                now = self.jobs[candidates[0]].arrival
            failed: set[int] = set()
            for position in candidates:
                group = self._group[position]
                found = None if group in failed else self._place(group, names, idle)
                if found is None:
                    failed.add(group)
                    waiting.append(position)
                    continue
                idle[found].subtract(self._wanted[group])
                count += 1
                waited_s += (now - self.jobs[position].arrival).total_seconds()
                heapq.heappush(ends, (now + self._life(self.jobs[position]), position, found))
        waited_s += sum(
            (self._end - self.jobs[position].arrival).total_seconds() for position in waiting
        )
        counts = collections.Counter(map(picture.counted, contents))
        return Score(name=name, served=count, waited_s=waited_s, gpus=dict(counts))

    def best(self) -> Score:
        """Search the layouts of parts of the GPUs, one part after the other."""
        asked = {profile for job in self.jobs for profile in job.needs.profiles}
        menus = [_menu(gpu, frozenset(asked)) for _, gpu in self.gpus]
        parts: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for number, menu in enumerate(menus):
            kind = tuple(map(picture.counted, menu))
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
        """Return the first of these nodes that has what a job asks for; None of them: all."""
        hosts = self._hosts[group]
        for name in hosts if names is None else names:
            has = idle[name]
            if name in hosts and all(has[p] >= n for p, n in self._wanted[group].items()):
                return name
        return None

    def _life(self, job: Job) -> dt.timedelta:
        began = job.start or job.arrival
        return max((job.end or self._end) - began, dt.timedelta())


def _generated(node: partitioned.PartitionedNode) -> dict[str, dict[str, Devices]]:
    """Return the devices in each generated layout with MIG, by UUID and name."""
    found: dict[str, dict[str, Devices]] = {gpu.uuid: {} for gpu in node.gpus}
    for name, layout in served.generated(node.gpus).items():
        for uuid, goal in config.select(layout, node.gpus).items():
            if goal.counts:
                found[uuid][name] = collections.Counter(goal.counts)
    return found


def _menu(gpu: model.Gpu, asked: frozenset[model.Profile]) -> list[Devices]:
    """Return what a GPU can have of the profiles that are asked for, none of it in vain."""
    specs = [spec for spec in gpu.profiles or () if spec.profile in asked]
    return [collections.Counter(dict(counts)) for counts in generator.maximal(specs)]


def _content(gpu: model.Gpu) -> Devices:
    return collections.Counter(
        device.profile for device in gpu.devices if resources.of_profile(device.profile)
    )
