"""Who holds a GPU, as far as can be told: for the message of an IN_USE error."""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pynvml

from mig_manager import errors
from mig_manager.adapters.host import procfs
from mig_manager.adapters.nvml import nvml_calls, nvml_device

NO_INSTANCE = 0xFFFFFFFF
"""``gpuInstanceId`` of a process that uses the GPU itself (nvml.h, ``nvmlProcessInfo_t``)."""


def named(
    error: errors.HardwareError,
    gpu: nvml_device.Device,
    *,
    gpu_instance_id: int | None,
    proc_root: pathlib.Path | None = None,
    driver_roots: Sequence[str] = (),
) -> errors.HardwareError:
    """Return the error with the holders in its message; what cannot be told is left out.

    Args:
        error: With reason IN_USE.
        gpu: The whole GPU.
        gpu_instance_id: Only holders of this GPU instance, or of the GPU itself; None for all.
        proc_root: Where to look for holders that NVML does not list; None: nowhere.
        driver_roots: File systems in whose ``proc`` the driver's files may be.
    """
    listed = _listed(gpu.handle, gpu_instance_id)
    seen = _seen(gpu, gpu_instance_id, proc_root, driver_roots)
    homes = {holder.pid: holder.home for holder in seen}
    others = [holder for holder in seen if holder.pid not in listed]
    if listed:
        who = [_describe(pid, listed[pid], homes.get(pid, "")) for pid in sorted(listed)]
        told = f"held by {procfs.listed(who)}"
    elif others:
        told = "NVML names no process that holds it"
    else:
        # NVML lists processes with a context; a monitor such as DCGM holds on without one.
        told = "NVML names no process that holds it; a monitor may"
        hidden = procfs.hidden(proc_root) if proc_root else ""
        told += f"; {hidden}" if hidden else ""
    if others:
        told += (
            f"; open in {procfs.named(others)}, and maybe in others that cannot be seen from here"
        )
    return errors.HardwareError(
        f"{error.message}; {told}",
        reason=error.reason,
        operation=error.operation,
        gpu=error.gpu,
        code=error.code,
    )


def running(gpu: nvml_device.Handle) -> Iterator[Any]:
    """Yield each process that NVML lists, as ``nvmlProcessInfo_t``; none where it refuses to."""
    for function in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        with contextlib.suppress(errors.HardwareError):
            yield from nvml_calls.call(function, gpu)


def process_name(pid: int) -> str:
    """Return the name of a process's program; ``process`` where NVML does not tell it."""
    try:
        path: str = nvml_calls.call(pynvml.nvmlSystemGetProcessName, pid)
    except errors.HardwareError:
        # In another PID namespace, or just gone.
        path = ""
    return path.split(" ", maxsplit=1)[0].rsplit("/", maxsplit=1)[-1] or "process"


def _listed(gpu: nvml_device.Handle, gpu_instance_id: int | None) -> dict[int, int | None]:
    """Return the GPU instance, if any, of each process that NVML lists, by pid."""
    return {
        process.pid: process.gpuInstanceId
        for process in running(gpu)
        if gpu_instance_id is None or process.gpuInstanceId in (gpu_instance_id, NO_INSTANCE)
    }


def _seen(
    gpu: nvml_device.Device,
    gpu_instance_id: int | None,
    proc_root: pathlib.Path | None,
    driver_roots: Sequence[str],
) -> tuple[procfs.Holder, ...]:
    """Return who has the device nodes open, our agent and its children apart."""
    minor = None if proc_root is None else gpu.minor()
    if proc_root is None or minor is None:
        return ()
    # Of our family: the agent, which started us, and all that it has started.
    found = procfs.holders(proc_root, but=(os.getpid(), os.getppid()))
    driver_proc = procfs.of_driver(proc_root, map(pathlib.Path, driver_roots))
    caps = procfs.capabilities(driver_proc, minor)
    if gpu_instance_id is None:
        return procfs.of_gpu(found, minor, caps=caps)
    return procfs.of_gpu_instance(found, minor, caps=caps, gpu_instance_id=gpu_instance_id)


def _describe(pid: int, gpu_instance_id: int | None, home: str) -> str:
    where = "" if gpu_instance_id in (None, NO_INSTANCE) else f" in GPU instance {gpu_instance_id}"
    return f"{process_name(pid)} (pid {pid}{where}{f', {home}' if home else ''})"
