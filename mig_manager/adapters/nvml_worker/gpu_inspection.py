"""What NVML tells of driver and processes, asked by a child process that can be ended."""

import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.adapters.host import subprocesses
from mig_manager.adapters.nvml import processes
from mig_manager.adapters.nvml_worker import gpu_process
from mig_manager.core.host import gpu_processes

_MAX_BYTES = 1 << 20
_MAX_ERROR_BYTES = 2000


def command(
    *,
    library_path: str | None = None,
    driver_roots: Sequence[str] = (),
    simulate_state: str | None = None,
    proc_root: pathlib.Path | None = None,
) -> tuple[str, ...]:
    """Return the command line of ``mig_manager.adapters.nvml_worker.gpu_inspector``.

    Args:
        library_path: File of the NVML library; None leaves the search to the loader.
        driver_roots: Where to look for the library when the loader does not find it.
        simulate_state: State file of a simulated node; None for real GPUs.
        proc_root: Where to look for processes that NVML does not list; None: nowhere.
    """
    line = gpu_process.command(
        "mig_manager.adapters.nvml_worker.gpu_inspector",
        library_path=library_path,
        driver_roots=driver_roots,
        simulate_state=simulate_state,
    )
    return (*line, "--proc-root", str(proc_root)) if proc_root else tuple(line)


def inspect(
    line: Sequence[str], *, timeout_s: float, variables: Mapping[str, str]
) -> processes.Inspection:
    """Run the inspector to its end, or end it.

    Args:
        line: What ``command`` returned.
        timeout_s: How long it may take.
        variables: Those by which our own loader finds libraries.

    Raises:
        HardwareError: What NVML told; NVML_TIMEOUT when it told nothing in time; NVML_ERROR when
            the process died of it.
    """
    root = pathlib.Path("/")
    try:
        process = subprocesses.start(line, root=root, variables=variables, given="")
    except OSError as error:
        raise errors.HardwareError(
            f"the GPU inspector cannot be started: {error}", reason=errors.Reason.INTERNAL
        ) from error
    told = subprocesses.Kept(process.stdout, _MAX_BYTES)
    said = subprocesses.Kept(process.stderr, _MAX_ERROR_BYTES, is_end=True)
    deadline = time.monotonic() + timeout_s
    try:
        has_ended = subprocesses.attend(
            process.pid, (told, said), lambda: time.monotonic() > deadline
        )
    finally:
        subprocesses.end(process, "gpu_inspector")
    if not has_ended:
        raise errors.HardwareError(
            f"NVML gave no answer within {timeout_s:g} s", reason=errors.Reason.NVML_TIMEOUT
        )
    return _understood(told.text(), f"it ended with status {process.returncode}: {said.text()}")


def _understood(text: str, otherwise: str) -> processes.Inspection:
    try:
        data: Mapping[str, Any] = json.loads(text)
        if "error" in data:
            raise errors.HardwareError(data["error"], reason=errors.Reason(data["reason"]))
        return processes.Inspection(
            driver_version=data["driver_version"],
            nvml_version=data["nvml_version"],
            holders=tuple(
                (uuid, tuple(_process(each) for each in processes))
                for uuid, processes in data["holders"]
            ),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise errors.HardwareError(
            f"the GPU inspector gave no answer; {otherwise.strip()}",
            reason=errors.Reason.NVML_ERROR,
        ) from error


def _process(data: Mapping[str, Any]) -> gpu_processes.GpuProcess:
    return gpu_processes.GpuProcess(
        pid=data["pid"],
        name=data["name"],
        home=data["home"],
        gpu_instances=tuple(data["gpu_instances"]),
        compute_instances=tuple((one, two) for one, two in data["compute_instances"]),
    )
