"""Time as a port of its own, so that small processes import only this."""

import dataclasses
from typing import Protocol


class Clock(Protocol):
    """Time as an argument, so that tests need not spend it."""

    def now_iso(self, *, after_s: float = 0.0) -> str:
        """Return the wall-clock time, now or later, as RFC 3339 in UTC, for people only."""

    def monotonic(self) -> float:
        """Return seconds from some fixed point, for deadlines."""

    def wait(self, seconds: float) -> None:
        """Sleep without interruption."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays of a poll: short at first, because most waits are short, then longer."""

    first_s: float = 0.05
    max_s: float = 1.0
    factor: float = 1.6

    def delay_s(self, attempt: int) -> float:
        """Return the pause before an attempt, counted from 0."""
        return min(self.max_s, self.first_s * self.factor ** min(attempt, 64))


class Burst:
    """Debounces events: a burst ends after ``quiet_s`` without one, or after ``longest_s``.

    Times are seconds of any one clock.
    """

    def __init__(self, *, quiet_s: float, longest_s: float) -> None:
        self._quiet_s = quiet_s
        self._longest_s = longest_s
        self._first: float | None = None
        self._last = 0.0

    def add(self, now: float) -> None:
        """Add an event."""
        if self._first is None:
            self._first = now
        self._last = now

    def ends_in_s(self, now: float) -> float | None:
        """Return the time until the burst ends, 0 if it has; None without a burst."""
        if self._first is None:
            return None
        end = min(self._last + self._quiet_s, self._first + self._longest_s)
        return max(0.0, end - now)

    def clear(self) -> None:
        """Wait for the next burst."""
        self._first = None
