"""The raw arguments of simulated C functions: numbers, strings, pointers and arrays of ctypes.

Functions raise ``Refused`` (INVALID_ARGUMENT) for a NULL pointer. Where the real library would
write past a buffer or take a struct for a pointer, and crash the process later, they raise at
once.
"""

import ctypes
from typing import Any

from mig_manager.sandbox.driver import states


def number(argument: Any) -> int:
    """Return an integer argument, given as ``int`` or as a ctypes integer."""
    return int(getattr(argument, "value", argument))


def text(argument: Any) -> str:
    """Return a ``char *`` argument."""
    raw = argument if isinstance(argument, bytes) else getattr(argument, "value", None)
    if not isinstance(raw, bytes):
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    return raw.decode("utf-8", "replace")


def put(reference: Any, kind: Any, value: Any) -> None:
    """Write one value through a pointer."""
    _pointer(reference, kind)[0] = value


def put_all(reference: Any, kind: Any, values: list[Any]) -> None:
    """Write values to a caller's array, whose length NVML does not know.

    Raises:
        Refused: INVALID_ARGUMENT, the pointer is NULL.
        BufferError: The array is too short: the real library would write past its end.
    """
    if isinstance(reference, ctypes.Array) and len(reference) < len(values):
        raise BufferError(f"NVML writes {len(values)} entries to an array of {len(reference)}")
    pointer = _pointer(reference, kind)
    for index, value in enumerate(values):
        pointer[index] = value


def put_text(buffer: Any, length: Any, value: str) -> None:
    """Write a string to a caller's buffer; INSUFFICIENT_SIZE when it does not fit."""
    raw = value.encode() + b"\0"
    if buffer is None:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    if len(raw) > number(length):
        raise states.Refused(states.Code.INSUFFICIENT_SIZE)
    ctypes.memmove(buffer, raw, len(raw))


def struct(reference: Any, kind: Any) -> Any:
    """Return the caller's struct behind a pointer."""
    return _pointer(reference, kind).contents


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


def address(argument: Any) -> int:
    """Return the address in a handle argument; 0 for NULL."""
    if argument is None or isinstance(argument, int):
        return argument or 0
    return ctypes.cast(argument, ctypes.c_void_p).value or 0
