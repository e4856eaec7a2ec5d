"""Signals that wait until what must not be cut off is complete."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from mig_manager import errors


@contextlib.contextmanager
def completed(tell: Callable[[str], object]) -> Iterator[Callable[[], None]]:
    """Hold a signal off until the body is complete, or a second one insists.

    A change that is cut off leaves GPUs without the instances from before and without the new
    ones. It ends by itself, undone if need be: what is in use is waited for with a deadline.

    Args:
        tell: Says that the signal was heard, and what it waits for.

    Yields:
        What those call who can be ended early: it raises ``Superseded`` once a signal was heard,
        and the signal takes its effect when that comes out of the body.
    """
    signals = _Signals(tell)
    try:
        yield signals.check
    except errors.Superseded:
        signals.let_go()
        raise
    finally:
        signals.resume()
    signals.let_go()


class _Signals:
    """The signals that would end this process, held off from now on."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._held: list[int] = []
        # What nohup or a background job ignores stays ignored.
        self._handlers = {
            number: signal.signal(number, self._hold)
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) is not signal.SIG_IGN
        }

    def check(self) -> None:
        """Raise ``Superseded`` when a signal was heard."""
        if self._held:
            name = signal.Signals(self._held[0]).name
            raise errors.Superseded(f"ended by {name}", is_replaced=False, is_stopping=True)

    def resume(self) -> None:
        """Have signals do again what they did before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def let_go(self) -> None:
        """Let the signal that was heard have its effect, if one was."""
        self.resume()
        if self._held:
            signal.raise_signal(self._held[0])

    def _hold(self, number: int, _frame: FrameType | None) -> None:
        self._held.append(number)
        if len(self._held) > 1:
            self.resume()
            signal.raise_signal(number)
        self._tell("completing the change first, or undoing it; once more to leave it half done")
