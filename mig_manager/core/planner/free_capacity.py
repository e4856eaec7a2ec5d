"""Measure the free capacity of a GPU: the instances that fit beside the instances in use.

All figures assume that every idle GPU instance is destroyed. They count memory slices and media
engines as the planner does (``placement``), so a plan for these instances succeeds.
"""

import dataclasses
from collections.abc import Collection, Mapping

from mig_manager.core import model
from mig_manager.core.planner import packing, placement


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FreeCapacity:
    """The free capacity of one GPU."""

    free_slices: int  # memory slices outside the instances in use
    room: Mapping[model.Profile, int]
    """How many more of a profile fit alone: largest first, zeros included."""
    stranded_slices: int  # free memory slices that no possible instance would cover
    largest_slices: int  # memory slices of the largest possible instance; 0 if none is possible

    @property
    def fragmentation(self) -> float:
        """The share of the free slices outside the largest possible instance, 0 to 1.

        Memory allocators call it external fragmentation. 0: one instance fills the free slices, or
        none is free; 1: no instance is possible.
        """
        return 1 - self.largest_slices / self.free_slices if self.free_slices else 0.0


NONE = FreeCapacity(free_slices=0, room={}, stranded_slices=0, largest_slices=0)


def measure(gpu: model.Gpu, in_use: Collection[model.Placement]) -> FreeCapacity | None:
    """Measure what is free on a GPU whose GPU instances at these placements are in use.

    None if the GPU has no instance at one of them: use and GPU were not observed at the same time.
    A GPU whose MIG mode is disabled or pending has nothing free, because a mode change affects
    the whole GPU.
    """
    used = [gi for gi in gpu.gpu_instances if gi.placement in in_use]
    if len(used) != len(set(in_use)):
        return None
    if gpu.current_mode is not model.MigMode.ENABLED or gpu.has_pending_mode:
        return NONE
    live = [gi.profile for gi in gpu.gpu_instances]
    capacity = placement.Capacity(gpu.profiles or (), live=live)
    occupied = packing.slices(gi.placement for gi in used)
    counts = capacity.room(occupied, capacity.engines(gi.profile for gi in used))
    possible = [
        place
        for spec, count in zip(capacity.specs, counts, strict=True)
        for place in spec.placements
        if count and not occupied & packing.mask(place)
    ]
    free = ((1 << capacity.memory_slices) - 1) & ~occupied
    return FreeCapacity(
        free_slices=free.bit_count(),
        room={spec.profile: n for spec, n in zip(capacity.specs, counts, strict=True)},
        stranded_slices=(free & ~packing.slices(possible)).bit_count(),
        largest_slices=max((place.size for place in possible), default=0),
    )
