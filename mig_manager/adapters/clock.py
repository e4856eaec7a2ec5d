"""The real clock."""

import datetime as dt
import threading
import time


class SystemClock:
    """Implements ``ports.Clock`` on the operating system's clocks."""

    def now_iso(self, *, after_s: float = 0.0) -> str:
        """Return the wall-clock time, now or later, as RFC 3339 in UTC, whole seconds."""
        then = dt.datetime.now(tz=dt.UTC) + dt.timedelta(seconds=after_s)
        return then.strftime("%Y-%m-%dT%H:%M:%SZ")

    def monotonic(self) -> float:
        """Return seconds of the monotonic clock."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Sleep through."""
        threading.Event().wait(max(0.0, seconds))
