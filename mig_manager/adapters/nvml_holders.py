"""Who holds a GPU, as far as NVML knows: for the message of an IN_USE error."""

import pynvml

from mig_manager import errors
from mig_manager.adapters import nvml_device, nvml_errors

_MAX_NAMED = 8

_NO_INSTANCE = 0xFFFFFFFF
"""``gpuInstanceId`` of a process that holds the GPU itself (nvml.h, ``nvmlProcessInfo_t``)."""


def named(
    error: errors.HardwareError, gpu: nvml_device.Handle, *, gpu_instance_id: int | None
) -> errors.HardwareError:
    """Return the error with the holders in its message; what NVML does not tell is left out.

    Args:
        error: With reason IN_USE.
        gpu: Handle of the whole GPU.
        gpu_instance_id: Only holders of this GPU instance, or of the GPU itself; None for all.
    """
    holders = _holders(gpu, gpu_instance_id)
    if holders:
        shown = ", ".join(holders[:_MAX_NAMED])
        more = len(holders) - _MAX_NAMED
        who = f"held by {shown} and {more} more" if more > 0 else f"held by {shown}"
    else:
        # NVML lists processes with a context; a monitor such as DCGM holds on without one.
        who = "NVML names no process that holds it; a monitor may"
    return errors.HardwareError(
        f"{error.message}; {who}",
        reason=error.reason,
        operation=error.operation,
        gpu=error.gpu,
        code=error.code,
    )


def _holders(gpu: nvml_device.Handle, gpu_instance_id: int | None) -> list[str]:
    processes: dict[int, str] = {}
    for function in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        try:
            running = nvml_errors.call(function, gpu)
        except errors.HardwareError:
            continue
        for process in running:
            if gpu_instance_id is None or process.gpuInstanceId in (gpu_instance_id, _NO_INSTANCE):
                processes[process.pid] = _describe(process.pid, process.gpuInstanceId)
    return [processes[pid] for pid in sorted(processes)]


def _describe(pid: int, gpu_instance_id: int) -> str:
    try:
        path: str = nvml_errors.call(pynvml.nvmlSystemGetProcessName, pid)
    except errors.HardwareError:
        # In another PID namespace, or just gone.
        path = ""
    name = path.split(" ", maxsplit=1)[0].rsplit("/", maxsplit=1)[-1] or "process"
    where = (
        "" if gpu_instance_id in (None, _NO_INSTANCE) else f" in GPU instance {gpu_instance_id}"
    )
    return f"{name} (pid {pid}{where})"
