"""Place GPU instances by memory slices and media engines, or explain why they do not fit.

A set of GPU instances fits a GPU if each has a possible placement of its profile, no two share a
memory slice, and the GPU has enough of every media engine. The compute slices follow from the
placements. NVML's maximum instance counts are wrong on A30 and not used.

The driver creates one instance at a time, which can block a later one. This module chooses all
placements together before the first creation.
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
    """Lower is better: negated counts of how many more of every profile fit alone; then the starts
    of all instances, kept ones included. Both have the largest profile first."""


class Capacity:
    """The memory slices and media engines of one GPU, with a cache.

    ``specs`` are its profiles, largest first: by memory slices, then GPU slices.
    """

    def __init__(
        self,
        profiles: Iterable[model.GpuInstanceProfile],
        *,
        live: Iterable[model.Profile] = (),
    ) -> None:
        """Build it from all profiles of a GPU; it has at least the engines of live instances."""
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
        self.pool = model.Engines.pool([*engines, self.engines(live)])
        self.memory_slices = max((p.end for s in self.specs for p in s.placements), default=0)
        self._rooms: dict[tuple[int, model.Engines], tuple[int, ...]] = {}

    def engines(self, profiles: Iterable[model.Profile]) -> model.Engines:
        """Sum up the media engines of instances of these profiles."""
        total = model.Engines()
        for profile in profiles:
            spec = self.by_profile.get(profile)
            total = total + spec.engines if spec else total
        return total

    def most(self, profile: model.Profile) -> int:
        """Return how many instances of a profile fit the empty GPU."""
        rank = self._rank.get(profile)
        return 0 if rank is None else self.room(0, model.Engines())[rank]

    def room(self, occupied: int, used: model.Engines) -> tuple[int, ...]:
        """Return how many more of every profile fit alone; ``occupied`` is a bit mask."""
        if (occupied, used) not in self._rooms:
            free = [n - m for n, m in zip(self.pool.counts, used.counts, strict=True)]

            def limits(spec: model.GpuInstanceProfile) -> Iterator[int]:
                yield max_instances(spec, occupied)
                for count, needed in zip(free, spec.engines.counts, strict=True):
                    if needed:
                        yield count // needed

            self._rooms[occupied, used] = tuple(min(limits(spec)) for spec in self.specs)
        return self._rooms[occupied, used]

    def best(
        self,
        fixed: Sequence[Placed],
        new: Mapping[model.Profile, int],
        *,
        pinned: Sequence[Placed] = (),
    ) -> Arrangement | None:
        """Place new instances so that the largest profiles keep the most room; None if impossible.

        ``pinned`` are further new instances with placements, which do not overlap.
        """
        specs = [spec for spec in self.specs for _ in range(new.get(spec.profile, 0))]
        known = [*fixed, *pinned]
        used = self.engines([p for p, _ in known] + [spec.profile for spec in specs])
        # Live instances have their engines already.
        if (specs or pinned) and not used.within(self.pool):
            return None
        if any(place.overlaps(other) for _, place in pinned for _, other in fixed):
            return None
        occupied = packing.slices(place for _, place in known)

        def arrange(placed: tuple[Placed, ...]) -> Arrangement:
            room = self.room(occupied | packing.slices(place for _, place in placed), used)
            ranked = sorted((self._rank[p], place.start) for p, place in (*known, *placed))
            starts = tuple(start for _, start in ranked)
            return Arrangement(placed=placed, rank=(tuple(-count for count in room), starts))

        arrangements = map(arrange, _ways(occupied, specs))
        return min(arrangements, key=lambda arrangement: arrangement.rank, default=None)

    def fits(self, counts: Mapping[model.Profile, int], *, pinned: Sequence[Placed] = ()) -> bool:
        """Return whether these instances fit together, beside the pinned ones."""
        specs = [spec for spec in self.specs for _ in range(counts.get(spec.profile, 0))]
        used = self.engines([p for p, _ in pinned] + [spec.profile for spec in specs])
        if not used.within(self.pool):
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
    """Yield every way to place the instances; equal specs are adjacent, their starts ascend."""
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
        similar = profile_name.suggest(profile, [spec.profile for spec in capacity.specs])
        hint = f"did you mean {similar[0]}? " if similar else ""
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
    """Return the error for a layout that does not fit; it names the largest part that fits.

    ``devices`` are the devices without ``pinned`` placements.
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
    rest = "" if engines else _free_slices(devices, part, capacity, pinned)
    beside = f" beside {_placements_text(pinned)}" if pinned else ""
    return errors.LayoutError(
        f"{show(devices)}{beside} does not fit {gpu}: {'; '.join(why)}; "
        f"the largest part that fits is {show(part) or 'nothing'}{rest}",
        reason=errors.Reason.DOES_NOT_FIT,
        gpu_uuid=gpu.uuid,
    )


