"""Report that the loop is alive, for kubelet's probe."""

import math
import time
from collections.abc import Callable


class Pulse:
    """When the loop last reported that it is alive; for any thread."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._last = math.inf

    def beat(self) -> None:
        """Report that the loop is alive; the next report must come within a bound."""
        self._last = self._monotonic()

    def rest(self) -> None:
        """Begin a wait that may never end; no report is expected before the next ``beat``."""
        self._last = math.inf

    @property
    def silence_s(self) -> float:
        """How long a report has been overdue; 0 while none is expected."""
        return max(0.0, self._monotonic() - self._last)
