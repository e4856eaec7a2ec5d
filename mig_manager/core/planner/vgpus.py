"""GPUs that are shared with virtual machines: what a guest cannot change, and a host destroys."""

from collections.abc import Sequence

from mig_manager import errors, reasons
from mig_manager.core import messages, model, steps


def refuse(gpus: Sequence[model.Gpu], plan: steps.Plan) -> None:
    """Raise LayoutError (NOT_SUPPORTED) if a plan has steps that a vGPU guest cannot run.

    A guest can change compute instances only (``nvml.h``: NOT_SUPPORTED in guests).
    """
    guests = {gpu.uuid: gpu for gpu in gpus if gpu.virtualization is model.Virtualization.VGPU}
    for each in plan.gpus:
        is_only_inside = all(
            isinstance(step, steps.CreateComputeInstance | steps.DestroyComputeInstance)
            for step in each.steps
        )
        if each.gpu_uuid in guests and not is_only_inside:
            raise errors.LayoutError(
                f"{guests[each.gpu_uuid]} is a vGPU: only its host can partition it",
                reason=reasons.Reason.NOT_SUPPORTED,
            )


def host_warnings(gpus: Sequence[model.Gpu], plan: steps.Plan) -> tuple[str, ...]:
    """Describe the effects of a plan on virtual machines of a vGPU host, with a remedy.

    A reset, and on some GPUs a mode change, destroys the SR-IOV virtual functions and the vGPUs on
    them. The driver does not create them again (NVIDIA vGPU user guide; gpu-operator#2600).
    """
    hosts = {gpu.uuid: gpu for gpu in gpus if gpu.virtualization is model.Virtualization.HOST}
    changed = [each for each in plan.gpus if each.steps and each.gpu_uuid in hosts]
    warnings = []
    for has_new_mode in (True, False):
        affected = [
            hosts[each.gpu_uuid] for each in changed if each.takes_whole_gpu is has_new_mode
        ]
        if not affected:
            continue
        afterwards = "create the vGPUs of the new instances afterwards"
        if has_new_mode:
            # sysfs and sriov-manage write the domain with four digits.
            addresses = ", ".join(gpu.pci_address[-12:] for gpu in affected)
            afterwards = (
                "afterwards restore their virtual functions ('sriov-manage -e ADDRESS' for "
                f"{addresses}) and create their vGPUs"
            )
        numbers = ", ".join(messages.ranges(gpu.index for gpu in affected))
        warnings.append(
            f"shared with virtual machines: GPU {numbers}; "
            f"stop the machines with vGPUs, and {afterwards}"
        )
    return tuple(warnings)
