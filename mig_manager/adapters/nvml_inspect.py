"""What NVML tells of driver and processes, for people; never more than it tells anybody."""

import dataclasses
import pathlib
from collections.abc import Sequence

import pynvml

from mig_manager import errors
from mig_manager.adapters import nvml_device, nvml_errors, nvml_session, procfs
from mig_manager.core import holders

_NO_INSTANCE = 0xFFFFFFFF
"""``gpuInstanceId`` of a process that holds the GPU itself (nvml.h, ``nvmlProcessInfo_t``)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What was told."""

    driver_version: str
    nvml_version: str
    holders: tuple[tuple[str, tuple[holders.Holder, ...]], ...]
    """For each GPU its UUID, and who holds it, ascending by pid."""


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
    # Before the session, which would have us and our parent among those who hold the GPUs.
    seen = procfs.holders(proc_root, but=but) if proc_root else ()
    roots = map(pathlib.Path, driver_roots)
    driver_proc = procfs.of_driver(proc_root, roots) if proc_root else None
    with nvml_session.opened(library_path, driver_roots):
        count = nvml_errors.call(pynvml.nvmlDeviceGetCount)
        return Inspection(
            driver_version=nvml_errors.call(pynvml.nvmlSystemGetDriverVersion),
            nvml_version=nvml_errors.call(pynvml.nvmlSystemGetNVMLVersion),
            holders=tuple(
                found for i in range(count) if (found := _of_gpu(i, seen, driver_proc)) is not None
            ),
        )


def _of_gpu(
    index: int, seen: tuple[procfs.Holder, ...], driver_proc: pathlib.Path | None
) -> tuple[str, tuple[holders.Holder, ...]] | None:
    try:
        handle = nvml_errors.call(pynvml.nvmlDeviceGetHandleByIndex, index)
        uuid: str = nvml_errors.call(pynvml.nvmlDeviceGetUUID, handle)
    except errors.HardwareError:
        return None
    minor = nvml_device.Device(handle).minor()
    caps = procfs.capabilities(driver_proc, minor) if driver_proc and minor is not None else {}
    listed = _listed(handle)
    homes = {holder.pid: holder.home for holder in seen}
    found = {
        pid: holders.Holder(
            pid=pid,
            name=_name(pid),
            home=homes.get(pid, ""),
            gpu_instances=() if instance is None else (instance,),
        )
        for pid, instance in listed.items()
    }
    for holder in procfs.of_gpu(seen, minor, caps=caps) if minor is not None else ():
        instances = tuple(sorted({caps[cap] for cap in holder.caps if cap in caps}))
        found.setdefault(
            holder.pid,
            holders.Holder(
                pid=holder.pid, name=holder.name, home=holder.home, gpu_instances=instances
            ),
        )
    return uuid, tuple(found[pid] for pid in sorted(found))


def _listed(handle: nvml_device.Handle) -> dict[int, int | None]:
    """Return the GPU instance, if any, of each process that NVML lists, by pid."""
    found: dict[int, int | None] = {}
    for function in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    ):
        try:
            running = nvml_errors.call(function, handle)
        except errors.HardwareError:
            continue
        for process in running:
            instance = process.gpuInstanceId
            found[process.pid] = None if instance in (None, _NO_INSTANCE) else instance
    return found


def _name(pid: int) -> str:
    try:
        path: str = nvml_errors.call(pynvml.nvmlSystemGetProcessName, pid)
    except errors.HardwareError:
        # In another PID namespace, or just gone.
        return "process"
    name = path.split(" ", maxsplit=1)[0].rsplit("/", maxsplit=1)[-1]
    return "".join(letter if letter.isprintable() else "?" for letter in name) or "process"
