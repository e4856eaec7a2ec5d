"""Signals during a change of the GPUs."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from mig_manager import errors
from mig_manager.adapters import host


@contextlib.contextmanager
def deferred(note: Callable[[str], object]) -> Iterator[Callable[[], None]]:
    """Defer a signal until the body has finished; a second signal is not deferred.

    An interrupted change would leave GPUs with neither the old nor the new instances. The change
    finishes within its deadlines, or rolls back.

    Args:
        note: Called with a sentence for the user when a signal arrives, and with the outcome.

    Yields:
        A function that raises ``Superseded`` after a signal, for points where the change can still
        be abandoned. If the exception leaves the body, the signal takes effect.
    """
    received: list[int] = []

    def check() -> None:
        if received:
            name = signal.Signals(received[0]).name
            raise errors.Superseded(f"ended by {name}", errors.SupersededBy.STOP)

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            restore()
            signal.raise_signal(number)
        note("finishing or rolling back the change first; repeat to abort it midway")

    try:
        with host.handled_signals(receive) as restore:
            yield check
    except errors.Superseded as error:
        if received:
            note(error.why)
            signal.raise_signal(received[0])
        raise
    if received:
        note("the change has finished")
        signal.raise_signal(received[0])
