"""The machine: its clocks, files, processes, device nodes, services and signals."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any


class SystemClock:
    """Implements ``timing.Clock`` on the operating system's clocks."""

    def now_iso(self, *, after_s: float = 0.0) -> str:
        """Return the wall-clock time, now or later, as RFC 3339 in UTC, whole seconds."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + after_s))

    def monotonic(self) -> float:
        """Return seconds of the monotonic clock."""
        return time.monotonic()

    def unix_s(self) -> float:
        """Return the wall-clock time in seconds since 1970."""
        return time.time()

    def wait(self, seconds: float) -> None:
        """Sleep, without waking early."""
        threading.Event().wait(max(0.0, seconds))


ENDING_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""Signals from people and systemd that end a program after it has cleaned up."""


@contextlib.contextmanager
def handled_signals(
    receive: Callable[[int, FrameType | None], object], *further: signal.Signals
) -> Iterator[Callable[[], None]]:
    """Call ``receive`` on ``ENDING_SIGNALS`` and ``further`` signals until the body ends.

    Yields:
        A function that restores the handlers early.
    """
    handlers = _handle((*further, *ENDING_SIGNALS), receive)

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    try:
        yield restore
    finally:
        restore()


def end_on_signals(stop: Callable[[], None]) -> None:
    """Call ``stop`` in a new thread on all ``ENDING_SIGNALS``.

    SIGHUP ends the program too: a service manager restarts it. SIGUSR1 and SIGUSR2, which log
    rotation sends to some programs, have no effect.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        # A handler runs between two bytecodes of the main thread, which may own the inbox's lock;
        # another thread can wait for it.
        threading.Thread(target=stop, name="stop").start()

    _handle(ENDING_SIGNALS, end)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # Unlike SIG_IGN, programs that we start do not inherit a handler.
        signal.signal(number, lambda _number, _frame: None)


def _handle(
    numbers: Iterable[signal.Signals], receive: Callable[[int, FrameType | None], object]
) -> dict[signal.Signals, Any]:
    """Install a handler, but for signals that nohup or a background job ignores."""
    return {
        number: signal.signal(number, receive)
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }
