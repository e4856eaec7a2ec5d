"""What NVML tells of driver and processes, for people; never more than it tells anybody."""

import dataclasses
import pathlib
from collections.abc import Sequence

import pynvml

from mig_manager import errors
from mig_manager.adapters.host import procfs
from mig_manager.adapters.nvml import nvml_calls, nvml_device, nvml_holders, nvml_session
from mig_manager.core import model
from mig_manager.core.host import holders
from mig_manager.core.text import messages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What was told."""

    driver_version: str
    nvml_version: str
    holders: tuple[tuple[str, tuple[holders.Holder, ...]], ...]
    """For each GPU its UUID, and who holds it, ascending by pid."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenFiles:
    """Which processes have device nodes of GPUs open."""

    processes: tuple[procfs.Holder, ...] = ()
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
            processes=procfs.holders(proc_root, but=but),
            driver_proc=procfs.of_driver(proc_root, map(pathlib.Path, driver_roots)),
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


def _of_gpu(index: int, files: OpenFiles) -> tuple[str, tuple[holders.Holder, ...]] | None:
    try:
        handle = nvml_calls.call(pynvml.nvmlDeviceGetHandleByIndex, index)
        uuid: str = nvml_calls.call(pynvml.nvmlDeviceGetUUID, handle)
    except errors.HardwareError:
        return None
    minor = nvml_device.Device(handle).minor()
    driver_proc = files.driver_proc if minor is not None else None
    known = procfs.capabilities(driver_proc, minor or 0) if driver_proc else {}
    inside = procfs.compute_capabilities(driver_proc, minor or 0) if driver_proc else {}
    homes = {holder.pid: holder.home for holder in files.processes}
    found = {
        pid: holders.Holder(
            pid=pid,
            name=messages.printable(nvml_holders.process_name(pid)),
            home=homes.get(pid, ""),
            gpu_instances=tuple(sorted({ids[0] for ids in used})),
            compute_instances=tuple(sorted((one, two) for one, two in used if two is not None)),
        )
        for pid, used in _listed(handle).items()
    }
    for holder in procfs.of_gpu(files.processes, minor, caps=known) if minor is not None else ():
        found.setdefault(
            holder.pid,
            holders.Holder(
                pid=holder.pid,
                name=holder.name,
                home=holder.home,
                gpu_instances=tuple(sorted({known[cap] for cap in holder.caps if cap in known})),
                compute_instances=tuple(
                    sorted({inside[cap] for cap in holder.caps if cap in inside})
                ),
            ),
        )
    return uuid, tuple(found[pid] for pid in sorted(found))


def require_idle(plan: model.Plan, files: OpenFiles) -> None:
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
        users = holders.in_the_way(gpu, found[1])
        if users:
            names = procfs.listed([str(user) for user in users])
            busy.append(f"GPU {gpu.gpu_index} ({gpu.gpu_uuid}) is in use by {names}")
    if busy:
        raise errors.GpuInUseError("; ".join(busy))


def _listed(handle: nvml_device.Handle) -> dict[int, set[tuple[int, int | None]]]:
    """Return what each process that NVML lists uses, by pid: GPU and compute instances.

    None of the former: the GPU itself.
    """
    found: dict[int, set[tuple[int, int | None]]] = {}
    for process in nvml_holders.running(handle):
        used = found.setdefault(process.pid, set())
        if process.gpuInstanceId not in (None, nvml_holders.NO_INSTANCE):
            inside = process.computeInstanceId
            used.add(
                (process.gpuInstanceId, None if inside == nvml_holders.NO_INSTANCE else inside)
            )
    return found
