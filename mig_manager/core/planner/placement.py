"""Place GPU instances: memory slices, media engines, and the room that stays free.

A set of GPU instances fits a GPU if each has a possible placement of its profile, no two share a
memory slice, and the GPU has enough of each media engine. The compute slices follow from the
placements; the maximum instance counts of NVML are wrong on A30 and not used.

The driver puts one instance at a time and can block a later one. Here all placements are chosen
together before the first creation.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager.core import model

Placed = tuple[model.Profile, model.Placement]  # profile and placement of a GPU instance


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """One way to place new GPU instances beside those that stay."""

    placed: tuple[Placed, ...]  # the new ones, largest profile first, ascending within a profile
    room: tuple[int, ...]  # how many more of each profile fit, each alone, largest profile first
    starts: tuple[int, ...]
    """First slices of all instances, also of those that stay, in the order of ``placed``."""

    @property
    def rank(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Lower is better: the most room for the largest profiles, then the lowest starts."""
        return tuple(-count for count in self.room), self.starts


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
        self._by_profile = by_profile

        def largest_first(spec: model.GpuInstanceProfile) -> tuple[object, ...]:
            size = max((place.size for place in spec.placements), default=0)
            return -size, -spec.profile.gpu_slices, spec.profile.sort_key

        self.specs = tuple(sorted(by_profile.values(), key=largest_first))
        self._rank = {spec.profile: rank for rank, spec in enumerate(self.specs)}
        engines = [spec.engines for spec in self.specs]
        self.pool = model.Engines.pool([*engines, self.drawn(live)])
        self.memory_slices = max((p.end for s in self.specs for p in s.placements), default=0)
        self._rooms: dict[tuple[int, model.Engines], tuple[int, ...]] = {}

    def find(self, profile: model.Profile) -> model.GpuInstanceProfile | None:
        """Return the GPU's description of a profile; None if the GPU lacks the profile."""
        return self._by_profile.get(profile)

    def __getitem__(self, profile: model.Profile) -> model.GpuInstanceProfile:
        return self._by_profile[profile]

    def drawn(self, profiles: Iterable[model.Profile]) -> model.Engines:
        """Return the media engines that instances of these profiles need together."""
        total = model.Engines()
        for profile in profiles:
            spec = self._by_profile.get(profile)
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
            found = tuple(
                min(
                    max_instances(spec, occupied), draws(spec.engines, drawn=drawn, pool=self.pool)
                )
                for spec in self.specs
            )
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
        occupied = slices(place for _, place in known)

        def judged(placed: tuple[Placed, ...]) -> Arrangement:
            ranked = sorted((self._rank[p], place.start) for p, place in (*known, *placed))
            return Arrangement(
                placed=placed,
                room=self.room(occupied | slices(place for _, place in placed), drawn),
                starts=tuple(start for _, start in ranked),
            )

        ways = map(judged, _ways(occupied, specs))
        return min(ways, key=lambda arrangement: arrangement.rank, default=None)

    def fits(self, counts: Mapping[model.Profile, int], *, pinned: Sequence[Placed] = ()) -> bool:
        """Return whether that many of each profile fit at once, beside the pinned ones."""
        specs = [spec for spec in self.specs for _ in range(counts.get(spec.profile, 0))]
        drawn = self.drawn([p for p, _ in pinned] + [spec.profile for spec in specs])
        if not drawn.within(self.pool):
            return False
        return next(_ways(slices(place for _, place in pinned), specs), None) is not None


@functools.lru_cache(maxsize=1024)
def mask(place: model.Placement) -> int:
    """Return the slices of a span as a bit mask, slice 0 lowest."""
    return ((1 << place.size) - 1) << place.start


def slices(spans: Iterable[model.Placement]) -> int:
    """Return the slices of several spans as one bit mask."""
    return functools.reduce(lambda total, span: total | mask(span), spans, 0)


def max_instances(spec: model.GpuInstanceProfile, occupied: int = 0) -> int:
    """Return how many instances of a profile fit the free memory slices."""
    count = 0
    # Greedy by end is optimal for intervals.
    for place in sorted(spec.placements, key=lambda place: place.end):
        if not occupied & mask(place):
            occupied |= mask(place)
            count += 1
    return count


def draws(
    engines: model.Engines, *, pool: model.Engines, drawn: model.Engines | None = None
) -> int:
    """Return how often ``engines`` fit into ``pool`` less ``drawn``; ``_UNLIMITED`` for none."""
    used = drawn or model.Engines()
    return min(
        (
            (has - taken) // wants
            for wants, taken, has in zip(engines.counts, used.counts, pool.counts, strict=True)
            if wants
        ),
        default=_UNLIMITED,
    )


def _ways(
    occupied: int, specs: Sequence[model.GpuInstanceProfile], *, floor: int = 0
) -> Iterator[tuple[Placed, ...]]:
    """Yield every way to place the instances; equal ones are adjacent and ascend."""
    if not specs:
        yield ()
        return
    head, *rest = specs
    for place in head.placements:
        if place.start < floor or occupied & mask(place):
            continue
        follows = place.start + 1 if rest and rest[0] is head else 0
        for tail in _ways(occupied | mask(place), rest, floor=follows):
            yield ((head.profile, place), *tail)


_UNLIMITED = 1 << 16
