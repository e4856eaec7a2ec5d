"""Draw a day of pods that request MIG devices, and bound how well any scheduler can serve them.

All times are seconds of the day as it is played, which is compressed.
"""

import bisect
import collections
import dataclasses
import functools
import heapq
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.catalogue import hardware
from mig_manager.core import model, profile_name
from mig_manager.core.layout import generator
from mig_manager.core.planner import placement

Waits = Mapping[str, float | None]
"""From a pod's creation to its binding, by name; None: it is not bound by the end of the day."""

PRODUCT = "A100-SXM4-40GB"
_MIXES: Mapping[float, Mapping[str, float]] = {
    0.0: {"1g.5gb": 0.20, "2g.10gb": 0.20, "3g.20gb": 0.35, "7g.40gb": 0.25},
    7.0: {"1g.5gb": 0.20, "2g.10gb": 0.20, "3g.20gb": 0.35, "7g.40gb": 0.25},
    10.0: {"1g.5gb": 0.65, "2g.10gb": 0.22, "3g.20gb": 0.10, "7g.40gb": 0.03},
    16.0: {"1g.5gb": 0.65, "2g.10gb": 0.22, "3g.20gb": 0.10, "7g.40gb": 0.03},
    19.0: {"1g.5gb": 0.20, "2g.10gb": 0.55, "3g.20gb": 0.20, "7g.40gb": 0.05},
    24.0: {"1g.5gb": 0.20, "2g.10gb": 0.20, "3g.20gb": 0.35, "7g.40gb": 0.25},
}
"""Shares of the requested profiles at an hour: training by night, notebooks by day, inference in
the evening; between the hours the shares change evenly."""
_SPREAD = 1.0
"""Standard deviation of the logarithm of a life: one pod in twenty lives five times the median."""
_HOURS = 24.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A pod of a day; seconds since its begin."""

    name: str
    profile: str
    at_s: float
    run_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The slices of a GPU that a profile needs."""

    compute: int
    memory: int
    most: int
    """How many instances of this profile fit on a GPU."""


@functools.cache
def capacity() -> placement.Capacity:
    """Return the profiles and placements of the GPUs."""
    return placement.Capacity(hardware.template(hardware.find(PRODUCT)).profiles or ())


def sizes() -> dict[str, Size]:
    """Return the profiles of the day."""
    profiles = {name: profile_name.parse(name) for name in _MIXES[0.0]}
    return {
        name: Size(
            compute=profile.gpu_slices,
            memory=capacity().by_profile[profile].placements[0].size,
            most=capacity().most(profile),
        )
        for name, profile in profiles.items()
    }


def jobs(*, seed: int, pods: int, day_s: float, gpus: int, load: float) -> list[Job]:
    """Draw the pods of a day.

    Args:
        seed: The same seed gives the same day for every ``day_s``.
        pods: Their number; the last pod comes an hour before the end.
        day_s: How long the day is played.
        gpus: The number of GPUs of the cluster.
        load: The share of all GPUs that the pods would use if none waited, where a pod uses the
            n-th part of a GPU if n instances of its profile fit.
    """
    draw = random.Random(seed)  # noqa: S311 - a bench, no secret
    rows = []
    for hour in sorted(draw.uniform(0.0, _HOURS - 1.0) for _ in range(pods)):
        mix = _mix(hour)
        (name,) = draw.choices(list(mix), list(mix.values()))
        rows.append((hour, name, draw.lognormvariate(0.0, _SPREAD)))
    sized = sizes()

    def used(factor: float) -> float:
        spans = ((min(run * factor, _HOURS - hour), name) for hour, name, run in rows)
        return sum(span / sized[name].most for span, name in spans) / (gpus * _HOURS)

    # Lives are cut at the end of the day, so the factor must be searched.
    low, high = 0.0, _HOURS
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if used(middle) < load else (low, middle)
    scale = day_s / _HOURS
    return [
        Job(name=f"pod-{number:03}", profile=name, at_s=hour * scale, run_s=run * low * scale)
        for number, (hour, name, run) in enumerate(rows)
    ]


