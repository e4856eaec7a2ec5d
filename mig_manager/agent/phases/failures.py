"""Undo failed and interrupted runs, and decide what a failure means for the next attempt."""

import dataclasses

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts, outcomes
from mig_manager.agent.phases import resolving, rolling_back, services_and_hooks, verification
from mig_manager.agent.pods import pausing
from mig_manager.core import messages, pod_rights
from mig_manager.core.records import change_failures, journals, requests, run_status

_log = structlog.get_logger()


def conclude(attempt: attempts.Attempt, error: errors.MigManagerError) -> outcomes.Outcome:
    """Undo a run after an error; return its failure."""
    if isinstance(error, errors.DrainError):
        attempt.recorder.set_journal(is_draining=error.keeps_taint)
    elif not isinstance(error, errors.ClusterError) or (
        attempt.status.phase is run_status.Phase.PAUSE
        and error.reason is not reasons.Reason.API_UNAVAILABLE
    ):
        # What stops a drain that has begun, such as a foreign manager, may last.
        attempt.recorder.set_journal(is_draining=False)
    record_costs(attempt, error)
    outcome = attempt.failure(
        error.reason,
        error.message,
        undo(attempt),
        is_final=_is_final(attempt, error),
        remedy=error.remedy_on_node,
    )
    if isinstance(error, errors.MissingGpusError):
        outcome = dataclasses.replace(outcome, missing_gpus=error.gpus)
    if outcome.should_retry:
        return outcome
    # From now on the hardware decides when to try again.
    gpus = resolving.observe_at_end(attempt)
    return dataclasses.replace(
        verification.verify_restored(attempt, gpus, outcome), gpus_after_failure=gpus
    )


def record_costs(attempt: attempts.Attempt, error: errors.MigManagerError) -> None:
    """Record a failure after evictions, except one of the drain; after a few, no pod is evicted.

    Otherwise a hook, service or driver that always fails would cost pods in every attempt.
    """
    is_drain = isinstance(error, errors.DrainError) or (
        attempt.journal.is_draining and isinstance(error, errors.ClusterError)
    )
    is_costly = attempt.journal.has_evicted and not attempt.is_repair
    if is_costly and not (is_drain or error.reason is reasons.Reason.API_UNAVAILABLE):
        failed = change_failures.FailedChanges(
            content_hash=attempt.status.content_hash,
            boot_id=attempt.deps.boot_id,
            reason=error.reason,
            problem=messages.fit(error.message, requests.MAX_PROBLEM),
        )
        attempt.recorder.set_record(attempt.record.with_failed_change(failed))


def _is_final(attempt: attempts.Attempt, error: errors.MigManagerError) -> bool:
    """Return whether not to retry after a temporary error.

    If devices to be destroyed are in use, the program that chose an on-demand layout chooses
    another. A GPU client that does not stop in time is not the layout's fault.
    """
    is_client = isinstance(error, errors.NotReadyError)
    is_in_use = error.reason is reasons.Reason.IN_USE and not is_client
    return is_in_use and isinstance(attempt.rights.pods, pod_rights.OnDemand)


def undo(attempt: attempts.Attempt) -> str:
    """Undo an unfinished change; return the result as part of a sentence."""
    result = "" if attempt.recorder.has_begun_rollback else rolling_back.roll_back(attempt)
    pausing.record_present(attempt)
    return messages.join(result, services_and_hooks.restore(attempt))


def undo_interrupted(attempt: attempts.Attempt) -> None:
    """Undo an interrupted run, whose journal the attempt has; report the result as an Event.

    Raises:
        ClusterError: The API refused or does not answer.
        LockedError: Another manager is at work; nothing was undone.
    """
    name = attempt.request.layout or "a layout"
    with attempt.hold_journal(f"undoing an interrupted change to {name}"):
        before = attempt.journal
        result = undo(attempt)
        if before.gpus.has_stale_files:
            try:
                attempt.new_transaction().refresh()
            except errors.HostError as error:
                result = messages.join(result, error.message)
    attempt.recorder.abandon()
    remaining = attempt.journal
    if remaining.without_creations == before.without_creations:
        _log.warning("rollback_pending", config=attempt.request.layout, why=result)
        return
    done = f"restored the node after an interrupted run for {name}"
    is_partial = remaining.remainder is journals.Remainder.CHANGE
    if is_partial:
        done = f"an interrupted run for {name} is only partly undone"
    attempt.deps.node.emit(
        reason="Recovered",
        message=messages.join(done, result),
        is_warning=is_partial,
    )
