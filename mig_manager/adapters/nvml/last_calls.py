"""Record the last call of each thread of a worker, to name the call that hung in the driver.

A stuck thread cannot report. So each thread of a worker first notes its call in shared memory, and
the agent reads the note if the worker does not answer. A note costs a few microseconds.
"""

import contextlib
import dataclasses
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator

_SLOTS = 128
"""Threads that can note calls: one for each GPU, the main thread, and plenty to spare."""

_GPU = struct.Struct("=ii48s")
"""NVML index and device minor number, -1 if unknown, and UUID (40 bytes in nvml.h's form)."""
_CALL = struct.Struct("=Q80s")
"""Its start, in nanoseconds, and its name; the longest that we call has 50 letters."""

_GPU_AT = 1
"""After the state, which is one of the two below, and 0 in an unused slot."""
_CALL_AT = _GPU_AT + _GPU.size
_SLOT_BYTES = _CALL_AT + _CALL.size

_RUNNING = 1
_RETURNED = 2
_UNKNOWN = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The last call of one of a worker's threads."""

    function: str
    gpu: str
    """Index and UUID as text, as far as known; empty when no GPU is concerned."""
    minor: int | None
    """The N of ``/dev/nvidiaN``; None if unknown."""
    since_s: float
    """When it began; on the monotonic clock, which all processes share."""
    is_running: bool

    def __str__(self) -> str:
        return f"{self.function} on {self.gpu}" if self.gpu else self.function


class LastCalls:
    """The memory that one worker notes its calls in; OSError if none is left."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("nvml-last-calls", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, _SLOTS * _SLOT_BYTES)
            self._memory = mmap.mmap(self.fd, _SLOTS * _SLOT_BYTES)
        except BaseException:
            os.close(self.fd)
            raise

    def read(self) -> tuple[Call, ...]:
        """Return each thread's last call, the oldest first, also after a crash of the worker."""
        calls = []
        for slot in range(0, _SLOTS * _SLOT_BYTES, _SLOT_BYTES):
            state = self._memory[slot]
            if state not in (_RUNNING, _RETURNED):
                continue
            index, minor, uuid_field = _GPU.unpack_from(self._memory, slot + _GPU_AT)
            since_ns, function = _CALL.unpack_from(self._memory, slot + _CALL_AT)
            uuid = _text(uuid_field)
            gpu = f"GPU {index} ({uuid})" if uuid else f"GPU {index}"
            calls.append(
                Call(
                    function=_text(function),
                    gpu="" if index < 0 else gpu,
                    minor=None if minor < 0 else minor,
                    since_s=since_ns / 1e9,
                    is_running=state == _RUNNING,
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

    text = data.split(b"\0", maxsplit=1)[0].decode("ascii", errors="replace")
    return messages.printable(text)


class Recorder:
    """Counts and times the calls of this process, and notes each thread's last one if attached.

    For any thread. If all slots are used, a thread's calls are only counted.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._lock = threading.Lock()
        self._used_slots = 0
        self._local = threading.local()
        self._totals: dict[str, tuple[int, float]] = {}
        self._trace: list[tuple[str, int, float]] | None = None

    def attach(self, fd: int) -> None:
        """Note calls in the memory of ``LastCalls`` from now on; close the descriptor."""
        self._memory = mmap.mmap(fd, _SLOTS * _SLOT_BYTES)
        os.close(fd)

    @contextlib.contextmanager
    def on_gpu(self, index: int) -> Iterator[None]:
        """Note that the calls of this thread in the body concern the GPU of this NVML index."""
        self.set_gpu(index)
        try:
            yield
        finally:
            self.set_gpu(_UNKNOWN)

    def set_gpu(self, index: int, uuid: str = "", minor: int | None = None) -> None:
        """Note more about the GPU that the calls of this thread concern."""
        if (slot := self._slot()) is not None:
            known_minor = _UNKNOWN if minor is None else minor
            _GPU.pack_into(slot, _GPU_AT, index, known_minor, uuid.encode())

    def began(self, function: str, since_s: float) -> None:
        """Note that this thread is about to call a function."""
        if (slot := self._slot()) is not None:
            _CALL.pack_into(slot, _CALL_AT, int(since_s * 1e9), function.encode())
            # Last: it makes the rest valid.
            slot[0] = _RUNNING

    def returned(self) -> None:
        """Note that this thread's function has returned."""
        if (slot := self._slot()) is not None:
            slot[0] = _RETURNED

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
    def calling(self, function: str) -> Iterator[None]:
        """Note a call outside of NVML that may hang for the same reasons."""
        self.began(function, time.monotonic())
        try:
            yield
        finally:
            self.returned()

    def _slot(self) -> memoryview | None:
        if self._memory is None:
            return None
        try:
            slot: memoryview | None = self._local.slot
        except AttributeError:
            with self._lock:
                number, self._used_slots = self._used_slots, self._used_slots + 1
            slot = None
            if number < _SLOTS:
                slot = memoryview(self._memory)[number * _SLOT_BYTES :][:_SLOT_BYTES]
                _GPU.pack_into(slot, _GPU_AT, _UNKNOWN, _UNKNOWN, b"")
            self._local.slot = slot
        return slot


RECORDER = Recorder()
