"""Who holds a GPU, as far as can be told: for the message of an IN_USE error."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pynvml

from mig_manager import errors
from mig_manager.adapters.host import procfs
from mig_manager.adapters.nvml import nvml_calls, nvml_device, nvml_session
from mig_manager.core import messages, steps
from mig_manager.core.host import gpu_processes

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
    homes = {holder.pid: holder.owner for holder in seen}
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
) -> tuple[procfs.GpuProcess, ...]:
    """Return who has the device nodes open, our agent and its children apart."""
    minor = None if proc_root is None else gpu.minor()
    if proc_root is None or minor is None:
        return ()
    # Of our family: the agent, which started us, and all that it has started.
    found = procfs.gpu_processes(proc_root, ignore=(os.getpid(), os.getppid()))
    driver_proc = procfs.driver_proc(proc_root, map(pathlib.Path, driver_roots))
    caps = procfs.capabilities(driver_proc, minor)
    if gpu_instance_id is None:
        return procfs.using_gpu(found, minor, caps=caps)
    return procfs.using_gpu_instance(found, minor, caps=caps, gpu_instance_id=gpu_instance_id)


def _describe(pid: int, gpu_instance_id: int | None, home: str) -> str:
    where = "" if gpu_instance_id in (None, NO_INSTANCE) else f" in GPU instance {gpu_instance_id}"
    return f"{process_name(pid)} (pid {pid}{where}{f', {home}' if home else ''})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What was told."""

    driver_version: str
    nvml_version: str
    holders: tuple[tuple[str, tuple[gpu_processes.GpuProcess, ...]], ...]
    """For each GPU its UUID, and who holds it, ascending by pid."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenFiles:
    """Which processes have device nodes of GPUs open."""

    processes: tuple[procfs.GpuProcess, ...] = ()
    driver_proc: pathlib.Path | None = None
    """Where the driver's capability files are; None: processes were not looked for."""

    @staticmethod
    def seen(
        proc_root: pathlib.Path | None, driver_roots: Sequence[str], *, but: tuple[int, ...]
    ) -> "OpenFiles":
        """Look for them; call before a session, which would have us and our parent among them.

        Args:
            proc_root: Where to look; None: nowhere.
            driver_roots: Where the driver's capability files may be.
            but: Processes of our own, which do not count.
        """
        if proc_root is None:
            return OpenFiles()
        return OpenFiles(
            processes=procfs.gpu_processes(proc_root, ignore=but),
            driver_proc=procfs.driver_proc(proc_root, map(pathlib.Path, driver_roots)),
        )


def inspect(
    library_path: str | None,
    *,
    driver_roots: Sequence[str] = (),
    proc_root: pathlib.Path | None,
    but: tuple[int, ...] = (),
) -> Inspection:
    """Ask in an NVML session of its own. What one GPU does not tell is left out.

    Args:
        library_path: File of the NVML library; None leaves the search to the loader.
        driver_roots: Where to look for the library when the loader does not find the right one.
        proc_root: Where to look for processes that NVML does not list; None: nowhere.
        but: Processes of our own, which do not count.

    Raises:
        HardwareError: The library cannot be loaded, or NVML cannot be initialised.
    """
    files = OpenFiles.seen(proc_root, driver_roots, but=but)
    with nvml_session.opened(library_path, driver_roots):
        count = nvml_calls.call(pynvml.nvmlDeviceGetCount)
        return Inspection(
            driver_version=nvml_calls.call(pynvml.nvmlSystemGetDriverVersion),
            nvml_version=nvml_calls.call(pynvml.nvmlSystemGetNVMLVersion),
            holders=tuple(found for i in range(count) if (found := _of_gpu(i, files)) is not None),
        )


def _of_gpu(
    index: int, files: OpenFiles
) -> tuple[str, tuple[gpu_processes.GpuProcess, ...]] | None:
    try:
        handle = nvml_calls.call(pynvml.nvmlDeviceGetHandleByIndex, index)
        uuid: str = nvml_calls.call(pynvml.nvmlDeviceGetUUID, handle)
    except errors.HardwareError:
        return None
    minor = nvml_device.Device(handle).minor()
    driver_proc = files.driver_proc if minor is not None else None
    known = procfs.capabilities(driver_proc, minor or 0) if driver_proc else {}
    inside = procfs.compute_capabilities(driver_proc, minor or 0) if driver_proc else {}
    homes = {holder.pid: holder.owner for holder in files.processes}
    found = {
        pid: gpu_processes.GpuProcess(
            pid=pid,
            name=messages.printable(process_name(pid)),
            home=homes.get(pid, ""),
            gpu_instances=tuple(sorted({ids[0] for ids in used})),
            compute_instances=tuple(sorted((one, two) for one, two in used if two is not None)),
        )
        for pid, used in _nvml_inspect_listed(handle).items()
    }
    for holder in (
        procfs.using_gpu(files.processes, minor, caps=known) if minor is not None else ()
    ):
        found.setdefault(
            holder.pid,
            gpu_processes.GpuProcess(
                pid=holder.pid,
                name=holder.name,
                home=holder.owner,
                gpu_instances=tuple(sorted({known[cap] for cap in holder.caps if cap in known})),
                compute_instances=tuple(
                    sorted({inside[cap] for cap in holder.caps if cap in inside})
                ),
            ),
        )
    return uuid, tuple(found[pid] for pid in sorted(found))


def require_idle(plan: steps.Plan, files: OpenFiles) -> None:
    """Refuse a plan while a process uses what it destroys; call within a session.

    Processes that cannot be seen from here, and GPUs that do not answer, are left to the driver.

    Args:
        plan: The steps that are going to be executed.
        files: Who had device nodes open before the session.

    Raises:
        GpuInUseError: Names the GPUs and their processes.
    """
    busy: list[str] = []
    for gpu in plan.gpus:
        found = _of_gpu(gpu.gpu_index, files)
        if found is None or found[0] != gpu.gpu_uuid:
            continue
        users = gpu_processes.blocking(gpu, found[1])
        if users:
            names = procfs.listed([str(user) for user in users])
            busy.append(f"GPU {gpu.gpu_index} ({gpu.gpu_uuid}) is in use by {names}")
    if busy:
        raise errors.GpuInUseError("; ".join(busy))


def _nvml_inspect_listed(handle: nvml_device.Handle) -> dict[int, set[tuple[int, int | None]]]:
    """Return what each process that NVML lists uses, by pid: GPU and compute instances.

    None of the former: the GPU itself.
    """
    found: dict[int, set[tuple[int, int | None]]] = {}
    for process in running(handle):
        used = found.setdefault(process.pid, set())
        if process.gpuInstanceId not in (None, NO_INSTANCE):
            inside = process.computeInstanceId
            used.add((process.gpuInstanceId, None if inside == NO_INSTANCE else inside))
    return found
