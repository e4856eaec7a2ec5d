"""Plan the smallest change from observed GPUs to a layout, a snapshot or a checkpoint.

``plan`` is the only definition of "applied": a layout is active if its plan is empty. The plan of
a GPU is empty if its MIG mode is right (current and pending), its compute instances are the
desired ones, counted by profile, pinned instances have their placements, and every GPU instance
has a compute instance. Placements and grouping of other instances are not part of a layout.

``search`` defines the smallest change. Compute instances are destroyed before GPU instances, as
the driver requires. All are destroyed before MIG mode changes: Ampere counts GPU instances as
clients of the GPU and would leave the change pending. Then instances are created with placements.
"""

import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence

from mig_manager import errors, reasons
from mig_manager.core import model, steps
from mig_manager.core.files import checkpoint
from mig_manager.core.planner import packing, restoring, search, vgpus


def plan(
    gpus: Sequence[model.Gpu],
    desired: Mapping[str, model.DesiredGpu],
    *,
    use: Mapping[str, int] = types.MappingProxyType({}),
) -> steps.Plan:
    """Find the smallest change to the desired state of each GPU; empty if the layout is active.

    Args:
        gpus: The observed GPUs, in any order; the plan sorts them by index.
        desired: By GPU UUID; other GPUs are not touched.
        use: How much the loss of a MIG device in use matters, by UUID: the plan destroys devices
            whose sum is the smallest.

    Raises:
        errors.LayoutError: A GPU lacks a profile (UNKNOWN_PROFILE), is too small for the layout
            (DOES_NOT_FIT), has no MIG (NOT_MIG_CAPABLE), is a vGPU that only its host can
            partition (NOT_SUPPORTED), or is not among ``gpus`` (NO_GPU_MATCHES).
    """
    missing = sorted(desired.keys() - {gpu.uuid for gpu in gpus})
    if missing:
        problem = f"GPU {missing[0]} is not on this node"
        raise errors.LayoutError(problem, reason=reasons.Reason.NO_GPU_MATCHES)
    finder = search.Search(use)
    plans = [
        _plan_gpu(gpu, desired[gpu.uuid], finder) for gpu in _by_index(gpus) if gpu.uuid in desired
    ]
    changes = steps.Plan(gpus=tuple(p for p in plans if p))
    vgpus.refuse(gpus, changes)
    return changes


def combine(first: steps.Plan, second: steps.Plan) -> steps.Plan:
    """Join two plans for different GPUs."""
    return steps.Plan(
        gpus=tuple(sorted((*first.gpus, *second.gpus), key=lambda gpu: gpu.gpu_index))
    )


def restore(
    gpus: Sequence[model.Gpu],
    snapshots: Sequence[model.GpuSnapshot],
    *,
    keep_pending: bool = False,
) -> steps.Plan:
    """Find the steps to snapshots: modes, placements and compute instances.

    GPU instances without a compute instance are restored too. GPUs without a snapshot or not on
    the node, and ``unowned_instances``, are not touched. ``keep_pending`` accepts a pending mode.

    Raises:
        LayoutError: A snapshot lacks the spans of compute instances, and they cannot be placed
            again (DOES_NOT_FIT), or a GPU has lost MIG (NOT_MIG_CAPABLE).
    """
    before = {gpu.uuid: gpu for gpu in snapshots}
    plans = [
        _restore_gpu(gpu, before[gpu.uuid], keep_pending=keep_pending)
        for gpu in _by_index(gpus)
        if gpu.uuid in before
    ]
    return steps.Plan(gpus=tuple(p for p in plans if p))


def repair(gpus: Sequence[model.Gpu], before: Sequence[model.GpuSnapshot]) -> steps.Plan:
    """Find the steps to repair GPUs: reset GPUs that await it, and restore the others.

    A GPU is restored with the next plan, once it is reset. Raises as ``restore``.

    Args:
        gpus: The observed GPUs.
        before: The GPUs to repair, as they were before the repair.
    """
    to_repair = {gpu.uuid for gpu in before}
    resets = tuple(
        _reset(gpu) for gpu in _by_index(gpus) if gpu.uuid in to_repair and gpu.recovers_by_reset
    )
    uuids = {each.gpu_uuid for each in resets}
    rest = restore(gpus, [each for each in before if each.uuid not in uuids])
    return combine(steps.Plan(gpus=resets), rest)


def are_restored(gpus: model.ObservedGpus, snapshots: Sequence[model.GpuSnapshot]) -> bool:
    """Return whether all GPUs of snapshots have exactly their instances; raises as ``restore``.

    A GPU that is not on the node counts as restored, and one that is unreachable does not.
    """
    return restore(gpus, snapshots).is_empty and not (
        gpus.unreachable_snapshots(snapshots) or unowned_instances(gpus, snapshots)
    )


def unowned_instances(
    gpus: Sequence[model.Gpu], snapshots: Sequence[model.GpuSnapshot]
) -> tuple[str, ...]:
    """Describe the unowned instances, which ``restore`` keeps; see ``restoring``."""
    before = {gpu.uuid: gpu for gpu in snapshots}
    return tuple(
        f"{name} on GPU {gpu.index}"
        for gpu in _by_index(gpus)
        if gpu.uuid in before
        for name in restoring.unowned_names(gpu, before[gpu.uuid])
    )


