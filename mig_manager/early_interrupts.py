"""Ctrl-C while a program loads, before it can answer with an exit status of its own."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def end_process() -> Iterator[None]:
    """End on Ctrl-C without the traceback of an import, unless SIGINT is handled or ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, end)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


def end(number: int, _frame: FrameType | None) -> None:
    """End at once, as without a handler; an exception could get lost within an import."""
    os._exit(128 + number)
