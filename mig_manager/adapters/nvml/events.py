"""Receive MIG changes of any process as NVML events.

From ``nvml.h``, "Event Handling Methods": changes before a GPU is registered are not reported; a
GPU or driver without the event refuses the registration with NOT_SUPPORTED and the set stays
usable; a wait may end before its time. Old drivers refuse GPUs whose MIG mode is off (DCGM's cache
manager tolerates that), so the registration decides and not the GPU's product.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pynvml

from mig_manager import errors
from mig_manager.adapters.nvml import library


class MigChanges:
    """The MIG changes of the registered GPUs, while a session is open; for one thread.

    Attributes:
        of: How many GPUs the node has, registered or not.
    """

    def __init__(self, event_set: Any, names: Mapping[int, str], *, of: int) -> None:
        self._event_set = event_set
        self._names = names
        self.of = of

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the registered GPUs."""
        return tuple(self._names.values())

    def wait(self, timeout_s: float) -> str | None:
        """Return the UUID of a changed GPU; None if none changed in time.

        Raises:
            HardwareError: NVML failed, for example since a GPU fell off the bus.
        """
        event = library.call_unless(
            {pynvml.NVML_ERROR_TIMEOUT},
            pynvml.nvmlEventSetWait_v2,
            self._event_set,
            int(timeout_s * 1000),
        )
        return None if event is None else self._names.get(_address(event.device), "unknown")


@contextlib.contextmanager
def listening(library_path: str | None, driver_roots: Sequence[str] = ()) -> Iterator[MigChanges]:
    """Open an NVML session and register every GPU that can report changes.

    Raises:
        HardwareError: As ``library.session``; with NOT_SUPPORTED when no GPU can.
    """
    with library.session(library_path, driver_roots):
        event_set = library.call(pynvml.nvmlEventSetCreate)
        try:
            yield _registered(event_set)
        finally:
            with contextlib.suppress(errors.HardwareError):
                library.call(pynvml.nvmlEventSetFree, event_set)


def _registered(event_set: Any) -> MigChanges:
    count = library.call(pynvml.nvmlDeviceGetCount)
    names: dict[int, str] = {}
    left_out: list[errors.HardwareError] = []
    for index in range(count):
        try:
            names |= _register(index, event_set)
        except errors.HardwareError as error:
            about = library.about(f"GPU {index}", error)
            # A GPU that cannot be watched is left out; a failure of the whole driver is not.
            if error.code in library.WHOLE_DRIVER - library.UNSUPPORTED:
                raise about from error
            left_out.append(about)
    if names:
        return MigChanges(event_set, names, of=count)
    if left_out:
        raise left_out[0]
    raise errors.HardwareError(
        "this node has no GPU", reason=errors.Reason.NOT_SUPPORTED, operation="nvmlDeviceGetCount"
    )


def _register(index: int, event_set: Any) -> dict[int, str]:
    """Register one GPU; return its handle and its UUID."""
    handle = library.call(pynvml.nvmlDeviceGetHandleByIndex, index)
    # A GPU without MIG refuses this, even where its driver accepts the event.
    library.call(pynvml.nvmlDeviceGetMigMode, handle)
    uuid: str = library.call(pynvml.nvmlDeviceGetUUID, handle)
    change = pynvml.nvmlEventMigConfigChange
    library.call(pynvml.nvmlDeviceRegisterEvents, handle, change, event_set)
    return {_address(handle): uuid}


def _address(handle: Any) -> int:
    """Return the value of a handle, which identifies the GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
