"""Place GPU instances, or explain why they do not fit: memory slices, media engines, free room.

A set of GPU instances fits a GPU if each has a possible placement of its profile, no two share a
memory slice, and the GPU has enough of each media engine. The compute slices follow from the
placements; the maximum instance counts of NVML are wrong on A30 and not used.

The driver puts one instance at a time and can block a later one. Here all placements are chosen
together before the first creation.
"""

import collections
import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager import errors
from mig_manager.core import messages, model, profile_name
from mig_manager.core.planner import packing

Placed = tuple[model.Profile, model.Placement]  # profile and placement of a GPU instance


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """One way to place new GPU instances beside those that stay."""

    placed: tuple[Placed, ...]  # the new ones, largest profile first, ascending within a profile
    rank: tuple[tuple[int, ...], tuple[int, ...]]
    """Lower is better: how many more of each profile fit, each alone, negated; then the starts of
    all instances, also of those that stay. Both have the largest profile first."""


class Capacity:
    """The memory slices and media engines of one GPU; remembers what it computed.

    ``specs`` are its profiles, largest first: by memory slices, then GPU slices.
    """

    def __init__(
        self,
        profiles: Iterable[model.GpuInstanceProfile],
        *,
        live: Iterable[model.Profile] = (),
    ) -> None:
        """Build it from all profiles of a GPU; it has at least the engines of the live ones."""
        by_profile: dict[model.Profile, model.GpuInstanceProfile] = {}
        for spec in sorted(profiles, key=lambda spec: spec.enum_index):
            by_profile.setdefault(spec.profile, spec)
        self.by_profile: Mapping[model.Profile, model.GpuInstanceProfile] = by_profile

        def largest_first(spec: model.GpuInstanceProfile) -> tuple[object, ...]:
            size = max((place.size for place in spec.placements), default=0)
            return -size, -spec.profile.gpu_slices, spec.profile.sort_key

        self.specs = tuple(sorted(by_profile.values(), key=largest_first))
        self._rank = {spec.profile: rank for rank, spec in enumerate(self.specs)}
        engines = [spec.engines for spec in self.specs]
        self.pool = model.Engines.pool([*engines, self.drawn(live)])
        self.memory_slices = max((p.end for s in self.specs for p in s.placements), default=0)
        self._rooms: dict[tuple[int, model.Engines], tuple[int, ...]] = {}

    def drawn(self, profiles: Iterable[model.Profile]) -> model.Engines:
        """Return the media engines that instances of these profiles need together."""
        total = model.Engines()
        for profile in profiles:
            spec = self.by_profile.get(profile)
            total = total + spec.engines if spec else total
        return total

    def most(self, profile: model.Profile) -> int:
        """Return how many instances of one profile fit the empty GPU."""
        rank = self._rank.get(profile)
        return 0 if rank is None else self.room(0, model.Engines())[rank]

    def room(self, occupied: int, drawn: model.Engines) -> tuple[int, ...]:
        """Return how many more of each profile fit, each alone; ``occupied`` is a bit mask."""
        found = self._rooms.get((occupied, drawn))
        if found is None:
            pool = list(zip(self.pool.counts, drawn.counts, strict=True))

            def limits(spec: model.GpuInstanceProfile) -> Iterator[int]:
                yield max_instances(spec, occupied)
                for (has, used), wants in zip(pool, spec.engines.counts, strict=True):
                    if wants:
                        yield (has - used) // wants

            found = tuple(min(limits(spec)) for spec in self.specs)
            self._rooms[occupied, drawn] = found
        return found

    def best(
        self,
        fixed: Sequence[Placed],
        new: Mapping[model.Profile, int],
        *,
        pinned: Sequence[Placed] = (),
    ) -> Arrangement | None:
        """Place new instances so that the largest profiles keep the most room; None if impossible.

        ``pinned`` are further new ones with given placements, which do not overlap.
        """
        specs = [spec for spec in self.specs for _ in range(new.get(spec.profile, 0))]
        known = [*fixed, *pinned]
        drawn = self.drawn([p for p, _ in known] + [spec.profile for spec in specs])
        # Live instances have their engines already.
        if (specs or pinned) and not drawn.within(self.pool):
            return None
        if any(place.overlaps(other) for _, place in pinned for _, other in fixed):
            return None
        occupied = packing.slices(place for _, place in known)

        def judged(placed: tuple[Placed, ...]) -> Arrangement:
            room = self.room(occupied | packing.slices(place for _, place in placed), drawn)
            ranked = sorted((self._rank[p], place.start) for p, place in (*known, *placed))
            starts = tuple(start for _, start in ranked)
            return Arrangement(placed=placed, rank=(tuple(-count for count in room), starts))

        ways = map(judged, _ways(occupied, specs))
        return min(ways, key=lambda arrangement: arrangement.rank, default=None)

    def fits(self, counts: Mapping[model.Profile, int], *, pinned: Sequence[Placed] = ()) -> bool:
        """Return whether that many of each profile fit at once, beside the pinned ones."""
        specs = [spec for spec in self.specs for _ in range(counts.get(spec.profile, 0))]
        drawn = self.drawn([p for p, _ in pinned] + [spec.profile for spec in specs])
        if not drawn.within(self.pool):
            return False
        return next(_ways(packing.slices(place for _, place in pinned), specs), None) is not None


