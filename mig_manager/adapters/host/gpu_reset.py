"""Reset GPUs whose MIG mode is pending, by ``nvidia-smi --gpu-reset``.

Before and after a reset ``nvidia-smi -q -x`` shows what is on the GPU. Its elements are those of
NVIDIA's ``nvsmi_device`` DTD.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence

import structlog

from mig_manager import errors
from mig_manager.adapters.host import procfs, programs
from mig_manager.core import host_settings, messages, model, steps

MAX_BYTES = 4 * 2**20
"""A GPU with seven instances and hundreds of processes needs a tenth of it."""

_NO_NAME = "process"
_END = "</nvidia_smi_log>"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that has a context on the GPU."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuStatus:
    """A GPU as ``nvidia-smi`` sees it."""

    uuid: str
    minor: int | None
    """The N of its ``/dev/nvidiaN``; None if unknown."""
    is_pending: bool
    """Whether a change of the MIG mode is pending."""
    is_persistent: bool
    """Whether persistence mode is on: the driver itself then keeps the GPU open."""
    has_instances: bool
    """Whether it has MIG devices; a GPU instance without compute instances is not shown."""
    processes: tuple[Process, ...]


def parse(text: str) -> GpuStatus | None:
    """Parse the XML of one GPU; None if it is malformed or has not exactly one."""
    # Warnings, such as that of a corrupt infoROM, follow the document.
    document, end, _ = text.partition(_END)
    try:
        # Of the driver's own tool, whose output is bounded; expat bounds what entities make of it.
        root = ET.fromstring(document + end)  # noqa: S314
    except ET.ParseError:
        return None
    gpus = root.findall("gpu")
    if len(gpus) != 1:
        return None
    gpu = gpus[0]
    current, pending = (_text(gpu, f"mig_mode/{which}_mig") for which in ("current", "pending"))
    minor = _text(gpu, "minor_number")
    return GpuStatus(
        uuid=_text(gpu, "uuid"),
        minor=int(minor) if minor.isdecimal() else None,
        is_pending=bool(current and pending) and current != pending,
        is_persistent=_text(gpu, "persistence_mode") == "Enabled",
        has_instances=gpu.find("mig_devices/mig_device") is not None,
        processes=tuple(
            Process(pid=int(pid), name=_name(each))
            for each in gpu.iterfind("processes/process_info")
            if (pid := _text(each, "pid")).isdecimal()
        ),
    )


def _name(process: ET.Element) -> str:
    return messages.printable(steps.program_name(_text(process, "process_name")) or _NO_NAME)


def _text(element: ET.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


_TOOL = "nvidia-smi"
_RESET_TIMEOUT_S = 120.0
_QUERY_TIMEOUT_S = 60.0

_REASON = errors.Reason.RESET_REQUIRED

_NOT_AVAILABLE = 3
"""Exit status: "the requested operation is not available on target device" (``nvidia-smi(1)``)."""
_NO_PERMISSION = 4
_IN_USE = re.compile(r"in use by another|being used by", re.IGNORECASE)
_UNSUPPORTED = re.compile(r"not supported", re.IGNORECASE)
_ADDRESS = re.compile(r"\b([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])\b", re.IGNORECASE)

_Address = tuple[int, ...]

_log = structlog.get_logger()


class SmiReset:
    """Implements ``ports.GpuReset``.

    Args:
        search: Finds ``nvidia-smi``; see ``roots``.
        timeout_s: How long each reset may take.
        proc: The ``/proc`` that shows processes using a GPU.
    """

    def __init__(
        self,
        search: programs.Programs,
        *,
        timeout_s: float = _RESET_TIMEOUT_S,
        proc: pathlib.Path = procfs.ROOT,
    ) -> None:
        self._tools = search
        self._timeout_s = timeout_s
        self._proc = proc

    def reset(self, gpus: Sequence[model.Gpu]) -> None:
        """Reset those of the GPUs whose MIG mode is still pending, one after the other.

        GPUs that NVLink connects are reset by one command if all of them are listed; a GPU that
        is not listed is never reset.

        Raises:
            HostError: IN_USE: a process uses one. RESET_REQUIRED: one has instances or was
                refused; says which and why. REBOOT_REQUIRED: this machine cannot reset it.
                NO_PERMISSION.
        """
        if not gpus:
            return
        for gpu in gpus:
            _require_resettable(gpu)
        program = self._program()
        statuses = [(gpu, self._query(program, gpu)) for gpu in gpus]
        pending = [gpu for gpu, status in statuses if status.is_pending]
        for gpu, status in statuses:
            if status.is_pending:
                self._require_free(gpu, status)
        while pending:
            done = self._reset(program, pending[:1], pending)
            pending = [gpu for gpu in pending if gpu not in done]

    def _program(self) -> programs.Program:
        program = self._tools.find(_TOOL)
        if program is None:
            raise errors.HostError(
                f"{_TOOL}, which resets GPUs, is found neither with the driver nor on the host",
                reason=_REASON,
            )
        return program

    def _query(self, program: programs.Program, gpu: model.Gpu) -> GpuStatus:
        """Query a GPU, and check that the tool means the same one."""
        done = self._tools.run(
            program,
            ["-q", "-x", "-i", _bus_id(gpu)],
            timeout_s=_QUERY_TIMEOUT_S,
            reason=_REASON,
            max_output_bytes=MAX_BYTES,
        )
        if done.status:
            raise done.refused(_REASON)
        status = parse(done.stdout)
        if status is None or status.uuid != gpu.uuid:
            raise errors.HostError(
                f"{done.line} does not show {gpu}; it is not reset", reason=_REASON
            )
        return status

    def _require_free(self, gpu: model.Gpu, status: GpuStatus) -> None:
        if status.has_instances:
            raise _with_instances(gpu)
        users = self._users(status, ignore=steps.RELEASING_DAEMONS)
        if users:
            raise errors.HostError(
                f"{gpu} is not reset while it is in use by {procfs.listed(users)}",
                reason=errors.Reason.IN_USE,
            )
        hidden = procfs.hidden(self._proc)
        if hidden:
            # The tool refuses a GPU that is in use, without naming processes.
            _log.warning("gpu_users_unknown", gpu=gpu.uuid, why=hidden)

    def _users(self, status: GpuStatus, *, ignore: Sequence[str] = ()) -> list[str]:
        """Name the processes that use a GPU, as far as they are visible here."""
        seen = {
            process.pid: str(process)
            for process in procfs.gpu_processes(self._proc, ignore=(os.getpid(),))
            if status.minor in process.gpus and process.name not in ignore
        }
        listed = {each.pid: str(each) for each in status.processes}
        return [name for _, name in sorted({**listed, **seen}.items())]

    def _reset(
        self, program: programs.Program, chosen: Sequence[model.Gpu], pending: Sequence[model.Gpu]
    ) -> Sequence[model.Gpu]:
        """Reset GPUs in one command, with those of ``pending`` connected to them; return which."""
        done = self._reset_once(program, chosen)
        if done.status and _IN_USE.search(_output(done)):
            persistent = [gpu for gpu in chosen if self._query(program, gpu).is_persistent]
            if persistent:
                with self._without_persistence(program, persistent):
                    done = self._reset_once(program, chosen)
        if done.status == 0:
            for gpu in chosen:
                self._require_applied(program, gpu)
            return chosen
        output = _output(done)
        tied = _addresses(output) - {_address(gpu) for gpu in chosen}
        more = [gpu for gpu in pending if _address(gpu) in tied]
        if tied and len(more) == len(tied):
            return self._reset(program, [*chosen, *more], pending)
        if tied:
            raise _tied(chosen, tied, done)
        raise self._refused(program, chosen, done, output)

    def _reset_once(
        self, program: programs.Program, chosen: Sequence[model.Gpu]
    ) -> programs.Finished:
        return self._tools.run(
            program,
            ["--gpu-reset", "-i", _bus_ids(chosen)],
            timeout_s=self._timeout_s,
            reason=_REASON,
        )

    @contextlib.contextmanager
    def _without_persistence(
        self, program: programs.Program, gpus: Sequence[model.Gpu]
    ) -> Iterator[None]:
        """Disable persistence mode during the body, and enable it again afterwards.

        With it the driver keeps a GPU open that no process uses (``nvidia-smi(1)``, ``-pm``).
        """
        self._set_persistence(program, gpus, is_on=False)
        try:
            yield
        finally:
            self._set_persistence(program, gpus, is_on=True)

    def _set_persistence(
        self, program: programs.Program, gpus: Sequence[model.Gpu], *, is_on: bool
    ) -> None:
        """Set persistence mode; only log a failure, because the reset shows whether it matters."""
        arguments = ["-pm", str(int(is_on)), "-i", _bus_ids(gpus)]
        uuids = [gpu.uuid for gpu in gpus]
        try:
            done = self._tools.run(program, arguments, timeout_s=_QUERY_TIMEOUT_S, reason=_REASON)
            if done.status:
                raise done.refused(_REASON)
        except errors.HostError as error:
            _log.warning("persistence_mode_unchanged", gpus=uuids, error=error.message)
        else:
            _log.info("persistence_mode_set", gpus=uuids, is_on=is_on)

    def _require_applied(self, program: programs.Program, gpu: model.Gpu) -> None:
        if self._query(program, gpu).is_pending:
            raise errors.HostError(
                f"{_TOOL} says that it reset {gpu}, yet its MIG mode is still pending",
                reason=_REASON,
            )

    def _refused(
        self,
        program: programs.Program,
        chosen: Sequence[model.Gpu],
        done: programs.Finished,
        output: str,
    ) -> errors.HostError:
        """Return the error for a reset that the tool refused."""
        if _IN_USE.search(output):
            return self._in_use(program, chosen, done)
        if done.status == _NO_PERMISSION:
            return done.refused(errors.Reason.NO_PERMISSION)
        if done.status == _NOT_AVAILABLE or _UNSUPPORTED.search(output):
            error = done.refused(errors.Reason.REBOOT_REQUIRED)
            error.add("only a reboot applies the mode")
            return error
        return done.refused(_REASON)

    def _in_use(
        self, program: programs.Program, chosen: Sequence[model.Gpu], done: programs.Finished
    ) -> errors.HostError:
        users = [user for gpu in chosen for user in self._users(self._query(program, gpu))]
        names = procfs.listed(list(dict.fromkeys(users)))
        by = f"by {names}, and maybe by other processes" if names else "by processes"
        hidden = procfs.hidden(self._proc)
        why = f"; {hidden}" if hidden else ""
        return errors.HostError(
            f"{done.line}: in use {by} that are not visible here{why}",
            reason=errors.Reason.IN_USE,
        )


def roots(host: host_settings.HostRoots) -> tuple[programs.Root, ...]:
    """Return the roots that may have ``nvidia-smi``, best first: driver, host, our own.

    Our own is not first, unlike for other programs: the persistence daemon releases a GPU only for
    an ``nvidia-smi`` that sees its socket, ``/run/nvidia-persistenced/socket``.
    """
    here, *others = programs.roots(host)
    return (*others, here)


def _require_resettable(gpu: model.Gpu) -> None:
    match gpu.virtualization:
        case model.Virtualization.PASSTHROUGH:
            raise errors.HostError(
                f"{gpu} is passed through to this virtual machine, inside which it cannot be "
                "reset: only a reboot of the machine applies the mode",
                reason=errors.Reason.REBOOT_REQUIRED,
            )
        case model.Virtualization.VGPU:
            raise errors.HostError(
                f"{gpu} is a vGPU: only its host can reset it",
                reason=errors.Reason.NOT_SUPPORTED,
            )
        case model.Virtualization.NONE | model.Virtualization.HOST:
            pass
    if not gpu.has_pending_mode:
        raise errors.HostError(
            f"{gpu} is not reset: no change of its MIG mode is pending", reason=_REASON
        )
    if gpu.gpu_instances:
        raise _with_instances(gpu)


def _with_instances(gpu: model.Gpu) -> errors.HostError:
    return errors.HostError(
        f"{gpu} is not reset: it has GPU instances, which would be lost", reason=_REASON
    )


def _tied(
    chosen: Sequence[model.Gpu], tied: set[_Address], done: programs.Finished
) -> errors.HostError:
    names = ", ".join(f"{a:08X}:{b:02X}:{c:02X}.{d:X}" for a, b, c, d in sorted(tied))
    which = ", ".join(map(str, chosen))
    return errors.HostError(
        f"{which} can only be reset together with {names}, which must not be: {done.line} "
        f"ended with status {done.status}. Start NVIDIA's Fabric Manager, with which GPUs are "
        "reset one by one, or reboot",
        reason=_REASON,
    )


def _output(done: programs.Finished) -> str:
    return f"{done.stdout}\n{done.stderr}"


def _bus_ids(gpus: Sequence[model.Gpu]) -> str:
    return ",".join(map(_bus_id, gpus))


def _bus_id(gpu: model.Gpu) -> str:
    """Return the PCI address, by which nvidia-smi finds a GPU without opening the others."""
    return gpu.pci_address.upper()


def _address(gpu: model.Gpu) -> _Address:
    (address,) = _addresses(gpu.pci_address)
    return address


def _addresses(text: str) -> set[_Address]:
    """Return the PCI addresses in a text; domains are written with four digits or eight."""
    return {tuple(int(part, 16) for part in found) for found in _ADDRESS.findall(text)}
