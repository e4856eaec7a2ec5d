"""Execute a plan on the GPUs, all or nothing."""

import contextlib

from mig_manager import errors
from mig_manager.agent import jobs
from mig_manager.agent.phases import draining, host, preparing, rebooting, recovery
from mig_manager.agent.pods import advertising, resuming
from mig_manager.core import model


def execute(
    job: jobs.Job, change: preparing.PlannedChange, paused: advertising.Paused
) -> model.ObservedGpus:
    """Execute and verify the plan, or roll back; reboot if nothing else helps.

    Raises:
        MigManagerError: As ``transaction.Transaction.run`` and ``refresh``, and as
            ``rebooting.reboot`` returns.
        Rebooting: The machine goes down.
        Superseded: Another layout is requested, or the agent stops; the GPUs are as before.
    """
    transaction = job.transaction(preparing.idle_wait(job))
    # If this fails, the end of the run rolls back while clients and services are still paused.
    interrupted = recovery.rollback_target(job, change.gpus)
    try:
        after, _ = transaction.run(
            change.plan,
            change,
            observed=change.gpus,
            interrupted=interrupted,
            points=job.hooks,
        )
        job.journal.note_gpus(after)
        job.note_target_active()
        transaction.refresh()
    except errors.MigManagerError as error:
        if not rebooting.may_help(job, error):
            _resume_after_failure(job, paused, error)
            raise
        failure = rebooting.reboot(
            job, error, lambda: draining.drain_whole_node(job, change, paused)
        )
        _resume_after_failure(job, paused, failure)
        raise failure from error
    return after


def _resume_after_failure(
    job: jobs.Job, paused: advertising.Paused, error: errors.MigManagerError
) -> None:
    """Resume host services and device plugin, but report the original failure."""
    failed = host.restore(job)
    if failed:
        error.add(failed)
    # If the API fails now, the end of the run restores the rest.
    with contextlib.suppress(errors.ClusterError):
        resuming.resume_advertisers(job, paused)
