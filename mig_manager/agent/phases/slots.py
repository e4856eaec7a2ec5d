"""Wait for a slot if the number of nodes under change is limited."""

import dataclasses
import math
import random

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts
from mig_manager.agent.phases import resolving
from mig_manager.agent.pods import stale_devices
from mig_manager.core import ports, timing
from mig_manager.core.records import journals, run_status

_BACKOFF = timing.Backoff(first_s=0.25, max_s=10.0, jitter=random.random)
"""Fast enough even if many nodes wait, because they ask at random times."""
_PUBLISH_AGAIN_S = 60.0
"""Hundreds of nodes may wait: limits how often a node publishes which nodes have the slots."""

_log = structlog.get_logger()


def wait(attempt: attempts.Attempt) -> None:
    """Wait until the node has a slot; an interrupted change goes on without one.

    The wait may be long, so it comes before the lock.

    Raises:
        ClusterError: The API refused the request as such, or a status.
        LockedError: Another manager is at work.
        Superseded: Another layout is requested, or the agent stops.
    """
    slots = attempt.deps.slots
    clock = attempt.deps.clock
    journal = attempt.journal
    if slots is None or journal.node.blocks_workloads:
        return
    if journal.remainder is not journals.Remainder.CHANGE and _changes_nothing(attempt):
        return
    waiting = dataclasses.replace(attempt.new_wait(math.inf), backoff=_BACKOFF)
    published, published_at_s = "", -math.inf
    checked_at_s = clock.monotonic()
    for _ in waiting.tries():
        why = _take(slots)
        if why is None:
            return
        now_s = clock.monotonic()
        if now_s - checked_at_s >= attempt.settings.drift_check_interval_s:
            stale_devices.observe_and_remove(attempt)
            checked_at_s = now_s
        if why != published and now_s - published_at_s >= _PUBLISH_AGAIN_S:
            published, published_at_s = why, now_s
            attempt.recorder.enter(run_status.Phase.WAIT, why)


def take_again(attempt: attempts.Attempt) -> None:
    """Try to take a slot for an interrupted change, which blocks workloads and cannot wait."""
    slots = attempt.deps.slots
    if slots is None or not attempt.journal.node.blocks_workloads:
        return
    try:
        denial = slots.take()
        why = "" if denial is None else str(denial)
    except errors.ClusterError as error:
        why = error.message
    if why:
        _log.warning("slot_not_taken_again", why=why)


def require(attempt: attempts.Attempt) -> None:
    """Check that the node has its slot, before anything that another node must not do meanwhile.

    Raises:
        NotReadyError: SLOTS_TAKEN: it has none, or another node may take it soon.
    """
    if attempt.deps.slots is not None and not attempt.journal.node.blocks_workloads:
        attempt.deps.slots.check()


def _changes_nothing(attempt: attempts.Attempt) -> bool:
    """Return whether the layout is active, or cannot be resolved or planned now.

    An error of the plan, even if it passes soon, costs no slot; ``require`` then stops a run that
    has a plan after all. If a GPU of an earlier change is back, even a run that fails restores it,
    and needs a slot.

    Raises:
        LockedError: Another manager is at work.
        Superseded: Another layout is requested, or the agent stops.
    """
    try:
        lock_wait = attempt.new_wait(attempt.settings.lock_timeout_s)
        with attempt.hold_lock(
            f"planning layout {attempt.request.layout}", lock_wait, changes_gpus=False
        ):
            entries = attempt.journal.gpus
            if entries.snapshots and not entries.are_unreachable(
                resolving.observe_and_record(attempt)
            ):
                return False
            target = resolving.resolve(attempt)
            return target.plan(resolving.observed_for(attempt, target)).is_empty
    except errors.LockedError:
        # Else the run would wait for the lock a second time.
        raise
    except errors.MigManagerError:
        return True


def _take(slots: ports.Slots) -> str | None:
    """Take a slot; return why the node has none, and None with a slot."""
    try:
        denial = slots.take()
    except errors.ClusterError as error:
        if error.reason is reasons.Reason.FORBIDDEN:
            raise
        _log.warning("slots_unknown", reason=error.reason.value, error=error.message)
        return f"waiting for a slot for nodes under change: {error.message}"
    return None if denial is None else str(denial)
