"""Reset GPUs, with ``nvidia-smi --gpu-reset``."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

import structlog

from mig_manager import errors, reasons
from mig_manager.adapters.host import device_users, procfs, programs, smi_status
from mig_manager.core import gpu_processes, model, ports
from mig_manager.core.settings import host_settings

_MAX_BYTES = 4 * 2**20
"""Ten times the output for a GPU with seven instances and hundreds of processes."""
_TOOL = "nvidia-smi"
_QUERY_TIMEOUT_S = 60.0

_REASON = reasons.Reason.RESET_REQUIRED
_NOT_AVAILABLE = 3
"""Exit status: "the requested operation is not available on target device" (``nvidia-smi(1)``)."""
_NO_PERMISSION = 4
_IN_USE = re.compile(r"in use by another|being used by", re.IGNORECASE)
_UNSUPPORTED = re.compile(r"not supported", re.IGNORECASE)
_ADDRESS = re.compile(r"\b([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])\b", re.IGNORECASE)

_log = structlog.get_logger()


@dataclasses.dataclass(eq=False, repr=False, match_args=False)
class SmiReset:
    """Implements ``ports.GpuReset``."""

    tools: programs.Programs
    _: dataclasses.KW_ONLY
    timeout_s: float = 120.0  # for every reset command
    proc: pathlib.Path = procfs.ROOT

    def restore_persistence(self, gpus: Sequence[model.Gpu]) -> bool:
        """Switch persistence mode on; a failure is logged. Return whether it is on."""
        return not gpus or self._set_persistence(gpus, is_on=True)

    def reset(
        self,
        gpus: Sequence[model.Gpu],
        record_persistence: ports.RecordPersistence,
        *,
        is_repair: bool = False,
    ) -> None:
        """Reset the GPUs whose MIG mode is still pending; for a repair all of them.

        One command resets all of them, in a fraction of the time. If the driver refuses it, GPUs
        are reset one by one, together with GPUs connected by NVLink.
        """
        for gpu in gpus:
            require_resettable(gpu, is_repair=is_repair)
        statuses = self._query(gpus)
        pending = [gpu for gpu in gpus if is_repair or statuses[gpu.uuid].is_pending]
        for gpu in pending:
            self._require_free(gpu, statuses[gpu.uuid], is_repair=is_repair)
        if len(pending) > 1:
            answer = self._try_reset(pending, record_persistence)
            after = self._query(pending)
            is_left = is_repair and answer.status != 0
            pending = [gpu for gpu in pending if is_left or after[gpu.uuid].is_pending]
            if pending:
                _log.warning(
                    "gpus_reset_one_by_one",
                    gpus=[gpu.uuid for gpu in pending],
                    status=answer.status,
                    output=answer.output,
                )
        while pending:
            done = self._reset(pending[:1], pending, record_persistence)
            pending = [gpu for gpu in pending if gpu not in done]

    def _run(self, *arguments: str, timeout_s: float = _QUERY_TIMEOUT_S) -> programs.Finished:
        program = self.tools.find(_TOOL)
        if program is None:
            raise errors.HostError(
                f"{_TOOL}, which resets GPUs, is found neither with the driver nor on the host",
                reason=_REASON,
            )
        return programs.run(
            program,
            arguments,
            timeout_s=timeout_s,
            reason=_REASON,
            max_output_bytes=_MAX_BYTES,
        )

    def _query(self, gpus: Sequence[model.Gpu]) -> Mapping[str, smi_status.SmiStatus]:
        """Query GPUs by UUID, and check that the tool shows the same GPUs."""
        if not gpus:
            return {}
        done = self._run("-q", "-x", "-i", _bus_ids(gpus))
        if done.status:
            raise done.failure(_REASON)
        statuses = {status.uuid: status for status in smi_status.parse(done.stdout)}
        if missing := [str(gpu) for gpu in gpus if gpu.uuid not in statuses]:
            raise errors.HostError(
                f"{done.line} does not show {', '.join(missing)}", reason=_REASON
            )
        return statuses

    def _require_free(
        self, gpu: model.Gpu, status: smi_status.SmiStatus, *, is_repair: bool
    ) -> None:
        if status.has_instances and not is_repair:
            raise _with_instances(gpu)
        if users := self._users(gpu, status, ignore=gpu_processes.RELEASING_DAEMONS):
            raise errors.HostError(
                f"{gpu} is not reset while it is in use by {device_users.name_users(users)}",
                reason=reasons.Reason.IN_USE,
            )
        if hidden := device_users.describe_hidden(self.proc):
            # The tool refuses a GPU that is in use, without naming processes.
            _log.warning("gpu_users_unknown", gpu=gpu.uuid, why=hidden)

    def _users(
        self, gpu: model.Gpu, status: smi_status.SmiStatus, *, ignore: Sequence[str] = ()
    ) -> list[str]:
        processes = device_users.find_users(self.proc, ignore=(os.getpid(),))
        drm = device_users.drm_nodes(self.proc, gpu.pci_address)
        openers = {
            process.pid: str(process)
            for process in device_users.using_gpu(processes, status.minor, drm=drm)
            if process.name not in ignore
        }
        return [name for _, name in sorted({**status.processes, **openers}.items())]

    def _reset(
        self,
        gpus: Sequence[model.Gpu],
        pending: Sequence[model.Gpu],
        record: ports.RecordPersistence,
    ) -> Sequence[model.Gpu]:
        """Reset GPUs and connected GPUs of ``pending`` in one command; return the reset GPUs."""
        done = self._try_reset(gpus, record)
        if done.status == 0:
            statuses = self._query(gpus)
            if waiting := [str(gpu) for gpu in gpus if statuses[gpu.uuid].is_pending]:
                raise errors.HostError(
                    f"{_TOOL} says that it reset {', '.join(waiting)}, yet their MIG mode is "
                    "still pending",
                    reason=_REASON,
                )
            return gpus
        addresses = (_addresses(gpu.pci_address) for gpu in gpus)
        linked = _addresses(done.output).difference(*addresses)
        if not linked:
            raise self._refusal(gpus, done)
        linked_pending = [gpu for gpu in pending if linked & _addresses(gpu.pci_address)]
        if len(linked_pending) < len(linked):
            names = ", ".join(f"{a:08X}:{b:02X}:{c:02X}.{d:X}" for a, b, c, d in sorted(linked))
            raise errors.HostError(
                f"{', '.join(map(str, gpus))} can only be reset together with {names}, which "
                f"must not be: {done.line} ended with status {done.status}. Start NVIDIA's Fabric "
                "Manager, with which GPUs are reset one by one, or reboot",
                reason=_REASON,
            )
        return self._reset([*gpus, *linked_pending], pending, record)

    def _try_reset(
        self, gpus: Sequence[model.Gpu], record: ports.RecordPersistence
    ) -> programs.Finished:
        """Run one reset command; first switch off persistence mode that keeps a GPU open."""
        command = ("--gpu-reset", "-i", _bus_ids(gpus))
        done = self._run(*command, timeout_s=self.timeout_s)
        if done.status and _IN_USE.search(done.output):
            # With persistence mode the driver keeps a GPU open that no process uses
            # (``nvidia-smi(1)``, ``-pm``).
            statuses = self._query(gpus)
            persistent = [gpu for gpu in gpus if statuses[gpu.uuid].is_persistent]
            if persistent:
                uuids = [gpu.uuid for gpu in persistent]
                record(uuids, is_on=False)
                self._set_persistence(persistent, is_on=False)
                try:
                    done = self._run(*command, timeout_s=self.timeout_s)
                finally:
                    if self._set_persistence(persistent, is_on=True):
                        record(uuids, is_on=True)
        return done

    def _set_persistence(self, gpus: Sequence[model.Gpu], *, is_on: bool) -> bool:
        """Set persistence mode; log a failure, and return whether it was set."""
        uuids = [gpu.uuid for gpu in gpus]
        try:
            done = self._run("-pm", str(int(is_on)), "-i", _bus_ids(gpus))
            if done.status:
                raise done.failure(_REASON)
        except errors.HostError as error:
            _log.warning("persistence_mode_unchanged", gpus=uuids, error=error.message)
            return False
        _log.info("persistence_mode_set", gpus=uuids, is_on=is_on)
        return True

    def _refusal(self, gpus: Sequence[model.Gpu], done: programs.Finished) -> errors.HostError:
        if _IN_USE.search(done.output):
            statuses = self._query(gpus)
            users = [user for gpu in gpus for user in self._users(gpu, statuses[gpu.uuid])]
            names = device_users.name_users(dict.fromkeys(users))
            by = f"by {names}, and maybe by other processes" if names else "by processes"
            error = errors.HostError(
                f"{done.line}: in use {by} that are not visible here", reason=reasons.Reason.IN_USE
            )
            for cause in (
                device_users.describe_hidden(self.proc),
                device_users.drm_module(self.proc),
            ):
                if cause:
                    error.add(cause)
            return error
        if done.status == _NO_PERMISSION:
            return done.failure(reasons.Reason.NO_PERMISSION)
        if done.status == _NOT_AVAILABLE or _UNSUPPORTED.search(done.output):
            error = done.failure(reasons.Reason.REBOOT_REQUIRED)
            error.add("only a reboot resets it")
            return error
        return done.failure(_REASON)


def require_resettable(gpu: model.Gpu, *, is_repair: bool) -> None:
    """Check that a GPU may be reset; ``HostError`` as ``ports.GpuReset.reset``."""
    match gpu.virtualization:
        case model.Virtualization.PASSTHROUGH:
            raise errors.HostError(
                f"{gpu} is passed through to this virtual machine, inside which it cannot be "
                "reset: only a reboot of the machine does that",
                reason=reasons.Reason.REBOOT_REQUIRED,
            )
        case model.Virtualization.VGPU:
            raise errors.HostError(
                f"{gpu} is a vGPU: only its host can reset it",
                reason=reasons.Reason.NOT_SUPPORTED,
            )
        case model.Virtualization.NONE | model.Virtualization.HOST:
            pass
    if is_repair:
        # A fault may keep the driver from destroying its instances.
        return
    if not gpu.has_pending_mode:
        raise errors.HostError(
            f"{gpu} is not reset: no change of its MIG mode is pending", reason=_REASON
        )
    if gpu.gpu_instances:
        raise _with_instances(gpu)


def roots(host: host_settings.HostRoots) -> tuple[programs.Root, ...]:
    """Return the roots that may have ``nvidia-smi``, best first: driver, host, our own.

    The persistence daemon releases a GPU only for an ``nvidia-smi`` that sees its socket in
    ``/run``, so our own is last.
    """
    own_root, *others = programs.roots(host)
    return (*others, own_root)


def _with_instances(gpu: model.Gpu) -> errors.HostError:
    return errors.HostError(
        f"{gpu} is not reset: it has GPU instances, which would be lost", reason=_REASON
    )


def _bus_ids(gpus: Sequence[model.Gpu]) -> str:
    """Return the PCI addresses, by which nvidia-smi finds GPUs without opening the others."""
    return ",".join(gpu.pci_address.upper() for gpu in gpus)


def _addresses(text: str) -> set[tuple[int, ...]]:
    """Return the PCI addresses in a text; domains are written with four digits or eight."""
    return {tuple(int(part, 16) for part in parts) for parts in _ADDRESS.findall(text)}
