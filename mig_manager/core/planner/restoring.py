"""Restore a GPU to a snapshot or a checkpoint: profiles, placements and spans.

A snapshot has all placements, so no search is necessary. Instances of the snapshot stay, instances
that the change created are destroyed, missing ones are created. All other instances are unowned
and stay: the first observation missed them, or another program created them.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NoReturn

from mig_manager import errors, reasons
from mig_manager.core import model, steps
from mig_manager.core.files import checkpoint
from mig_manager.core.planner import misfits, packing, placement, search


def decide(gpu: model.Gpu, before: model.GpuSnapshot) -> search.GpuDecision:
    """Decide which GPU instances stay and which are created.

    An instance of the snapshot that overlaps an unowned one is omitted.

    Raises:
        LayoutError: DOES_NOT_FIT: the snapshot lacks the spans of compute instances, and they
            cannot be packed again.
    """
    past = _by_place(before)
    unowned = {_place(gi): gi for gi in _unowned_instances(gpu, before)}
    occupied = [gi.placement for place, gi in unowned.items() if place not in past]
    now = {_place(gi): (i, gi) for i, gi in enumerate(search.in_order(gpu))}
    stays = [search.stay_unchanged(i, gi) for i, gi in now.values() if gi.placement in occupied]
    created: list[steps.TargetInstance] = []
    # Profile ids can change with the driver; names do not.
    ids = {spec.profile: spec.profile_id for spec in gpu.profiles or ()}
    for place, old in past.items():
        if place in now:
            stays.append(_restore_stay(gpu, *now[place], _join(old, unowned.get(place))))
        elif not any(map(old.placement.overlaps, occupied)):
            created.append(
                steps.TargetInstance(
                    profile=old.profile,
                    profile_id=ids.get(old.profile, old.profile_id),
                    placement=old.placement,
                    compute_instances=_inside(gpu, old),
                    is_kept=False,
                )
            )
    created.sort(key=lambda new: (-new.placement.size, new.placement))
    return search.GpuDecision(stays=tuple(stays), created=tuple(created))


def unowned_names(gpu: model.Gpu, before: model.GpuSnapshot) -> Iterator[str]:
    """Name the unowned instances; in a GPU instance of the snapshot, its compute instances."""
    past = _by_place(before)
    for gi in _unowned_instances(gpu, before):
        where = f"{gi.profile} at {gi.placement}"
        if _place(gi) in past:
            yield from (f"{ci.profile} in {where}" for ci in gi.compute_instances)
        else:
            yield where


def adopt(gpu: model.Gpu, before: model.GpuSnapshot) -> model.GpuSnapshot:
    """Return the snapshot with the unowned instances added, for the next change."""
    unowned = {_place(gi): gi for gi in _unowned_instances(gpu, before)}
    if not unowned:
        return before
    past = _by_place(before)
    added = [gi for place, gi in unowned.items() if place not in past]
    remaining = [
        _join(gi, unowned.get(place))
        for place, gi in past.items()
        if not any(gi.placement.overlaps(other.placement) for other in added)
    ]
    return dataclasses.replace(
        before,
        # MIG is on where instances exist.
        current_mode=gpu.current_mode,
        pending_mode=gpu.pending_mode,
        gpu_instances=tuple(sorted((*remaining, *added), key=lambda gi: gi.placement)),
    )


def trim(gpu: model.Gpu, before: model.GpuSnapshot) -> model.GpuSnapshot:
    """Return the snapshot without the creations whose instances do not exist on its GPU."""
    live: set[model.Creation] = set()
    for gi in gpu.gpu_instances:
        live.add(model.Creation(gi.profile, gi.placement))
        live.update(
            model.Creation.inside(ci.profile, gi.placement, ci.placement)
            for ci in gi.compute_instances
        )
    unclear = {gi.placement for gi in gpu.gpu_instances if _lacks_placements(gi)}
    existing = tuple(
        each
        for each in before.created or ()
        if each in live or (each.span and each.gpu_instance in unclear)
    )
    return before if before.created is None else dataclasses.replace(before, created=existing)


def _unowned_instances(gpu: model.Gpu, before: model.GpuSnapshot) -> Iterator[model.GpuInstance]:
    if before.created is None:
        return
    created = set(before.created)
    past = _by_place(before)
    for gi in search.in_order(gpu):
        old = past.get(_place(gi))
        if old is None:
            if model.Creation(gi.profile, gi.placement) not in created:
                yield gi
        elif not (_lacks_placements(gi) or _lacks_placements(old)):
            had = {(ci.profile, ci.placement) for ci in old.compute_instances}
            others = tuple(
                ci
                for ci in gi.compute_instances
                if (ci.profile, ci.placement) not in had
                and model.Creation.inside(ci.profile, gi.placement, ci.placement) not in created
            )
            if others:
                yield dataclasses.replace(gi, compute_instances=others)


def _join(gi: model.GpuInstance, other: model.GpuInstance | None) -> model.GpuInstance:
    """Return a GPU instance with the compute instances of both; of overlapping ones, the other's.

    Both have placements.
    """
    more = other.compute_instances if other else ()
    occupied = packing.slices(ci.placement for ci in more if ci.placement)
    remaining = (
        ci
        for ci in gi.compute_instances
        if not (ci.placement and occupied & packing.mask(ci.placement))
    )
    return dataclasses.replace(gi, compute_instances=(*remaining, *more))


def _place(gi: model.GpuInstance) -> placement.Placed:
    return gi.profile, gi.placement


def _by_place(before: model.GpuSnapshot) -> dict[placement.Placed, model.GpuInstance]:
    return {_place(gi): gi for gi in search.in_order(before)}


def _restore_stay(
    gpu: model.Gpu, position: int, now: model.GpuInstance, old: model.GpuInstance
) -> search.Stay:
    """Restore the compute instances; all of them if spans are unknown and profiles differ."""
    if _lacks_placements(now) or _lacks_placements(old):
        if _profiles(now) == _profiles(old):
            return search.stay_unchanged(position, now)
        return search.Stay(position=position, kept=(), added=_inside(gpu, old))
    desired = {(ci.profile, ci.placement) for ci in old.compute_instances}
    has = [(ci.profile, ci.placement) for ci in now.compute_instances]
    return search.Stay(
        position=position,
        kept=tuple(i for i, each in enumerate(has) if each in desired),
        added=tuple(ci for ci in _inside(gpu, old) if (ci.profile, ci.placement) not in has),
    )


def _inside(gpu: model.Gpu, old: model.GpuInstance) -> tuple[steps.TargetComputeInstance, ...]:
    """Return the compute instances with their spans; packed again if a span is unknown."""
    if not _lacks_placements(old):
        return tuple(
            steps.TargetComputeInstance(profile=ci.profile, placement=ci.placement)
            for ci in old.compute_instances
            if ci.placement
        )
    spans = packing.fit(packing.count_sizes(_profiles(old), old.profile))
    if spans is None:
        raise errors.LayoutError(
            f"the compute instances that {gpu} had in its {old.profile} at {old.placement} "
            "cannot be placed again",
            reason=reasons.Reason.DOES_NOT_FIT,
        )
    return packing.inside(old.profile, spans)


def _profiles(gi: model.GpuInstance) -> collections.Counter[model.Profile]:
    return collections.Counter(ci.profile for ci in gi.compute_instances)


def _lacks_placements(gi: model.GpuInstance) -> bool:
    return any(ci.placement is None for ci in gi.compute_instances)


def snapshots(
    saved: Sequence[checkpoint.SavedGpu], gpus: Sequence[model.Gpu], *, is_mode_only: bool
) -> list[model.GpuSnapshot]:
    """Return the GPUs of a checkpoint, which can be of another node or edited, as snapshots.

    Raises:
        CheckpointError: With location: a GPU is missing, has no MIG, or cannot have its instances.
        LayoutError: A GPU is unreachable.
    """
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    unreachable = model.unreachable_of(gpus)
    restored: list[model.GpuSnapshot] = []
    for device in saved:
        gpu = by_uuid.get(device.uuid)
        if gpu is None and any(each.uuid in ("", device.uuid) for each in unreachable):
            raise errors.LayoutError(
                f"the checkpoint has GPU {device.uuid}, which is not among the reachable GPUs: "
                + "; ".join(each.sentence for each in unreachable),
                reason=reasons.Reason.GPU_UNREACHABLE,
                location=device.location,
            )
        if gpu is None:
            _refuse(device, f"GPU {device.uuid} is not on this node")
        if gpu.current_mode is None:
            _refuse(device, f"{gpu} has no MIG")
        instances: tuple[model.GpuInstance, ...] = ()
        if is_mode_only:
            # A mode change destroys all instances; otherwise they stay.
            instances = gpu.gpu_instances if gpu.current_mode is device.mode else ()
        elif gpu.profiles is not None:
            instances = tuple(_instances(device, gpu))
            _require_engines(device, gpu, [gi.profile for gi in instances])
        restored.append(
            model.GpuSnapshot(
                uuid=gpu.uuid,
                current_mode=device.mode,
                pending_mode=device.mode,
                gpu_instances=instances,
            )
        )
    return restored


def _instances(device: checkpoint.SavedGpu, gpu: model.Gpu) -> Iterator[model.GpuInstance]:
    specs = {spec.enum_index: spec for spec in gpu.profiles or ()}
    live = {_place(gi): gi.compute_instances for gi in gpu.gpu_instances}
    occupied = 0
    for number, old in enumerate(device.instances):
        spec = specs.get(old.enum_index)
        if spec is None:
            _refuse(old, f"{gpu} has no GPU instance profile {old.enum_index}")
        name, place = spec.profile, old.placement
        if place not in spec.placements:
            possible = ", ".join(map(str, spec.placements))
            _refuse(old, f"{name} cannot be at {place} on {gpu}; it can be at {possible}")
        if occupied & packing.mask(place):
            _refuse(old, f"{name} at {place} overlaps another instance")
        occupied |= packing.mask(place)
        yield model.GpuInstance(
            instance_id=number,
            profile=name,
            profile_id=spec.profile_id,
            placement=place,
            compute_instances=tuple(
                model.ComputeInstance(
                    instance_id=nth, profile=ci.profile, placement=ci.placement, uuid=None
                )
                for nth, ci in enumerate(
                    packing.inside(name, _spans(old, name, live.get((name, place), ())))
                )
            ),
        )


def _require_engines(
    device: checkpoint.SavedGpu, gpu: model.Gpu, instances: Sequence[model.Profile]
) -> None:
    live = [gi.profile for gi in gpu.gpu_instances]
    capacity = placement.Capacity(gpu.profiles or (), live=live)
    if why := misfits.missing_engines(collections.Counter(instances), capacity):
        _refuse(device, f"its instances do not fit {gpu}: {'; '.join(why)}")


def _spans(
    old: checkpoint.Instance, whole: model.Profile, live: Sequence[model.ComputeInstance]
) -> packing.Spans:
    """Return the spans, which a checkpoint lacks: spans of live instances, the others packed."""
    for size in old.compute_slices:
        if not packing.exists(size, whole.gpu_slices):
            _refuse(old, f"{whole} has no compute instance of {size} slices")
    remaining = collections.Counter(old.compute_slices)
    kept: list[model.Placement] = []
    for ci in live:
        if ci.placement and remaining[ci.profile.compute_slices] > 0:
            remaining[ci.profile.compute_slices] -= 1
            kept.append(ci.placement)
    rest = _pack(remaining, whole, packing.slices(kept))
    if rest is None:
        # The rest may fit without the live ones.
        kept = []
        rest = _pack(collections.Counter(old.compute_slices), whole, 0)
    if rest is None:
        sizes = ", ".join(f"{size}c" for size in old.compute_slices)
        _refuse(old, f"compute instances of {sizes} do not fit {whole}")
    return (*kept, *rest)


def _pack(
    sizes: collections.Counter[int], whole: model.Profile, occupied: int
) -> packing.Spans | None:
    counts = tuple(sizes[size] for size in range(1, whole.gpu_slices + 1))
    # Packing more than fits would take too long.
    return packing.fit(counts, occupied) if sum(counts) <= whole.gpu_slices else None


def _refuse(place: checkpoint.SavedGpu | checkpoint.Instance, why: str) -> NoReturn:
    raise errors.CheckpointError(why, location=place.location)
