"""Many things that happen at once, taken for one."""


class Burst:
    """Says when a burst is over: when nothing has happened for a while, or it lasts too long.

    Times are seconds of any one clock.

    Args:
        quiet_s: How long nothing must happen.
        longest_s: A burst counts as over after this long, whatever still happens.
    """

    def __init__(self, *, quiet_s: float, longest_s: float) -> None:
        self._quiet_s = quiet_s
        self._longest_s = longest_s
        self._first: float | None = None
        self._last = 0.0

    def add(self, now: float) -> None:
        """Note that something has happened."""
        if self._first is None:
            self._first = now
        self._last = now

    def due_in_s(self, now: float) -> float | None:
        """Return the time until it is over, 0 when it is; None while nothing has happened."""
        if self._first is None:
            return None
        end = min(self._last + self._quiet_s, self._first + self._longest_s)
        return max(0.0, end - now)

    def clear(self) -> None:
        """Wait for the next one."""
        self._first = None
