"""Wait for a slot before a node is disrupted, where its owner has a budget for the cluster.

Nothing has been taken yet, so a newer wish ends the wait for free, and an API that does not
answer only makes it longer. A node that an interrupted run has left disrupted does not wait: to
finish is the quickest way to have it back.
"""

import random

import structlog

from mig_manager import errors
from mig_manager.agent import record
from mig_manager.core import model, ports, timing
from mig_manager.core import timing as pacing

_log = structlog.get_logger()

_PACE = pacing.Pace(first_s=0.25, max_s=10.0)
"""A slot that becomes free is taken soon where many wait, for their looks are spread."""
_TELL_AGAIN_S = 60.0
"""Hundreds of nodes may wait: each says anew who is before it only so often."""


class Admission:
    """The way of one run to a slot."""

    def __init__(
        self,
        slots: ports.Slots,
        written: record.Record,
        clock: timing.Clock,
        *,
        pace: pacing.Pace = _PACE,
    ) -> None:
        self._slots = slots
        self._record = written
        self._clock = clock
        self._pace = pace
        self._told = ""
        self._told_at_s = 0.0

    def take_again(self) -> None:
        """Take our former slot, or another, for a node that is disrupted already."""
        try:
            denial = self._slots.take()
        except errors.ClusterError as error:
            denial = error.message
        if denial:
            _log.warning("slot_not_taken_again", why=denial)

    def wait(self, wish: ports.Wish) -> None:
        """Return once a slot is held.

        Args:
            wish: Asked at every turn.

        Raises:
            ClusterError: The API refused the request as such, or the news of the wait.
            Superseded: The run is no longer wanted.
        """
        turn = 0
        while denial := self._ask():
            self._tell(denial)
            # Lest all who wait come at the same time.
            wish.wait(self._pace.delay_s(turn) * random.uniform(0.5, 1.0))  # noqa: S311 - a spread
            turn += 1

    def _ask(self) -> str:
        try:
            return self._slots.take()
        except errors.ClusterError as error:
            if error.reason is errors.Reason.FORBIDDEN:
                raise
            _log.warning("slots_unknown", reason=error.reason.value, error=error.message)
            return f"waiting for a slot for nodes under change: {error.message}"

    def _tell(self, denial: str) -> None:
        now_s = self._clock.monotonic()
        is_due = not self._told or now_s - self._told_at_s >= _TELL_AGAIN_S
        if denial == self._told or not is_due:
            return
        self._told, self._told_at_s = denial, now_s
        self._record.enter(model.Phase.WAIT, denial, reason=errors.Reason.SLOTS_TAKEN)
