"""Pack compute instances into GPU instances of one profile, and place them there.

A layout counts compute instances by size and does not assign them to GPU instances: the packing
changes as little as possible.

The driver puts a span of one compute slice anywhere, of two on every second slice, of three and
four on every fourth (open-gpu-kernel-modules, ``kernel_mig_manager.c``). In a ``3g``, one slice
beside two must be at 2, so first-fit is wrong. If the driver reports other placements for a live
GPU instance, the driver chooses among them (``adapters.nvml.step_executor``).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from mig_manager.core import model, steps

Counts = tuple[int, ...]
"""Numbers of compute instances of 1, 2, ... slices, up to the slices of the GPU instance."""

Spans = tuple[model.Placement, ...]
"""Spans of compute instances in one GPU instance, in compute slices; or of GPU instances."""

_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Occupant:
    """A live compute instance."""

    size: int  # compute slices; 0 for another GPU-instance profile, so that it never stays
    span: model.Placement | None  # None: the driver does not report it
    use: int  # 0: it may be destroyed; the higher, the more it should stay


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The compute instances of a GPU instance that stays."""

    kept: tuple[int, ...]  # positions of compute instances that stay, ascending
    added: Spans


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """One way to the desired compute instances of a GPU-instance profile."""

    destroyed_use: int  # the sum of ``use`` of the compute instances that it destroys
    cost: int  # GPU and compute instances that it destroys or creates
    stays: tuple[tuple[int, Content], ...] = ()
    """Positions of the GPU instances that stay, ascending, each with its content."""
    fresh: tuple[Spans, ...] = ()  # one entry for each GPU instance to create

    @property
    def price(self) -> tuple[int, int]:
        """The value to minimise."""
        return self.destroyed_use, self.cost


@functools.lru_cache(maxsize=1024)
def mask(place: model.Placement) -> int:
    """Return the slices of a span as a bit mask, slice 0 lowest."""
    return ((1 << place.size) - 1) << place.start


def slices(placements: Iterable[model.Placement]) -> int:
    """Return the slices of several spans as one bit mask."""
    return functools.reduce(lambda total, span: total | mask(span), placements, 0)


def count_sizes(devices: Mapping[model.Profile, int], profile: model.Profile) -> Counts:
    """Count the devices of one GPU-instance profile by their compute slices."""
    counts = [0] * profile.gpu_slices
    for device, count in devices.items():
        if device.gpu_instance == profile:
            counts[device.compute_slices - 1] += count
    return tuple(counts)


def total_slices(counts: Counts) -> int:
    """Return the compute slices of all counted instances."""
    return sum(size * count for size, count in enumerate(counts, start=1))


def exists(compute_slices: int, gpu_slices: int) -> bool:
    """Return whether a GPU instance has a compute-instance profile of that size.

    Sizes are the full size, and up to half of it, rounded up; ``3c.4g`` does not exist. NVIDIA's
    go-nvlib has the same rule, and every published table of profiles agrees.
    """
    return compute_slices == gpu_slices or 0 < 2 * compute_slices <= gpu_slices + 1


def spans(compute_slices: int, gpu_slices: int) -> Spans:
    """Return the possible spans of a compute instance, ascending."""
    if compute_slices == gpu_slices:
        return (model.Placement(0, gpu_slices),)
    step = 1 << (compute_slices - 1).bit_length()
    starts = range(0, gpu_slices - compute_slices + 1, step)
    return tuple(model.Placement(start, compute_slices) for start in starts)


@functools.lru_cache(maxsize=4096)
def fit(counts: Counts, occupied: int = 0) -> Spans | None:
    """Place compute instances in one GPU instance of ``len(counts)`` slices.

    Return the spans, largest first; None if they do not fit. They leave the most room for large
    compute instances, then are the lowest. ``occupied`` is a bit mask of compute slices.
    """
    sizes = [size for size in range(len(counts), 0, -1) for _ in range(counts[size - 1])]
    if sum(sizes) > len(counts) - occupied.bit_count():
        return None

    def rank(way: Spans) -> tuple[tuple[int, ...], Spans]:
        return _lost_room(occupied | slices(way), len(counts)), way

    every = ways(sizes, lambda size: spans(size, len(counts)), occupied)
    return min(every, key=rank, default=None)


