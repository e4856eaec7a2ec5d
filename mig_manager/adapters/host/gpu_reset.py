"""What ``nvidia-smi -q -x`` says of one GPU: its XML, in our words.

The elements are those of NVIDIA's ``nvsmi_device`` DTD. Where one is absent nothing is assumed.
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
from mig_manager.core import messages, model
from mig_manager.core.host import gpu_processes, host_settings
from mig_manager.core.host import gpu_processes as processes

MAX_BYTES = 4 * 2**20
"""A GPU cut in seven with hundreds of processes needs a tenth of it."""

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
class Look:
    """What there is on a GPU."""

    uuid: str
    minor: int | None
    """The N of its ``/dev/nvidiaN``; None when it is not told."""
    is_pending: bool
    """Whether a switch of MIG mode is."""
    is_persistent: bool
    """Whether persistence mode is on: the driver itself then keeps the GPU open."""
    has_instances: bool
    """Whether it has MIG devices; GPU instances without a compute instance are not told of."""
    processes: tuple[Process, ...]


def parse(text: str) -> Look | None:
    """Return what is said of the one GPU; None when it is not one, or not to be made sense of."""
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
    current, pending = (_said(gpu, f"mig_mode/{which}_mig") for which in ("current", "pending"))
    minor = _said(gpu, "minor_number")
    return Look(
        uuid=_said(gpu, "uuid"),
        minor=int(minor) if minor.isdecimal() else None,
        is_pending=bool(current and pending) and current != pending,
        is_persistent=_said(gpu, "persistence_mode") == "Enabled",
        has_instances=gpu.find("mig_devices/mig_device") is not None,
        processes=tuple(
            Process(pid=int(pid), name=_name(each))
            for each in gpu.iterfind("processes/process_info")
            if (pid := _said(each, "pid")).isdecimal()
        ),
    )


def _name(process: ET.Element) -> str:
    return messages.printable(gpu_processes.program(_said(process, "process_name")) or _NO_NAME)


def _said(element: ET.Element, path: str) -> str:
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
        found: Where ``nvidia-smi`` is looked for; see ``roots``.
        timeout_s: How long each reset may take.
        proc: Where to look for processes that hold a GPU.
    """

    def __init__(
        self,
        found: programs.Programs,
        *,
        timeout_s: float = _RESET_TIMEOUT_S,
        proc: pathlib.Path = procfs.ROOT,
    ) -> None:
        self._tools = found
        self._timeout_s = timeout_s
        self._proc = proc

    def reset(self, gpus: Sequence[model.Gpu]) -> None:
        """Reset those of the GPUs whose MIG mode is still pending, one after the other.

        GPUs that NVLink ties together go into one command where all of them are wanted; others
        are never taken along.

        Raises:
            HostError: IN_USE: somebody holds one, and may let go of it. RESET_REQUIRED: one has
                instances or was refused; says which and why. REBOOT_REQUIRED: this machine
                cannot reset it. NO_PERMISSION.
        """
        if not gpus:
            return
        for gpu in gpus:
            _require_resettable(gpu)
        program = self._program()
        looks = [(gpu, self._look(program, gpu)) for gpu in gpus]
        due = [gpu for gpu, look in looks if look.is_pending]
        for gpu, look in looks:
            if look.is_pending:
                self._require_free(gpu, look)
        while due:
            done = self._reset(program, due[:1], due)
            due = [gpu for gpu in due if gpu not in done]

    def _program(self) -> programs.Program:
        program = self._tools.find(_TOOL)
        if program is None:
            raise errors.HostError(
                f"{_TOOL}, which resets GPUs, is found neither with the driver nor on the host",
                reason=_REASON,
            )
        return program

    def _look(self, program: programs.Program, gpu: model.Gpu) -> Look:
        """Ask the tool itself about a GPU: which one it takes it for, and what is on it now."""
        done = self._tools.run(
            program,
            ["-q", "-x", "-i", _bus_id(gpu)],
            timeout_s=_QUERY_TIMEOUT_S,
            reason=_REASON,
            max_output_bytes=MAX_BYTES,
        )
        if done.status:
            raise done.refused(_REASON)
        look = parse(done.stdout)
        if look is None or look.uuid != gpu.uuid:
            raise errors.HostError(
                f"{done.line} does not tell of {gpu}; it is not reset", reason=_REASON
            )
        return look

    def _require_free(self, gpu: model.Gpu, look: Look) -> None:
        if look.has_instances:
            raise _with_instances(gpu)
        holders = self._holders(look, but=processes.RELEASING_DAEMONS)
        if holders:
            raise errors.HostError(
                f"{gpu} is not reset while it is held by {procfs.listed(holders)}",
                reason=errors.Reason.IN_USE,
            )
        hidden = procfs.hidden(self._proc)
        if hidden:
            # The tool refuses a GPU that is in use, and says less about it than we could.
            _log.warning("gpu_users_unknown", gpu=gpu.uuid, why=hidden)

    def _holders(self, look: Look, *, but: Sequence[str] = ()) -> list[str]:
        """Return who holds a GPU, as far as can be seen from here."""
        seen = {
            holder.pid: str(holder)
            for holder in procfs.gpu_processes(self._proc, ignore=(os.getpid(),))
            if look.minor in holder.gpus and holder.name not in but
        }
        listed = {each.pid: str(each) for each in look.processes}
        return [name for _, name in sorted({**listed, **seen}.items())]

    def _reset(
        self, program: programs.Program, chosen: Sequence[model.Gpu], due: Sequence[model.Gpu]
    ) -> Sequence[model.Gpu]:
        """Reset GPUs in one command, and those of ``due`` that are tied to them; return which."""
        done = self._reset_once(program, chosen)
        if done.status and _IN_USE.search(_output(done)):
            persistent = [gpu for gpu in chosen if self._look(program, gpu).is_persistent]
            if persistent:
                with self._without_persistence(program, persistent):
                    done = self._reset_once(program, chosen)
        if done.status == 0:
            for gpu in chosen:
                self._require_in_force(program, gpu)
            return chosen
        said = _output(done)
        tied = _addresses(said) - {_address(gpu) for gpu in chosen}
        more = [gpu for gpu in due if _address(gpu) in tied]
        if tied and len(more) == len(tied):
            return self._reset(program, [*chosen, *more], due)
        if tied:
            raise _tied(chosen, tied, done)
        raise self._refused(program, chosen, done, said)

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
        """Switch persistence mode off for the body, and on again afterwards.

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
        """Switch persistence mode; the reset then shows whether a failure matters."""
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

    def _require_in_force(self, program: programs.Program, gpu: model.Gpu) -> None:
        if self._look(program, gpu).is_pending:
            raise errors.HostError(
                f"{_TOOL} says that it reset {gpu}, yet its MIG mode is still pending",
                reason=_REASON,
            )

    def _refused(
        self,
        program: programs.Program,
        chosen: Sequence[model.Gpu],
        done: programs.Finished,
        said: str,
    ) -> errors.HostError:
        """Return the error for a reset that the tool refused."""
        if _IN_USE.search(said):
            return self._in_use(program, chosen, done)
        if done.status == _NO_PERMISSION:
            return done.refused(errors.Reason.NO_PERMISSION)
        if done.status == _NOT_AVAILABLE or _UNSUPPORTED.search(said):
            error = done.refused(errors.Reason.REBOOT_REQUIRED)
            error.add("only a reboot brings the mode into force")
            return error
        return done.refused(_REASON)

    def _in_use(
        self, program: programs.Program, chosen: Sequence[model.Gpu], done: programs.Finished
    ) -> errors.HostError:
        holders = [holder for gpu in chosen for holder in self._holders(self._look(program, gpu))]
        who = procfs.listed(list(dict.fromkeys(holders)))
        held = f"it is open in {who}, and maybe in others" if who else "somebody has it open"
        hidden = procfs.hidden(self._proc)
        why = f"; {hidden}" if hidden else ""
        return errors.HostError(
            f"{done.line}: in use; {held} that cannot be seen from here{why}",
            reason=errors.Reason.IN_USE,
        )


def roots(host: host_settings.HostRoots) -> tuple[programs.Root, ...]:
    """Return where to look for ``nvidia-smi``, best first: with the driver, on the host, here.

    Not here first, as for other tools: the persistence daemon lets go of a GPU only for an
    ``nvidia-smi`` that sees its socket, ``/run/nvidia-persistenced/socket``.

    Args:
        host: Where driver and host are.
    """
    here, *others = programs.roots(host)
    return (*others, here)


def _require_resettable(gpu: model.Gpu) -> None:
    """Refuse, before anything is asked, what must not or cannot be reset."""
    match gpu.virtualization:
        case model.Virtualization.PASSTHROUGH:
            raise errors.HostError(
                f"{gpu} is passed through to this virtual machine, inside which it cannot be "
                "reset: only a reboot of it brings the mode into force",
                reason=errors.Reason.REBOOT_REQUIRED,
            )
        case model.Virtualization.VGPU:
            raise errors.HostError(
                f"{gpu} is a vGPU: it is up to its host to reset it",
                reason=errors.Reason.NOT_SUPPORTED,
            )
        case model.Virtualization.NONE | model.Virtualization.HOST:
            pass
    if not gpu.has_pending_mode:
        raise errors.HostError(
            f"{gpu} is not reset: no switch of its MIG mode is pending", reason=_REASON
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
    """Return the name that finds a GPU without a look at the others, as nvidia-smi writes it."""
    return gpu.pci_address.upper()


def _address(gpu: model.Gpu) -> _Address:
    (address,) = _addresses(gpu.pci_address)
    return address


def _addresses(text: str) -> set[_Address]:
    """Return the PCI addresses in a text; domains are written with four digits or eight."""
    return {tuple(int(part, 16) for part in found) for found in _ADDRESS.findall(text)}
