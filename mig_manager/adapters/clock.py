"""The real clock."""

import datetime as dt
import threading
import time


class SystemClock:
    """Implements ``ports.Clock`` on the operating system's clocks."""

    def now_iso(self) -> str:
        """Return the wall-clock time as RFC 3339 in UTC, whole seconds."""
        now = dt.datetime.now(tz=dt.UTC)
        return now.strftime("%Y-%m-%dT%H:%M:%SZ")

    def monotonic(self) -> float:
        """Return seconds of the monotonic clock."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Sleep through."""
        threading.Event().wait(max(0.0, seconds))
