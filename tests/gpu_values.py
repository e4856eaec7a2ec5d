"""GPUs as values: steps, layouts and losses applied to them."""

import dataclasses
import uuid
from collections.abc import Collection, Iterable

from mig_manager import errors
from mig_manager.core import model, steps
from mig_manager.core.planner import planner
from tests.sandbox import driver_rules


def of_plan(
    gpus: Iterable[model.Gpu], plan: steps.Plan, lost: Collection[str] = ()
) -> model.ObservedGpus:
    """Return the GPUs that a plan is about, in its order."""
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    return seen_of((by_uuid[gpu_plan.gpu_uuid] for gpu_plan in plan.gpus), lost)


def seen_of(gpus: Iterable[model.Gpu], lost: Collection[str]) -> model.ObservedGpus:
    """Return GPUs as they are observed where some have fallen off the bus."""
    each = tuple(gpus)
    return model.ObservedGpus(
        (gpu for gpu in each if gpu.uuid not in lost),
        (unreachable(gpu) for gpu in each if gpu.uuid in lost),
    )


def unreachable(gpu: model.Gpu) -> model.UnreachableGpu:
    """Return a GPU that has fallen off the bus, as the driver reports it."""
    return model.UnreachableGpu(
        index=gpu.index,
        uuid=gpu.uuid,
        pci_address=gpu.pci_address,
        pci_device_id=gpu.pci_device_id,
        reason=errors.Reason.GPU_LOST,
        code=15,
        message="nvmlDeviceGetHandleByIndex answered 'GPU is lost'",
    )


def apply_step(gpu: model.Gpu, step: steps.Step) -> model.Gpu:
    """Do one step to an observed GPU.

    Raises:
        ImpossibleStepError: The driver would refuse it.
    """
    driver_rules.check(gpu, step)
    instances = gpu.gpu_instances
    kept: list[model.GpuInstance]
    match step:
        case steps.SetMode():
            return dataclasses.replace(
                gpu, current_mode=step.mode, pending_mode=step.mode, gpu_instances=()
            )
        case steps.DestroyComputeInstance():
            kept = [_without(gi, step) for gi in instances]
        case steps.DestroyGpuInstance():
            kept = [gi for gi in instances if gi.instance_id != step.gpu_instance_id]
        case steps.CreateGpuInstance():
            kept = [
                *instances,
                model.GpuInstance(
                    instance_id=1 + max((gi.instance_id for gi in instances), default=0),
                    profile=step.profile,
                    profile_id=step.profile_id,
                    placement=step.placement,
                    compute_instances=(),
                ),
            ]
        case steps.CreateComputeInstance():
            kept = [_with(gpu, gi, step) for gi in instances]
    kept.sort(key=lambda gi: gi.placement)
    return dataclasses.replace(gpu, gpu_instances=tuple(kept))


def _without(gi: model.GpuInstance, step: steps.DestroyComputeInstance) -> model.GpuInstance:
    if gi.instance_id != step.gpu_instance_id:
        return gi
    staying = tuple(c for c in gi.compute_instances if c.instance_id != step.compute_instance_id)
    return dataclasses.replace(gi, compute_instances=staying)


def _with(
    gpu: model.Gpu, gi: model.GpuInstance, step: steps.CreateComputeInstance
) -> model.GpuInstance:
    if gi.placement != step.gpu_instance_placement:
        return gi
    number = len(gi.compute_instances)
    created = model.ComputeInstance(
        instance_id=number,
        profile=step.profile,
        placement=step.placement,
        uuid=mig_uuid(f"{gpu.index}-{gi.placement}-{step.profile}-{number}"),
    )
    return dataclasses.replace(gi, compute_instances=(*gi.compute_instances, created))


def geometry(gpus: Iterable[model.Gpu | model.GpuSnapshot]) -> dict[str, tuple[object, ...]]:
    """Return modes, instances and placements by UUID, without what the driver gives at will.

    Tests compare these, and not what the planner would still do, which they test.
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


def mig_uuid(name: str) -> str:
    """Return the UUID of a MIG device, the same one for the same name."""
    return f"MIG-{uuid.uuid5(uuid.NAMESPACE_OID, name)}"


def brought_to(gpus: tuple[model.Gpu, ...], wanted: model.DesiredGpu) -> tuple[model.Gpu, ...]:
    """Return the GPUs with ``wanted`` applied to each."""
    return execute(gpus, planner.plan(gpus, {gpu.uuid: wanted for gpu in gpus}))


def execute(gpus: tuple[model.Gpu, ...], plan: steps.Plan) -> tuple[model.Gpu, ...]:
    """Return the GPUs after the steps of a plan."""
    for step in plan.steps:
        gpus = tuple(apply_step(g, step) if g.uuid == step.gpu_uuid else g for g in gpus)
    return gpus
