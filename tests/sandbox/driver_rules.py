"""Check steps on observed GPUs by the simulated driver's rules, for GPUs that are values."""

import functools
from collections.abc import Iterable

from mig_manager.catalogue import hardware
from mig_manager.core import model, steps
from mig_manager.sandbox.driver import states, transitions


class ImpossibleStepError(AssertionError):
    """The driver would refuse this step: the plan is wrong."""


def check(gpu: model.Gpu, step: steps.Step) -> None:
    """Check that the driver would carry out a step on a GPU that no process uses.

    Raises:
        ImpossibleStepError: It would refuse.
    """
    try:
        _carry_out(_situation(gpu), step)
    except states.Refused as refused:
        raise ImpossibleStepError(f"{refused}: {step} on {gpu}") from refused


def _carry_out(now: transitions.Situation, step: steps.Step) -> None:
    instances = {instance.instance_id: instance for instance in now.gpu.instances}
    match step:
        case steps.SetMode():
            _, code = transitions.set_mode(now, int(step.mode is model.MigMode.ENABLED))
            if code is not states.Code.SUCCESS:
                raise states.Refused(code)
        case steps.DestroyComputeInstance():
            instance = instances[step.gpu_instance_id]
            computes = {compute.instance_id: compute for compute in instance.compute_instances}
            compute = computes[step.compute_instance_id]
            transitions.destroy_compute_instance(now, instance, compute)
        case steps.DestroyGpuInstance():
            transitions.destroy_gpu_instance(now, instances[step.gpu_instance_id])
        case steps.CreateGpuInstance():
            transitions.create_gpu_instance(now, step.profile_id, step.placement)
            if now.board.row(step.profile_id).profile != step.profile:
                raise states.Refused(states.Code.INVALID_ARGUMENT)
        case steps.CreateComputeInstance():
            _create_compute_instance(now, step)


@functools.cache
def _product(name: str, pci_device_id: int, memory_mib: int) -> hardware.Product:
    return next(
        product
        for product in hardware.products().values()
        if (product.pci_device_ids[0], product.memory_mib) == (pci_device_id, memory_mib)
        and name == product.name
    )


def _situation(gpu: model.Gpu) -> transitions.Situation:
    """Return an observed GPU as the driver has it, used by no process."""
    options = states.Options()
    board = states.Board(
        index=gpu.index,
        product=_product(gpu.name, gpu.pci_device_id, gpu.memory_mib),
        uuid=gpu.uuid,
        pci_bus=gpu.index + 1,
        is_swapped=False,
        serial_number=gpu.index,
    )
    return transitions.Situation(
        board=board,
        gpu=states.GpuState(
            is_enabled=gpu.current_mode is model.MigMode.ENABLED,
            is_pending=gpu.pending_mode is model.MigMode.ENABLED,
            instances=tuple(_state(board, each) for each in gpu.gpu_instances),
        ),
        clients=(),
        options=options,
        serial=0,
    )


def _state(board: states.Board, instance: model.GpuInstance) -> states.GpuInstance:
    rows = board.row(instance.profile_id).compute
    return states.GpuInstance(
        instance_id=instance.instance_id,
        serial=0,
        profile_id=instance.profile_id,
        placement=instance.placement,
        compute_instances=tuple(
            states.ComputeInstance(
                instance_id=compute.instance_id,
                serial=0,
                profile_id=_row(rows, compute.placement).profile_id,
                placement=compute.placement,
            )
            for compute in instance.compute_instances
            if compute.placement is not None
        ),
    )


def _row(
    rows: Iterable[hardware.ComputeProfile], placement: model.Placement | None
) -> hardware.ComputeProfile:
    for row in rows:
        if placement in row.placements:
            return row
    raise states.Refused(states.Code.INVALID_ARGUMENT)


def _create_compute_instance(
    now: transitions.Situation, step: steps.CreateComputeInstance
) -> None:
    for instance in now.gpu.instances:
        if instance.placement == step.gpu_instance_placement:
            around = now.board.row(instance.profile_id)
            row = _row(around.compute, step.placement)
            transitions.create_compute_instance(now, instance, row.profile_id, step.placement)
            if transitions.compute_name(around, row.slices) != str(step.profile):
                raise states.Refused(states.Code.INVALID_ARGUMENT)
            return
    raise states.Refused(states.Code.NOT_FOUND)
