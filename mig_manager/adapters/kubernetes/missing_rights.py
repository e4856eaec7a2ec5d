"""Rights that our ServiceAccount may lack: the stock GPU operator grants few."""

import math
from collections.abc import Callable

from mig_manager import errors, reasons
from mig_manager.core import timing

_PAUSE_S = 600.0


class MissingRight:
    """Pauses one kind of request after a 403: the right may be granted while we run."""

    def __init__(
        self, clock: timing.Clock, log_first: Callable[[errors.ClusterError], None]
    ) -> None:
        """Build it; ``log_first`` logs the first refusal, and no later one."""
        self._clock = clock
        self._log_first = log_first
        self._paused_until_s = -math.inf

    @property
    def is_missing(self) -> bool:
        """Whether the pause after a refusal lasts."""
        return self._clock.monotonic() < self._paused_until_s

    def is_refusal(self, error: errors.ClusterError) -> bool:
        """Return whether an error is a refusal for lack of the right; if so, begin a pause."""
        if error.reason is not reasons.Reason.FORBIDDEN:
            return False
        if self._paused_until_s == -math.inf:
            self._log_first(error)
        self._paused_until_s = self._clock.monotonic() + _PAUSE_S
        return True
