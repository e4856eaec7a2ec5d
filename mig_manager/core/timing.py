"""The clock port, and what is built on it: backoff, waits, bursts and rate limits.

In a module of its own, because small processes import nothing else of the core.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from mig_manager import errors

_Result = TypeVar("_Result")


class Clock(Protocol):
    """Time as a port, so that tests need not wait.

    Adapters of processes, threads and connections read the operating system's clock themselves:
    what they wait for takes real time in tests too.
    """

    def now_iso(self, *, after_s: float = 0.0) -> str:
        """Return the wall-clock time, now or later, as RFC 3339 in UTC, for people only."""

    def monotonic(self) -> float:
        """Return seconds from some fixed point, for deadlines."""

    def unix_s(self) -> float:
        """Return the wall-clock time in seconds since 1970, for pauses that outlast a process."""

    def wait(self, seconds: float) -> None:
        """Sleep without interruption."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Growing delays of a poll: most waits are short."""

    first_s: float = 0.05
    max_s: float = 1.0
    factor: float = 1.6
    jitter: Callable[[], float] = lambda: 1.0
    """Returns from 0 to 1 how much of a delay's second half counts. A random number keeps
    programs that wait for the same thing from acting at the same time."""

    def delay_s(self, attempt: int) -> float:
        """Return the pause before an attempt, counted from 0."""
        longest_s = min(self.max_s, self.first_s * self.factor ** min(attempt, 64))
        return longest_s * (1 + self.jitter()) / 2


_BACKOFF = Backoff()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A wait for other programs, with a deadline and growing pauses."""

    clock: Clock
    timeout_s: float = 0.0  # 0: one try; inf: no deadline
    sleep: Callable[[float], object] | None = None
    """Pauses, and reports that the caller is alive; its exceptions end the wait. None: the clock's
    uninterruptible wait."""
    backoff: Backoff = _BACKOFF
    on_wait: Callable[[errors.MigManagerError], object] = lambda _error: None
    """Called once by ``retry``, before the first pause."""

    def tries(self) -> Iterator[bool]:
        """Yield for each try whether it is the last one; pause before the next.

        The duration of the first one does not count.
        """
        is_last = self.timeout_s <= 0
        yield is_last
        until_s = self.clock.monotonic() + self.timeout_s
        pauses_s = map(self.backoff.delay_s, itertools.count())
        while not is_last:
            remaining_s = until_s - self.clock.monotonic()
            if remaining_s > 0:
                (self.sleep or self.clock.wait)(min(next(pauses_s), remaining_s))
            is_last = self.clock.monotonic() >= until_s
            yield is_last

    def retry(
        self,
        act: Callable[[], _Result],
        *,
        may_pass: Callable[[errors.MigManagerError], bool],
        goal: str = "",
    ) -> _Result:
        """Call ``act`` until it succeeds, while its failure may pass, until the deadline.

        The last error has the length of the wait and its ``goal``.
        """
        tries, has_waited = self.tries(), False
        while True:
            is_last = next(tries)
            try:
                return act()
            except errors.MigManagerError as error:
                if not may_pass(error):
                    raise
                if is_last and has_waited:
                    error.add(f"waited {round(self.timeout_s, 1):g} s{goal}")
                if is_last:
                    raise
                if not has_waited:
                    self.on_wait(error)
                has_waited = True


class Burst:
    """Debounces events: a burst ends after ``quiet_s`` without one, or after ``max_s``.

    All times are seconds of one clock.
    """

    def __init__(self, *, quiet_s: float, max_s: float) -> None:
        self._quiet_s = quiet_s
        self._max_s = max_s
        self._first: float | None = None
        self._last = 0.0

    def add(self, now: float) -> None:
        """Add an event."""
        if self._first is None:
            self._first = now
        self._last = now

    def begin(self, now: float) -> None:
        """Begin a burst unless one is under way, which this event does not prolong."""
        if self._first is None:
            self.add(now)

    def ends_in_s(self, now: float) -> float | None:
        """Return the time until the burst ends, 0 if it has; None without a burst."""
        if self._first is None:
            return None
        end = min(self._last + self._quiet_s, self._first + self._max_s)
        return max(0.0, end - now)

    def clear(self) -> None:
        """Wait for the next burst."""
        self._first = None


class TokenBucket:
    """A number of acts at once, and one more after each pause.

    All times are seconds of one clock.
    """

    def __init__(self, *, burst: int, pause_s: float) -> None:
        self._burst_s = burst * pause_s
        self._pause_s = pause_s
        self._spent_s = -math.inf  # the tokens gained up to this time are spent

    def take(self, now_s: float) -> bool:
        """Take a token; return False if none is available."""
        if self._next(now_s) > now_s:
            return False
        self.reserve(now_s)
        return True

    def reserve(self, now_s: float) -> float:
        """Take a token, on credit if need be; return the seconds until it is available."""
        self._spent_s = self._next(now_s)
        return max(0.0, self._spent_s - now_s)

    def _next(self, now_s: float) -> float:
        return max(self._spent_s, now_s - self._burst_s) + self._pause_s
