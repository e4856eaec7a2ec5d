"""Wait for what nothing reports."""

import threading
import time
from collections.abc import Callable


def until(holds: Callable[[], bool], what: str, *, within_s: float = 180.0) -> None:
    """Wait until a condition holds; AssertionError if it does not in time."""
    assert comes_true(holds, within_s=within_s), f"waited {within_s:g} s in vain for {what}"


def comes_true(holds: Callable[[], bool], *, within_s: float) -> bool:
    """Return whether a condition holds in time, without keeping the processor from its cause."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not holds():
        if time.monotonic() >= deadline:
            return False
        pause.wait(0.01)
    return True
