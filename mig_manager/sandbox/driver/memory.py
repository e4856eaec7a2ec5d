"""C arguments as ctypes passes them: numbers in and out, handles, arrays, strings.

The simulated functions get what a C function would get, so they read and write the caller's
memory. Where the real library would run over a buffer or take a struct for a pointer, and crash
the process some time later, these raise at once. A NULL pointer is refused as INVALID_ARGUMENT.
"""

import ctypes
from typing import Any

from mig_manager.core import model
from mig_manager.sandbox.driver import states


def number(argument: Any) -> int:
    """Return an integer argument, given as ``int`` or as a ctypes integer."""
    return int(getattr(argument, "value", argument))


def text(argument: Any) -> str:
    """Return a ``char *`` argument.

    Raises:
        Refused: INVALID_ARGUMENT for NULL and for what is no text.
    """
    raw = argument if isinstance(argument, bytes) else getattr(argument, "value", None)
    if not isinstance(raw, bytes):
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    return raw.decode("utf-8", "replace")


def address(argument: Any) -> int:
    """Return the address that a handle argument holds; 0 for NULL."""
    if argument is None:
        return 0
    if isinstance(argument, int):
        return argument
    return ctypes.cast(argument, ctypes.c_void_p).value or 0


def put(reference: Any, kind: Any, value: Any) -> None:
    """Write one value through a pointer."""
    _pointer(reference, kind)[0] = value


def put_handle(reference: Any, handle: int) -> None:
    """Write an opaque handle through a pointer."""
    put(reference, ctypes.c_void_p, handle)


def put_all(reference: Any, kind: Any, values: list[Any]) -> None:
    """Write values to a caller's array; NVML itself does not know how long that is.

    Raises:
        Refused: INVALID_ARGUMENT, the pointer is NULL.
        BufferError: The array is too short: the real library would write past its end.
    """
    if isinstance(reference, ctypes.Array) and len(reference) < len(values):
        raise BufferError(f"NVML writes {len(values)} entries to an array of {len(reference)}")
    pointer = _pointer(reference, kind)
    for index, value in enumerate(values):
        pointer[index] = value


def put_placements(
    placements: tuple[model.Placement, ...], kind: Any, array: Any, count: Any
) -> None:
    """Write placements and their number; only the number where the caller has no array.

    Raises:
        Refused: INVALID_ARGUMENT, there is nowhere to write the number.
        BufferError: The array is too short.
    """
    if array is not None:
        values = [kind(start=place.start, size=place.size) for place in placements]
        put_all(array, kind, values)
    put(count, ctypes.c_uint, len(placements))


def put_text(buffer: Any, length: Any, value: str) -> None:
    """Write a string to a caller's buffer of a given length.

    Raises:
        Refused: INVALID_ARGUMENT for NULL, INSUFFICIENT_SIZE when it does not fit.
    """
    raw = value.encode() + b"\0"
    if buffer is None:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    if len(raw) > number(length):
        raise states.Refused(states.Code.INSUFFICIENT_SIZE)
    ctypes.memmove(buffer, raw, len(raw))


def struct(reference: Any, kind: Any) -> Any:
    """Return the caller's struct behind a pointer."""
    return _pointer(reference, kind).contents


def require_version(target: Any, version: int) -> None:
    """Refuse a struct of another version than the function knows."""
    if target.version != version:
        raise states.Refused(states.Code.ARGUMENT_VERSION_MISMATCH)


def fill(target: Any, **fields: Any) -> None:
    """Set fields of a struct."""
    for name, value in fields.items():
        setattr(target, name, value)


def _pointer(reference: Any, kind: Any) -> Any:
    if reference is None:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    if isinstance(reference, ctypes.Structure):
        raise TypeError("a struct is passed by value: the real library would crash; use byref()")
    return ctypes.cast(reference, ctypes.POINTER(kind))
