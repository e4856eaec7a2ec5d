"""Receive the driver's events: MIG changes by all processes, and critical errors of GPUs."""

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pynvml

from mig_manager import errors, reasons
from mig_manager.adapters.nvml import library

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Xids that errors of an application cause (NVIDIA's Xid catalogue); the GPU is not at fault. The
device plugin also ignores exactly these (``internal/rm/health.go``)."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuEvent:
    """An event of a GPU."""

    uuid: str
    xid: int | None = None  # number of a critical error; None: a change of MIG


class MigChanges:
    """Receives MIG changes of all processes as NVML events in an open session; for one thread.

    The registered GPUs also report their critical errors (Xid), if they can.

    Changes before a GPU is registered are not reported, and a wait may end before its time
    (``nvml.h``, "Event Handling Methods"). A GPU or driver without the event refuses the
    registration with NOT_SUPPORTED, an old driver also while MIG mode is off (DCGM's cache manager
    tolerates that).

    Raises:
        HardwareError: NOT_SUPPORTED: no GPU can report changes.
    """

    def __init__(self, event_set: Any) -> None:
        self._event_set = event_set
        self._uuids: dict[int, str] = {}
        self.gpu_count: int = library.call(pynvml.nvmlDeviceGetCount)
        """Number of the node's GPUs, registered or not."""
        refusals: list[errors.HardwareError] = []
        for index in range(self.gpu_count):
            try:
                handle = library.call(pynvml.nvmlDeviceGetHandleByIndex, index)
                # A GPU without MIG refuses this, even where its driver accepts the event.
                library.call(pynvml.nvmlDeviceGetMigMode, handle)
                uuid: str = library.call(pynvml.nvmlDeviceGetUUID, handle)
                change = pynvml.nvmlEventMigConfigChange
                types = library.call_unless(
                    library.UNSUPPORTED, pynvml.nvmlDeviceGetSupportedEventTypes, handle
                )
                change |= (types or 0) & pynvml.nvmlEventTypeXidCriticalError
                library.call(pynvml.nvmlDeviceRegisterEvents, handle, change, event_set)
                self._uuids[_address(handle)] = uuid
            except errors.HardwareError as error:
                error.begin_with(f"GPU {index}")
                # A GPU that cannot be watched is left out; a failure of the whole driver is not.
                if error.code in library.WHOLE_DRIVER - library.UNSUPPORTED:
                    raise
                refusals.append(error)
        if not self._uuids:
            no_gpu = errors.HardwareError(
                "this node has no GPU",
                reason=reasons.Reason.NOT_SUPPORTED,
                operation="nvmlDeviceGetCount",
            )
            raise refusals[0] if refusals else no_gpu

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the registered GPUs."""
        return tuple(self._uuids.values())

    def wait(self, timeout_s: float) -> GpuEvent | None:
        """Return the next event; None if none comes in time, or an application caused it."""
        wait = pynvml.nvmlEventSetWait_v2
        timeout_ms = int(timeout_s * 1000)
        event = library.call_unless({pynvml.NVML_ERROR_TIMEOUT}, wait, self._event_set, timeout_ms)
        if event is None:
            return None
        uuid = self._uuids.get(_address(event.device), "unknown")
        if event.eventType != pynvml.nvmlEventTypeXidCriticalError:
            return GpuEvent(uuid)
        xid = int(event.eventData)
        return None if xid in APPLICATION_XIDS else GpuEvent(uuid, xid)


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


@contextlib.contextmanager
def registered() -> Iterator[MigChanges]:
    """Register every GPU, within an open session.

    Raises:
        HardwareError: No GPU can report changes (NOT_SUPPORTED), or as ``library.call``.
    """
    event_set = library.call(pynvml.nvmlEventSetCreate)
    try:
        yield MigChanges(event_set)
    finally:
        with contextlib.suppress(errors.HardwareError):
            library.call(pynvml.nvmlEventSetFree, event_set)


@contextlib.contextmanager
def listening(library_path: str | None, driver_roots: Sequence[str] = ()) -> Iterator[MigChanges]:
    """Open an NVML session and register every GPU.

    Raises:
        HardwareError: The session cannot be opened, or as ``registered``.
    """
    with library.session(library_path, driver_roots), registered() as changes:
        yield changes
