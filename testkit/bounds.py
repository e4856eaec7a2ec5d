"""Bound how well any scheduler can serve the pods of a day."""

import collections
import enum
import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.core import model, profile_name
from mig_manager.core.planner import packing
from testkit import day

_MEMORY_SLICES = 8


class Choice(enum.Enum):
    """Which GPU and placement a device gets if repartitioning takes no time."""

    FULLEST = "fullest"  # the fullest GPU, at the placement that leaves the most room
    FIRST = "first"  # the first GPU with room, at its first placement
    LEAST_FRAGMENTED = "least-fragmented"
    """Where fragmentation grows least, as MFI (arXiv 2511.18906)."""


_Running = tuple[float, int, int, model.Placement]  # end, sequence, GPU, placement


class _Free:
    """GPUs on which instances come and go in no time."""

    def __init__(self, gpus: int, choice: Choice, product: str) -> None:
        self.masks = [0] * gpus
        self._choice = choice
        self._capacity = day.capacity(product)
        self._fits: dict[tuple[int, str], tuple[tuple[float, ...], model.Placement] | None] = {}
        self._scores: dict[int, float] = {}

    def take(self, job: day.Job) -> list[tuple[int, model.Placement]]:
        """Place all devices of a pod on one node; return none if they do not fit."""
        for first in range(0, len(self.masks), day.GPUS_EACH) if job.count > 1 else (0,):
            last = first + day.GPUS_EACH if job.count > 1 else len(self.masks)
            before, placed = list(self.masks), list[tuple[int, model.Placement]]()
            while len(placed) < job.count:
                best = self._best(job.profile, range(first, min(last, len(self.masks))))
                if best is None:
                    break
                self.masks[best[0]] |= packing.mask(best[1])
                placed.append(best)
            if len(placed) == job.count:
                return placed
            self.masks = before
        return []

    def _best(self, profile: str, gpus: Iterable[int]) -> tuple[int, model.Placement] | None:
        """Return the GPU and the placement of a device."""
        best: tuple[tuple[float, ...], int, model.Placement] | None = None
        for gpu in gpus:
            way = self._way(self.masks[gpu], profile)
            if way is not None and (best is None or way[0] < best[0]):
                best = (way[0], gpu, way[1])
                if self._choice is Choice.FIRST:
                    break
        return best and best[1:]

    def _way(self, mask: int, profile: str) -> tuple[tuple[float, ...], model.Placement] | None:
        """Return the best placement on a GPU with its cost."""
        key = mask, profile
        if key not in self._fits:
            spec = self._capacity.by_profile[profile_name.parse(profile)]
            ways = [
                (self._cost(mask, packing.mask(place), place.start), place)
                for place in spec.placements
                if not mask & packing.mask(place)
            ]
            self._fits[key] = min(ways, default=None)
        return self._fits[key]

    def _cost(self, mask: int, added: int, start: int) -> tuple[float, ...]:
        match self._choice:
            case Choice.FIRST:
                return (float(start),)
            case Choice.FULLEST:
                room = self._capacity.room(mask | added, model.Engines())
                return (-float(mask.bit_count()), *(-float(count) for count in room), float(start))
            case Choice.LEAST_FRAGMENTED:
                grown = self._fragmentation(mask | added) - self._fragmentation(mask)
                return (grown, -float(mask.bit_count()), float(start))

    def _fragmentation(self, mask: int) -> float:
        """Return the slices of placements that are blocked though enough slices are free."""
        if mask not in self._scores:
            free = self._capacity.memory_slices - mask.bit_count()
            self._scores[mask] = float(
                sum(
                    place.size
                    for spec in self._capacity.specs
                    for place in spec.placements
                    if place.size <= free and mask & packing.mask(place)
                )
            )
        return self._scores[mask]


