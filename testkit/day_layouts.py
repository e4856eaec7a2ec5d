"""Fill the GPUs of a cluster with fixed layouts, and find the best ones for a known day."""

import collections
import dataclasses
import datetime as dt
import functools
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager.catalogue import hardware
from mig_manager.core import model, profile_name
from mig_manager.core.layout import generator
from mig_manager.core.node.devices import resources
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.nodes import partitioned_nodes
from mig_manager.partitioner.replay import simulated_cluster, simulated_node
from testkit import day

_EPOCH = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def fixed_waits(
    jobs: Iterable[day.Job], devices: Mapping[str, int], *, end_s: float
) -> dict[str, float | None]:
    """Return how long pods wait for the devices of a fixed layout, first come, first served."""
    return {job.name: wait_s for job, wait_s in _waits(jobs, devices, end_s=end_s)}


def _waits(
    jobs: Iterable[day.Job], devices: Mapping[str, int], *, end_s: float
) -> Iterator[tuple[day.Job, float | None]]:
    free = {name: [0.0] * count for name, count in devices.items()}
    for job in sorted(jobs, key=lambda job: job.at_s):
        heap = free.get(job.profile)
        start = max(job.at_s, heap[0]) if heap else math.inf
        if heap and start <= end_s:
            heapq.heapreplace(heap, start + job.run_s)
            yield job, start - job.at_s
        else:
            yield job, None


Counts = tuple[tuple[str, int], ...]  # the devices of a GPU, by profile


def layouts_of(product: str = day.PRODUCT, profiles: Iterable[str] = ()) -> list[Counts]:
    """Return every way to fill a GPU with the profiles of the day, and these."""
    # The largest must be there: it shows how many media engines the GPU has.
    names = {str(day.plain(product)[size]) for size in day.NIGHT} | set(profiles)
    specs = [spec for spec in day.capacity(product).specs if str(spec.profile) in names]
    return [
        tuple((str(profile), count) for profile, count in counts)
        for counts in generator.maximal(specs)
    ]


def best_fixed(
    jobs: Sequence[day.Job], *, gpus: int, end_s: float, product: str = day.PRODUCT
) -> dict[Counts, int]:
    """Return the number of GPUs for each layout that serves the known day best.

    The best has fewest pods without a device, then the least waiting. The search starts with each
    layout on all GPUs, and changes more and more, then fewer GPUs at a time while that is better.
    A pod with several devices counts as several pods.
    """
    every_device = [job for job in jobs for _ in range(job.count)]
    by_profile = {
        name: [job for job in every_device if job.profile == name]
        for name in {job.profile: 0 for job in jobs}
    }

    @functools.cache
    def price(name: str, count: int) -> tuple[int, float]:
        return _price(by_profile[name], {name: count}, end_s=end_s)

    def prices_of(numbers: Mapping[Counts, int]) -> tuple[int, float]:
        total = devices_of(numbers)
        prices = [price(name, total.get(name, 0)) for name in by_profile]
        return sum(p[0] for p in prices), sum(p[1] for p in prices)

    every_layout = layouts_of(product, by_profile)
    steps = [2**power for power in reversed(range(gpus.bit_length()))]
    ends = []
    for start in every_layout:
        numbers = {start: gpus}
        for step in steps:
            now = (len(every_device) + 1, 0.0)
            while prices_of(numbers) < now:
                now = prices_of(numbers)
                numbers = min((numbers, *_neighbours(numbers, every_layout, step)), key=prices_of)
        ends.append(numbers)
    return min(ends, key=prices_of)


def _price(
    jobs: Sequence[day.Job], devices: Mapping[str, int], *, end_s: float
) -> tuple[int, float]:
    """Return how many pods get no device, and how long all wait; jobs need no distinct name."""
    waits = list(_waits(jobs, devices, end_s=end_s))
    waited_s = sum(end_s - job.at_s if wait_s is None else wait_s for job, wait_s in waits)
    return sum(wait_s is None for _, wait_s in waits), waited_s


def _neighbours(
    numbers: Mapping[Counts, int], every_layout: Iterable[Counts], step: int
) -> Iterable[dict[Counts, int]]:
    for new in every_layout:
        for old, there in numbers.items():
            if there >= step and new != old:
                moved = collections.Counter(numbers)
                moved[old] -= step
                moved[new] += step
                yield {counts: number for counts, number in moved.items() if number}


def devices_of(numbers: Mapping[Counts, int]) -> dict[str, int]:
    """Return the devices of all GPUs by profile."""
    total: collections.Counter[str] = collections.Counter()
    for counts, number in numbers.items():
        for name, count in counts:
            total[name] += count * number
    return dict(total)


def spread(mix: Mapping[Counts, int]) -> list[Counts]:
    """Return the layouts of all GPUs so that each node has a part of each."""
    gpus = [counts for counts, number in mix.items() for _ in range(number)]
    nodes = len(gpus) // day.GPUS_EACH
    return [counts for number in range(nodes) for counts in gpus[number::nodes]]


def cluster(
    layouts: Sequence[Counts],
    scheduler: simulated_cluster.Scheduler,
    *,
    seed: int,
    product: str = day.PRODUCT,
) -> simulated_cluster.SimulatedCluster:
    """Return a cluster whose GPUs have these layouts, node by node."""
    nodes: list[partitioned_nodes.PartitionedNode] = []
    for first in range(0, len(layouts), day.GPUS_EACH):
        name = f"node-{len(nodes):04}"
        gpus = tuple(
            _gpu(product, index, counts)
            for index, counts in enumerate(layouts[first : first + day.GPUS_EACH])
        )
        nodes.append(
            partitioned_nodes.PartitionedNode(
                name=name,
                version="",
                labels={},
                taints=(),
                is_opted_in=True,
                gpus=gpus,
                supply=partitioned_nodes.Supply(allocatable=(("pods", 999),)),
            )
        )
    return simulated_cluster.SimulatedCluster(
        nodes=nodes, scheduler=scheduler, seed=seed, begin=_EPOCH
    )


def pods(jobs: Iterable[day.Job]) -> list[simulated_cluster.SimulatedPod]:
    """Return the pods of a day for the simulated cluster; their names are their UIDs."""
    return [
        simulated_cluster.SimulatedPod(
            pod=demand.PendingPod(
                namespace="day",
                name=job.name,
                uid=job.name,
                needs=_needs(job.profile, job.count),
                created_at=_EPOCH + dt.timedelta(seconds=job.at_s),
            ),
            at_s=job.at_s,
            run_s=job.run_s,
        )
        for job in jobs
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
    return simulated_node.apply_desired((on,), {on.uuid: goal})[0][0]
