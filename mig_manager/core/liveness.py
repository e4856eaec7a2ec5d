"""Liveness of a loop and contact with the API, for kubelet's probes."""

import dataclasses
import math
from collections.abc import Callable

_CONTACT_WITHIN_S = 180.0
"""An idle watch gets a bookmark each minute; a dead one is noticed within 90 s."""


class Pulse:
    """Records when the loop last reported that it is alive; for any thread."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._last = math.inf

    def beat(self) -> None:
        """Report that the loop is alive; the next report must come within a bound."""
        self._last = self._monotonic()

    def rest(self) -> None:
        """Begin a wait that may never end; no report is expected before the next ``beat``."""
        self._last = math.inf

    @property
    def silence_s(self) -> float:
        """How long a report has been overdue; 0 if none is expected."""
        return max(0.0, self._monotonic() - self._last)


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """Answers kubelet's probes."""

    pulse: Pulse
    stuck_after_s: float
    contact_age_s: Callable[[], float]  # since the last data; infinite before the first
    is_recovered: Callable[[], bool] = lambda: True

    def why_dead(self) -> str:
        """Return why only a restart helps; empty if the loop is alive."""
        silence = self.pulse.silence_s
        if silence < self.stuck_after_s:
            return ""
        return f"the loop has been stuck for {silence:.0f} s"

    def why_unready(self) -> str:
        """Return why requests are not served now; empty if they are."""
        age_s = self.contact_age_s()
        if math.isinf(age_s):
            return "the Kubernetes API has not been reached yet"
        if age_s >= _CONTACT_WITHIN_S:
            return f"the Kubernetes API has not been heard of for {age_s:.0f} s"
        if not self.is_recovered():
            return "an earlier run is not undone yet"
        return self.why_dead()
