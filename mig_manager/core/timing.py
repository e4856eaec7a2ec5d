"""Time as a port of its own, so that small processes import only this."""

import dataclasses
from collections.abc import Callable
from typing import Protocol, TypeVar

from mig_manager import errors

_Result = TypeVar("_Result")

LONGEST_LEASE_S = 3600.0
"""A longer duration in a Lease counts as this. The API allows 68 years, and one Lease of another
program could stop those that wait for it as long."""


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


_BACKOFF = Backoff()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """How to wait for what another program uses."""

    timeout_s: float = 0.0
    """0: fail at once."""
    wait: Callable[[float], object] = lambda _seconds: None
    """Sleeps; what it raises ends the wait."""
    on_wait: Callable[[errors.MigManagerError], object] = lambda _error: None
    """Called once, before the first wait."""
    backoff: Backoff = _BACKOFF

    def retry(
        self,
        attempt: Callable[[], _Result],
        clock: Clock,
        *,
        may_pass: Callable[[errors.MigManagerError], bool],
        goal: str = "",
    ) -> _Result:
        """Attempt something, again while its failure may pass, until the deadline.

        Its last error says how long that took, and for what (``goal``).
        """
        until: float | None = None
        number = 0
        while True:
            try:
                return attempt()
            except errors.MigManagerError as error:
                if not may_pass(error):
                    raise
                # The time that the first attempt takes is no wait.
                if until is None:
                    until = clock.monotonic() + self.timeout_s
                remaining_s = until - clock.monotonic()
                if remaining_s <= 0:
                    if number:
                        error.add(f"waited {self.timeout_s:g} s{goal}")
                    raise
                if number == 0:
                    self.on_wait(error)
            self.wait(min(self.backoff.delay_s(number), remaining_s))
            number += 1


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


class Allowance:
    """A number of acts at once, and one more after each pause.

    Times are seconds of any one clock.
    """

    def __init__(self, *, burst: int, pause_s: float) -> None:
        self._burst_s = burst * pause_s
        self._pause_s = pause_s
        self._spent: float | None = None
        """The acts gained up to this time are spent."""

    def take(self, now: float) -> bool:
        """Take one act; return False if there is none now."""
        spent = now - self._burst_s if self._spent is None else self._spent
        spent = max(spent, now - self._burst_s) + self._pause_s
        if spent > now:
            return False
        self._spent = spent
        return True
