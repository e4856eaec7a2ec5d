"""Place GPU instances by memory slices and media engines.

A set of GPU instances fits a GPU if each has a possible placement of its profile, no two share a
memory slice, and the GPU has enough of every media engine. The compute slices follow from the
placements. NVML's maximum instance counts are wrong on A30 and not used.

The driver creates one instance at a time, which can block a later one. This module chooses all
placements together before the first creation.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager.core import model
from mig_manager.core.planner import packing

Placed = tuple[model.Profile, model.Placement]  # profile and placement of a GPU instance


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """One way to place new GPU instances beside the instances that stay."""

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
            return -size, -spec.profile.gpu_slices, spec.profile

        self.specs = tuple(sorted(by_profile.values(), key=largest_first))
        self._rank = {spec.profile: rank for rank, spec in enumerate(self.specs)}
        engines = [spec.engines for spec in self.specs]
        self.pool = model.Engines.pool([*engines, self.engines(live)])
        self.memory_slices = max((p.end for s in self.specs for p in s.placements), default=0)
        self._rooms: dict[tuple[int, model.Engines], tuple[int, ...]] = {}

    def engines(self, profiles: Iterable[model.Profile]) -> model.Engines:
        """Sum up the media engines of instances of these profiles."""
        specs = filter(None, map(self.by_profile.get, profiles))
        return model.Engines.total(spec.engines for spec in specs)

    def maximum(self, profile: model.Profile) -> int:
        """Return how many instances of a profile fit the empty GPU."""
        return self._maxima.get(profile, 0)

    @functools.cached_property
    def _maxima(self) -> dict[model.Profile, int]:
        return dict(zip(self._rank, self.room(0, model.Engines()), strict=True))

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
        specs = self._specs(new)
        existing = [*fixed, *pinned]
        used = self.engines([p for p, _ in existing] + [spec.profile for spec in specs])
        # Live instances have their engines already.
        if (specs or pinned) and not used.within(self.pool):
            return None
        if any(place.overlaps(other) for _, place in pinned for _, other in fixed):
            return None
        occupied = packing.slices(place for _, place in existing)

        def arrange(spans: packing.Spans) -> Arrangement:
            placed = tuple(zip((spec.profile for spec in specs), spans, strict=True))
            room = self.room(occupied | packing.slices(spans), used)
            ranked = sorted((self._rank[p], place.start) for p, place in (*existing, *placed))
            starts = tuple(start for _, start in ranked)
            return Arrangement(placed=placed, rank=(tuple(-count for count in room), starts))

        arrangements = map(arrange, packing.ways(specs, _possible, occupied))
        return min(arrangements, key=lambda arrangement: arrangement.rank, default=None)

    def fits(self, counts: Mapping[model.Profile, int], *, pinned: Sequence[Placed] = ()) -> bool:
        """Return whether these instances fit together, beside the pinned ones."""
        specs = self._specs(counts)
        occupied = packing.slices(place for _, place in pinned)
        if next(packing.ways(specs, _possible, occupied), None) is None:
            return False
        used = self.engines([p for p, _ in pinned] + [spec.profile for spec in specs])
        return used.within(self.pool)

    def _specs(self, counts: Mapping[model.Profile, int]) -> list[model.GpuInstanceProfile]:
        """Return the profile of each instance, largest first, without unknown profiles."""
        ranks = ((self._rank.get(profile), count) for profile, count in counts.items())
        ranked = sorted((rank, count) for rank, count in ranks if rank is not None)
        return [self.specs[rank] for rank, count in ranked for _ in range(count)]


def max_instances(spec: model.GpuInstanceProfile, occupied: int) -> int:
    """Return how many instances of a profile fit the free memory slices."""
    count = 0
    # Greedy by end is optimal for intervals.
    for place in sorted(spec.placements, key=lambda place: place.end):
        if not occupied & packing.mask(place):
            occupied |= packing.mask(place)
            count += 1
    return count


_possible = operator.attrgetter("placements")
