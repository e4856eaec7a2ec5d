"""What the GPU worker is doing, told through shared memory, so that a killed worker has told it.

A thread that is stuck in a call into the driver can send nothing any more. So each thread writes
down what it is about to do, before it does it, and the agent reads that when the worker gave no
answer. Nothing is waited for on either side, and a call costs a few microseconds.
"""

import contextlib
import dataclasses
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator

from mig_manager.core import messages

_SLOTS = 128
"""Threads that can tell: one for each GPU, the main thread, and plenty to spare."""

_STATE = struct.Struct("=B")
_GPU = struct.Struct("=ii48s")
"""NVML index and device minor number, -1 when not known, and UUID (40 bytes in nvml.h's form)."""
_CALL = struct.Struct("=Q80s")
"""When it began, in nanoseconds, and its name; the longest that we call has 50 letters."""

_GPU_AT = _STATE.size
_CALL_AT = _GPU_AT + _GPU.size
_SLOT_BYTES = _CALL_AT + _CALL.size

_UNDER_WAY = 1
_RETURNED = 2

_UNKNOWN = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The last call of one of the worker's threads."""

    function: str
    """The NVML function, such as ``nvmlGpuInstanceDestroy``."""
    gpu: str
    """Index and UUID as text, as far as they were known; empty when no GPU is concerned."""
    minor: int | None
    """The N of ``/dev/nvidiaN``; None when it was not known, or is not to be looked for."""
    since_s: float
    """When it began; on the monotonic clock, which all processes share."""
    is_under_way: bool

    def __str__(self) -> str:
        return f"{self.function} on {self.gpu}" if self.gpu else self.function


class Board:
    """The agent's side: the memory that one worker writes to."""

    def __init__(self) -> None:
        """Make the memory.

        Raises:
            OSError: There is no descriptor or no memory left.
        """
        self.fd = os.memfd_create("gpu-progress", os.MFD_CLOEXEC)
        """For the worker to inherit."""
        try:
            os.ftruncate(self.fd, _SLOTS * _SLOT_BYTES)
            self._memory = mmap.mmap(self.fd, _SLOTS * _SLOT_BYTES)
        except BaseException:
            os.close(self.fd)
            raise

    def calls(self) -> tuple[Call, ...]:
        """Return each thread's last call, the oldest first; whatever is there makes some sense."""
        slots = (_read(self._memory, number * _SLOT_BYTES) for number in range(_SLOTS))
        return tuple(sorted((call for call in slots if call), key=lambda call: call.since_s))

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
        os.close(self.fd)


class Progress:
    """The worker's side; without a board it tells nothing to nobody.

    From any thread. A thread beyond the board's room is not told of.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._lock = threading.Lock()
        self._taken = 0
        self._local = threading.local()

    def attach(self, fd: int) -> None:
        """Write to the board behind a descriptor from now on; the descriptor is closed.

        Raises:
            OSError: It is no board.
            ValueError: It is no board.
        """
        self._memory = mmap.mmap(fd, _SLOTS * _SLOT_BYTES)
        os.close(fd)

    @contextlib.contextmanager
    def about(self, index: int) -> Iterator[None]:
        """Tell that what this thread does in the body concerns the GPU of this NVML index."""
        self.names(index)
        try:
            yield
        finally:
            self.names(_UNKNOWN)

    def names(self, index: int, uuid: str = "", minor: int | None = None) -> None:
        """Tell more about the GPU that this thread is busy with."""
        if self._memory is not None and (slot := self._slot(self._memory)) is not None:
            known_minor = _UNKNOWN if minor is None else minor
            _GPU.pack_into(self._memory, slot + _GPU_AT, index, known_minor, uuid.encode())

    def began(self, function: str, since_s: float) -> None:
        """Tell that this thread is about to call a function."""
        if self._memory is not None and (slot := self._slot(self._memory)) is not None:
            _CALL.pack_into(self._memory, slot + _CALL_AT, int(since_s * 1e9), function.encode())
            # Last, because from here on the rest counts.
            self._memory[slot] = _UNDER_WAY

    def ended(self) -> None:
        """Tell that the function has returned."""
        if self._memory is not None and (slot := self._slot(self._memory)) is not None:
            self._memory[slot] = _RETURNED

    @contextlib.contextmanager
    def calling(self, function: str) -> Iterator[None]:
        """Tell that the body may not return for the same reasons as an NVML function."""
        self.began(function, time.monotonic())
        try:
            yield
        finally:
            self.ended()

    def _slot(self, memory: mmap.mmap) -> int | None:
        """Return where this thread's slot begins; None when there is none left."""
        try:
            slot: int | None = self._local.slot
        except AttributeError:
            with self._lock:
                number, self._taken = self._taken, self._taken + 1
            slot = self._local.slot = number * _SLOT_BYTES if number < _SLOTS else None
            if slot is not None:
                _GPU.pack_into(memory, slot + _GPU_AT, _UNKNOWN, _UNKNOWN, b"")
        return slot


PROGRESS = Progress()
"""Of this process, as the NVML session is."""


def _read(memory: mmap.mmap, slot: int) -> Call | None:
    (state,) = _STATE.unpack_from(memory, slot)
    if state not in (_UNDER_WAY, _RETURNED):
        return None
    index, minor, uuid = _GPU.unpack_from(memory, slot + _GPU_AT)
    since_ns, function = _CALL.unpack_from(memory, slot + _CALL_AT)
    return Call(
        function=_text(function),
        gpu=_name(index, _text(uuid)),
        minor=None if minor < 0 else minor,
        since_s=since_ns / 1e9,
        is_under_way=state == _UNDER_WAY,
    )


def _name(index: int, uuid: str) -> str:
    if index < 0:
        return ""
    return f"GPU {index} ({uuid})" if uuid else f"GPU {index}"


def _text(data: bytes) -> str:
    """Return the text in a field; a library gone wild may have written anything over it."""
    text = data.split(b"\0", maxsplit=1)[0].decode("ascii", errors="replace")
    return messages.printable(text)
