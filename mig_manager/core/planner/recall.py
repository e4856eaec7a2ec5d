"""From a checkpoint to what the GPUs of this node shall have: found by UUID, checked, planned.

Nothing is taken on trust: a checkpoint may be of another node, of a GPU that was replaced, or
edited by hand. All that can be told is told before anything is changed.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NoReturn

from mig_manager import errors
from mig_manager.core import model, steps
from mig_manager.core.planner import packing, placement, planner
from mig_manager.core.records import checkpoint


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """What a checkpoint wants of the GPUs as they are now."""

    plan: steps.Plan
    covered: frozenset[str]
    """UUIDs of the GPUs that it tells of."""


def plan(
    wish: checkpoint.Checkpoint, gpus: Sequence[model.Gpu], *, is_mode_only: bool = False
) -> Recalled:
    """Plan the way back to a checkpoint; what is right already stays.

    Args:
        wish: The checkpoint.
        gpus: All GPUs of the node; those that it does not tell of are not touched.
        is_mode_only: Whether only MIG mode counts; GPUs whose mode is right keep what they have.

    Raises:
        CheckpointError: A GPU is not here, has no MIG, or cannot have what it had; with place.
        LayoutError: NOT_SUPPORTED: a GPU is a vGPU, which only its host can divide;
            GPU_UNREACHABLE: a GPU cannot be observed.
    """
    here = {gpu.uuid: gpu for gpu in gpus}
    lost = model.unreachable(gpus)
    snapshot: list[model.GpuSnapshot] = []
    blind: set[str] = set()
    for device in wish.devices:
        gpu = here.get(device.uuid)
        if gpu is None and any(each.uuid in ("", device.uuid) for each in lost):
            raise errors.LayoutError(
                f"the checkpoint has GPU {device.uuid}, which is not among the reachable GPUs: "
                + "; ".join(each.sentence for each in lost),
                reason=errors.Reason.GPU_UNREACHABLE,
                location=device.location,
            )
        if gpu is None:
            _refuse(device, f"GPU {device.uuid} is not on this node")
        if gpu.current_mode is None:
            _refuse(device, f"{gpu} has no MIG")
        if gpu.profiles is None and device.instances and not is_mode_only:
            blind.add(gpu.uuid)
        snapshot.append(_wanted(device, gpu, is_mode_only=is_mode_only))
    due = planner.restore(gpus, snapshot)
    planner.refuse_on_vgpus(gpus, due)
    return Recalled(
        plan=steps.Plan(gpus=tuple(_provisional(each, blind) for each in due.gpus)),
        covered=frozenset(device.uuid for device in wish.devices),
    )


def _wanted(device: checkpoint.Device, gpu: model.Gpu, *, is_mode_only: bool) -> model.GpuSnapshot:
    instances: tuple[model.GpuInstance, ...] = ()
    if is_mode_only:
        # A switch ends all of them; without one they stay.
        instances = gpu.gpu_instances if gpu.current_mode is device.mode else ()
    elif gpu.profiles is not None:
        instances = tuple(_instances(device, gpu))
    return model.GpuSnapshot(
        uuid=gpu.uuid,
        current_mode=device.mode,
        pending_mode=device.mode,
        gpu_instances=instances,
    )


def _provisional(due: steps.GpuPlan, blind: set[str]) -> steps.GpuPlan:
    """Mark the plan of a GPU whose driver tells its profiles only once MIG is on."""
    is_so = due.gpu_uuid in blind
    return dataclasses.replace(due, is_provisional=True, target=()) if is_so else due


def _instances(device: checkpoint.Device, gpu: model.Gpu) -> Iterator[model.GpuInstance]:
    specs = {spec.enum_index: spec for spec in gpu.profiles or ()}
    live = {(gi.profile, gi.placement): gi for gi in gpu.gpu_instances}
    occupied = 0
    for number, old in enumerate(device.instances):
        spec = specs.get(old.enum_index)
        if spec is None:
            _refuse(old, f"{gpu} offers no GPU instance of profile {old.enum_index}")
        if old.placement not in spec.placements:
            known = ", ".join(str(place) for place in spec.placements)
            _refuse(
                old,
                f"{spec.profile} cannot be at {old.placement} on {gpu}; it can be at {known}",
            )
        if occupied & placement.mask(old.placement):
            _refuse(old, f"{spec.profile} at {old.placement} lies over another instance")
        occupied |= placement.mask(old.placement)
        there = live.get((spec.profile, old.placement))
        yield model.GpuInstance(
            instance_id=number,
            profile=spec.profile,
            profile_id=spec.profile_id,
            placement=old.placement,
            compute_instances=tuple(
                _inside(old, spec.profile, there.compute_instances if there else ())
            ),
        )


def _inside(
    old: checkpoint.Instance, whole: model.Profile, live: Sequence[model.ComputeInstance]
) -> Iterator[model.ComputeInstance]:
    """Yield compute instances with their spans: those that are there first, the rest packed.

    A checkpoint tells no spans, so whoever is there already is as good as any other.
    """
    for size in old.compute_slices:
        if not packing.exists(size, whole.gpu_slices):
            _refuse(old, f"{whole} has no compute instance of {size} slices")
    left = collections.Counter(old.compute_slices)
    kept: list[model.Placement] = []
    for ci in live:
        if ci.placement and left[ci.profile.compute_slices] > 0:
            left[ci.profile.compute_slices] -= 1
            kept.append(ci.placement)
    rest = _packed(left, whole, placement.slices(kept))
    if rest is None:
        # Beside those that are there it does not fit; alone it may.
        kept, rest = [], _packed(collections.Counter(old.compute_slices), whole, 0)
    if rest is None:
        sizes = ", ".join(f"{size}c" for size in old.compute_slices)
        _refuse(old, f"compute instances of {sizes} do not fit {whole}")
    for number, span in enumerate((*kept, *rest)):
        yield model.ComputeInstance(
            instance_id=number,
            profile=dataclasses.replace(whole, compute_slices=span.size),
            placement=span,
            uuid=None,
        )


def _packed(
    sizes: collections.Counter[int], whole: model.Profile, occupied: int
) -> packing.Spans | None:
    counts = tuple(sizes[size] for size in range(1, whole.gpu_slices + 1))
    # More than there is room for is not tried out.
    return packing.fit(counts, occupied) if sum(counts) <= whole.gpu_slices else None


def _refuse(place: checkpoint.Device | checkpoint.Instance, why: str) -> NoReturn:
    raise errors.CheckpointError(why, location=place.location)
