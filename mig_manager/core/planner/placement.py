"""Where GPU instances can lie: memory slices, media engines, and the room that stays free.

A set of GPU instances fits a GPU if each has one of its profile's possible placements, no two of
them share a memory slice, and together they draw no media engine more often than the GPU has it.
Nothing else binds: the compute slices follow from the placements, and the maximum instance counts
that NVML reports are wrong on A30, so they are not asked.

The driver's own choice of a place looks at one creation only and can block a later one. Here all
places are chosen together and in memory, so that no creation can fail for want of room.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager.core import model

Placed = tuple[model.Profile, model.Placement]
"""A GPU instance as far as room is concerned."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """One way to place new GPU instances beside those that stay."""

    placed: tuple[Placed, ...]
    """The new ones, largest profile first, ascending within a profile."""
    room: tuple[int, ...]
    """How many more of each profile would fit, each counted alone, largest profile first."""
    starts: tuple[int, ...]
    """First slices of all instances, also of those that stay, ordered as ``placed`` is."""

    @property
    def rank(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Lower is better: the most room for the largest profiles, then the lowest starts."""
        return tuple(-count for count in self.room), self.starts


class Capacity:
    """The memory slices and media engines of one GPU, with what was found out about them.

    Attributes:
        specs: The profiles the GPU offers, largest first: by memory slices, then GPU slices.
        pool: How many of each media engine the GPU has.
        memory_slices: How many memory slices the placements speak of.
    """

    def __init__(
        self,
        profiles: Iterable[model.GpuInstanceProfile],
        *,
        live: Iterable[model.Profile] = (),
    ) -> None:
        """Take the profiles as the GPU offers them.

        Args:
            profiles: What the GPU offers, in any order.
            live: Profiles of all live GPU instances. The driver has granted their engines, so
                the pool is at least what they draw, whatever the profiles make us believe.
        """
        by_profile: dict[model.Profile, model.GpuInstanceProfile] = {}
        for spec in sorted(profiles, key=lambda spec: spec.enum_index):
            by_profile.setdefault(spec.profile, spec)
        self._by_profile = by_profile
        self.specs = tuple(sorted(by_profile.values(), key=_largest_first))
        self._rank = {spec.profile: rank for rank, spec in enumerate(self.specs)}
        engines = [spec.engines for spec in self.specs]
        self.pool = model.Engines.pool([*engines, self.drawn(live)])
        self.memory_slices = max((p.end for s in self.specs for p in s.placements), default=0)
        self._rooms: dict[tuple[int, model.Engines], tuple[int, ...]] = {}

    def find(self, profile: model.Profile) -> model.GpuInstanceProfile | None:
        """Return what the GPU says of a GPU-instance profile; None when it does not offer it."""
        return self._by_profile.get(profile)

    def drawn(self, profiles: Iterable[model.Profile]) -> model.Engines:
        """Return the media engines that instances of these profiles draw together."""
        total = model.Engines()
        for profile in profiles:
            spec = self._by_profile.get(profile)
            total = total + spec.engines if spec else total
        return total

    def most(self, profile: model.Profile) -> int:
        """Return how many instances of one profile the empty GPU can hold."""
        rank = self._rank.get(profile)
        return 0 if rank is None else self.room(0, model.Engines())[rank]

    def room(self, occupied: int, drawn: model.Engines) -> tuple[int, ...]:
        """Return how many more of each profile would fit, each counted alone.

        Args:
            occupied: Bit mask of the memory slices in use.
            drawn: Media engines in use.
        """
        found = self._rooms.get((occupied, drawn))
        if found is None:
            found = tuple(
                min(places(spec, occupied), draws(spec.engines, drawn=drawn, pool=self.pool))
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
        """Place new instances so that the largest profiles keep the most room.

        Args:
            fixed: The instances that stay where they are.
            new: How many to place of each profile; all of them offered by this GPU.
            pinned: Further new ones, whose places are not ours to choose; no two of them overlap.

        Returns:
            The arrangement of lowest rank among all possible ones; None when there is none.
        """
        specs = [spec for spec in self.specs for _ in range(new.get(spec.profile, 0))]
        given = [*fixed, *pinned]
        drawn = self.drawn([p for p, _ in given] + [spec.profile for spec in specs])
        # Where nothing is added nothing can be refused, whatever we believe about engines.
        if (specs or pinned) and not drawn.within(self.pool):
            return None
        if any(place.overlaps(other) for _, place in pinned for _, other in fixed):
            return None
        occupied = slices(place for _, place in given)
        ways = (self._judge(given, way, drawn) for way in _ways(occupied, specs))
        return min(ways, key=lambda arrangement: arrangement.rank, default=None)

    def fits(self, counts: Mapping[model.Profile, int], *, pinned: Sequence[Placed] = ()) -> bool:
        """Return whether the GPU can hold that many of each profile at once, beside the pinned."""
        specs = [spec for spec in self.specs for _ in range(counts.get(spec.profile, 0))]
        drawn = self.drawn([p for p, _ in pinned] + [spec.profile for spec in specs])
        if not drawn.within(self.pool):
            return False
        return next(_ways(slices(place for _, place in pinned), specs), None) is not None

    def _judge(
        self, fixed: Sequence[Placed], placed: tuple[Placed, ...], drawn: model.Engines
    ) -> Arrangement:
        everything = sorted((self._rank[p], place.start) for p, place in (*fixed, *placed))
        occupied = slices(place for _, place in itertools.chain(fixed, placed))
        return Arrangement(
            placed=placed,
            room=self.room(occupied, drawn),
            starts=tuple(start for _, start in everything),
        )


@functools.lru_cache(maxsize=1024)
def mask(place: model.Placement) -> int:
    """Return the slices of a span as a bit mask, slice 0 lowest."""
    return ((1 << place.size) - 1) << place.start


def slices(spans: Iterable[model.Placement]) -> int:
    """Return the slices of several spans as one bit mask."""
    return functools.reduce(lambda total, span: total | mask(span), spans, 0)


def places(spec: model.GpuInstanceProfile, occupied: int = 0) -> int:
    """Return how many instances of a profile the free memory slices can hold."""
    count = 0
    # Taking the span that ends first never costs a place: the classic argument for intervals.
    for place in sorted(spec.placements, key=lambda place: place.end):
        if not occupied & mask(place):
            occupied |= mask(place)
            count += 1
    return count


def draws(
    engines: model.Engines, *, pool: model.Engines, drawn: model.Engines | None = None
) -> int:
    """Return how often ``engines`` can be drawn from what ``drawn`` leaves of ``pool``.

    Engines that are not drawn at all do not limit; then the answer is larger than any GPU.
    """
    used = drawn or model.Engines()
    return min(
        (
            (has - taken) // wants
            for wants, taken, has in (
                (engines.decoders, used.decoders, pool.decoders),
                (engines.encoders, used.encoders, pool.encoders),
                (engines.jpegs, used.jpegs, pool.jpegs),
                (engines.ofas, used.ofas, pool.ofas),
            )
            if wants
        ),
        default=_UNLIMITED,
    )


def _largest_first(spec: model.GpuInstanceProfile) -> tuple[object, ...]:
    size = max((place.size for place in spec.placements), default=0)
    return -size, -spec.profile.gpu_slices, spec.profile.sort_key


def _ways(
    occupied: int, specs: Sequence[model.GpuInstanceProfile], *, floor: int = 0
) -> Iterator[tuple[Placed, ...]]:
    """Yield every way to place the instances; equal ones stand together and ascend."""
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
