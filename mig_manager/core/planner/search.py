"""Search exactly for the smallest change to a set of devices on one GPU.

It minimises, in this order:

1. the sum of ``use`` of the MIG devices that are destroyed;
2. the driver calls: GPU and compute instances destroyed and created;
3. the room lost for the largest profiles: how many more of a profile fit alone, compared from the
   largest profile down;
4. the start slices of the GPU instances, largest profile first.

A GPU has eight instances at most. ``packing`` lists all choices of instances that stay, without
placements. The search tries them cheapest first, and compares every arrangement (``placement``) of
the first price at which one fits. Ties have a fixed order: equal input gives equal output.

Pinned devices are placed first. Every profile and start slice has its own GPU instance. An
existing one stays, which never costs more than to create it again.
"""

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from mig_manager import errors, reasons
from mig_manager.core import model, profile_name, steps
from mig_manager.core.planner import misfits, packing, placement

Pins = Iterable[tuple[model.Pin, int]]

LiveInstance = tuple[model.Profile, model.Placement, tuple[packing.Occupant, ...]]

Candidate = tuple[tuple[model.Profile, packing.Packing], ...]  # one packing of every profile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A live GPU instance that stays, with its compute instances."""

    position: int  # its position in ``in_order``
    kept: tuple[int, ...]  # positions of the compute instances that stay, in ``in_order``
    added: tuple[steps.TargetComputeInstance, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuDecision:
    """The instances of one GPU after the plan; other live instances are destroyed."""

    stays: tuple[Stay, ...] = ()
    created: tuple[steps.TargetInstance, ...] = ()  # pinned first, then largest first


def in_order(gpu: model.Gpu | model.GpuSnapshot) -> tuple[model.GpuInstance, ...]:
    """Return GPU instances and their compute instances by placement; none with MIG disabled."""
    if gpu.current_mode is not model.MigMode.ENABLED:
        return ()

    def compute_order(ci: model.ComputeInstance) -> tuple[object, ...]:
        return ci.placement or model.Placement(-1, 0), ci.profile, ci.instance_id

    return tuple(
        dataclasses.replace(
            gi, compute_instances=tuple(sorted(gi.compute_instances, key=compute_order))
        )
        for gi in sorted(gpu.gpu_instances, key=lambda gi: gi.placement)
    )


def stay_unchanged(position: int, gi: model.GpuInstance) -> Stay:
    """Return the stay of a GPU instance with all its compute instances."""
    return Stay(position=position, kept=tuple(range(len(gi.compute_instances))))


class Search:
    """Searches GPU by GPU, with a cache, because GPUs of a node are mostly equal."""

    def __init__(self, use: Mapping[str, int]) -> None:
        """Build it with the use of MIG devices, as for ``planner.plan``."""
        self._use = use
        self._decisions: dict[tuple[object, ...], GpuDecision] = {}

    def decide(self, gpu: model.Gpu, desired: model.DesiredGpu) -> GpuDecision:
        """Find the smallest change to exactly these devices; LayoutError if they do not fit.

        The profiles of the GPU are known if it changes.
        """
        live = in_order(gpu)
        if _is_right(live, desired):
            return GpuDecision(stays=tuple(stay_unchanged(i, gi) for i, gi in enumerate(live)))
        instances = tuple((gi.profile, gi.placement, self._occupants(gi)) for gi in live)
        key = (gpu.profiles, desired.devices, desired.pins, instances)
        if key not in self._decisions:
            self._decisions[key] = _decide(gpu, instances, desired)
        return self._decisions[key]

    def _occupants(self, gi: model.GpuInstance) -> tuple[packing.Occupant, ...]:
        return tuple(
            packing.Occupant(
                # Of another GPU-instance profile it never stays.
                size=ci.profile.compute_slices if ci.profile.gpu_instance == gi.profile else 0,
                span=ci.placement,
                use=self._use.get(ci.uuid or "", 0),
            )
            for ci in gi.compute_instances
        )


def _is_right(live: Sequence[model.GpuInstance], desired: model.DesiredGpu) -> bool:
    """Return whether the instances are the desired ones, all with compute instances."""
    pinned = _by_instance(desired.pins)
    free: collections.Counter[model.Profile] = collections.Counter()
    for gi in live:
        inside = collections.Counter(ci.profile for ci in gi.compute_instances)
        pinned_content = pinned.pop((gi.profile, gi.placement.start), None)
        if not inside or pinned_content not in (None, inside):
            return False
        free += inside if pinned_content is None else collections.Counter()
    return not pinned and free == dict(desired.devices)


def _by_instance(pins: Pins) -> dict[tuple[model.Profile, int], dict[model.Profile, int]]:
    """Return pinned devices by the profile and start of their GPU instance, ascending."""
    devices: dict[tuple[model.Profile, int], dict[model.Profile, int]] = {}
    for pin, count in pins:
        devices.setdefault((pin.profile.gpu_instance, pin.start), {})[pin.profile] = count
    return devices


def _decide(
    gpu: model.Gpu, live: Sequence[LiveInstance], desired: model.DesiredGpu
) -> GpuDecision:
    capacity = placement.Capacity(gpu.profiles or (), live=[profile for profile, _, _ in live])
    for profile in desired.counts:
        has_size = packing.exists(profile.compute_slices, profile.gpu_slices)
        if not has_size or profile.gpu_instance not in capacity.by_profile:
            raise misfits.unknown_profile(gpu, profile, capacity)
    pinned = _place_pins(gpu, capacity, live, desired.pins)
    positions = [stay.position for stay in pinned.stays]
    free = {position: each for position, each in enumerate(live) if position not in positions}
    kept = [live[position][:2] for position in positions]
    new = [(instance.profile, instance.placement) for instance in pinned.created]
    for equals in _by_price(capacity, free.values(), desired):
        fitting: list[tuple[placement.Arrangement, Candidate]] = []
        for candidate in equals:
            fixed = [live[position][:2] for position, _ in _kept_instances(candidate, free)]
            needed = {profile: len(option.fresh) for profile, option in candidate}
            if arrangement := capacity.best([*kept, *fixed], needed, pinned=new):
                fitting.append((arrangement, candidate))
        if not fitting:
            continue
        arrangement, candidate = min(fitting, key=lambda pair: pair[0].rank)
        stays = [
            _stay(position, live[position][0], content)
            for position, content in _kept_instances(candidate, free)
        ]
        fresh = {profile: iter(option.fresh) for profile, option in candidate}
        created = [
            _new_target(capacity, profile, place, next(fresh[profile]))
            for profile, place in arrangement.placed
        ]
        return GpuDecision(
            stays=tuple(sorted([*pinned.stays, *stays], key=lambda stay: stay.position)),
            created=(*pinned.created, *created),
        )
    raise misfits.does_not_fit(gpu, dict(desired.devices), capacity, pinned=(*kept, *new))


def _place_pins(
    gpu: model.Gpu, capacity: placement.Capacity, live: Sequence[LiveInstance], pins: Pins
) -> GpuDecision:
    """Decide which pinned GPU instances stay and which are created."""
    missing = _locate(gpu, pins, capacity)
    stays: list[Stay] = []
    for position, (profile, where, occupants) in enumerate(live):
        counts = missing.pop((profile, where), None)
        if counts is not None:
            stays.append(_stay(position, profile, packing.content(occupants, counts)))
    created = (
        _new_target(capacity, profile, where, packing.fit(counts) or ())
        for (profile, where), counts in missing.items()
    )
    return GpuDecision(stays=tuple(stays), created=tuple(created))


def _locate(
    gpu: model.Gpu, pins: Pins, capacity: placement.Capacity
) -> dict[placement.Placed, packing.Counts]:
    """Return the pinned GPU instances with their compute instances; LayoutError if impossible."""

    def refuse(why: str) -> errors.LayoutError:
        return errors.LayoutError(
            f"the layout does not fit {gpu}: {why}",
            reason=reasons.Reason.DOES_NOT_FIT,
            gpu_uuid=gpu.uuid,
        )

    pinned: dict[placement.Placed, packing.Counts] = {}
    for (profile, start), devices in _by_instance(pins).items():
        spec = capacity.by_profile.get(profile)
        possible = {place.start: place for place in spec.placements} if spec else {}
        if start not in possible:
            where = misfits.shown_slices(sorted(possible))
            raise refuse(f"{profile} cannot start at memory slice {start}; it can at {where}")
        counts = packing.count_sizes(devices, profile)
        if packing.fit(counts) is None:
            raise refuse(
                f"{profile_name.with_counts(devices)} do not fit into one {profile} together"
            )
        place = possible[start]
        for other, occupied in pinned:
            if place.overlaps(occupied):
                shared = max(place.start, occupied.start)
                both = model.Placement(shared, min(place.end, occupied.end) - shared)
                raise refuse(
                    f"{other}@{occupied.start} needs memory {misfits.span_text(occupied)} and "
                    f"{profile}@{start} {misfits.span_text(place)}; "
                    f"they collide in {misfits.span_text(both)}"
                )
        pinned[profile, place] = counts
    profiles = collections.Counter(profile for profile, _ in pinned)
    missing_engines = misfits.missing_engines(profiles, capacity)
    if missing_engines:
        raise refuse("; ".join(missing_engines))
    return pinned


def _by_price(
    capacity: placement.Capacity, live: Collection[LiveInstance], desired: model.DesiredGpu
) -> Iterator[Iterator[Candidate]]:
    """Yield the candidates for the devices without pins, grouped by price, cheapest first."""
    devices = dict(desired.devices)
    profiles = {device.gpu_instance for device in devices} | {p for p, _, _ in live}
    menus = []
    for profile in sorted(profiles):
        menu = packing.options(
            [occupants for other, _, occupants in live if other == profile],
            packing.count_sizes(devices, profile),
            maximum=capacity.maximum(profile),
        )
        menus.append([(profile, option) for option in menu])

    def price(candidate: Candidate) -> tuple[int, int]:
        return (
            sum(option.destroyed_use for _, option in candidate),
            sum(option.cost for _, option in candidate),
        )

    ordered = sorted(itertools.product(*menus), key=price)
    return (equals for _, equals in itertools.groupby(ordered, key=price))


def _kept_instances(
    candidate: Candidate, live: Mapping[int, LiveInstance]
) -> Iterator[tuple[int, packing.Content]]:
    """Yield the positions of GPU instances that stay, each with its content."""
    for profile, option in candidate:
        positions = [position for position, instance in live.items() if instance[0] == profile]
        yield from ((positions[nth], content) for nth, content in option.stays)


def _stay(position: int, profile: model.Profile, content: packing.Content) -> Stay:
    added = packing.inside(profile, content.added)
    return Stay(position=position, kept=content.kept, added=added)


def _new_target(
    capacity: placement.Capacity,
    profile: model.Profile,
    place: model.Placement,
    content: packing.Spans,
) -> steps.TargetInstance:
    return steps.TargetInstance(
        profile=profile,
        profile_id=capacity.by_profile[profile].profile_id,
        placement=place,
        compute_instances=packing.inside(profile, content),
        is_kept=False,
    )
