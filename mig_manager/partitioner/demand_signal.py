"""The signal that wakes the partitioner."""

import threading

from mig_manager.core import timing


class DemandSignal:
    """Wakes the loop when demand changes, a watch opens or the loop must end; for any thread."""

    def __init__(self, *, quiet_s: float, max_s: float, clock: timing.Clock) -> None:
        self._burst = timing.Burst(quiet_s=quiet_s, max_s=max_s)
        self._clock = clock
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self.is_over = False

    def record_demand(self) -> None:
        """Record a change of demand."""
        with self._lock:
            self._burst.add(self._clock.monotonic())
        self._wake.set()

    def record_node(self) -> None:
        """Record a change of a node: in a large cluster nodes never all rest."""
        with self._lock:
            self._burst.begin(self._clock.monotonic())
        self._wake.set()

    def wake(self) -> None:
        """Let the loop step soon."""
        self._wake.set()

    def end(self) -> None:
        """End the loop soon."""
        self.is_over = True
        self.wake()

    def quiet_in_s(self) -> float | None:
        """Return the time until demand is quiet, 0 if it is; None without a change."""
        with self._lock:
            return self._burst.ends_in_s(self._clock.monotonic())

    def clear(self) -> None:
        """Forget the changes until now."""
        with self._lock:
            self._burst.clear()

    def wait(self, seconds: float) -> None:
        """Wait for a change or the end, up to a time-out."""
        self._wake.wait(seconds)
        self._wake.clear()
