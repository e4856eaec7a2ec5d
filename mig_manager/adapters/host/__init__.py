"""The machine: its clocks, files, processes, device nodes, services, signals of the kernel."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
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


ENDING_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""Signals by which people and systemd end a program, and which let it clean up first."""


@contextlib.contextmanager
def handled_signals(
    receive: Callable[[int, FrameType | None], object], *further: signal.Signals
) -> Iterator[Callable[[], None]]:
    """Have the ``further`` and ``ENDING_SIGNALS`` call ``receive`` until the body ends.

    Yields:
        A function that restores the handlers before that.
    """
    # What nohup or a background job ignores stays ignored.
    handlers = {
        number: signal.signal(number, receive)
        for number in (*further, *ENDING_SIGNALS)
        if signal.getsignal(number) is not signal.SIG_IGN
    }

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    try:
        yield restore
    finally:
        restore()


def end_on_signals(stop: Callable[[], None]) -> None:
    """Have each of ``ENDING_SIGNALS`` call ``stop``, in a thread of its own.

    There is nothing to reload on SIGHUP: a service manager starts the program again. SIGUSR1 and
    SIGUSR2, which log rotation sends to some programs, have no effect.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        # A handler runs between two bytecodes of the main thread, which may hold the inbox's
        # lock; another thread can wait for it.
        threading.Thread(target=stop, name="stop").start()

    for number in ENDING_SIGNALS:
        # What nohup or a background job ignores stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # Unlike SIG_IGN, programs that we start do not inherit a handler.
        signal.signal(number, lambda _number, _frame: None)
