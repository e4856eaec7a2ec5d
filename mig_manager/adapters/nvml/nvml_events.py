"""Hear of MIG changes through NVML's events, whoever makes them.

Facts are those of ``nvml.h``, "Event Handling Methods": what happened before a GPU is registered
is not told; a GPU or driver without the event refuses the registration with NOT_SUPPORTED and the
set stays usable; a wait may end before its time. Old drivers refuse GPUs whose MIG mode is off
(DCGM's cache manager puts up with that), so the registration decides and not the GPU's product.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pynvml

from mig_manager import errors
from mig_manager.adapters.nvml import nvml_calls, nvml_session


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
        """UUIDs of the GPUs whose changes are told."""
        return tuple(self._names.values())

    def wait(self, timeout_s: float) -> str | None:
        """Return the UUID of a GPU that was changed; None when none was, so far.

        Raises:
            HardwareError: NVML failed, for example since a GPU fell off the bus.
        """
        told = nvml_calls.call_unless(
            {pynvml.NVML_ERROR_TIMEOUT},
            pynvml.nvmlEventSetWait_v2,
            self._event_set,
            int(timeout_s * 1000),
        )
        return None if told is None else self._names.get(_address(told.device), "unknown")


@contextlib.contextmanager
def listening(library_path: str | None, driver_roots: Sequence[str] = ()) -> Iterator[MigChanges]:
    """Hold an NVML session for the body, in which every GPU that can tell of changes does.

    Args:
        library_path: File of the NVML library; None leaves the search to the loader.
        driver_roots: Where to look for the library when the loader does not find the right one.

    Raises:
        HardwareError: As ``nvml_session.opened``; with NOT_SUPPORTED when no GPU can.
    """
    with nvml_session.opened(library_path, driver_roots):
        event_set = nvml_calls.call(pynvml.nvmlEventSetCreate)
        try:
            yield _registered(event_set)
        finally:
            with contextlib.suppress(errors.HardwareError):
                nvml_calls.call(pynvml.nvmlEventSetFree, event_set)


def _registered(event_set: Any) -> MigChanges:
    count = nvml_calls.call(pynvml.nvmlDeviceGetCount)
    names: dict[int, str] = {}
    left_out: list[errors.HardwareError] = []
    for index in range(count):
        try:
            names |= _register(index, event_set)
        except errors.HardwareError as error:
            about = nvml_calls.about(f"GPU {index}", error)
            # One GPU that cannot be watched is left out; the driver as a whole is another matter.
            if error.code in nvml_calls.WHOLE_DRIVER - nvml_calls.UNTOLD:
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
    handle = nvml_calls.call(pynvml.nvmlDeviceGetHandleByIndex, index)
    # A GPU without MIG refuses this, whatever its driver says of the event.
    nvml_calls.call(pynvml.nvmlDeviceGetMigMode, handle)
    uuid: str = nvml_calls.call(pynvml.nvmlDeviceGetUUID, handle)
    change = pynvml.nvmlEventMigConfigChange
    nvml_calls.call(pynvml.nvmlDeviceRegisterEvents, handle, change, event_set)
    return {_address(handle): uuid}


def _address(handle: Any) -> int:
    """Return what tells one GPU's handle from another's."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