def max_instances(spec: model.GpuInstanceProfile, occupied: int = 0) -> int:
    """Return how many instances of a profile fit the free memory slices."""
    count = 0
    # Greedy by end is optimal for intervals.
    for place in sorted(spec.placements, key=lambda place: place.end):
        if not occupied & packing.mask(place):
            occupied |= packing.mask(place)
            count += 1
    return count


def _ways(
    occupied: int, specs: Sequence[model.GpuInstanceProfile], *, floor: int = 0
) -> Iterator[tuple[Placed, ...]]:
    """Yield every way to place the instances; equal ones are adjacent and ascend."""
    if not specs:
        yield ()
        return
    head, *rest = specs
    for place in head.placements:
        if place.start < floor or occupied & packing.mask(place):
            continue
        follows = place.start + 1 if rest and rest[0] is head else 0
        for tail in _ways(occupied | packing.mask(place), rest, floor=follows):
            yield ((head.profile, place), *tail)


_by_size = operator.attrgetter("sort_key")
_ENGINES = (
    ("decoders", "decoder (NVDEC)"),
    ("encoders", "encoder (NVENC)"),
    ("jpegs", "JPEG engine (NVJPG)"),
    ("ofas", "optical-flow engine (OFA)"),
)


def unknown_profile(
    gpu: model.Gpu, profile: model.Profile, capacity: Capacity
) -> errors.LayoutError:
    """Return the error for a profile that this GPU lacks; it lists the GPU's profiles."""
    spec = capacity.by_profile.get(profile.gpu_instance)
    if spec:
        slices = profile.gpu_slices
        sizes = [s for s in range(slices, 0, -1) if packing.exists(s, slices)]
        what = f"{profile.gpu_instance} has compute instances of {_join(sizes)} slices"
    elif not capacity.specs:
        what = "the driver lists no profiles of this GPU"
    else:
        known = [str(spec.profile) for spec in capacity.specs]
        meant = profile_name.suggest(profile, [spec.profile for spec in capacity.specs])
        hint = f"did you mean {meant[0]}? " if meant else ""
        what = f"{hint}it has {_join(known)}"
    return errors.LayoutError(
        f"{gpu} has no profile {profile}: {what}",
        reason=errors.Reason.UNKNOWN_PROFILE,
        gpu_uuid=gpu.uuid,
        profile=str(profile),
    )


def does_not_fit(
    gpu: model.Gpu,
    devices: Mapping[model.Profile, int],
    capacity: Capacity,
    *,
    pinned: Sequence[Placed] = (),
) -> errors.LayoutError:
    """Return the error for a layout that does not fit, with the largest part that would.

    ``devices`` are those that are not ``pinned``.
    """
    needed = instances(devices, capacity)
    everything = collections.Counter(profile for profile, _ in pinned)
    everything.update(needed)
    engines = missing_engines(everything, capacity)
    occupied = packing.slices(place for _, place in pinned)
    crowded = [
        f"it needs {count} x {profile} and the memory slices have room for {room}"
        for profile, count in needed.items()
        if count > (room := max_instances(capacity.by_profile[profile], occupied))
    ]
    why = [*crowded, *engines] or [_scattered(needed, capacity, pinned)]
    part = _largest_part(devices, capacity, pinned)
    rest = "" if engines else _left_over(devices, part, capacity, pinned)
    beside = f" beside {_lying(pinned)}" if pinned else ""
    return errors.LayoutError(
        f"{show(devices)}{beside} does not fit {gpu}: {'; '.join(why)}; "
        f"the largest part that fits is {show(part) or 'nothing'}{rest}",
        reason=errors.Reason.DOES_NOT_FIT,
        gpu_uuid=gpu.uuid,
    )


