"""The processes that use a GPU: listed by NVML, or with its device nodes open."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import pynvml

from mig_manager import errors
from mig_manager.adapters.host import device_users, procfs
from mig_manager.adapters.nvml import gpu_device, library
from mig_manager.core import gpu_processes, messages, model, steps

_NO_INSTANCE = 0xFFFFFFFF
"""``gpuInstanceId`` of a process that uses the GPU itself (nvml.h, ``nvmlProcessInfo_t``)."""
_NONE = (None, _NO_INSTANCE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenFiles:
    """The processes that have device nodes of GPUs open."""

    processes: tuple[device_users.DeviceFileUser, ...] = ()
    driver_proc: pathlib.Path | None = None
    """Where the driver's capability files are; None without a search for processes."""
    proc_root: pathlib.Path = procfs.ROOT

    @staticmethod
    def find(
        proc_root: pathlib.Path | None, driver_roots: Sequence[str], *, exclude: tuple[int, ...]
    ) -> "OpenFiles":
        """Search before a session opens nodes; leave out ``exclude`` and their children."""
        if proc_root is None:
            return OpenFiles()
        return OpenFiles(
            processes=device_users.find_users(proc_root, ignore=exclude),
            driver_proc=device_users.driver_proc(proc_root, map(pathlib.Path, driver_roots)),
            proc_root=proc_root,
        )

    def capabilities(self, minor: int) -> dict[int, device_users.Instance]:
        """Return the known instances of a GPU by ``nvidia-cap`` number."""
        return device_users.capabilities(self.driver_proc, minor) if self.driver_proc else {}

    def drm_nodes(self, gpu: gpu_device.Handle) -> frozenset[str]:
        """Return the names in ``/dev/dri`` of a GPU; none if no process has any of them open."""
        if not any(process.drm for process in self.processes):
            return frozenset()
        with contextlib.suppress(errors.HardwareError):
            info = library.call(pynvml.nvmlDeviceGetPciInfo, gpu)
            return device_users.drm_nodes(self.proc_root, info.busId)
        return frozenset()


def inspect(
    library_path: str | None,
    *,
    driver_roots: Sequence[str] = (),
    proc_root: pathlib.Path | None,
    exclude: tuple[int, ...] = (),
) -> gpu_processes.Inspection:
    """Return versions and processes, in a session of its own; skip GPUs that do not answer."""
    files = OpenFiles.find(proc_root, driver_roots, exclude=exclude)
    with library.session(library_path, driver_roots):
        count = library.call(pynvml.nvmlDeviceGetCount)
        return gpu_processes.Inspection(
            driver_version=library.call(pynvml.nvmlSystemGetDriverVersion),
            nvml_version=library.call(pynvml.nvmlSystemGetNVMLVersion),
            processes=tuple(
                each for i in range(count) if (each := _at_index(i, files)) is not None
            ),
        )


def name_blocking(files: OpenFiles, plan: steps.GpuPlan, observed: model.Gpu | None) -> str:
    """Name the processes that block a GPU's plan, empty if none does; call within a session.

    The driver itself refuses for processes that are hidden from us.

    Raises:
        HardwareError: The GPU cannot be found.
    """
    try:
        device = gpu_device.find(plan.gpu_index, plan.gpu_uuid, observed)
    except errors.HardwareError as error:
        error.begin_with(str(plan), doing="cannot find it")
        raise
    with contextlib.suppress(errors.HardwareError):
        if users := gpu_processes.blocking(plan, _of_gpu(device.handle, files)):
            return f"{plan} is in use by {device_users.name_users(users)}"
    return ""


def add_users(
    error: errors.HardwareError,
    gpu: gpu_device.Device,
    *,
    gpu_instance_id: int | None,
    proc_root: pathlib.Path | None,
    driver_roots: Sequence[str],
) -> None:
    """Add the processes that use a GPU to an IN_USE error; of an instance only its own users."""
    # The agent started us; this leaves out all of its children, and so us too.
    files = OpenFiles.find(proc_root, driver_roots, exclude=(os.getppid(),))
    users = [
        user
        for user in _of_gpu(gpu.handle, files)
        if gpu_instance_id is None
        or not user.gpu_instances
        or gpu_instance_id in user.gpu_instances
    ]
    listed = [user for user in users if user.is_running]
    others = [user for user in users if not user.is_running]
    if listed:
        error.add(f"in use by {device_users.name_users(listed)}")
    elif others:
        error.add("NVML lists no process that uses it")
    else:
        # NVML lists processes with a context; a monitor such as DCGM uses the GPU without one.
        error.add("NVML lists no process that uses it; a monitor may")
        if proc_root and (hidden := device_users.describe_hidden(proc_root)):
            error.add(hidden)
    if others:
        error.add(
            f"open in {device_users.name_users(others)}, "
            "and maybe in others that cannot be seen from here"
        )
    is_unexplained = gpu_instance_id is None and not listed
    if is_unexplained and proc_root and (module := device_users.drm_module(proc_root)):
        error.add(module)


def _running(gpu: gpu_device.Handle) -> Iterator[Any]:
    """Yield each process that NVML lists, as ``nvmlProcessInfo_t``; none if it refuses."""
    for function in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        with contextlib.suppress(errors.HardwareError):
            yield from library.call(function, gpu)


def _name(pid: int) -> str:
    """Return the name of a process's program; ``process`` if NVML does not report it."""
    try:
        path: str = library.call(pynvml.nvmlSystemGetProcessName, pid)
    except errors.HardwareError:
        # It is in another PID namespace, or has ended.
        path = ""
    return gpu_processes.program_name(path) or "process"


def _at_index(
    index: int, files: OpenFiles
) -> tuple[str, tuple[gpu_processes.GpuProcess, ...]] | None:
    try:
        handle = library.call(pynvml.nvmlDeviceGetHandleByIndex, index)
        uuid: str = library.call(pynvml.nvmlDeviceGetUUID, handle)
    except errors.HardwareError:
        return None
    return uuid, _of_gpu(handle, files)


def _of_gpu(handle: gpu_device.Handle, files: OpenFiles) -> tuple[gpu_processes.GpuProcess, ...]:
    used: dict[int, set[device_users.Instance]] = {}
    for process in _running(handle):
        instances = used.setdefault(process.pid, set())
        if process.gpuInstanceId not in _NONE:
            inside = process.computeInstanceId
            instances.add((process.gpuInstanceId, None if inside == _NO_INSTANCE else inside))
    running = frozenset(used)
    names = {pid: messages.printable(_name(pid)) for pid in running}
    minor, drm = gpu_device.Device(handle).minor(), files.drm_nodes(handle)
    if minor is not None:
        caps = files.capabilities(minor)
        for each in device_users.using_gpu(files.processes, minor, caps=caps, drm=drm):
            used.setdefault(each.pid, {caps[cap] for cap in each.caps if cap in caps})
            names.setdefault(each.pid, each.name)
    owners = {process.pid: process.owner for process in files.processes}
    drawing = {process.pid for process in files.processes if process.drm & drm}
    return tuple(
        gpu_processes.GpuProcess(
            pid=pid,
            name=names[pid],
            owner=owners.get(pid, ""),
            gpu_instances=tuple(sorted({ids[0] for ids in used[pid]})),
            compute_instances=tuple(
                sorted((one, two) for one, two in used[pid] if two is not None)
            ),
            is_running=pid in running,
            has_drm_node=pid in drawing,
        )
        for pid in sorted(used)
    )
