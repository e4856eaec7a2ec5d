"""Signals that wait until what must not be cut off is complete."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def completed(tell: Callable[[str], object]) -> Iterator[None]:
    """Hold a signal off until the body is complete, or a second one insists.

    A change that is cut off leaves GPUs without the instances from before and without the new
    ones. It ends by itself, undone if need be: what is in use is waited for with a deadline.

    Args:
        tell: Says that the signal was heard, and what it waits for.
    """
    held: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        held.append(number)
        if len(held) > 1:
            resume()
            signal.raise_signal(number)
        tell("completing the change first, or undoing it; once more to leave it half done")

    def resume() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    # What nohup or a background job ignores stays ignored.
    handlers = {
        number: signal.signal(number, hold)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        resume()
    if held:
        signal.raise_signal(held[0])