@functools.lru_cache(maxsize=4096)
def bins(counts: Counts) -> tuple[Spans, ...]:
    """Pack compute instances into the fewest empty GPU instances, fullest first.

    The caller bounds ``counts`` by what the GPU can hold: the search is exhaustive.
    """
    if not any(counts):
        return ()
    largest = max(index for index, count in enumerate(counts) if count)
    best: tuple[Spans, ...] | None = None
    for part in _parts(counts):
        placed = fit(part) if part[largest] else None
        if not placed:
            continue
        rest = bins(_minus(counts, part))
        if best is None or len(rest) + 1 < len(best):
            best = (placed, *rest)
    return best or ()


def ways(
    items: Sequence[_Item], spans_of: Callable[[_Item], Spans], occupied: int, *, floor: int = 0
) -> Iterator[Spans]:
    """Yield every way to place items at possible spans; starts of adjacent equals ascend."""
    if not items:
        yield ()
        return
    head, *rest = items
    has_equal = bool(rest) and rest[0] == head
    for span in spans_of(head):
        if span.start < floor or occupied & mask(span):
            continue
        follows = span.end if has_equal else 0
        for others in ways(rest, spans_of, occupied | mask(span), floor=follows):
            yield (span, *others)


def inside(profile: model.Profile, placements: Spans) -> tuple[steps.TargetComputeInstance, ...]:
    """Return the compute instances at these spans of a GPU instance."""
    return tuple(
        steps.TargetComputeInstance(
            profile=dataclasses.replace(profile, compute_slices=span.size), placement=span
        )
        for span in placements
    )


def options(live: Sequence[Sequence[Occupant]], desired: Counts, *, maximum: int) -> list[Packing]:
    """List the ways to the desired compute instances that can be part of a cheapest plan.

    The list has a cheapest option for every set of GPU instances that stay and every number of new
    GPU instances, without options that need more new ones and are not cheaper. The order is fixed.
    The list is empty if more GPU instances are needed than fit the empty GPU (``maximum``).
    """
    slots = len(desired)
    if total_slices(desired) > maximum * slots:
        return []
    # The other GPU instances have room for the rest.
    least = total_slices(desired) - (maximum - 1) * slots
    packings: dict[tuple[tuple[int, ...], Counts], Packing] = {
        ((), desired): Packing(destroyed_use=0, cost=0)
    }
    for position, occupants in enumerate(live):
        following: dict[tuple[tuple[int, ...], Counts], Packing] = {}
        menu = _choices(tuple(occupants), desired, least)
        for ((stays, rest), option), choice in itertools.product(packings.items(), menu):
            if not _includes(rest, choice.part):
                continue
            kept = () if choice.content is None else ((position, choice.content),)
            after = Packing(
                destroyed_use=option.destroyed_use + choice.destroyed_use,
                cost=option.cost + choice.cost,
                stays=option.stays + kept,
            )
            key = stays + tuple(p for p, _ in kept), _minus(rest, choice.part)
            if key not in following or after.price < following[key].price:
                following[key] = after
        packings = following
    cheapest: dict[tuple[tuple[int, ...], int], Packing] = {}
    for (stays, rest), option in packings.items():
        fresh = bins(rest)
        if len(stays) + len(fresh) > maximum:
            continue
        cost = option.cost + len(fresh) + sum(rest)
        candidate = dataclasses.replace(option, cost=cost, fresh=fresh)
        if cheapest.setdefault((stays, len(fresh)), candidate).price > candidate.price:
            cheapest[stays, len(fresh)] = candidate
    return [
        option
        for (stays, count), option in cheapest.items()
        if not any(
            (stays, fewer) in cheapest and cheapest[stays, fewer].price <= option.price
            for fewer in range(count)
        )
    ]


