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


def why_no_contact(age_s: float) -> str:
    """Return why the API counts as lost ``age_s`` after its last data; empty if it does not.

    The age is infinite before the first contact.
    """
    if math.isinf(age_s):
        return "the Kubernetes API has not been reached yet"
    if age_s >= _CONTACT_WITHIN_S:
        return f"the Kubernetes API has not been heard of for {age_s:.0f} s"
    return ""


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """Answers kubelet's probes."""

    pulse: Pulse
    stuck_after_s: float
    contact_age_s: Callable[[], float]
    is_recovered: Callable[[], bool]

    def why_dead(self) -> str:
        """Return why only a restart helps; empty if the loop is alive."""
        silence = self.pulse.silence_s
        if silence < self.stuck_after_s:
            return ""
        return f"the worker has been stuck for {silence:.0f} s"

    def why_unready(self) -> str:
        """Return why requests are not served now; empty if they are."""
        if lost := why_no_contact(self.contact_age_s()):
            return lost
        if not self.is_recovered():
            return "an earlier run is not undone yet"
        return self.why_dead()
