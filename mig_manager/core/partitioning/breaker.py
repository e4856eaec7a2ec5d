"""Stop requests by itself while agents fail them: a circuit breaker.

Requests stop if agents failed ``max_failures`` of them in ten minutes, and at least half. After
the stop one request at a time is a trial: success ends it, a failure stops for twice as long.
"""

import dataclasses

WINDOW_S = 600.0
_STOP_S = 600.0
_MAX_STOP_S = 3600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """The recent outcomes of requests, and until when none is made; seconds of one clock."""

    outcomes: tuple[tuple[float, bool], ...] = ()
    """Time and success of the requests in the window, before a stop."""
    stop_s: float = 0.0  # length of the last stop; 0: requests have not stopped
    resumes_at_s: float = 0.0  # end of the stop, and begin of the trial

    def after(self, *, applied: int, failed: int, max_failures: int, now_s: float) -> "Breaker":
        """Return the breaker after these outcomes; ``max_failures`` 0: it never stops."""
        outcomes = tuple(each for each in self.outcomes if now_s - each[0] < WINDOW_S)
        outcomes += ((now_s, True),) * applied + ((now_s, False),) * failed
        failures = sum(not is_good for _, is_good in outcomes)
        if not self.stop_s:
            # Old successes that leave the window are no reason to stop.
            is_many = failures >= max_failures and 2 * failures >= len(outcomes)
            if not (max_failures and failed and is_many):
                return dataclasses.replace(self, outcomes=outcomes)
            return Breaker(stop_s=_STOP_S, resumes_at_s=now_s + _STOP_S)
        if now_s < self.resumes_at_s or not (applied or failed):
            return self  # Outcomes of requests from before the stop prove nothing.
        if not failed:
            return Breaker()
        stop_s = min(2 * self.stop_s, _MAX_STOP_S)
        return Breaker(stop_s=stop_s, resumes_at_s=now_s + stop_s)

    def allowance(self, awaited: int, *, now_s: float) -> int | None:
        """Return how many requests may follow ``awaited`` ones; None: any number."""
        if not self.stop_s:
            return None
        return 0 if now_s < self.resumes_at_s else max(0, 1 - awaited)