def baseline(
    change: steps.Plan, gpus: Sequence[model.Gpu], earlier: Sequence[model.GpuSnapshot] = ()
) -> tuple[model.GpuSnapshot, ...]:
    """Return snapshots of the GPUs that a plan changes, with the instances that it creates.

    ``earlier`` snapshots, of an interrupted change or an earlier plan, take precedence; all are
    kept.
    """
    by_uuid = {gpu.uuid: gpu for gpu in earlier}
    live = {gpu.uuid: gpu for gpu in gpus}
    for each in change.gpus:
        if not each.steps or each.gpu_uuid not in live:
            continue
        gpu = live[each.gpu_uuid]
        if gpu.uuid in by_uuid:
            before = restoring.adopt(gpu, by_uuid[gpu.uuid])
        else:
            before = dataclasses.replace(gpu.snapshot, created=())
        before = restoring.trim(gpu, before)
        if before.created is not None:
            created = dict.fromkeys((*before.created, *_creations(each)))
            before = dataclasses.replace(before, created=tuple(created))
        by_uuid[gpu.uuid] = before
    return tuple(by_uuid.values())


def trim(
    gpus: Sequence[model.Gpu], snapshots: Sequence[model.GpuSnapshot]
) -> tuple[model.GpuSnapshot, ...]:
    """Return the snapshots without creations that do not exist on the observed GPUs.

    Another program may create such an instance later, and a rollback must keep that one.
    """
    live = {gpu.uuid: gpu for gpu in gpus}
    return tuple(
        restoring.trim(live[each.uuid], each) if each.uuid in live else each for each in snapshots
    )


def _creations(gpu_plan: steps.GpuPlan) -> Iterator[model.Creation]:
    for step in gpu_plan.steps:
        match step:
            case steps.CreateGpuInstance():
                yield model.Creation(step.profile, step.placement)
            case steps.CreateComputeInstance():
                place = step.gpu_instance_placement
                yield model.Creation.inside(step.profile, place, step.placement)
            case _:
                pass


def restore_checkpoint(
    saved: Sequence[checkpoint.SavedGpu], gpus: Sequence[model.Gpu], *, is_mode_only: bool = False
) -> steps.Plan:
    """Find the steps to a checkpoint; GPUs that it lacks are not touched.

    With ``is_mode_only`` GPUs in the right MIG mode keep their instances.

    Raises:
        CheckpointError: With location: a GPU is missing, has no MIG, or cannot have its instances.
        LayoutError: Only the host can partition a GPU (NOT_SUPPORTED), or one is unreachable.
    """
    snapshots = restoring.snapshots(saved, gpus, is_mode_only=is_mode_only)
    restored = restore(gpus, snapshots)
    vgpus.refuse(gpus, restored)
    # Without profiles, only MIG mode can be restored before the next observation.
    blind = set() if is_mode_only else {gpu.uuid for gpu in gpus if gpu.profiles is None}
    partitioned = {device.uuid for device in saved if device.instances}
    changes = tuple(
        dataclasses.replace(each, is_provisional=True, target=())
        if each.gpu_uuid in blind & partitioned
        else each
        for each in restored.gpus
    )
    return steps.Plan(gpus=changes)


def _plan_gpu(
    gpu: model.Gpu, desired: model.DesiredGpu, finder: search.Search
) -> steps.GpuPlan | None:
    mode_step = _mode_step(gpu, desired.mode)
    if desired.mode is model.MigMode.DISABLED:
        return _build(gpu, search.GpuDecision(), mode_step)
    if gpu.current_mode is None:
        raise _not_capable(gpu)
    is_blind = gpu.current_mode is model.MigMode.DISABLED and gpu.profiles is None
    if mode_step and desired.counts and is_blind:
        return steps.GpuPlan(
            gpu_uuid=gpu.uuid,
            gpu_index=gpu.index,
            steps=(mode_step,),
            target=(),
            is_provisional=True,
        )
    return _build(gpu, finder.decide(gpu, desired), mode_step)


def _reset(gpu: model.Gpu) -> steps.GpuPlan:
    # The instances of a remembered GPU have no valid ids, and end with the reset.
    emptied = None if gpu.is_remembered else _build(gpu, search.GpuDecision(), None)
    return steps.GpuPlan(
        gpu_uuid=gpu.uuid,
        gpu_index=gpu.index,
        steps=(*(emptied.steps if emptied else ()), steps.Reset(gpu_uuid=gpu.uuid)),
        target=(),
        is_provisional=True,
    )


