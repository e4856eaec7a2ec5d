"""Devices that a layout gives a place of their own: what is there for them, and what is made.

All devices with one profile of GPU instance and one start slice share that GPU instance, which
holds them and nothing else. If it is there already it stays, for that never costs more than to
make it anew; what lies across it ends.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.planner import explain, packing, placement, steps


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

    stays: tuple[steps.Stay, ...]
    kept: tuple[placement.Placed, ...]
    """The same, as far as room is concerned."""
    created: tuple[model.TargetInstance, ...]
    positions: tuple[int, ...]
    """Those of the live GPU instances that no pin speaks of."""

    @property
    def new(self) -> tuple[placement.Placed, ...]:
        """The GPU instances to make, as far as room is concerned."""
        return tuple((instance.profile, instance.placement) for instance in self.created)


def settle(
    gpu: model.Gpu, board: placement.Board, holders: Sequence[Holder], pins: Pins
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
    stays: list[steps.Stay] = []
    kept: list[placement.Placed] = []
    positions: list[int] = []
    for position, (profile, where, tenants) in enumerate(holders):
        place = missing.pop((profile, where), None)
        if place is None:
            positions.append(position)
            continue
        content = packing.cheapest(tenants, place.counts)
        added = steps.inside(profile, content.added)
        stays.append(steps.Stay(position=position, kept=content.kept, added=added))
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
    gpu: model.Gpu, wanted: Iterable[Place], board: placement.Board
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
) -> model.TargetInstance:
    return model.TargetInstance(
        profile=place.profile,
        profile_id=spec.profile_id,
        placement=where,
        compute_instances=steps.inside(place.profile, packing.fit(place.counts) or ()),
        kept=False,
    )


def _refuse(gpu: model.Gpu, why: str) -> errors.LayoutError:
    return errors.LayoutError(
        f"the layout does not fit {gpu}: {why}",
        reason=errors.Reason.DOES_NOT_FIT,
        gpu_uuid=gpu.uuid,
    )
