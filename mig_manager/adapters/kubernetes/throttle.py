"""How fast we may ask: an agent that has gone astray must not take the API server along."""

import threading
import time
from collections.abc import Callable


class Throttle:
    """A token bucket; whoever comes when it is empty waits for the next token, in turn.

    Args:
        per_s: Requests a second in the long run.
        burst: Requests at once after a pause.
        monotonic: Seconds from some fixed point.
    """

    def __init__(
        self, *, per_s: float, burst: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._tokens = float(burst)
        self._at_s = monotonic()

    def take(self) -> float:
        """Take a token, on credit if need be; return the seconds to wait before using it."""
        with self._lock:
            now_s = self._monotonic()
            gained = (now_s - self._at_s) * self._per_s
            self._tokens = min(float(self._burst), self._tokens + gained) - 1.0
            self._at_s = now_s
            return max(0.0, -self._tokens / self._per_s)