def _restore_gpu(
    gpu: model.Gpu, before: model.GpuSnapshot, *, keep_pending: bool
) -> steps.GpuPlan | None:
    if before.current_mode is None:
        return None
    if gpu.current_mode is None:
        raise _not_capable(gpu)
    decision = restoring.decide(gpu, before)
    # A mode that was pending before may stay pending.
    has_pending = (gpu.pending_mode or gpu.current_mode) is (
        before.pending_mode or before.current_mode
    )
    is_as_before = gpu.current_mode is before.current_mode and (keep_pending or has_pending)
    # Disabling MIG would destroy the instances that stay.
    has_instances = bool(decision.stays) and before.current_mode is model.MigMode.DISABLED
    mode_step = None if is_as_before or has_instances else _mode_step(gpu, before.current_mode)
    return _build(gpu, decision, mode_step)


def _mode_step(gpu: model.Gpu, mode: model.MigMode) -> steps.SetMode | None:
    """Return the step to a mode; it can also cancel a pending change."""
    pending = gpu.pending_mode or gpu.current_mode
    if gpu.current_mode is None or (gpu.current_mode is mode and pending is mode):
        return None
    return steps.SetMode(
        gpu_uuid=gpu.uuid,
        mode=mode,
        # Cancelling a pending change needs no reset.
        needs_reset=gpu.mode_change_needs_reset and gpu.current_mode is not mode,
    )


def _build(
    gpu: model.Gpu, decision: search.GpuDecision, mode_step: steps.SetMode | None
) -> steps.GpuPlan | None:
    """Turn a decision into a plan; None without steps."""
    live = search.in_order(gpu)
    stays = {stay.position: stay for stay in decision.stays}
    destroyed: list[steps.Step] = [
        steps.DestroyComputeInstance(
            gpu_uuid=gpu.uuid,
            gpu_instance_id=gi.instance_id,
            within=gi.placement,
            compute_instance_id=ci.instance_id,
            profile=ci.profile,
            uuid=ci.uuid,
        )
        for position, gi in enumerate(live)
        for inner, ci in enumerate(gi.compute_instances)
        if position not in stays or inner not in stays[position].kept
    ]
    destroyed += [
        steps.DestroyGpuInstance(
            gpu_uuid=gpu.uuid,
            gpu_instance_id=gi.instance_id,
            profile=gi.profile,
            placement=gi.placement,
        )
        for position, gi in enumerate(live)
        if position not in stays
    ]
    ordered = (*destroyed, *([mode_step] if mode_step else []), *_create(gpu, live, decision))
    if not ordered:
        return None
    target = (
        *(_target_of_kept(live[stay.position], stay) for stay in decision.stays),
        *decision.created,
    )
    return steps.GpuPlan(
        gpu_uuid=gpu.uuid,
        gpu_index=gpu.index,
        steps=ordered,
        target=tuple(sorted(target, key=lambda instance: instance.placement)),
    )


def _create(
    gpu: model.Gpu, live: Sequence[model.GpuInstance], decision: search.GpuDecision
) -> Iterator[steps.Step]:
    """Yield new compute instances of GPU instances that stay, then the new GPU instances."""

    def fill(
        place: model.Placement, content: Sequence[steps.TargetComputeInstance]
    ) -> Iterator[steps.Step]:
        for ci in content:
            yield steps.CreateComputeInstance(
                gpu_uuid=gpu.uuid,
                gpu_instance_placement=place,
                profile=ci.profile,
                placement=ci.placement,
            )

    for stay in decision.stays:
        yield from fill(live[stay.position].placement, stay.added)
    for new in decision.created:
        yield steps.CreateGpuInstance(
            gpu_uuid=gpu.uuid,
            profile=new.profile,
            profile_id=new.profile_id,
            placement=new.placement,
        )
        yield from fill(new.placement, new.compute_instances)


def _target_of_kept(gi: model.GpuInstance, stay: search.Stay) -> steps.TargetInstance:
    """Return a GPU instance that stays, with assumed spans where the driver reports none."""
    kept = [gi.compute_instances[inner] for inner in stay.kept]
    placed = [(ci.profile, ci.placement) for ci in kept if ci.placement]
    unplaced = sorted(
        (ci.profile for ci in kept if not ci.placement), key=lambda ci: -ci.compute_slices
    )
    sizes = [ci.compute_slices for ci in unplaced]
    counts = tuple(sizes.count(size + 1) for size in range(gi.profile.gpu_slices))
    assumed = packing.fit(counts, packing.slices(span for _, span in placed))
    spans = assumed or tuple(model.Placement(0, size) for size in sizes)
    content = [
        steps.TargetComputeInstance(profile=profile, placement=span)
        for profile, span in (*placed, *zip(unplaced, spans, strict=True))
    ]
    return steps.TargetInstance(
        profile=gi.profile,
        profile_id=gi.profile_id,
        placement=gi.placement,
        compute_instances=tuple(sorted([*content, *stay.added], key=lambda ci: ci.placement)),
        is_kept=True,
    )


def _by_index(gpus: Sequence[model.Gpu]) -> list[model.Gpu]:
    return sorted(gpus, key=lambda gpu: (gpu.index, gpu.uuid))


def _not_capable(gpu: model.Gpu) -> errors.LayoutError:
    return errors.LayoutError(f"{gpu} has no MIG", reason=reasons.Reason.NOT_MIG_CAPABLE)
