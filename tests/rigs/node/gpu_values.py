"""GPUs as values: steps, layouts and losses applied to them."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from mig_manager import reasons
from mig_manager.catalogue import hardware
from mig_manager.core import model, profile_name, steps
from mig_manager.core.planner import planner
from tests.rigs.node import driver_rules


def of_plan(
    gpus: Iterable[model.Gpu], plan: steps.Plan, lost: Collection[str] = ()
) -> model.ObservedGpus:
    """Return the GPUs that a plan is about, in its order."""
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    return seen_of((by_uuid[gpu_plan.gpu_uuid] for gpu_plan in plan.gpus), lost)


def device_uuids(gpus: Iterable[model.Gpu]) -> frozenset[str]:
    """Return the UUIDs of the GPUs on which MIG is off, and of the MIG devices of the others.

    These are the devices of the device plugin and of the DRA driver. The product is not asked.
    """
    return frozenset(
        uuid
        for gpu in gpus
        for uuid in (gpu.mig_uuids if gpu.current_mode is model.MigMode.ENABLED else (gpu.uuid,))
    )


def seen_of(gpus: Iterable[model.Gpu], lost: Collection[str]) -> model.ObservedGpus:
    """Return GPUs as they are observed where some do not answer."""
    each = tuple(gpus)
    return model.ObservedGpus(
        (gpu for gpu in each if gpu.uuid not in lost),
        (unreachable(gpu) for gpu in each if gpu.uuid in lost),
    )


def with_action(
    gpus: Iterable[model.Gpu], action: model.RecoveryAction, *indices: int
) -> tuple[model.Gpu, ...]:
    """Return GPUs, with the same recovery action for some."""
    return tuple(
        dataclasses.replace(gpu, recovery_action=action) if gpu.index in indices else gpu
        for gpu in gpus
    )


def without_instances(gpus: Iterable[model.Gpu], *indices: int) -> tuple[model.Gpu, ...]:
    """Return GPUs, some without their instances."""
    return tuple(
        dataclasses.replace(gpu, gpu_instances=()) if gpu.index in indices else gpu for gpu in gpus
    )


def pending(gpus: Iterable[model.Gpu], step: steps.SetMode) -> tuple[model.Gpu, ...]:
    """Return GPUs whose driver has put off a change of MIG mode."""
    return tuple(
        dataclasses.replace(gpu, pending_mode=step.mode) if gpu.uuid == step.gpu_uuid else gpu
        for gpu in gpus
    )


def unreachable(gpu: model.Gpu) -> model.UnreachableGpu:
    """Return a GPU that requires a reset or has fallen off the bus, as the driver reports it."""
    reason, code, answer = reasons.Reason.GPU_LOST, 15, "GPU is lost"
    if gpu.recovers_by_reset:
        reason, code, answer = reasons.Reason.GPU_NEEDS_RESET, 16, "GPU requires reset"
    return model.UnreachableGpu(
        index=gpu.index,
        uuid=gpu.uuid,
        pci_address=gpu.pci_address,
        pci_device_id=gpu.pci_device_id,
        reason=reason,
        code=code,
        message=f"nvmlDeviceGetHandleByIndex answered '{answer}'",
    )


def geometry(gpus: Iterable[model.Gpu | model.GpuSnapshot]) -> dict[str, tuple[object, ...]]:
    """Return modes, instances and placements by UUID, without the ids and UUIDs of instances.

    Tests compare these. To ask the planner would be to trust what they test.
    """
    return {
        gpu.uuid: (
            gpu.current_mode,
            gpu.pending_mode,
            *sorted(
                (
                    gi.placement,
                    str(gi.profile),
                    sorted((ci.placement, str(ci.profile)) for ci in gi.compute_instances),
                )
                for gi in gpu.gpu_instances
            ),
        )
        for gpu in gpus
    }


def gpus_of(spec: str, devices: Mapping[str, int] | None = None) -> tuple[model.Gpu, ...]:
    """Return the GPUs of a simulated node, with MIG off or each with these devices."""
    bare = tuple(
        dataclasses.replace(hardware.template(product, index), is_template=False)
        for index, product in enumerate(hardware.parse_node(spec))
    )
    if devices is None:
        return bare
    desired = {profile_name.parse(name): count for name, count in devices.items()}
    return with_desired(bare, model.DesiredGpu.of(model.MigMode.ENABLED, desired))


def with_desired(gpus: tuple[model.Gpu, ...], desired: model.DesiredGpu) -> tuple[model.Gpu, ...]:
    """Return the GPUs with ``desired`` applied to each."""
    return execute(gpus, planner.plan(gpus, {gpu.uuid: desired for gpu in gpus}))


def execute(gpus: tuple[model.Gpu, ...], plan: steps.Plan) -> tuple[model.Gpu, ...]:
    """Return the GPUs after the steps of a plan."""
    for step in plan.steps:
        gpus = tuple(
            driver_rules.execute(g, [step]) if g.uuid == step.gpu_uuid else g for g in gpus
        )
    return gpus


def mode_step(gpu: model.Gpu, mode: model.MigMode) -> steps.SetMode:
    return steps.SetMode(gpu_uuid=gpu.uuid, mode=mode, needs_reset=gpu.mode_change_needs_reset)


def gi_step(gpu: model.Gpu, name: str, start: int | None = None) -> steps.CreateGpuInstance:
    """Create a GPU instance at a start, or at the first placement that is free."""
    row = _profile_of(gpu, name)
    occupied = [instance.placement for instance in gpu.gpu_instances]
    placement = next(
        place
        for place in row.placements
        if (place.start == start if start is not None else not any(map(place.overlaps, occupied)))
    )
    return steps.CreateGpuInstance(
        gpu_uuid=gpu.uuid, profile=row.profile, profile_id=row.profile_id, placement=placement
    )


def ci_step(
    created: steps.CreateGpuInstance, name: str, start: int = 0
) -> steps.CreateComputeInstance:
    profile = profile_name.parse(name)
    return steps.CreateComputeInstance(
        gpu_uuid=created.gpu_uuid,
        gpu_instance_placement=created.placement,
        profile=profile,
        placement=model.Placement(start, profile.compute_slices),
    )


def _profile_of(gpu: model.Gpu, name: str) -> model.GpuInstanceProfile:
    """Find a GPU-instance profile by the name of it or of a part of it."""
    profile = profile_name.parse(name).gpu_instance
    return next(row for row in gpu.profiles or () if row.profile == profile)
