"""The processes that use a GPU: listed by NVML, or with its device nodes open."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pynvml

from mig_manager import errors
from mig_manager.adapters.host import procfs
from mig_manager.adapters.nvml import device as gpu_device
from mig_manager.adapters.nvml import library
from mig_manager.core import messages, steps

NO_INSTANCE = 0xFFFFFFFF
"""``gpuInstanceId`` of a process that uses the GPU itself (nvml.h, ``nvmlProcessInfo_t``)."""


def named(
    error: errors.HardwareError,
    gpu: gpu_device.Device,
    *,
    gpu_instance_id: int | None,
    proc_root: pathlib.Path | None = None,
    driver_roots: Sequence[str] = (),
) -> errors.HardwareError:
    """Return an IN_USE error with the known processes in its message.

    With ``gpu_instance_id`` these are the processes that use that instance or the GPU itself.
    """
    listed = _listed(gpu.handle, gpu_instance_id)
    found = _with_open_nodes(gpu, gpu_instance_id, proc_root, driver_roots)
    owners = {process.pid: process.owner for process in found}
    others = [process for process in found if process.pid not in listed]
    if listed:
        names = [_describe(pid, listed[pid], owners.get(pid, "")) for pid in sorted(listed)]
        explanation = f"in use by {procfs.listed(names)}"
    elif others:
        explanation = "NVML lists no process that uses it"
    else:
        # NVML lists processes with a context; a monitor such as DCGM uses the GPU without one.
        explanation = "NVML lists no process that uses it; a monitor may"
        hidden = procfs.hidden(proc_root) if proc_root else ""
        explanation += f"; {hidden}" if hidden else ""
    if others:
        explanation += (
            f"; open in {procfs.named(others)}, and maybe in others that cannot be seen from here"
        )
    return errors.HardwareError(
        f"{error.message}; {explanation}",
        reason=error.reason,
        operation=error.operation,
        gpu=error.gpu,
        code=error.code,
    )


def running(gpu: gpu_device.Handle) -> Iterator[Any]:
    """Yield each process that NVML lists, as ``nvmlProcessInfo_t``; none if it refuses."""
    for function in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        with contextlib.suppress(errors.HardwareError):
            yield from library.call(function, gpu)


def process_name(pid: int) -> str:
    """Return the name of a process's program; ``process`` if NVML does not report it."""
    try:
        path: str = library.call(pynvml.nvmlSystemGetProcessName, pid)
    except errors.HardwareError:
        # In another PID namespace, or just gone.
        path = ""
    return path.split(" ", maxsplit=1)[0].rsplit("/", maxsplit=1)[-1] or "process"


def _listed(gpu: gpu_device.Handle, gpu_instance_id: int | None) -> dict[int, int | None]:
    """Return the GPU instance, if any, of each process that NVML lists, by pid."""
    return {
        process.pid: process.gpuInstanceId
        for process in running(gpu)
        if gpu_instance_id is None or process.gpuInstanceId in (gpu_instance_id, NO_INSTANCE)
    }


def _with_open_nodes(
    gpu: gpu_device.Device,
    gpu_instance_id: int | None,
    proc_root: pathlib.Path | None,
    driver_roots: Sequence[str],
) -> tuple[procfs.GpuProcess, ...]:
    """Return the processes with its device nodes open, except the agent and its children."""
    minor = None if proc_root is None else gpu.minor()
    if minor is None:
        return ()
    # The agent started us, and all of its children are left out with it.
    files = OpenFiles.find(proc_root, driver_roots, exclude=(os.getpid(), os.getppid()))
    caps = procfs.capabilities(files.driver_proc, minor) if files.driver_proc else {}
    if gpu_instance_id is None:
        return procfs.using_gpu(files.processes, minor, caps=caps)
    return procfs.using_gpu_instance(
        files.processes, minor, caps=caps, gpu_instance_id=gpu_instance_id
    )


