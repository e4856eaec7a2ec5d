"""The exact search for the cheapest way to a set of devices on one GPU.

Of all ways it takes, in this order, the one

1. that destroys the fewest MIG devices in use;
2. with the fewest driver calls, that is GPU and compute instances destroyed and created;
3. that leaves the most room for the largest profiles: for each profile of the GPU, largest
   first, count how many more of it would fit, were it alone; these counts are compared in order;
4. whose GPU instances have the lowest start slices, largest profile first.

It is small because a GPU holds eight instances at the most. First comes every choice of what
stays, without a look at places (``packing``); the choices are then tried cheapest first, and of
the first price at which anything can be placed, every arrangement is compared (``placement``).
Whatever is equal after that is settled by a fixed order, so that equal input gives equal output.

Devices that a layout gives a place are settled first (``pinning``), and the rest around them.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager import errors
from mig_manager.core import model, steps
from mig_manager.core.planner import explain, packing, placement, plan_builder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One GPU instance that shall be, and where."""

    profile: model.Profile
    start: int
    counts: packing.Counts
    """What it shall hold."""

    @property
    def devices(self) -> dict[model.Profile, int]:
        """What it shall hold, by profile."""
        return {
            dataclasses.replace(self.profile, compute_slices=size): count
            for size, count in enumerate(self.counts, start=1)
            if count
        }


Pins = Sequence[tuple[model.Pin, int]]

Holder = tuple[model.Profile, model.Placement, tuple[packing.Tenant, ...]]
"""A live GPU instance and what it holds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What the pins decide, before anything else is chosen."""

    stays: tuple[plan_builder.Stay, ...]
    kept: tuple[placement.Placed, ...]
    """The same, as far as room is concerned."""
    created: tuple[steps.TargetInstance, ...]
    positions: tuple[int, ...]
    """Those of the live GPU instances that no pin speaks of."""

    @property
    def new(self) -> tuple[placement.Placed, ...]:
        """The GPU instances to make, as far as room is concerned."""
        return tuple((instance.profile, instance.placement) for instance in self.created)


def settle(
    gpu: model.Gpu, board: placement.Capacity, holders: Sequence[Holder], pins: Pins
) -> Settled:
    """Decide what becomes of the GPU instances that pins speak of.

    Args:
        gpu: The GPU.
        board: Its room; it offers every profile that the pins name.
        holders: Its live GPU instances, in order.
        pins: What shall be where.

    Raises:
        errors.LayoutError: The GPU cannot have these places (DOES_NOT_FIT).
    """
    located = locate(gpu, places(pins), board)
    missing = {(place.profile, where): place for place, where in located.items()}
    stays: list[plan_builder.Stay] = []
    kept: list[placement.Placed] = []
    positions: list[int] = []
    for position, (profile, where, tenants) in enumerate(holders):
        place = missing.pop((profile, where), None)
        if place is None:
            positions.append(position)
            continue
        content = packing.cheapest(tenants, place.counts)
        added = plan_builder.inside(profile, content.added)
        stays.append(plan_builder.Stay(position=position, kept=content.kept, added=added))
        kept.append((profile, where))
    created = (
        _create(place, spec, where)
        for (profile, where), place in missing.items()
        if (spec := board.find(profile))
    )
    return Settled(
        stays=tuple(stays), kept=tuple(kept), created=tuple(created), positions=tuple(positions)
    )


def places(pins: Pins) -> tuple[Place, ...]:
    """Return the GPU instances that pins speak of, ascending by start."""
    found: dict[tuple[model.Profile, int], dict[model.Profile, int]] = {}
    for pin, count in pins:
        found.setdefault((pin.profile.gpu_instance, pin.start), {})[pin.profile] = count
    return tuple(
        Place(profile=profile, start=start, counts=packing.count_sizes(devices, profile))
        for (profile, start), devices in found.items()
    )


def locate(
    gpu: model.Gpu, wanted: Iterable[Place], board: placement.Capacity
) -> dict[Place, model.Placement]:
    """Return the memory slices of each place.

    Raises:
        errors.LayoutError: No such instance can start there, two of them share a slice or a media
            engine, or one cannot hold what it shall (DOES_NOT_FIT).
    """
    found: dict[Place, model.Placement] = {}
    for each in wanted:
        spec = board.find(each.profile)
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
    drained = explain.drained(collections.Counter(each.profile for each in found), board)
    if drained:
        raise _refuse(gpu, "; ".join(drained))
    return found


