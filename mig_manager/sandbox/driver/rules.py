"""The driver's own choices: which slices, which ids, how much room is left.

NVIDIA's chooser for GPU instances is closed. Its twin for compute instances is in the open kernel
modules (``kmigmgrGetFreeCTSId``: take what reduces the remaining capacity the least), and the
same rule reproduces every published sequence of GPU-instance placements we know of.
"""

from collections.abc import Iterable, Sequence

from mig_manager.catalogue import hardware
from mig_manager.core import model


def is_free(place: model.Placement, taken: Iterable[model.Placement]) -> bool:
    """Tell whether a span shares no slice with those taken."""
    return not any(place.overlaps(other) for other in taken)


def choose(
    candidates: Iterable[model.Placement],
    taken: Sequence[model.Placement],
    offered: Sequence[Sequence[model.Placement]],
) -> model.Placement | None:
    """Return the free span that leaves most (profile, span) pairs free; the lowest of equals.

    There is no look-ahead: the driver strands room that a wiser order would have kept, which is
    why mig-manager names its placements.

    Args:
        candidates: The spans of the profile to place.
        taken: The spans in use.
        offered: The spans of each profile on offer, the placed one included.

    Returns:
        None when no candidate is free.
    """

    def left(place: model.Placement) -> int:
        used = (*taken, place)
        return sum(is_free(other, used) for places in offered for other in places)

    free = [place for place in candidates if is_free(place, taken)]
    return max(free, key=lambda place: (left(place), -place.start), default=None)


def room(
    candidates: Iterable[model.Placement],
    taken: Sequence[model.Placement],
) -> int:
    """Return how many more spans of one profile fit side by side."""
    used = list(taken)
    for place in candidates:
        if is_free(place, used):
            used.append(place)
    return len(used) - len(taken)


def engines_left(
    product: hardware.Product, drawn: Iterable[model.Engines], wanted: model.Engines
) -> int:
    """Return how many instances the media engines still allow; a large number if unlimited."""
    pool = model.Engines.pool(row.engines for row in product.profiles)
    total = sum(drawn, start=model.Engines())
    count = 0
    while count < product.max_instances and (total := total + wanted).within(pool):
        count += 1
    return count


def gpu_instance_id(
    product: hardware.Product, placement: model.Placement, *, is_swapped: bool
) -> int:
    """Return the id of the GPU instance at a placement: the driver's swizzId.

    The whole GPU is 0, its halves are 1-2, quarters 3-6, eighths 7-14. On a swapped board of the
    seven-slice kind, placements keep their coordinates while ids count the other half first.
    Source: id ranges of ``kmigmgr_ga100.c``, mapping from captures of both kinds of board.
    """
    parts = product.memory_slices // placement.size
    index = placement.start // placement.size
    if is_swapped and product.grid is hardware.Grid.SEVEN_SLICE:
        index ^= parts // 2
    return parts - 1 + index


def lowest_free(used: Iterable[int]) -> int:
    """Return the lowest number from 0 that is not used: the id of the next compute instance."""
    taken = set(used)
    return next(number for number in range(len(taken) + 1) if number not in taken)


def physical_engine(
    product: hardware.Product, instance: model.Placement, compute: model.Placement
) -> int:
    """Return the graphics engine that a compute instance runs on; unique within a GPU.

    Inferred: engines follow the compute slices, which begin where the memory slices do.
    """
    per_engine = 3 if product.grid is hardware.Grid.TWELVE_SLICE else 1
    return instance.start // per_engine + compute.start
