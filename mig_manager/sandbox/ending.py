"""Signals that end the demo early, after it has cleaned up."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from mig_manager.adapters import host


class EndedBySignal(Exception):  # noqa: N818 - no error
    """A signal requested the end."""


@contextlib.contextmanager
def on_signals(end: Callable[[EndedBySignal], None]) -> Iterator[None]:
    """Call ``end`` at the first signal, and let the signal take effect after the body.

    Further signals do not interrupt the body, which cleans up within its own deadlines. A closed
    terminal sends SIGHUP twice: from the kernel, and from the shell for its jobs.

    Args:
        end: Makes the body end; called in a thread of its own.
    """
    received: list[int] = []

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            # The main thread, which runs this, may hold a lock that ``end`` needs.
            threading.Thread(target=end, args=(EndedBySignal(),), name="end").start()

    try:
        with host.handled_signals(receive):
            yield
    finally:
        if received:
            # It ends the process, or replaces the body's exception by KeyboardInterrupt.
            signal.raise_signal(received[0])