def _mix(hour: float) -> dict[str, float]:
    hours = list(_MIXES)
    after = max(1, bisect.bisect_left(hours, hour))
    first, last = hours[after - 1], hours[after]
    part = (hour - first) / (last - first)
    return {
        name: share * (1 - part) + _MIXES[last][name] * part
        for name, share in _MIXES[first].items()
    }


# -- fixed layouts ----------------------------------------------------------------------------


def fixed(
    day: Iterable[Job], devices: Mapping[str, int], *, end_s: float
) -> dict[str, float | None]:
    """Return how long pods wait for the devices of a fixed layout, first come, first served."""
    waits: dict[str, float | None] = {}
    free = {name: [0.0] * count for name, count in devices.items()}
    for job in sorted(day, key=lambda job: job.at_s):
        heap = free.get(job.profile)
        start = max(job.at_s, heap[0]) if heap else math.inf
        waits[job.name] = start - job.at_s if start <= end_s else None
        if heap and start <= end_s:
            heapq.heapreplace(heap, start + job.run_s)
    return waits


Counts = tuple[tuple[str, int], ...]
"""The devices of a GPU, by profile."""


def layouts() -> list[Counts]:
    """Return every way to fill a GPU with the profiles of the day."""
    by_name = {name: capacity().by_profile[profile_name.parse(name)] for name in sizes()}
    return [
        tuple((str(profile), count) for profile, count in counts)
        for counts in generator.maximal(by_name.values())
    ]


def best_fixed(day: Sequence[Job], *, gpus: int, end_s: float) -> dict[Counts, int]:
    """Return the number of GPUs for each layout that serves the known day best.

    The best has fewest pods without a device, then the least waiting. The search starts with each
    layout on all GPUs, changes one GPU at a time while that is better, and returns the best end.
    """
    by_profile = {name: [job for job in day if job.profile == name] for name in sizes()}

    @functools.cache
    def price(name: str, count: int) -> tuple[int, float]:
        waits = fixed(by_profile[name], {name: count}, end_s=end_s)
        late = sum(end_s - job.at_s for job in by_profile[name] if waits[job.name] is None)
        known = [wait for wait in waits.values() if wait is not None]
        return len(waits) - len(known), late + sum(known)

    def judged(chosen: Mapping[Counts, int]) -> tuple[int, float]:
        total = devices(chosen)
        prices = [price(name, total.get(name, 0)) for name in by_profile]
        return sum(p[0] for p in prices), sum(p[1] for p in prices)

    known = layouts()
    ends = []
    for start in known:
        chosen, now = {start: gpus}, (len(day) + 1, 0.0)
        while judged(chosen) < now:
            now = judged(chosen)
            chosen = min((chosen, *_neighbours(chosen, known)), key=judged)
        ends.append(chosen)
    return min(ends, key=judged)


def _neighbours(
    chosen: Mapping[Counts, int], known: Iterable[Counts]
) -> Iterable[dict[Counts, int]]:
    for new in known:
        for old in chosen:
            moved = collections.Counter(chosen)
            moved[old] -= 1
            moved[new] += 1
            yield {counts: number for counts, number in moved.items() if number}


def devices(chosen: Mapping[Counts, int]) -> dict[str, int]:
    """Return the devices of all GPUs by profile."""
    total: collections.Counter[str] = collections.Counter()
    for counts, number in chosen.items():
        for name, count in counts:
            total[name] += count * number
    return dict(total)


# -- bounds -----------------------------------------------------------------------------------


def instant(day: Iterable[Job], *, gpus: int, end_s: float) -> dict[str, float | None]:
    """Return how long pods wait if repartitioning takes no time.

    Running pods stay, and the future is unknown: the oldest pod comes first, on the fullest GPU
    that has room, at the placement that leaves the most room.
    """
    waits: dict[str, float | None] = {}
    running: list[tuple[float, int, placement.Placed]] = []
    used: list[list[placement.Placed]] = [[] for _ in range(gpus)]
    pending: list[Job] = []
    comings = collections.deque(sorted(day, key=lambda job: job.at_s))
    while comings or (pending and running):
        now = min(comings[0].at_s if comings else math.inf, running[0][0] if running else math.inf)
        if now > end_s:
            break
        while running and running[0][0] <= now:
            _, gpu, placed = heapq.heappop(running)
            used[gpu].remove(placed)
        while comings and comings[0].at_s <= now:
            pending.append(comings.popleft())
        still = []
        for job in pending:
            room = _room(job.profile, used)
            if room is None:
                still.append(job)
                continue
            waits[job.name] = now - job.at_s
            gpu, placed = room
            used[gpu].append(placed)
            heapq.heappush(running, (now + job.run_s, gpu, placed))
        pending = still
    return waits | {job.name: None for job in (*pending, *comings)}


def _room(
    name: str, used: Sequence[Sequence[placement.Placed]]
) -> tuple[int, placement.Placed] | None:
    profile = profile_name.parse(name)
    by_fill = sorted(range(len(used)), key=lambda gpu: -sum(p.size for _, p in used[gpu]))
    for gpu in by_fill:
        placed = _best(frozenset(used[gpu]), profile)
        if placed is not None:
            return gpu, placed
    return None


@functools.cache
def _best(used: frozenset[placement.Placed], profile: model.Profile) -> placement.Placed | None:
    packing = capacity().best(sorted(used, key=lambda each: each[1]), {profile: 1})
    return packing.placed[0] if packing else None


def least_wait(day: Sequence[Job], share: float, *, gpus: int, end_s: float) -> float:
    """Return the least possible wait of the pod at this share of all, for any scheduler.

    The scheduler may know the whole day, move running pods, split them over GPUs and repartition
    in no time. The only limit is the number of compute slices and of memory slices. A pod that
    waits at most W surely runs from W after its creation to the end of its life. If the pods that
    surely run at one moment need more slices than exist, some of them must wait longer: at least
    as many as the largest pods that must go until the others fit.
    """
    most = len(day) - math.ceil(share * len(day))
    low, high = 0.0, end_s
    if _late(day, 0.0, gpus=gpus) <= most:
        return 0.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _late(day, middle, gpus=gpus) > most else (low, middle)
    return low


def _late(day: Sequence[Job], wait_s: float, *, gpus: int) -> int:
    """Return a lower bound of the number of pods that wait longer."""
    sized = sizes()
    spans = [(job.at_s + wait_s, job.at_s + job.run_s, sized[job.profile]) for job in day]
    worst = 0
    for now, end, _ in spans:
        if now < end:
            sure = [size for start, stop, size in spans if start <= now < stop]
            for taken, pool in (
                ([size.compute for size in sure], 7 * gpus),
                ([size.memory for size in sure], 8 * gpus),
            ):
                worst = max(worst, _surplus(taken, pool))
    return worst


def _surplus(taken: Iterable[int], pool: int) -> int:
    """Return how many of the largest must go until the others fit."""
    largest = sorted(taken, reverse=True)
    over, count = sum(largest) - pool, 0
    while over > 0:
        over -= largest[count]
        count += 1
    return count


def quantile(waits: Waits, share: float) -> float:
    """Return how long the pod at this share of all waits; infinite if it is not bound."""
    ordered = sorted(math.inf if wait is None else wait for wait in waits.values())
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def mean(day: Iterable[Job], waits: Waits, *, end_s: float) -> float:
    """Return the mean wait; a pod without a node counts as waiting until the end of the day."""
    each = ((waits[job.name], end_s - job.at_s) for job in day)
    return statistics.fmean(late_s if wait is None else wait for wait, late_s in each)