def missing_engines(counts: Mapping[model.Profile, int], capacity: Capacity) -> list[str]:
    """Describe the media engines that the GPU has too few of."""
    found = []
    for field, name in _ENGINES:
        has = getattr(capacity.pool, field)
        wants = sum(
            count * getattr(spec.engines, field)
            for profile, count in counts.items()
            if (spec := capacity.by_profile.get(profile))
        )
        if wants > has:
            found.append(f"it needs {wants} x {name} and the GPU has {has}")
    return found


def show(devices: Mapping[model.Profile, int]) -> str:
    """Render devices as ``2 x 2g.10gb + 3 x 1g.5gb``."""
    ordered = sorted(devices.items(), key=lambda item: item[0].sort_key)
    return " + ".join(f"{count} x {profile}" for profile, count in ordered if count)


def instances(
    devices: Mapping[model.Profile, int], capacity: Capacity
) -> dict[model.Profile, int]:
    """Count the GPU instances that devices need at least."""
    needed: dict[model.Profile, int] = {}
    for profile in sorted({device.gpu_instance for device in devices}, key=_by_size):
        counts = packing.count_sizes(devices, profile)
        rough = -(-packing.total_slices(counts) // profile.gpu_slices)
        # Packing a count beyond all hardware would take too long.
        hopeless = rough > capacity.most(profile)
        needed[profile] = rough if hopeless else len(packing.bins(counts))
    return needed


def _scattered(
    needed: Mapping[model.Profile, int],
    capacity: Capacity,
    pinned: Sequence[Placed],
) -> str:
    sizes = {spec.profile: max(p.size for p in spec.placements) for spec in capacity.specs}
    wants = sum(count * sizes[profile] for profile, count in needed.items())
    free = capacity.memory_slices - sum(place.size for _, place in pinned)
    if wants > free:
        sums = " + ".join(f"{count} x {sizes[profile]}" for profile, count in needed.items())
        return f"it needs {wants} memory slices and the GPU has {free} ({sums})"
    return f"the possible placements in the {free} memory slices overlap however they are chosen"


def _largest_part(
    devices: Mapping[model.Profile, int],
    capacity: Capacity,
    pinned: Sequence[Placed],
) -> dict[model.Profile, int]:
    part: dict[model.Profile, int] = {}
    for profile in sorted(devices, key=_by_size):
        for count in range(1, devices[profile] + 1):
            needed = instances({**part, profile: count}, capacity)
            if not capacity.fits(needed, pinned=pinned):
                break
            part[profile] = count
    return part


def _left_over(
    devices: Mapping[model.Profile, int],
    part: Mapping[model.Profile, int],
    capacity: Capacity,
    pinned: Sequence[Placed],
) -> str:
    """Show the placements of that part, and the first profile that does not fit beside it."""
    short = [p for p in sorted(devices, key=_by_size) if part.get(p, 0) < devices[p]]
    spec = capacity.by_profile.get(short[0].gpu_instance) if short else None
    way = capacity.best((), instances(part, capacity), pinned=pinned)
    if spec is None or way is None:
        return ""
    lying = [*pinned, *way.placed]
    occupied = packing.slices(place for _, place in lying)
    free = [each for each in range(capacity.memory_slices) if not occupied >> each & 1]
    size = max(place.size for place in spec.placements)
    starts = sorted({place.start for place in spec.placements})
    room = (
        f"memory slice {shown_slices(free).replace(' or ', ' and ')} is free"
        if free
        else "no memory slice is free"
    )
    where = f" ({_lying(lying)})" if lying else ""
    takes = f"{size} in a row, starting" if size > 1 else "one"
    return f"{where}; then {room}, and {spec.profile} needs {takes} at {shown_slices(starts)}"


def _lying(placed: Iterable[Placed]) -> str:
    """Render placements: ``3g.20gb at 0-3, 4-7``."""
    where: dict[model.Profile, list[str]] = {}
    for profile, place in sorted(placed, key=lambda each: each[1]):
        where.setdefault(profile, []).extend(messages.ranges(range(place.start, place.end)))
    return "; ".join(f"{profile} at {_join(spans)}" for profile, spans in where.items())


def named(place: model.Placement) -> str:
    """Render a span as ``slices 0-3`` or ``slice 7``."""
    (text,) = messages.ranges(range(place.start, place.end))
    return f"slices {text}" if place.size > 1 else f"slice {text}"


def shown_slices(slices: Sequence[int]) -> str:
    """Render slices as ``0-3 or 7``."""
    *first, last = messages.ranges(slices) or ["none"]
    return f"{', '.join(first)} or {last}" if first else last


def _join(words: Iterable[object]) -> str:
    return ", ".join(map(str, words))