def _describe(pid: int, gpu_instance_id: int | None, home: str) -> str:
    where = "" if gpu_instance_id in (None, NO_INSTANCE) else f" in GPU instance {gpu_instance_id}"
    return f"{process_name(pid)} (pid {pid}{where}{f', {home}' if home else ''})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Versions and GPU processes, as the driver reports them."""

    driver_version: str
    nvml_version: str
    processes: tuple[tuple[str, tuple[steps.GpuProcess, ...]], ...]
    """For each GPU its UUID and the processes that use it, ascending by pid."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenFiles:
    """The processes that have device nodes of GPUs open."""

    processes: tuple[procfs.GpuProcess, ...] = ()
    driver_proc: pathlib.Path | None = None
    """Where the driver's capability files are; None if no processes were looked for."""

    @staticmethod
    def find(
        proc_root: pathlib.Path | None, driver_roots: Sequence[str], *, exclude: tuple[int, ...]
    ) -> "OpenFiles":
        """Look for them, but for ``exclude`` and their children; without ``/proc`` find none.

        To be called before opening a session, which opens device nodes itself.
        """
        if proc_root is None:
            return OpenFiles()
        return OpenFiles(
            processes=procfs.gpu_processes(proc_root, ignore=exclude),
            driver_proc=procfs.driver_proc(proc_root, map(pathlib.Path, driver_roots)),
        )


def inspect(
    library_path: str | None,
    *,
    driver_roots: Sequence[str] = (),
    proc_root: pathlib.Path | None,
    exclude: tuple[int, ...] = (),
) -> Inspection:
    """Return versions and processes, in an NVML session of its own; skip GPUs that do not answer.

    Raises:
        HardwareError: The library cannot be loaded, or NVML cannot be initialised.
    """
    files = OpenFiles.find(proc_root, driver_roots, exclude=exclude)
    with library.session(library_path, driver_roots):
        count = library.call(pynvml.nvmlDeviceGetCount)
        return Inspection(
            driver_version=library.call(pynvml.nvmlSystemGetDriverVersion),
            nvml_version=library.call(pynvml.nvmlSystemGetNVMLVersion),
            processes=tuple(
                found for i in range(count) if (found := _of_gpu(i, files)) is not None
            ),
        )


def _of_gpu(index: int, files: OpenFiles) -> tuple[str, tuple[steps.GpuProcess, ...]] | None:
    try:
        handle = library.call(pynvml.nvmlDeviceGetHandleByIndex, index)
        uuid: str = library.call(pynvml.nvmlDeviceGetUUID, handle)
    except errors.HardwareError:
        return None
    minor = gpu_device.Device(handle).minor()
    driver_proc = files.driver_proc if minor is not None else None
    known = procfs.capabilities(driver_proc, minor or 0) if driver_proc else {}
    inside = procfs.compute_capabilities(driver_proc, minor or 0) if driver_proc else {}
    owners = {process.pid: process.owner for process in files.processes}
    found = {
        pid: steps.GpuProcess(
            pid=pid,
            name=messages.printable(process_name(pid)),
            home=owners.get(pid, ""),
            gpu_instances=tuple(sorted({ids[0] for ids in used})),
            compute_instances=tuple(sorted((one, two) for one, two in used if two is not None)),
        )
        for pid, used in _instances_in_use(handle).items()
    }
    others = () if minor is None else procfs.using_gpu(files.processes, minor, caps=known)
    for process in others:
        found.setdefault(
            process.pid,
            steps.GpuProcess(
                pid=process.pid,
                name=process.name,
                home=process.owner,
                gpu_instances=tuple(sorted({known[cap] for cap in process.caps if cap in known})),
                compute_instances=tuple(
                    sorted({inside[cap] for cap in process.caps if cap in inside})
                ),
            ),
        )
    return uuid, tuple(found[pid] for pid in sorted(found))


def require_idle(plan: steps.Plan, files: OpenFiles) -> None:
    """Refuse a plan if a process uses what it destroys; call within a session.

    The driver itself refuses for processes that are hidden from us and GPUs that do not answer.

    Raises:
        GpuInUseError: Names the GPUs and their processes.
    """
    busy: list[str] = []
    for gpu in plan.gpus:
        found = _of_gpu(gpu.gpu_index, files)
        if found is None or found[0] != gpu.gpu_uuid:
            continue
        users = steps.blocking(gpu, found[1])
        if users:
            names = procfs.listed([str(user) for user in users])
            busy.append(f"GPU {gpu.gpu_index} ({gpu.gpu_uuid}) is in use by {names}")
    if busy:
        raise errors.GpuInUseError("; ".join(busy))


def _instances_in_use(handle: gpu_device.Handle) -> dict[int, set[tuple[int, int | None]]]:
    """Return the instances that each listed process uses, by pid; none for the GPU itself."""
    found: dict[int, set[tuple[int, int | None]]] = {}
    for process in running(handle):
        used = found.setdefault(process.pid, set())
        if process.gpuInstanceId not in (None, NO_INSTANCE):
            inside = process.computeInstanceId
            used.add((process.gpuInstanceId, None if inside == NO_INSTANCE else inside))
    return found