def _create(
    place: Place, spec: model.GpuInstanceProfile, where: model.Placement
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

_Holder = Holder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """One choice of what stays and how many new GPU instances there are."""

    options: tuple[tuple[model.Profile, packing.Option], ...]

    @property
    def price(self) -> tuple[int, int]:
        return (
            sum(option.busy for _, option in self.options),
            sum(option.cost for _, option in self.options),
        )


class Search:
    """Decides for one GPU after the other; remembers, since GPUs of a node are mostly alike."""

    def __init__(self, busy: frozenset[str]) -> None:
        """Take the UUIDs of the MIG devices that workloads hold."""
        self._busy = busy
        self._known: dict[tuple[object, ...], plan_builder.Decision] = {}

    def decide(
        self, gpu: model.Gpu, live: Sequence[model.GpuInstance], wish: model.DesiredGpu
    ) -> plan_builder.Decision:
        """Find the best way to exactly these devices.

        Args:
            gpu: The GPU; its profiles may be unknown only if it needs no change.
            live: Its GPU instances, in order.
            wish: How many of each profile, and which of them where.

        Raises:
            errors.LayoutError: The GPU does not offer a profile, or cannot hold the devices.
        """
        if is_right(live, wish):
            return _leave(live)
        holders = tuple(self._holder(gi) for gi in live)
        key = (gpu.profiles, wish.devices, wish.pins, holders)
        if key not in self._known:
            self._known[key] = _decide(gpu, holders, wish)
        return self._known[key]

    def _holder(self, gi: model.GpuInstance) -> _Holder:
        tenants = tuple(
            packing.Tenant(size=_size(gi, ci), span=ci.placement, is_busy=ci.uuid in self._busy)
            for ci in gi.compute_instances
        )
        return gi.profile, gi.placement, tenants


def is_right(live: Sequence[model.GpuInstance], wish: model.DesiredGpu) -> bool:
    """Return whether the instances are the wanted ones and none lies idle."""
    pinned: dict[tuple[model.Profile, int], collections.Counter[model.Profile]] = {}
    for pin, count in wish.pins:
        place = pin.profile.gpu_instance, pin.start
        pinned.setdefault(place, collections.Counter())[pin.profile] = count
    free: collections.Counter[model.Profile] = collections.Counter()
    for gi in live:
        inside = collections.Counter(ci.profile for ci in gi.compute_instances)
        wanted = pinned.pop((gi.profile, gi.placement.start), None)
        if not inside or wanted not in (None, inside):
            return False
        free += inside if wanted is None else collections.Counter()
    return not pinned and free == dict(wish.devices)


def _leave(live: Sequence[model.GpuInstance]) -> plan_builder.Decision:
    return plan_builder.Decision(
        stays=tuple(
            plan_builder.Stay(position=i, kept=tuple(range(len(gi.compute_instances))), added=())
            for i, gi in enumerate(live)
        )
    )


def _decide(
    gpu: model.Gpu, holders: Sequence[_Holder], wish: model.DesiredGpu
) -> plan_builder.Decision:
    board = placement.Capacity(gpu.profiles or (), live=[profile for profile, _, _ in holders])
    for profile in wish.counts:
        has_size = packing.exists(profile.compute_slices, profile.gpu_slices)
        if not has_size or board.find(profile.gpu_instance) is None:
            raise explain.unknown_profile(gpu, profile, board)
    settled = settle(gpu, board, holders, wish.pins)
    free = [holders[position] for position in settled.positions]
    candidates = sorted(_candidates(board, free, dict(wish.devices)), key=lambda c: c.price)
    for _, equals in itertools.groupby(candidates, key=lambda c: c.price):
        ways = [(way, c) for c in equals if (way := _arrange(board, free, c, settled))]
        if ways:
            way, candidate = min(ways, key=lambda pair: pair[0].rank)
            return _settle(board, candidate, way, free, settled)
    raise explain.does_not_fit(
        gpu, dict(wish.devices), board, pinned=(*settled.kept, *settled.new)
    )


def _candidates(
    board: placement.Capacity, holders: Sequence[_Holder], devices: Devices
) -> Iterator[_Candidate]:
    profiles = {device.gpu_instance for device in devices} | {p for p, _, _ in holders}
    menus = []
    for profile in sorted(profiles, key=lambda profile: profile.sort_key):
        menu = packing.options(
            [tenants for other, _, tenants in holders if other == profile],
            packing.count_sizes(devices, profile),
            most=board.most(profile),
        )
        menus.append([(profile, option) for option in menu])
    return (_Candidate(options=options) for options in itertools.product(*menus))


def _arrange(
    board: placement.Capacity,
    holders: Sequence[_Holder],
    candidate: _Candidate,
    settled: Settled,
) -> placement.Arrangement | None:
    fixed = [
        (profile, holders[position][1])
        for profile, option in candidate.options
        for position, _ in _located(option, profile, holders)
    ]
    fresh = {profile: len(option.fresh) for profile, option in candidate.options}
    return board.best([*settled.kept, *fixed], fresh, pinned=settled.new)


def _located(
    option: packing.Option, profile: model.Profile, holders: Sequence[_Holder]
) -> Iterator[tuple[int, packing.Content]]:
    """Yield what stays by its position among all GPU instances, not those of one profile."""
    own = [position for position, holder in enumerate(holders) if holder[0] == profile]
    return ((own[nth], content) for nth, content in option.stays)


def _settle(
    board: placement.Capacity,
    candidate: _Candidate,
    way: placement.Arrangement,
    holders: Sequence[_Holder],
    settled: Settled,
) -> plan_builder.Decision:
    stays = [
        plan_builder.Stay(
            position=settled.positions[position],
            kept=content.kept,
            added=plan_builder.inside(profile, content.added),
        )
        for profile, option in candidate.options
        for position, content in _located(option, profile, holders)
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
        if (spec := board.find(profile))
    ]
    return plan_builder.Decision(
        stays=tuple(sorted([*settled.stays, *stays], key=lambda stay: stay.position)),
        created=(*settled.created, *created),
    )


def _size(gi: model.GpuInstance, ci: model.ComputeInstance) -> int:
    return ci.profile.compute_slices if ci.profile.gpu_instance == gi.profile else 0