def content(occupants: Sequence[Occupant], desired: Counts) -> Content:
    """Return the cheapest way to these compute instances, which must fit the GPU instance."""
    choice = _cheapest(_subsets(tuple(occupants), desired), desired, len(occupants))
    if choice is None or choice.content is None:
        raise AssertionError(desired)
    return choice.content


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """One way to change one GPU instance."""

    part: Counts  # the desired compute instances that it has afterwards
    destroyed_use: int
    cost: int
    content: Content | None  # None: it is destroyed


@functools.lru_cache(maxsize=512)
def _choices(occupants: tuple[Occupant, ...], desired: Counts, least: int) -> tuple[_Choice, ...]:
    """List the ways to change one GPU instance: destroy it, or change its content."""
    subsets = _subsets(occupants, desired)
    destroy = _Choice(
        part=(0,) * len(desired),
        destroyed_use=sum(occupant.use for occupant in occupants),
        cost=1 + len(occupants),
        content=None,
    )
    changes = (
        _cheapest(subsets, part, len(occupants))
        for part in _parts(desired)
        if max(1, least) <= total_slices(part) <= len(desired)
    )
    return (destroy, *filter(None, changes))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Subset:
    """Compute instances of one GPU instance that can stay together."""

    kept: tuple[int, ...]
    counts: Counts
    occupied: int | None  # bit mask of their slices; None: unknown, so nothing can be added
    destroyed_use: int  # the sum of ``use`` of the compute instances outside it


def _subsets(occupants: tuple[Occupant, ...], desired: Counts) -> list[_Subset]:
    """List the subsets that can stay: least use destroyed first, then most kept."""
    positions = [i for i, occupant in enumerate(occupants) if 0 < occupant.size <= len(desired)]
    subsets: list[_Subset] = []
    for kept in (
        each for n in range(len(positions) + 1) for each in itertools.combinations(positions, n)
    ):
        sizes = [occupants[i].size for i in kept]
        counts = tuple(sizes.count(size + 1) for size in range(len(desired)))
        if not _includes(desired, counts):
            continue
        placements = [span for i in kept if (span := occupants[i].span)]
        subsets.append(
            _Subset(
                kept=kept,
                counts=counts,
                occupied=slices(placements) if len(placements) == len(kept) else None,
                destroyed_use=sum(each.use for i, each in enumerate(occupants) if i not in kept),
            )
        )
    return sorted(subsets, key=lambda subset: (subset.destroyed_use, -len(subset.kept)))


def _cheapest(subsets: Sequence[_Subset], part: Counts, occupants: int) -> _Choice | None:
    """Return the best change to ``part``: most kept, then most room, then lowest spans."""
    best: tuple[tuple[object, ...], _Choice] | None = None
    for subset in subsets:
        price = (subset.destroyed_use, -len(subset.kept))
        if best and price > best[0][:2]:
            break
        if not _includes(part, subset.counts):
            continue
        missing = _minus(part, subset.counts)
        is_known = subset.occupied is not None
        added = fit(missing, subset.occupied or 0) if is_known or not any(missing) else None
        if added is None:
            continue
        occupied = (subset.occupied or 0) | slices(added)
        rank = (*price, _lost_room(occupied, len(part)), added, subset.kept)
        choice = _Choice(
            part=part,
            destroyed_use=subset.destroyed_use,
            cost=occupants - len(subset.kept) + len(added),
            content=Content(kept=subset.kept, added=added),
        )
        if best is None or rank < best[0]:
            best = rank, choice
    return best[1] if best else None


def _lost_room(occupied: int, slots: int) -> tuple[int, ...]:
    """Return the negated numbers of further compute instances that fit, largest size first."""
    return tuple(
        -sum(not occupied & mask(span) for span in spans(size, slots))
        for size in range(slots, 0, -1)
        if exists(size, slots)
    )


def _parts(counts: Counts) -> Iterator[Counts]:
    """Yield every part of ``counts``, the fullest of the largest sizes first."""
    ranges = [range(count, -1, -1) for count in reversed(counts)]
    return (part[::-1] for part in itertools.product(*ranges))


def _minus(counts: Counts, part: Counts) -> Counts:
    return tuple(a - b for a, b in zip(counts, part, strict=True))


def _includes(counts: Counts, part: Counts) -> bool:
    return all(a >= b for a, b in zip(counts, part, strict=True))
