"""The best plan, found the slow way: by looking at everything there is.

Shares no code with the planner and works on sets of slots instead of bit masks.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping

from mig_manager.core import model
from tests.rigs.node import driver_rules

Inside = frozenset[tuple[int, int]]  # compute instances of one GPU instance as (size, start)
Spot = tuple[model.Profile, int]  # a GPU instance by profile and first memory slice
State = Mapping[Spot, Inside]


@functools.cache
def insides(slices: int) -> tuple[Inside, ...]:
    """Return every set of compute instances that a GPU instance of that many slices can hold."""
    every = [
        (size, at) for size in range(1, slices + 1) for at in driver_rules.spans(size, slices)
    ]

    def grow(rest: list[tuple[int, int]], free: frozenset[int]) -> Iterator[Inside]:
        if not rest:
            yield frozenset()
            return
        (size, at), *others = rest
        yield from grow(others, free)
        span = frozenset(range(at, at + size))
        if span <= free:
            for inside in grow(others, free - span):
                yield inside | {(size, at)}

    return tuple(grow(every, frozenset(range(slices))))


def state_of(gpu: model.Gpu) -> dict[Spot, Inside]:
    return {
        (gi.profile, gi.placement.start): frozenset(
            (ci.profile.compute_slices, ci.placement.start if ci.placement else -1)
            for ci in gi.compute_instances
        )
        for gi in gpu.gpu_instances
    }


def devices_in(state: State) -> dict[model.Profile, int]:
    return dict(
        collections.Counter(
            dataclasses.replace(profile, compute_slices=size)
            for (profile, _), inside in state.items()
            for size, _ in inside
        )
    )


def goals(gpu: model.Gpu, devices: Mapping[model.Profile, int]) -> Iterator[State]:
    """Yield every state without idle GPU instances that has exactly these devices."""
    profiles = {device.gpu_instance for device in devices}
    spots = [
        (spec.profile, frozenset(range(place.start, place.end)))
        for spec in gpu.profiles or ()
        if spec.profile in profiles
        for place in spec.placements
    ]

    def grow(
        rest: list[tuple[model.Profile, frozenset[int]]], state: dict[Spot, Inside]
    ) -> Iterator[State]:
        has = devices_in(state)
        if any(count > devices.get(device, 0) for device, count in has.items()):
            return
        if has == dict(devices):
            yield state
            return
        for index, (profile, span) in enumerate(rest):
            later = [spot for spot in rest[index + 1 :] if not spot[1] & span]
            if not driver_rules.pool_allows(gpu, [profile, *(other for other, _ in state)]):
                continue
            for inside in insides(profile.gpu_slices):
                if inside:
                    yield from grow(later, {**state, (profile, min(span)): inside})

    return grow(spots, {})


def price(gpu: model.Gpu, goal: State, use: Mapping[str, int]) -> tuple[int, int]:
    """Return the use of the devices that end and how many calls it takes to reach ``goal``."""
    live, destroyed = state_of(gpu), destroyed_uuids(gpu, goal)
    calls = len(destroyed) + len(live.keys() - goal.keys())
    for spot, inside in goal.items():
        calls += len(inside - live[spot]) if spot in live else 1 + len(inside)
    return sum(use.get(uuid or "", 0) for uuid in destroyed), calls


def destroyed_uuids(gpu: model.Gpu, goal: State) -> list[str | None]:
    """Return the UUID of each device that must end to reach ``goal``."""
    return [
        ci.uuid
        for gi in gpu.gpu_instances
        for ci in gi.compute_instances
        if (ci.profile.compute_slices, ci.placement.start if ci.placement else -1)
        not in goal.get((gi.profile, gi.placement.start), frozenset())
    ]


def room(gpu: model.Gpu, goal: State) -> tuple[int, ...]:
    """Count, largest profile first, how many more of each alone the goal leaves room for."""
    specs = by_size(gpu)
    sizes = {spec.profile: spec.placements[0].size for spec in specs}
    occupied = {at + i for profile, at in goal for i in range(sizes[profile])}
    present = [profile for profile, _ in goal]

    def more(spec: model.GpuInstanceProfile, spans: list[set[int]], count: int) -> int:
        if not driver_rules.pool_allows(gpu, [*present, *[spec.profile] * (count + 1)]):
            return count
        return max(
            (
                more(spec, [later for later in spans[index + 1 :] if not later & span], count + 1)
                for index, span in enumerate(spans)
            ),
            default=count,
        )

    def free(spec: model.GpuInstanceProfile) -> list[set[int]]:
        spans = [set(range(place.start, place.end)) for place in spec.placements]
        return [span for span in spans if not span & occupied]

    return tuple(more(spec, free(spec), 0) for spec in specs)


def by_size(gpu: model.Gpu) -> list[model.GpuInstanceProfile]:
    return sorted(
        gpu.profiles or (),
        key=lambda s: (-s.placements[0].size, -s.profile.gpu_slices, s.profile),
    )


def starts(gpu: model.Gpu, goal: State) -> list[int]:
    return [at for s in by_size(gpu) for at in sorted(a for p, a in goal if p == s.profile)]


def best(
    gpu: model.Gpu, devices: Mapping[model.Profile, int], use: Mapping[str, int]
) -> tuple[object, ...] | None:
    """Return the lowest rank of any goal; None when the devices do not fit at all."""
    priced = [(price(gpu, goal, use), goal) for goal in goals(gpu, devices)]
    if not priced:
        return None
    cheapest = min(cost for cost, _ in priced)
    return min(rank(gpu, goal, use) for cost, goal in priced if cost == cheapest)


def rank(gpu: model.Gpu, goal: State, use: Mapping[str, int]) -> tuple[object, ...]:
    room_rank = [-count for count in room(gpu, goal)]
    return (*price(gpu, goal, use), room_rank, starts(gpu, goal))


def fewest_calls(gpu: model.Gpu) -> dict[frozenset[tuple[model.Profile, int]], int]:
    """Walk every sequence of driver calls; return the calls needed for each set of devices."""
    start = frozenset(state_of(gpu).items())
    calls_by_devices: dict[frozenset[tuple[model.Profile, int]], int] = {}
    visited = {start}
    edge = [start]
    for depth in itertools.count():
        if not edge:
            return calls_by_devices
        following = []
        for state in edge:
            if all(inside for _, inside in state):
                calls_by_devices.setdefault(frozenset(devices_in(dict(state)).items()), depth)
            for reached in _neighbours(gpu, state):
                if reached not in visited:
                    visited.add(reached)
                    following.append(reached)
        edge = following
    raise AssertionError


def _neighbours(
    gpu: model.Gpu, state: frozenset[tuple[Spot, Inside]]
) -> Iterator[frozenset[tuple[Spot, Inside]]]:
    sizes = {spec.profile: spec.placements[0].size for spec in gpu.profiles or ()}
    occupied = {at + i for (profile, at), _ in state for i in range(sizes[profile])}
    for entry in state:
        yield from _inner_neighbours(state, entry)
    present = [profile for (profile, _), _ in state]
    for spec in gpu.profiles or ():
        if driver_rules.pool_allows(gpu, [*present, spec.profile]):
            for place in spec.placements:
                if not occupied & set(range(place.start, place.end)):
                    yield state | {((spec.profile, place.start), frozenset())}


def _inner_neighbours(
    state: frozenset[tuple[Spot, Inside]], entry: tuple[Spot, Inside]
) -> Iterator[frozenset[tuple[Spot, Inside]]]:
    spot, inside = entry
    others = state - {entry}
    if not inside:
        yield others
    for changed in insides(spot[0].gpu_slices):
        if len(changed ^ inside) == 1:
            yield others | {(spot, changed)}
