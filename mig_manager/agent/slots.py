"""Wait for a slot where the cluster limits how many nodes change at the same time."""

import random

import structlog

from mig_manager import errors
from mig_manager.agent import record
from mig_manager.core import model, ports, timing

_log = structlog.get_logger()

_BACKOFF = timing.Backoff(first_s=0.25, max_s=10.0)
"""Quick enough where many nodes wait, because each asks at a random time."""
_PUBLISH_AGAIN_S = 60.0
"""Hundreds of nodes may wait: each publishes which nodes have the slots only so often."""


def take_again(slots: ports.Slots) -> None:
    """Take our former slot, or another, for a node whose change is under way."""
    try:
        denial = slots.take()
    except errors.ClusterError as error:
        denial = error.message
    if denial:
        _log.warning("slot_not_taken_again", why=denial)


def wait(
    slots: ports.Slots, written: record.Record, clock: timing.Clock, request: ports.Cancellation
) -> None:
    """Wait until the node has a slot, and publish which nodes have them meanwhile.

    Raises:
        ClusterError: The API refused the request as such, or a status.
        Superseded: Another layout is requested, or the agent stops.
    """
    published, published_at_s = "", 0.0
    attempt = 0
    while denial := _take(slots):
        now_s = clock.monotonic()
        may_publish = not published or now_s - published_at_s >= _PUBLISH_AGAIN_S
        if denial != published and may_publish:
            published, published_at_s = denial, now_s
            written.enter(model.Phase.WAIT, denial, reason=errors.Reason.SLOTS_TAKEN)
        # A random pause, so that waiting nodes do not ask at the same time.
        request.wait(_BACKOFF.delay_s(attempt) * random.uniform(0.5, 1.0))  # noqa: S311 - a spread
        attempt += 1


def _take(slots: ports.Slots) -> str:
    try:
        return slots.take()
    except errors.ClusterError as error:
        if error.reason is errors.Reason.FORBIDDEN:
            raise
        _log.warning("slots_unknown", reason=error.reason.value, error=error.message)
        return f"waiting for a slot for nodes under change: {error.message}"
