"""The states to which the course of ``acceptance --change-gpu`` changes a GPU."""

import dataclasses
import itertools
from collections.abc import Iterator

from mig_manager.core import model
from mig_manager.core.layout import generator

_MOST_LAYOUTS = 4  # full layouts, each in two orders


def single(
    profiles: tuple[model.GpuInstanceProfile, ...],
) -> Iterator[tuple[str, model.DesiredGpu]]:
    """Yield each profile at each placement, and one divided into compute instances."""
    on = model.MigMode.ENABLED
    for row in profiles:
        for place in row.placements:
            pin = model.Pin(profile=row.profile, start=place.start)
            yield f"{row.profile} at {place}", model.DesiredGpu.of(on, {}, {pin: 1})
        if row.profile.gpu_slices > 1:
            part = dataclasses.replace(row.profile, compute_slices=1)
            count = row.profile.gpu_slices
            yield f"{count} of {part}", model.DesiredGpu.of(on, {part: count})


def full(
    profiles: tuple[model.GpuInstanceProfile, ...],
) -> Iterator[tuple[str, model.DesiredGpu]]:
    """Yield some full layouts, in one order and in the reverse."""
    counts = list(itertools.islice(generator.maximal(profiles), _MOST_LAYOUTS))
    for order, each in (("", counts), (" in reverse order", counts[::-1])):
        for devices in each:
            name = ", ".join(f"{count} {profile}" for profile, count in dict(devices).items())
            yield f"full: {name}{order}", model.DesiredGpu.of(model.MigMode.ENABLED, dict(devices))


def pair(profiles: tuple[model.GpuInstanceProfile, ...]) -> tuple[model.Pin, model.Pin] | None:
    """Return two instances that exist beside each other; None if no profile fits twice."""
    for row in profiles:
        if row.max_instances > 1 and len(row.placements) > 1:
            one, *_, other = row.placements
            if not one.overlaps(other):
                return (
                    model.Pin(profile=row.profile, start=one.start),
                    model.Pin(profile=row.profile, start=other.start),
                )
    return None
