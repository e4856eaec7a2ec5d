"""A GPU as a value: what the driver allows and refuses, step by step.

Written from the rules of the driver, not from the planner, and strict: whatever a real driver
would refuse is an assertion here, so that a plan which runs through needs no luck.
"""

import dataclasses
import uuid
from collections.abc import Iterable

from mig_manager.core import model, steps

_STEP_OF_SIZE = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}


def execute(gpu: model.Gpu, planned: Iterable[steps.Step]) -> model.Gpu:
    """Do steps to a GPU that no process uses."""
    for step in planned:
        assert step.gpu_uuid == gpu.uuid
        match step:
            case steps.DestroyComputeInstance():
                gpu = _destroy_ci(gpu, step)
            case steps.DestroyGpuInstance():
                gpu = _destroy_gi(gpu, step)
            case steps.SetMode():
                gpu = _set_mode(gpu, step)
            case steps.Reset():
                pass  # by the transaction, not the driver
            case steps.CreateGpuInstance():
                gpu = _create_gi(gpu, step)
            case steps.CreateComputeInstance():
                gpu = _create_ci(gpu, step)
    return gpu


def reboot(gpu: model.Gpu) -> model.Gpu:
    """Return a GPU after a reboot.

    Its instances are lost; MIG mode is, too, if it can be changed without a reset.
    """
    mode = gpu.pending_mode
    if mode is model.MigMode.ENABLED and not gpu.mode_change_needs_reset:
        mode = model.MigMode.DISABLED
    return dataclasses.replace(gpu, current_mode=mode, pending_mode=mode, gpu_instances=())


def spans(size: int, slices: int) -> list[int]:
    """Return the starts a compute instance of that size may have."""
    if size == slices:
        return [0]
    if 2 * size > slices + 1:
        return []
    return [s for s in range(8) if s % _STEP_OF_SIZE[size] == 0 and s + size <= slices]


def pool_allows(gpu: model.Gpu, profiles: Iterable[model.Profile]) -> bool:
    """Return whether the media engines suffice for these instances together."""
    specs = {spec.profile: spec for spec in gpu.profiles or ()}
    demands = [specs[profile].engines for profile in profiles]
    return all(
        sum(getattr(engines, kind) for engines in demands)
        <= max(getattr(spec.engines, kind) for spec in specs.values())
        for kind in ("decoders", "encoders", "jpegs", "ofas")
    )


def mig_uuid(name: str) -> str:
    """Return the UUID of a MIG device, the same one for the same name."""
    return f"MIG-{uuid.uuid5(uuid.NAMESPACE_OID, name)}"


def _destroy_ci(gpu: model.Gpu, step: steps.DestroyComputeInstance) -> model.Gpu:
    gi = next(gi for gi in gpu.gpu_instances if gi.instance_id == step.gpu_instance_id)
    ci = next(c for c in gi.compute_instances if c.instance_id == step.compute_instance_id)
    assert (ci.profile, ci.uuid) == (step.profile, step.uuid)
    remaining = tuple(other for other in gi.compute_instances if other is not ci)
    return _swap(gpu, gi, dataclasses.replace(gi, compute_instances=remaining))


def _destroy_gi(gpu: model.Gpu, step: steps.DestroyGpuInstance) -> model.Gpu:
    gi = next(gi for gi in gpu.gpu_instances if gi.instance_id == step.gpu_instance_id)
    assert (gi.profile, gi.placement) == (step.profile, step.placement)
    assert not gi.compute_instances, "IN_USE: it holds compute instances"
    return _swap(gpu, gi, None)


def _set_mode(gpu: model.Gpu, step: steps.SetMode) -> model.Gpu:
    if step.mode is gpu.current_mode:
        return dataclasses.replace(gpu, pending_mode=step.mode)
    assert not gpu.gpu_instances, "Ampere: instances are clients, the switch would be pending"
    assert step.needs_reset == gpu.mode_change_needs_reset
    return dataclasses.replace(gpu, current_mode=step.mode, pending_mode=step.mode)


def _create_gi(gpu: model.Gpu, step: steps.CreateGpuInstance) -> model.Gpu:
    assert gpu.current_mode is model.MigMode.ENABLED, "NOT_SUPPORTED: MIG is off"
    spec = next(s for s in gpu.profiles or () if s.profile_id == step.profile_id)
    assert spec.profile == step.profile
    assert step.placement in spec.placements, "INVALID_ARGUMENT: no such placement"
    others = gpu.gpu_instances
    assert not any(step.placement.overlaps(gi.placement) for gi in others), "occupied"
    assert pool_allows(gpu, [step.profile, *(gi.profile for gi in others)]), "engines"
    new = model.GpuInstance(
        instance_id=max((gi.instance_id for gi in others), default=0) + 1,
        profile=step.profile,
        profile_id=step.profile_id,
        placement=step.placement,
        compute_instances=(),
    )
    instances = sorted((*others, new), key=lambda gi: gi.placement)
    return dataclasses.replace(gpu, gpu_instances=tuple(instances))


def _create_ci(gpu: model.Gpu, step: steps.CreateComputeInstance) -> model.Gpu:
    gi = next(g for g in gpu.gpu_instances if g.placement == step.gpu_instance_placement)
    size = step.profile.compute_slices
    assert step.profile.gpu_instance == gi.profile
    assert step.placement.size == size
    assert step.placement.start in spans(size, gi.profile.gpu_slices), "no such span"
    for other in gi.compute_instances:
        assert other.placement, "cannot know that this is free"
        assert not other.placement.overlaps(step.placement), "span occupied"
    number = max((ci.instance_id for ci in gi.compute_instances), default=-1) + 1
    new = model.ComputeInstance(
        instance_id=number,
        profile=step.profile,
        placement=step.placement,
        uuid=mig_uuid(f"{gpu.index}-{gi.placement}-{step.profile}-{number}"),
    )
    return _swap(gpu, gi, dataclasses.replace(gi, compute_instances=(*gi.compute_instances, new)))


def _swap(gpu: model.Gpu, old: model.GpuInstance, new: model.GpuInstance | None) -> model.Gpu:
    others = tuple(new if gi is old else gi for gi in gpu.gpu_instances)
    return dataclasses.replace(gpu, gpu_instances=tuple(gi for gi in others if gi))