def instant(
    jobs: Iterable[day.Job],
    *,
    gpus: int,
    end_s: float,
    choice: Choice = Choice.FULLEST,
    product: str = day.PRODUCT,
) -> dict[str, float | None]:
    """Return how long pods wait if repartitioning takes no time.

    Running pods stay, and the future is unknown: the oldest pod comes first, and those behind it
    pass if they fit.
    """
    waits: dict[str, float | None] = {}
    running: list[_Running] = []
    free = _Free(gpus, choice, product)
    pending: list[day.Job] = []
    numbers = itertools.count()
    comings = collections.deque(sorted(jobs, key=lambda job: job.at_s))
    while comings or (pending and running):
        now = min(comings[0].at_s if comings else math.inf, running[0][0] if running else math.inf)
        if now > end_s:
            break
        while running and running[0][0] <= now:
            _, _, gpu, place = heapq.heappop(running)
            free.masks[gpu] &= ~packing.mask(place)
        while comings and comings[0].at_s <= now:
            pending.append(comings.popleft())
        still, failed = [], set()
        for job in pending:
            kind = job.profile, job.count
            placed = [] if kind in failed else free.take(job)
            if not placed:
                failed.add(kind)
                still.append(job)
                continue
            waits[job.name] = now - job.at_s
            for gpu, place in placed:
                heapq.heappush(running, (now + job.run_s, next(numbers), gpu, place))
        pending = still
    return waits | {job.name: None for job in (*pending, *comings)}


def least_wait(jobs: Sequence[day.Job], share: float, *, gpus: int, end_s: float) -> float:
    """Return the least possible wait of the pod at this share of all, for any scheduler.

    The scheduler may know the whole day, move running pods, split them over GPUs and repartition
    in no time. The only limit is the number of compute slices and of memory slices. A pod that
    waits at most W surely runs from W after its creation to the end of its life. If the pods that
    surely run at one moment need more slices than exist, some of them must wait longer: at least
    as many as the largest pods that must go until the others fit.
    """
    most = len(jobs) - math.ceil(share * len(jobs))
    low, high = 0.0, end_s
    if _late(jobs, 0.0, gpus=gpus) <= most:
        return 0.0
    for _ in range(30):
        middle = (low + high) / 2
        is_less = _late(jobs, middle, gpus=gpus) > most
        low, high = (middle, high) if is_less else (low, middle)
    return low


def least_mean(
    jobs: Sequence[day.Job], *, gpus: int, end_s: float, product: str = day.PRODUCT
) -> float:
    """Return a lower bound of the mean wait, for any scheduler.

    The mean is the integral over W of the share that waits longer, which falls with W.
    """
    total, before = 0.0, 0.0
    for wait_s in (2.0**power for power in range(math.ceil(math.log2(end_s)))):
        late = _late(jobs, wait_s, gpus=gpus, product=product)
        if not late:
            break
        total += (wait_s - before) * late
        before = wait_s
    return total / max(1, len(jobs))


def _late(jobs: Sequence[day.Job], wait_s: float, *, gpus: int, product: str = day.PRODUCT) -> int:
    """Return a lower bound of the number of pods that wait longer."""
    sized = day.sizes(product)
    changes = []
    for job in jobs:
        if job.run_s > wait_s:
            size = sized[job.profile]
            need = size.compute * job.count, size.memory * job.count
            changes += [(job.at_s + wait_s, 1, need), (job.at_s + job.run_s, -1, need)]
    sure: collections.Counter[tuple[int, int]] = collections.Counter()
    worst = 0
    for _, sign, need in sorted(changes):
        sure[need] += sign
        if sign > 0:
            for part, pool in ((0, 7 * gpus), (1, _MEMORY_SLICES * gpus)):
                worst = max(worst, _surplus(sure, part, pool))
    return worst


def _surplus(sure: Mapping[tuple[int, int], int], part: int, pool: int) -> int:
    """Return how many of the largest must go until the others fit."""
    over = sum(need[part] * number for need, number in sure.items()) - pool
    count = 0
    for need, number in sorted(sure.items(), key=lambda each: -each[0][part]):
        if over <= 0:
            break
        gone = min(number, math.ceil(over / need[part]))
        over, count = over - gone * need[part], count + gone
    return count
