"""Root without the right to pass over file modes, for tests of what a folder forbids."""

import contextlib
import ctypes
import os
from collections.abc import Iterator

_VERSION_3 = 0x2008_0522  # of ``capset(2)``: each set has two words of 32 bits
_PR_SET_SECUREBITS = 28
_NO_SETUID_FIXUP = 1 << 2
"""Of ``capabilities(7)``: without it access(2) takes root for one with all its rights."""
_DAC_OVERRIDE = 1 << 1
_DAC_READ_SEARCH = 1 << 2


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@contextlib.contextmanager
def bound_by_file_modes() -> Iterator[None]:
    """Have file modes count for this thread, even where it is root's."""
    if os.geteuid() != 0:
        yield
        return
    header = _Header(_VERSION_3, 0)
    sets = (_Sets * 2)()
    _call("capget", ctypes.byref(header), sets)
    before = sets[0].effective
    sets[0].effective = before & ~(_DAC_OVERRIDE | _DAC_READ_SEARCH)
    _call("prctl", _PR_SET_SECUREBITS, _NO_SETUID_FIXUP, 0, 0, 0)
    _call("capset", ctypes.byref(header), sets)
    try:
        yield
    finally:
        sets[0].effective = before
        _call("capset", ctypes.byref(header), sets)
        _call("prctl", _PR_SET_SECUREBITS, 0, 0, 0, 0)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
