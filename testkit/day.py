"""Draw a day of pods that request MIG devices, and bound how well any scheduler can serve them.

All times are seconds of the day as it is played, which is compressed.
"""

import bisect
import collections
import csv
import dataclasses
import datetime as dt
import enum
import functools
import heapq
import io
import itertools
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.catalogue import hardware
from mig_manager.core import model, profile_name
from mig_manager.core.fleet import demand, partitioned, simulated_cluster
from mig_manager.core.layout import generator
from mig_manager.core.node import resources
from mig_manager.core.planner import packing, placement

Waits = Mapping[str, float | None]
"""From a pod's creation to its binding, by name; None: it is not bound by the end of the day."""

PRODUCT = "A100-SXM4-40GB"
GPUS_EACH = 8
"""GPUs of a node."""
Mix = Mapping[str, float]
"""Shares of the requests: ``3g`` is one device, ``2x1g`` are two."""
_NIGHT: Mix = {"1g": 0.20, "2g": 0.20, "3g": 0.35, "7g": 0.25}
_NOON: Mix = {"1g": 0.65, "2g": 0.22, "3g": 0.10, "7g": 0.03}
_EVENING: Mix = {"1g": 0.20, "2g": 0.55, "3g": 0.20, "7g": 0.05}
SHIFT: Mapping[float, Mix] = {
    0.0: _NIGHT,
    7.0: _NIGHT,
    10.0: _NOON,
    16.0: _NOON,
    19.0: _EVENING,
    24.0: _NIGHT,
}
"""The mix at an hour: training by night, notebooks by day, inference in the evening; between the
hours it changes evenly."""
_SPREAD = 1.0
"""Standard deviation of the logarithm of a life: one pod in twenty lives five times the median."""
_EPOCH = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
_HOURS = 24.0
_MEMORY_SLICES = 8
_MAX_FACTOR = 1e6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A pod of a day; seconds since its begin."""

    name: str
    profile: str
    at_s: float
    run_s: float
    count: int = 1
    """Devices of this profile, all on one node."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The slices of a GPU that a profile needs."""

    compute: int
    memory: int
    most: int
    """How many instances of this profile fit on a GPU."""


@functools.cache
def capacity(product: str = PRODUCT) -> placement.Capacity:
    """Return the profiles and placements of the GPUs."""
    return placement.Capacity(hardware.template(hardware.find(product)).profiles or ())


@functools.cache
def plain(product: str = PRODUCT) -> dict[str, model.Profile]:
    """Return the profile with the least memory by its slices, such as ``3g``."""
    profiles = sorted(capacity(product).by_profile, key=lambda p: -p.memory_gb)
    return {f"{p.gpu_slices}g": p for p in profiles if str(p).endswith("gb")}


