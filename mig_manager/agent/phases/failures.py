"""Undo failed and interrupted runs, and decide what a failure means for the next attempt."""

import dataclasses

import structlog

from mig_manager import errors
from mig_manager.agent import jobs, outcomes
from mig_manager.agent.phases import host, recovery, resolving, verification
from mig_manager.core import messages, model
from mig_manager.core.records import requests

_log = structlog.get_logger()


def conclude(job: jobs.Job, error: errors.MigManagerError) -> outcomes.Outcome:
    """Undo a run after an error; return its failure."""
    if isinstance(error, errors.DrainError):
        job.journal.note(draining=error.keeps_taint)
    elif not _is_of_api(error) or (
        job.status.phase is model.Phase.PAUSE and error.reason is not errors.Reason.API_UNAVAILABLE
    ):
        # What keeps a begun drain from going on, such as a foreign manager, may last.
        job.journal.note(draining=False)
    note_costs(job, error)
    outcome = job.journal.failure(
        error.reason,
        error.message,
        undo(job),
        is_final=_is_final(job, error),
        remedy=error.own_remedy if isinstance(error, errors.NotReadyError) else "",
    )
    if outcome.should_retry:
        return outcome
    # From now on the hardware decides when to try again.
    gpus = resolving.observe_at_end(job)
    return dataclasses.replace(
        verification.verify_restored(job, gpus, outcome), gpus_after_failure=gpus
    )


def note_costs(job: jobs.Job, error: errors.MigManagerError) -> None:
    """Record a failure that follows evictions, except of the drain: a few later no pod is evicted.

    Else a hook, a service or a driver that always fails would cost pods in every attempt.
    """
    is_drain = isinstance(error, errors.DrainError) or (
        job.journal.entries.draining and _is_of_api(error)
    )
    is_costly = job.journal.entries.has_evicted and not job.request.repairs
    if is_costly and not (is_drain or error.reason is errors.Reason.API_UNAVAILABLE):
        failed = requests.FailedChanges(
            config_hash=job.status.config_hash,
            boot_id=job.deps.boot_id,
            reason=error.reason,
            problem=messages.fit(error.message, requests.MAX_PROBLEM),
        )
        job.journal.note_record(job.journal.record.with_failed_change(failed))


def _is_of_api(error: errors.MigManagerError) -> bool:
    """Return whether the API refuses or fails, which may pass; kubelet does not count."""
    is_of_kubelet = isinstance(error, errors.KubeletError)
    return isinstance(error, errors.ClusterError) and not is_of_kubelet


def _is_final(job: jobs.Job, error: errors.MigManagerError) -> bool:
    """Return whether not to retry after a temporary error.

    If devices to be destroyed are in use, the program that chose an on-demand layout chooses
    another. A GPU client that does not stop in time is not the layout's fault.
    """
    is_client = isinstance(error, errors.NotReadyError)
    is_in_use = error.reason is errors.Reason.IN_USE and not is_client
    return job.request.is_on_demand and job.may_evict and is_in_use


def undo(job: jobs.Job) -> str:
    """Undo an unfinished change; return the result as part of a sentence."""
    result = "" if job.journal.has_begun_rollback else recovery.roll_back(job)
    return messages.join(result, host.restore(job))


def undo_interrupted(job: jobs.Job) -> None:
    """Undo an interrupted run, whose journal the job has; report the result as an Event.

    Raises:
        ClusterError: The API refused or does not answer.
        LockedError: Another manager is at work; nothing was undone.
    """
    name = job.request.config or "a layout"
    with job.hold_lock(f"undoing an interrupted change to {name}"):
        job.journal.take_over()
        before = job.journal.entries
        result = undo(job)
        if before.stale_files:
            try:
                job.transaction().refresh()
            except errors.HostError as error:
                result = messages.join(result, error.message)
    job.journal.abandon()
    remaining = job.journal.entries
    if remaining.without_creations == before.without_creations:
        _log.warning("rollback_pending", config=job.request.config, why=result)
        return
    done = f"restored the node after an interrupted run for {name}"
    if not remaining.has_nothing_to_undo:
        done = f"an interrupted run for {name} is only partly undone"
    job.deps.node.emit(
        reason="Recovered",
        message=messages.join(done, result),
        is_warning=not remaining.has_nothing_to_undo,
    )
