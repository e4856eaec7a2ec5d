"""The machine: its clocks, files, processes, device nodes, services, signals of the kernel."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType


class SystemClock:
    """Implements ``timing.Clock`` on the operating system's clocks."""

    def now_iso(self, *, after_s: float = 0.0) -> str:
        """Return the wall-clock time, now or later, as RFC 3339 in UTC, whole seconds."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + after_s))

    def monotonic(self) -> float:
        """Return seconds of the monotonic clock."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Sleep, without waking early."""
        threading.Event().wait(max(0.0, seconds))


def end_on_signals(stop: Callable[[], None]) -> None:
    """Have SIGTERM and SIGINT call ``stop``, in a thread of its own."""

    def end(_number: int, _frame: FrameType | None) -> None:
        # A handler runs between two bytecodes of the main thread, which may hold the inbox's
        # lock; another thread can wait for it.
        threading.Thread(target=stop, name="stop").start()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