def missing_engines(counts: Mapping[model.Profile, int], capacity: Capacity) -> list[str]:
    """Describe the shortage of media engines."""
    missing = []
    for field, name in _ENGINES:
        has = getattr(capacity.pool, field)
        wants = sum(
            count * getattr(spec.engines, field)
            for profile, count in counts.items()
            if (spec := capacity.by_profile.get(profile))
        )
        if wants > has:
            missing.append(f"it needs {wants} x {name} and the GPU has {has}")
    return missing


def show(devices: Mapping[model.Profile, int]) -> str:
    """Render devices as ``2 x 2g.10gb + 3 x 1g.5gb``."""
    ordered = sorted(devices.items(), key=lambda item: item[0].sort_key)
    return " + ".join(f"{count} x {profile}" for profile, count in ordered if count)


def instances(
    devices: Mapping[model.Profile, int], capacity: Capacity
) -> dict[model.Profile, int]:
    """Count the fewest GPU instances for these devices."""
    needed: dict[model.Profile, int] = {}
    for profile in sorted({device.gpu_instance for device in devices}, key=_by_size):
        counts = packing.count_sizes(devices, profile)
        rough = -(-packing.total_slices(counts) // profile.gpu_slices)
        # Packing an impossible count would take too long.
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


def _free_slices(
    devices: Mapping[model.Profile, int],
    part: Mapping[model.Profile, int],
    capacity: Capacity,
    pinned: Sequence[Placed],
) -> str:
    """Describe the placements of a part, and the first profile that does not fit beside it."""
    short = [p for p in sorted(devices, key=_by_size) if part.get(p, 0) < devices[p]]
    spec = capacity.by_profile.get(short[0].gpu_instance) if short else None
    arrangement = capacity.best((), instances(part, capacity), pinned=pinned)
    if spec is None or arrangement is None:
        return ""
    placed = [*pinned, *arrangement.placed]
    occupied = packing.slices(place for _, place in placed)
    free = [each for each in range(capacity.memory_slices) if not occupied >> each & 1]
    size = max(place.size for place in spec.placements)
    starts = sorted({place.start for place in spec.placements})
    room = (
        f"memory slice {shown_slices(free).replace(' or ', ' and ')} is free"
        if free
        else "no memory slice is free"
    )
    where = f" ({_placements_text(placed)})" if placed else ""
    takes = f"{size} in a row, starting" if size > 1 else "one"
    return f"{where}; then {room}, and {spec.profile} needs {takes} at {shown_slices(starts)}"


def _placements_text(placed: Iterable[Placed]) -> str:
    """Render placements: ``3g.20gb at 0-3, 4-7``."""
    spans: dict[model.Profile, list[str]] = collections.defaultdict(list)
    for profile, place in sorted(placed, key=lambda each: each[1]):
        spans[profile] += messages.ranges(range(place.start, place.end))
    return "; ".join(f"{profile} at {_join(texts)}" for profile, texts in spans.items())


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
