"""Checks of driver and GPUs."""

import collections
from collections.abc import Callable, Iterable, Sequence

from mig_manager import errors
from mig_manager.adapters.nvml import processes as gpu_processes
from mig_manager.cli.doctor import findings
from mig_manager.core import model, picture

_OLDEST_DRIVER = 450
"""The first branch with MIG (NVIDIA MIG User Guide, "Deployment Considerations")."""

Gpus = findings.Once[model.ObservedGpus]
Inspection = findings.Once[gpu_processes.Inspection]


def driver(inspection: Inspection) -> Sequence[findings.Found]:
    """Tell whether NVML can be had, and its versions."""
    try:
        found = inspection.get()
    except errors.HardwareError as error:
        is_absent = error.reason is errors.Reason.DRIVER_NOT_LOADED
        return (findings.fail(error.message, "" if is_absent else error.reason.remedy),)
    text = f"driver {found.driver_version}, NVML {found.nvml_version}"
    branch = found.driver_version.partition(".")[0]
    if branch.isdecimal() and int(branch) < _OLDEST_DRIVER:
        return (findings.fail(f"{text}: too old for MIG", "Install a newer NVIDIA driver."),)
    return (findings.ok(text),)


def modes(gpus: Gpus) -> Sequence[findings.Found]:
    """Tell which GPUs have MIG, and in which mode they are."""
    seen = gpus.get()
    lost = [
        findings.fail(f"{gpu}: unreachable: {gpu.message}", errors.Reason.GPU_UNREACHABLE.remedy)
        for gpu in seen.unreachable
    ]
    if not any(gpu.is_mig_capable for gpu in seen):
        what = "no GPU of this node has MIG" if seen else "this node has no NVIDIA GPU"
        return (findings.fail(what, "Take the node's label nvidia.com/mig.config away."),)
    waiting = [_waiting(gpu) for gpu in seen if gpu.has_pending_mode]
    steady = [gpu for gpu in seen if not gpu.has_pending_mode]
    return (*lost, *waiting, *(findings.ok(text) for text in _grouped(steady, _mode)))


def virtualization(gpus: Gpus) -> Sequence[findings.Found]:
    """Tell which GPUs belong to a host that has a say in their MIG mode."""
    seen = gpus.needed()
    found = [findings.ok(text) for text in _grouped((g for g in seen if _is_own(g)), _belonging)]
    for gpu in seen:
        if gpu.virtualization is model.Virtualization.VGPU:
            found.append(findings.fail(f"GPU {gpu.index} is a vGPU: its host decides about MIG"))
        elif not _is_own(gpu):
            found.append(
                findings.warn(
                    f"GPU {gpu.index} is passed through to this virtual machine, which cannot "
                    "reset it: another MIG mode waits for a reboot",
                    "Switch MIG on before the layout is wanted, and reboot the virtual machine.",
                )
            )
    return found or [findings.skipped("there is no GPU")]


def instances(gpus: Gpus) -> Sequence[findings.Found]:
    """Tell which GPU instances no pod can use."""
    seen = gpus.needed()
    useless = [
        findings.warn(
            f"GPU {gpu.index}: GPU instance {gi.instance_id} ({gi.profile} at {gi.placement}) "
            "has no compute instance: it takes room and nobody can use it"
        )
        for gpu in seen
        for gi in gpu.gpu_instances
        if not gi.compute_instances
    ]
    count = sum(len(gpu.gpu_instances) for gpu in seen)
    return useless or [findings.ok(f"{count} GPU instances, each with a compute instance")]


def holders(gpus: Gpus, inspection: Inspection) -> Sequence[findings.Found]:
    """Tell who holds which GPU."""
    by_uuid = dict(inspection.needed().processes)
    seen = gpus.needed()
    held = [(gpu, by_uuid[gpu.uuid]) for gpu in seen if by_uuid.get(gpu.uuid)]
    found = []
    for gpu, processes in held:
        text = f"GPU {gpu.index}: {', '.join(map(str, processes))}"
        if gpu.has_pending_mode:
            found.append(findings.warn(f"{text}; a reset for the new MIG mode has to wait"))
        else:
            found.append(findings.ok(text))
    free = [gpu for gpu in seen if gpu.uuid in by_uuid and not by_uuid[gpu.uuid]]
    if free:
        found.append(
            findings.ok(f"GPU {picture.indices(free)}: nobody that can be seen from here")
        )
    return found or [findings.skipped("NVML tells of no GPU who holds it")]


def _waiting(gpu: model.Gpu) -> findings.Found:
    current, pending = gpu.current_mode, gpu.pending_mode
    assert current  # noqa: S101 - a GPU without MIG waits for no mode
    assert pending  # noqa: S101 - as above
    text = f"GPU {gpu.index}: MIG {current.value}, to be {pending.value} after a reset"
    if gpu.virtualization is model.Virtualization.PASSTHROUGH:
        return findings.warn(text, "Reboot the virtual machine: it cannot reset the GPU.")
    return findings.warn(
        text, f"Run 'nvidia-smi --gpu-reset -i {gpu.index}' once nobody holds it, or reboot."
    )


def _mode(gpu: model.Gpu) -> str:
    if gpu.current_mode is None:
        return f"{gpu.name}, no MIG"
    switch = "resets the GPU" if gpu.mode_change_needs_reset else "needs no reset"
    text = f"{gpu.name}, MIG {gpu.current_mode.value}, a switch of mode {switch}"
    if gpu.profiles is None:
        text += ", profiles are told only with MIG on (and to those who may)"
    return text


def _is_own(gpu: model.Gpu) -> bool:
    """Tell whether this machine can switch the GPU's mode as if no other had a say."""
    match gpu.virtualization:
        case model.Virtualization.NONE | model.Virtualization.HOST:
            return True
        case model.Virtualization.PASSTHROUGH:
            return not gpu.mode_change_needs_reset
        case model.Virtualization.VGPU:
            return False


def _belonging(gpu: model.Gpu) -> str:
    match gpu.virtualization:
        case model.Virtualization.PASSTHROUGH:
            return "passed through; a switch of MIG mode needs no reset"
        case model.Virtualization.HOST:
            return "shared by this host with its virtual machines"
        case model.Virtualization.NONE | model.Virtualization.VGPU:
            return "not virtual, as far as the driver says"


def _grouped(gpus: Iterable[model.Gpu], tell: Callable[[model.Gpu], str]) -> list[str]:
    """Return what is the same of several GPUs once."""
    groups: dict[str, list[model.Gpu]] = collections.defaultdict(list)
    for gpu in gpus:
        groups[tell(gpu)].append(gpu)
    return [f"GPU {picture.indices(group)}: {text}" for text, group in groups.items()]