@functools.cache
def sizes(product: str = PRODUCT) -> dict[str, Size]:
    """Return the profiles that pods request."""
    return {
        str(profile): Size(
            compute=profile.gpu_slices,
            memory=capacity(product).by_profile[profile].placements[0].size,
            most=capacity(product).most(profile),
        )
        for profile in plain(product).values()
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A pod before its life is scaled to a load; in units of the same, unknown length."""

    at: float
    life: float
    request: str  # as in ``Mix``


def jobs(  # noqa: PLR0913 - a cluster, its pods and a time
    *,
    seed: int,
    pods: int,
    day_s: float,
    gpus: int,
    load: float,
    mix: Mapping[float, Mix] | None = None,
    product: str = PRODUCT,
) -> list[Job]:
    """Draw the pods of a day.

    Args:
        seed: The same seed gives the same day for every ``day_s``.
        pods: Their number; the last pod comes an hour before the end.
        day_s: How long the day is played.
        gpus: The number of GPUs of the cluster.
        load: The share of all GPUs that the pods would use if none waited, where a device uses
            the n-th part of a GPU if n instances of its profile fit.
        mix: The requests by the hour; ``SHIFT`` by default.
        product: The GPUs.
    """
    draw = random.Random(seed)  # noqa: S311 - a bench, no secret
    rows = []
    for hour in sorted(draw.uniform(0.0, _HOURS - 1.0) for _ in range(pods)):
        shares = _mix(hour, mix or SHIFT)
        (request,) = draw.choices(list(shares), list(shares.values()))
        rows.append(Row(at=hour, life=draw.lognormvariate(0.0, _SPREAD), request=request))
    return scaled(rows, end=_HOURS, day_s=day_s, gpus=gpus, load=load, product=product)


def scaled(
    rows: Sequence[Row], *, end: float, day_s: float, gpus: int, load: float, product: str
) -> list[Job]:
    """Return jobs whose lives are scaled so that they keep a share of the GPUs."""
    requests = {row.request: _parse_request(row.request, product) for row in rows}
    most = {name: size.most for name, size in sizes(product).items()}
    shares = {key: count / most[name] for key, (name, count) in requests.items()}

    def used(factor: float) -> float:
        spans = ((min(row.life * factor, end - row.at), row.request) for row in rows)
        return sum(span * shares[request] for span, request in spans) / (gpus * end)

    # Lives are cut at the end of the day, so the factor must be searched.
    low, high = 0.0, end
    while used(high) < load and high < _MAX_FACTOR:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if used(middle) < load else (low, middle)
    scale = day_s / end
    return [
        Job(
            name=f"pod-{number:03}",
            profile=requests[row.request][0],
            count=requests[row.request][1],
            at_s=row.at * scale,
            run_s=row.life * low * scale,
        )
        for number, row in enumerate(rows)
    ]


def mean_share(mix: Mapping[float, Mix], product: str) -> float:
    """Return the part of a GPU that a pod of this mix uses in the mean."""
    most = {name: size.most for name, size in sizes(product).items()}
    hours = [_HOURS * step / 100 for step in range(100)]
    total = 0.0
    for hour in hours:
        shares = _mix(hour, mix)
        requests = {key: _parse_request(key, product) for key in shares}
        parts = (
            share * requests[key][1] / most[requests[key][0]] for key, share in shares.items()
        )
        total += sum(parts) / sum(shares.values())
    return total / len(hours)


def _parse_request(text: str, product: str) -> tuple[str, int]:
    """Return the profile and the number of devices."""
    count, _, size = text.rpartition("x")
    return str(plain(product)[size]), int(count or 1)


def _mix(hour: float, mixes: Mapping[float, Mix]) -> dict[str, float]:
    hours = list(mixes)
    after = max(1, bisect.bisect_left(hours, hour))
    if len(hours) == 1:
        return dict(mixes[hours[0]])
    first, last = hours[after - 1], hours[after]
    part = (hour - first) / (last - first)
    return {
        name: share * (1 - part) + mixes[last][name] * part for name, share in mixes[first].items()
    }


# -- a trace --------------------------------------------------------------------------------


class Mapped(enum.Enum):
    """How a share of a GPU in a trace becomes a profile."""

    COMPUTE = "compute"  # the fewest sevenths of the compute slices
    MEMORY = "memory"  # the fewest eighths of the memory


_MILLI = 1000
_PROFILES = {
    Mapped.COMPUTE: (7, {1: "1g", 2: "2g", 3: "3g", 4: "4g", 7: "7g"}),
    Mapped.MEMORY: (8, {1: "1g", 2: "2g", 4: "3g", 8: "7g"}),
}
"""The parts of a GPU, and the profiles by their number of parts."""


def parse_trace(text: str, mapped: Mapped) -> list[Row]:
    """Parse the pods of ``openb_pod_list_*.csv`` of Alibaba's cluster-trace-gpu-v2023.

    A pod with ``gpu_milli`` below 1000 shares a GPU: it requests the smallest profile with as
    much. Other pods request whole GPUs, and pods without a GPU are left out. A life is from the
    scheduled time to the deletion. Raises ValueError: a row is malformed.
    """
    parts, profiles = _PROFILES[mapped]
    rows = []
    for row in csv.DictReader(io.StringIO(text)):
        count, milli = int(row["num_gpu"]), int(row["gpu_milli"])
        if not count:
            continue
        needed = min(parts, math.ceil(parts * milli / _MILLI))
        size = next(name for part, name in profiles.items() if part >= needed)
        at, end = float(row["creation_time"]), float(row["deletion_time"])
        start = float(row["scheduled_time"] or at)
        request = f"{count}x{size}" if count > 1 else size
        rows.append(Row(at=at, life=max(1.0, end - start), request=request))
    return sorted(rows, key=lambda row: row.at)


_SHARED = {0.14: 32, 0.28: 280, 0.42: 389, 0.57: 971, 1.0: 1406}
"""Pods of the trace by the share of a GPU that they request, as by compute."""
_WHOLE = 3986
_MEDIAN_S, _NINE_TENTHS_S = 539.0, 9235.0
"""Lives of shared pods; 1.2816 standard deviations lie between the two."""


def synthetic_trace(seed: int, pods: int) -> str:
    """Return a trace with the published marginals of the real one, and none of its rows."""
    draw = random.Random(seed)  # noqa: S311 - a bench, no secret
    sigma = math.log(_NINE_TENTHS_S / _MEDIAN_S) / 1.2816
    lines = ["name,num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time"]
    kinds = [*_SHARED, _WHOLE]
    at = 0.0
    for number in range(pods):
        at += draw.expovariate(1 / 60)
        (share,) = draw.choices(kinds, [*_SHARED.values(), _WHOLE])
        milli = round(1000 * min(1.0, share))
        life = draw.lognormvariate(math.log(_MEDIAN_S), sigma)
        lines.append(f"pod-{number},1,{milli},{at:.0f},{at + life:.0f},{at:.0f}")
    return "\n".join(lines)


def trace_jobs(  # noqa: PLR0913 - as ``jobs``
    rows: Sequence[Row],
    *,
    seed: int,
    pods: int,
    day_s: float,
    gpus: int,
    load: float,
    product: str,
) -> list[Job]:
    """Return consecutive pods of a trace, at its gaps, with lives scaled to a load."""
    first = random.Random(seed).randrange(max(1, len(rows) - pods))  # noqa: S311 - no secret
    chosen = rows[first : first + pods]
    begin, last = chosen[0].at, chosen[-1].at
    # The last pod comes as late as in ``jobs``.
    end = (last - begin + 1) * _HOURS / (_HOURS - 1)
    moved = [dataclasses.replace(row, at=row.at - begin) for row in chosen]
    return scaled(moved, end=end, day_s=day_s, gpus=gpus, load=load, product=product)


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


def layouts(product: str = PRODUCT, profiles: Iterable[str] = ()) -> list[Counts]:
    """Return every way to fill a GPU with the profiles of the day, and these."""
    # The largest must be there: it shows how many media engines the GPU has.
    names = {str(plain(product)[size]) for size in _NIGHT} | set(profiles)
    specs = [spec for spec in capacity(product).specs if str(spec.profile) in names]
    return [
        tuple((str(profile), count) for profile, count in counts)
        for counts in generator.maximal(specs)
    ]


def best_fixed(
    day: Sequence[Job], *, gpus: int, end_s: float, product: str = PRODUCT
) -> dict[Counts, int]:
    """Return the number of GPUs for each layout that serves the known day best.

    The best has fewest pods without a device, then the least waiting. The search starts with each
    layout on all GPUs, and changes more and more, then fewer GPUs at a time while that is better.
    A pod with several devices counts as several pods.
    """
    devices_of = [job for job in day for _ in range(job.count)]
    by_profile = {
        name: [job for job in devices_of if job.profile == name]
        for name in {job.profile: 0 for job in day}
    }

    @functools.cache
    def price(name: str, count: int) -> tuple[int, float]:
        return _price(by_profile[name], {name: count}, end_s=end_s)

    def judged(chosen: Mapping[Counts, int]) -> tuple[int, float]:
        total = devices(chosen)
        prices = [price(name, total.get(name, 0)) for name in by_profile]
        return sum(p[0] for p in prices), sum(p[1] for p in prices)

    known = layouts(product, by_profile)
    steps = [2**power for power in reversed(range(gpus.bit_length()))]
    ends = []
    for start in known:
        chosen = {start: gpus}
        for step in steps:
            now = (len(devices_of) + 1, 0.0)
            while judged(chosen) < now:
                now = judged(chosen)
                chosen = min((chosen, *_neighbours(chosen, known, step)), key=judged)
        ends.append(chosen)
    return min(ends, key=judged)


def _price(day: Sequence[Job], total: Mapping[str, int], *, end_s: float) -> tuple[int, float]:
    """Return how many pods get no device, and how long all wait; jobs need no distinct name."""
    heaps = {name: [0.0] * count for name, count in total.items()}
    unplaced, waited_s = 0, 0.0
    for job in sorted(day, key=lambda job: job.at_s):
        heap = heaps.get(job.profile)
        start = max(job.at_s, heap[0]) if heap else math.inf
        if heap and start <= end_s:
            heapq.heapreplace(heap, start + job.run_s)
            waited_s += start - job.at_s
        else:
            unplaced, waited_s = unplaced + 1, waited_s + end_s - job.at_s
    return unplaced, waited_s


def _neighbours(
    chosen: Mapping[Counts, int], known: Iterable[Counts], step: int
) -> Iterable[dict[Counts, int]]:
    for new in known:
        for old, there in chosen.items():
            if there >= step and new != old:
                moved = collections.Counter(chosen)
                moved[old] -= step
                moved[new] += step
                yield {counts: number for counts, number in moved.items() if number}


def devices(chosen: Mapping[Counts, int]) -> dict[str, int]:
    """Return the devices of all GPUs by profile."""
    total: collections.Counter[str] = collections.Counter()
    for counts, number in chosen.items():
        for name, count in counts:
            total[name] += count * number
    return dict(total)


# -- the simulated cluster ---------------------------------------------------------------------


def spread(mix: Mapping[Counts, int]) -> list[Counts]:
    """Return the layouts of all GPUs so that each node has a part of each."""
    gpus = [counts for counts, number in mix.items() for _ in range(number)]
    nodes = len(gpus) // GPUS_EACH
    return [counts for number in range(nodes) for counts in gpus[number::nodes]]


def cluster(
    layouts: Sequence[Counts],
    scheduler: simulated_cluster.Scheduler,
    *,
    seed: int,
    product: str = PRODUCT,
) -> simulated_cluster.Cluster:
    """Return a cluster whose GPUs have these layouts, node by node."""
    nodes: list[partitioned.PartitionedNode] = []
    for first in range(0, len(layouts), GPUS_EACH):
        name = f"node-{len(nodes):04}"
        gpus = tuple(
            _gpu(product, index, counts)
            for index, counts in enumerate(layouts[first : first + GPUS_EACH])
        )
        nodes.append(
            partitioned.PartitionedNode(
                name=name,
                version="",
                labels={},
                taints=(),
                allocatable=(("pods", 999),),
                is_opted_in=True,
                gpus=gpus,
            )
        )
    return simulated_cluster.Cluster(nodes=nodes, scheduler=scheduler, seed=seed, begin=_EPOCH)


def pods(day: Iterable[Job]) -> list[simulated_cluster.Job]:
    """Return the pods of a day for the simulated cluster; their names are their UIDs."""
    return [
        simulated_cluster.Job(
            pod=demand.Pending(
                namespace="day",
                name=job.name,
                uid=job.name,
                needs=_needs(job.profile, job.count),
                created_at=_EPOCH + dt.timedelta(seconds=job.at_s),
            ),
            at_s=job.at_s,
            run_s=job.run_s,
        )
        for job in day
    ]


@functools.cache
def _needs(profile: str, count: int) -> demand.Needs:
    resource = resources.of_profile(profile_name.parse(profile)) or ""
    return demand.Needs(amounts=demand.to_amounts({resource: count, "pods": 1}))


@functools.cache
def _gpu(product: str, index: int, counts: Counts) -> model.Gpu:
    bare = hardware.template(hardware.find(product), index)
    on = dataclasses.replace(
        bare, current_mode=model.MigMode.ENABLED, pending_mode=model.MigMode.ENABLED
    )
    goal = model.DesiredGpu.of(
        model.MigMode.ENABLED, {profile_name.parse(name): count for name, count in counts}, {}
    )
    return simulated_cluster.changed((on,), {on.uuid: goal})[0][0]


# -- bounds -----------------------------------------------------------------------------------


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
        self._capacity = capacity(product)
        self._known: dict[tuple[int, str], tuple[tuple[float, ...], model.Placement] | None] = {}
        self._scores: dict[int, float] = {}

    def take(self, job: Job) -> list[tuple[int, model.Placement]]:
        """Place all devices of a pod on one node; return none if they do not fit."""
        for first in range(0, len(self.masks), GPUS_EACH) if job.count > 1 else (0,):
            last = first + GPUS_EACH if job.count > 1 else len(self.masks)
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
        if key not in self._known:
            spec = self._capacity.by_profile[profile_name.parse(profile)]
            ways = [
                (self._cost(mask, packing.mask(place), place.start), place)
                for place in spec.placements
                if not mask & packing.mask(place)
            ]
            self._known[key] = min(ways, default=None)
        return self._known[key]

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
    day: Iterable[Job],
    *,
    gpus: int,
    end_s: float,
    choice: Choice = Choice.FULLEST,
    product: str = PRODUCT,
) -> dict[str, float | None]:
    """Return how long pods wait if repartitioning takes no time.

    Running pods stay, and the future is unknown: the oldest pod comes first, and those behind it
    pass if they fit.
    """
    waits: dict[str, float | None] = {}
    running: list[_Running] = []
    free = _Free(gpus, choice, product)
    pending: list[Job] = []
    numbers = itertools.count()
    comings = collections.deque(sorted(day, key=lambda job: job.at_s))
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


def least_wait(
    day: Sequence[Job], share: float, *, gpus: int, end_s: float, product: str = PRODUCT
) -> float:
    """Return the least possible wait of the pod at this share of all, for any scheduler.

    The scheduler may know the whole day, move running pods, split them over GPUs and repartition
    in no time. The only limit is the number of compute slices and of memory slices. A pod that
    waits at most W surely runs from W after its creation to the end of its life. If the pods that
    surely run at one moment need more slices than exist, some of them must wait longer: at least
    as many as the largest pods that must go until the others fit.
    """
    most = len(day) - math.ceil(share * len(day))
    low, high = 0.0, end_s
    if _late(day, 0.0, gpus=gpus, product=product) <= most:
        return 0.0
    for _ in range(30):
        middle = (low + high) / 2
        is_less = _late(day, middle, gpus=gpus, product=product) > most
        low, high = (middle, high) if is_less else (low, middle)
    return low


def least_mean(day: Sequence[Job], *, gpus: int, end_s: float, product: str = PRODUCT) -> float:
    """Return a lower bound of the mean wait, for any scheduler.

    The mean is the integral over W of the share that waits longer, which falls with W.
    """
    total, before = 0.0, 0.0
    for wait_s in (2.0**power for power in range(math.ceil(math.log2(end_s)))):
        late = _late(day, wait_s, gpus=gpus, product=product)
        if not late:
            break
        total += (wait_s - before) * late
        before = wait_s
    return total / max(1, len(day))


def _late(day: Sequence[Job], wait_s: float, *, gpus: int, product: str) -> int:
    """Return a lower bound of the number of pods that wait longer."""
    sized = sizes(product)
    changes = []
    for job in day:
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


def quantile(waits: Waits, share: float) -> float:
    """Return how long the pod at this share of all waits; infinite if it is not bound."""
    ordered = sorted(math.inf if wait is None else wait for wait in waits.values())
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def mean(day: Iterable[Job], waits: Waits, *, end_s: float) -> float:
    """Return the mean wait; a pod without a node counts as waiting until the end of the day."""
    each = ((waits[job.name], end_s - job.at_s) for job in day)
    return statistics.fmean(late_s if wait is None else wait for wait, late_s in each)
