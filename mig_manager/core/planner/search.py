"""Search exactly for the smallest change to a set of devices on one GPU.

It minimises, in this order:

1. the MIG devices in use that are destroyed;
2. the driver calls, that is GPU and compute instances destroyed and created;
3. the room lost for the largest profiles: how many more of each profile fit, each alone, compared
   from the largest profile down;
4. the start slices of the GPU instances, largest profile first.

A GPU has eight instances at most. ``packing`` lists all choices of what stays, without placements;
the search tries them cheapest first, and compares every arrangement (``placement``) of the first
price at which one fits. Ties have a fixed order: equal input gives equal output.

Pinned devices are placed first, in a GPU instance of their own for each profile and start slice.
One that exists stays, which never costs more than to create it again.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager import errors
from mig_manager.core import model, steps
from mig_manager.core.planner import explain, packing, placement, plan_builder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PinnedInstance:
    """A GPU instance with a given start slice."""

    profile: model.Profile
    start: int
    counts: packing.Counts
    """Its compute instances."""

    @property
    def devices(self) -> dict[model.Profile, int]:
        """Its devices by profile."""
        return {
            dataclasses.replace(self.profile, compute_slices=size): count
            for size, count in enumerate(self.counts, start=1)
            if count
        }


Pins = Sequence[tuple[model.Pin, int]]

LiveInstance = tuple[model.Profile, model.Placement, tuple[packing.Occupant, ...]]
"""A live GPU instance and its compute instances."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """The GPU instances that the pins determine."""

    stays: tuple[plan_builder.Stay, ...]
    kept: tuple[placement.Placed, ...]
    """Their profiles and placements."""
    created: tuple[steps.TargetInstance, ...]
    positions: tuple[int, ...]
    """Positions of the other live GPU instances."""

    @property
    def new(self) -> tuple[placement.Placed, ...]:
        """Profiles and placements of the GPU instances to create."""
        return tuple((instance.profile, instance.placement) for instance in self.created)


def place_pins(
    gpu: model.Gpu, capacity: placement.Capacity, live: Sequence[LiveInstance], pins: Pins
) -> Pinned:
    """Decide which pinned GPU instances stay and which are created.

    Args:
        gpu: The GPU.
        capacity: Its capacity, with every profile of the pins.
        live: Its live GPU instances, in order.
        pins: The pinned devices.

    Raises:
        errors.LayoutError: The GPU cannot have these placements (DOES_NOT_FIT).
    """
    located = locate(gpu, pinned_instances(pins), capacity)
    missing = {(place.profile, where): place for place, where in located.items()}
    stays: list[plan_builder.Stay] = []
    kept: list[placement.Placed] = []
    positions: list[int] = []
    for position, (profile, where, occupants) in enumerate(live):
        place = missing.pop((profile, where), None)
        if place is None:
            positions.append(position)
            continue
        content = packing.cheapest(occupants, place.counts)
        added = plan_builder.inside(profile, content.added)
        stays.append(plan_builder.Stay(position=position, kept=content.kept, added=added))
        kept.append((profile, where))
    created = (
        _create(place, spec, where)
        for (profile, where), place in missing.items()
        if (spec := capacity.find(profile))
    )
    return Pinned(
        stays=tuple(stays), kept=tuple(kept), created=tuple(created), positions=tuple(positions)
    )


def pinned_instances(pins: Pins) -> tuple[PinnedInstance, ...]:
    """Return the pinned GPU instances, ascending by start."""
    found: dict[tuple[model.Profile, int], dict[model.Profile, int]] = {}
    for pin, count in pins:
        found.setdefault((pin.profile.gpu_instance, pin.start), {})[pin.profile] = count
    return tuple(
        PinnedInstance(profile=profile, start=start, counts=packing.count_sizes(devices, profile))
        for (profile, start), devices in found.items()
    )


def locate(
    gpu: model.Gpu, wanted: Iterable[PinnedInstance], capacity: placement.Capacity
) -> dict[PinnedInstance, model.Placement]:
    """Return the placement of each pinned GPU instance.

    Raises:
        errors.LayoutError: No such instance can start there, two of them share a slice or a media
            engine, or its devices do not fit it (DOES_NOT_FIT).
    """
    found: dict[PinnedInstance, model.Placement] = {}
    for each in wanted:
        spec = capacity.find(each.profile)
        possible = {place.start: place for place in spec.placements} if spec else {}
        if each.start not in possible:
            raise _refuse(gpu, explain.bad_start(each.profile, each.start, sorted(possible)))
        if packing.fit(each.counts) is None:
            raise _refuse(
                gpu, f"{explain.show(each.devices)} do not fit into one {each.profile} together"
            )
        place = possible[each.start]
        for other, taken in found.items():
            if place.overlaps(taken):
                raise _refuse(
                    gpu, explain.collision((other.profile, taken), (each.profile, place))
                )
        found[each] = place
    missing_engines = explain.missing_engines(
        collections.Counter(each.profile for each in found), capacity
    )
    if missing_engines:
        raise _refuse(gpu, "; ".join(missing_engines))
    return found


def _create(
    place: PinnedInstance, spec: model.GpuInstanceProfile, where: model.Placement
) -> steps.TargetInstance:
    return steps.TargetInstance(
        profile=place.profile,
        profile_id=spec.profile_id,
        placement=where,
        compute_instances=plan_builder.inside(place.profile, packing.fit(place.counts) or ()),
        kept=False,
    )


def _refuse(gpu: model.Gpu, why: str) -> errors.LayoutError:
    return errors.LayoutError(
        f"the layout does not fit {gpu}: {why}",
        reason=errors.Reason.DOES_NOT_FIT,
        gpu_uuid=gpu.uuid,
    )


Devices = Mapping[model.Profile, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """One choice of what stays and how many GPU instances are new."""

    options: tuple[tuple[model.Profile, packing.Option], ...]

    @property
    def price(self) -> tuple[int, int]:
        return (
            sum(option.busy for _, option in self.options),
            sum(option.cost for _, option in self.options),
        )


class Search:
    """Searches for one GPU after the other; caches, since GPUs of a node are mostly alike."""

    def __init__(self, busy: frozenset[str]) -> None:
        """Build it with the UUIDs of the MIG devices in use."""
        self._busy = busy
        self._known: dict[tuple[object, ...], plan_builder.Decision] = {}

    def decide(
        self, gpu: model.Gpu, live: Sequence[model.GpuInstance], desired: model.DesiredGpu
    ) -> plan_builder.Decision:
        """Find the smallest change to exactly these devices.

        Args:
            gpu: The GPU; its profiles must be known if it needs a change.
            live: Its GPU instances, in order.
            desired: The devices.

        Raises:
            errors.LayoutError: The GPU lacks a profile, or the devices do not fit.
        """
        if is_right(live, desired):
            return _leave(live)
        instances = tuple(self._live_instance(gi) for gi in live)
        key = (gpu.profiles, desired.devices, desired.pins, instances)
        if key not in self._known:
            self._known[key] = _decide(gpu, instances, desired)
        return self._known[key]

    def _live_instance(self, gi: model.GpuInstance) -> LiveInstance:
        occupants = tuple(
            packing.Occupant(size=_size(gi, ci), span=ci.placement, is_busy=ci.uuid in self._busy)
            for ci in gi.compute_instances
        )
        return gi.profile, gi.placement, occupants


def is_right(live: Sequence[model.GpuInstance], desired: model.DesiredGpu) -> bool:
    """Return whether the instances are the desired ones and none lacks a compute instance."""
    pinned: dict[tuple[model.Profile, int], collections.Counter[model.Profile]] = {}
    for pin, count in desired.pins:
        place = pin.profile.gpu_instance, pin.start
        pinned.setdefault(place, collections.Counter())[pin.profile] = count
    free: collections.Counter[model.Profile] = collections.Counter()
    for gi in live:
        inside = collections.Counter(ci.profile for ci in gi.compute_instances)
        wanted = pinned.pop((gi.profile, gi.placement.start), None)
        if not inside or wanted not in (None, inside):
            return False
        free += inside if wanted is None else collections.Counter()
    return not pinned and free == dict(desired.devices)


def _leave(live: Sequence[model.GpuInstance]) -> plan_builder.Decision:
    return plan_builder.Decision(
        stays=tuple(
            plan_builder.Stay(position=i, kept=tuple(range(len(gi.compute_instances))), added=())
            for i, gi in enumerate(live)
        )
    )


def _decide(
    gpu: model.Gpu, live: Sequence[LiveInstance], desired: model.DesiredGpu
) -> plan_builder.Decision:
    capacity = placement.Capacity(gpu.profiles or (), live=[profile for profile, _, _ in live])
    for profile in desired.counts:
        has_size = packing.exists(profile.compute_slices, profile.gpu_slices)
        if not has_size or capacity.find(profile.gpu_instance) is None:
            raise explain.unknown_profile(gpu, profile, capacity)
    pinned = place_pins(gpu, capacity, live, desired.pins)
    free = [live[position] for position in pinned.positions]
    candidates = sorted(_candidates(capacity, free, dict(desired.devices)), key=lambda c: c.price)
    for _, equals in itertools.groupby(candidates, key=lambda c: c.price):
        ways = [(way, c) for c in equals if (way := _arrange(capacity, free, c, pinned))]
        if ways:
            way, candidate = min(ways, key=lambda pair: pair[0].rank)
            return _decision(capacity, candidate, way, free, pinned)
    raise explain.does_not_fit(
        gpu, dict(desired.devices), capacity, pinned=(*pinned.kept, *pinned.new)
    )


def _candidates(
    capacity: placement.Capacity, live: Sequence[LiveInstance], devices: Devices
) -> Iterator[_Candidate]:
    profiles = {device.gpu_instance for device in devices} | {p for p, _, _ in live}
    menus = []
    for profile in sorted(profiles, key=lambda profile: profile.sort_key):
        menu = packing.options(
            [occupants for other, _, occupants in live if other == profile],
            packing.count_sizes(devices, profile),
            most=capacity.most(profile),
        )
        menus.append([(profile, option) for option in menu])
    return (_Candidate(options=options) for options in itertools.product(*menus))


def _arrange(
    capacity: placement.Capacity,
    live: Sequence[LiveInstance],
    candidate: _Candidate,
    pinned: Pinned,
) -> placement.Arrangement | None:
    fixed = [
        (profile, live[position][1])
        for profile, option in candidate.options
        for position, _ in _located(option, profile, live)
    ]
    fresh = {profile: len(option.fresh) for profile, option in candidate.options}
    return capacity.best([*pinned.kept, *fixed], fresh, pinned=pinned.new)


def _located(
    option: packing.Option, profile: model.Profile, live: Sequence[LiveInstance]
) -> Iterator[tuple[int, packing.Content]]:
    """Yield what stays, with its position among all GPU instances."""
    own = [position for position, instance in enumerate(live) if instance[0] == profile]
    return ((own[nth], content) for nth, content in option.stays)


def _decision(
    capacity: placement.Capacity,
    candidate: _Candidate,
    way: placement.Arrangement,
    live: Sequence[LiveInstance],
    pinned: Pinned,
) -> plan_builder.Decision:
    stays = [
        plan_builder.Stay(
            position=pinned.positions[position],
            kept=content.kept,
            added=plan_builder.inside(profile, content.added),
        )
        for profile, option in candidate.options
        for position, content in _located(option, profile, live)
    ]
    fresh = {profile: iter(option.fresh) for profile, option in candidate.options}
    created = [
        steps.TargetInstance(
            profile=profile,
            profile_id=spec.profile_id,
            placement=place,
            compute_instances=plan_builder.inside(profile, next(fresh[profile])),
            kept=False,
        )
        for profile, place in way.placed
        if (spec := capacity.find(profile))
    ]
    return plan_builder.Decision(
        stays=tuple(sorted([*pinned.stays, *stays], key=lambda stay: stay.position)),
        created=(*pinned.created, *created),
    )


def _size(gi: model.GpuInstance, ci: model.ComputeInstance) -> int:
    return ci.profile.compute_slices if ci.profile.gpu_instance == gi.profile else 0
