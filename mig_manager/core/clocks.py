"""Time, as a port of its own: whoever needs no more of the world loads no more."""

from typing import Protocol


class Clock(Protocol):
    """Time as an argument, so that tests need not spend it."""

    def now_iso(self, *, after_s: float = 0.0) -> str:
        """Return the wall-clock time, now or later, as RFC 3339 in UTC, for people only."""

    def monotonic(self) -> float:
        """Return seconds from some fixed point, for deadlines."""

    def wait(self, seconds: float) -> None:
        """Sleep through; for waits that must not be cut short."""
