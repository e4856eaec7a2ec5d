"""Record the last call of each thread of a worker, to name the call that hung in the driver.

A stuck thread cannot report. So each thread of a worker first records its call in shared memory,
and the agent reads the record if the worker does not answer. A record costs a few microseconds.
"""

import contextlib
import ctypes
import dataclasses
import mmap
import os
import threading
import time
from collections.abc import Iterator

_SLOTS = 128  # threads that can record calls: one for each GPU, the main one, and plenty to spare

_RUNNING = 1
_RETURNED = 2
_UNKNOWN = -1
_UUID_BYTES = 48  # 40 in nvml.h's form
_NAME_BYTES = 80  # the longest name that we call has 50 letters


class _Slot(ctypes.Structure):
    """The last call of one thread."""

    _fields_ = (
        ("state", ctypes.c_ubyte),  # one of the two above; 0: unused
        ("index", ctypes.c_int),  # NVML's index; -1 if unknown
        ("minor", ctypes.c_int),  # the device's minor number; -1 if unknown
        ("uuid", ctypes.c_char * _UUID_BYTES),
        ("since_ns", ctypes.c_uint64),
        ("function", ctypes.c_char * _NAME_BYTES),
    )


_Slots = _Slot * _SLOTS
_BYTES = ctypes.sizeof(_Slots)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LastCall:
    """The last call of one of a worker's threads."""

    function: str
    gpu: str  # index and UUID as text, as far as known; empty when no GPU is concerned
    minor: int | None  # the N of ``/dev/nvidiaN``; None if unknown
    since_s: float  # when it began; on the monotonic clock, which all processes share
    is_running: bool

    def __str__(self) -> str:
        return f"{self.function} on {self.gpu}" if self.gpu else self.function


class LastCalls:
    """The memory that one worker records its calls in; OSError if none is left."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("nvml-last-calls", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, _BYTES)
            self._memory = mmap.mmap(self.fd, _BYTES)
        except BaseException:
            os.close(self.fd)
            raise

    def read(self) -> tuple[LastCall, ...]:
        """Return each thread's last call, the oldest first, also after a crash of the worker."""
        calls = []
        for slot in _Slots.from_buffer_copy(self._memory):
            if slot.state not in (_RUNNING, _RETURNED):
                continue
            uuid = _text(slot.uuid)
            gpu = f"GPU {slot.index} ({uuid})" if uuid else f"GPU {slot.index}"
            calls.append(
                LastCall(
                    function=_text(slot.function),
                    gpu="" if slot.index < 0 else gpu,
                    minor=None if slot.minor < 0 else slot.minor,
                    since_s=slot.since_ns / 1e9,
                    is_running=slot.state == _RUNNING,
                )
            )
        return tuple(sorted(calls, key=lambda call: call.since_s))

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        os.close(self.fd)


def _text(data: bytes) -> str:
    """Return the text in a field, which a crash may have overwritten."""
    from mig_manager.core import messages  # noqa: PLC0415 - for the agent's side only

    return messages.printable(data.decode("ascii", errors="replace"))


class Recorder:
    """Counts and times the calls of this process, and records each thread's last one if attached.

    For any thread. If all slots are used, a thread's calls are only counted.
    """

    def __init__(self) -> None:
        self._unused: Iterator[_Slot] = iter(())
        self._lock = threading.Lock()
        self._local = threading.local()
        self._totals: dict[str, tuple[int, float]] = {}
        self._trace: list[tuple[str, int, float]] | None = None

    def attach(self, fd: int) -> None:
        """Record calls in the memory of ``LastCalls`` from now on; close the descriptor."""
        self._unused = iter(_Slots.from_buffer(mmap.mmap(fd, _BYTES)))
        self._local = threading.local()
        os.close(fd)

    @contextlib.contextmanager
    def on_gpu(self, index: int) -> Iterator[None]:
        """Record that the calls of this thread in the body concern the GPU of this NVML index."""
        self.set_gpu(index)
        try:
            yield
        finally:
            self.set_gpu(_UNKNOWN)

    def set_gpu(self, index: int, uuid: str = "", minor: int | None = None) -> None:
        """Record more about the GPU that the calls of this thread concern."""
        if (slot := self._slot()) is not None:
            slot.index, slot.minor = index, _UNKNOWN if minor is None else minor
            slot.uuid = uuid.encode()[:_UUID_BYTES]

    def began(self, function: str, since_s: float) -> None:
        """Record that this thread is about to call a function."""
        if (slot := self._slot()) is not None:
            slot.since_ns = int(since_s * 1e9)
            slot.function = function.encode()[:_NAME_BYTES]
            # Last: it makes the rest valid.
            slot.state = _RUNNING

    def record_return(self) -> None:
        """Record that this thread's function has returned."""
        if (slot := self._slot()) is not None:
            slot.state = _RETURNED

    def count(self, function: str, seconds: float, code: int) -> None:
        """Add a call and NVML's answer to the totals."""
        with self._lock:
            count, spent = self._totals.get(function, (0, 0.0))
            self._totals[function] = count + 1, spent + seconds
            if self._trace is not None:
                self._trace.append((function, code, seconds))

    @contextlib.contextmanager
    def traced(self) -> Iterator[list[tuple[str, int, float]]]:
        """Add function, answer and seconds of each call in the body to a list, which it yields."""
        trace: list[tuple[str, int, float]] = []
        self._trace = trace
        try:
            yield trace
        finally:
            self._trace = None

    def take_totals(self) -> tuple[tuple[str, int, float], ...]:
        """Return number and seconds of the calls by function, and start again at zero."""
        with self._lock:
            totals, self._totals = self._totals, {}
        return tuple((name, count, seconds) for name, (count, seconds) in sorted(totals.items()))

    @contextlib.contextmanager
    def loading_library(self) -> Iterator[None]:
        """Record in the body that NVML's library is loaded, which may hang as its calls do."""
        self.began("dlopen", time.monotonic())
        try:
            yield
        finally:
            self.record_return()

    def _slot(self) -> _Slot | None:
        try:
            slot: _Slot | None = self._local.slot
        except AttributeError:
            with self._lock:
                slot = next(self._unused, None)
            if slot is not None:
                slot.index = slot.minor = _UNKNOWN
            self._local.slot = slot
        return slot


RECORDER = Recorder()
