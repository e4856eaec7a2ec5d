"""Wait for what nothing reports."""

import threading
import time
from collections.abc import Callable


def until(holds: Callable[[], bool], what: str, *, within_s: float = 180.0) -> None:
    """Wait until a condition holds, without keeping the processor from what it waits for."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, f"waited {within_s:g} s in vain for {what}"
        pause.wait(0.01)
