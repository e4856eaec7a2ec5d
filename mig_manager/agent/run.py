"""The pipeline: from the requested layout to an outcome.

    resolve -> observe -> plan -> taint -> drain -> pause -> execute -> resume -> verify

The hooks run before the node is tainted, within the execution, and before the resume.

Steps that can fail without disturbing a pod come before steps that disturb one. The journal lists
every action first; the end of a run undoes the entries and publishes one final state with one
reason. Until GPUs are touched, a newer request ends the run. After that the change is finished or
rolled back first, and only its verification may be left to the next run.
"""

import contextlib
import dataclasses

import structlog

from mig_manager import errors
from mig_manager.agent import jobs, outcomes
from mig_manager.agent.pods import drain
from mig_manager.agent.steps import (
    draining,
    execution,
    host,
    preparing,
    rebooting,
    recovery,
    resolving,
    slots,
    verification,
)
from mig_manager.core import messages, model
from mig_manager.core.planner import vgpus
from mig_manager.core.records import requests

_log = structlog.get_logger()

_MID_CHANGE = (
    model.Phase.EXECUTE,
    model.Phase.ROLL_BACK,
    model.Phase.RESUME,
    model.Phase.VERIFY,
)


def run(job: jobs.Job) -> outcomes.Outcome:
    """Apply the layout or repair GPUs, or roll back; return the outcome without publishing it.

    Raises:
        ClusterError: API_UNAVAILABLE: in mid-change; the next attempt resumes from the journal.
        Rebooting: The machine goes down; nothing is restored.
        Superseded: Another layout is requested, or the agent stops.
    """
    with contextlib.ExitStack() as locked:
        try:
            slots.wait(job)
            wait = job.wait(job.limits.lock_timeout_s)
            locked.enter_context(job.hold_lock(f"applying layout {job.request.config}", wait))
            job.journal.take_over()
            # The interrupted run may be another agent's, unknown before.
            slots.take_again(job)
        except (errors.ClusterError, errors.LockedError) as error:
            return job.journal.failure(error.reason, error.message)
        outcome = _run_locked(job)
        _save_for_boot(job, outcome)
        return outcome


def _run_locked(job: jobs.Job) -> outcomes.Outcome:
    """Execute the steps, and undo them after an error."""
    try:
        return _steps(job)
    except errors.Rebooting:
        raise
    except errors.Superseded as end:
        end.add(undo(job))
        raise
    except errors.MigManagerError as error:
        if _is_resumed_next(job, error):
            raise
        if isinstance(error, errors.DrainError):
            job.journal.note(draining=error.keeps_taint)
        elif not _is_outage(error) and (
            job.status.phase is model.Phase.PAUSE or not _is_of_api(error)
        ):
            # What keeps a begun drain from going on, such as a foreign manager, may last.
            job.journal.note(draining=False)
        _count_failure(job, error)
        result = undo(job)
        is_final = _is_final(job, error)
        remedy = error.own_remedy if isinstance(error, errors.NotReadyError) else ""
        outcome = job.journal.failure(
            error.reason, error.message, result, is_final=is_final, remedy=remedy
        )
        if outcome.should_retry:
            return outcome
        # From now on the hardware decides when to try again.
        gpus = resolving.observe_at_end(job)
        return dataclasses.replace(
            verification.verify_restored(job, gpus, outcome), gpus_after_failure=gpus
        )
    except Exception as error:  # noqa: BLE001 - a bug must not leave the node pending
        _log.exception("run_crashed")
        problem = f"{type(error).__name__}: {error}"
        _count_failure(job, errors.MigManagerError(problem, reason=errors.Reason.INTERNAL))
        return job.journal.failure(errors.Reason.INTERNAL, problem, undo(job))


def _count_failure(job: jobs.Job, error: errors.MigManagerError) -> None:
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


def _save_for_boot(job: jobs.Job, outcome: outcomes.Outcome) -> None:
    """Save a verified layout for the next boot; a failure is logged.

    Once the lock is released, another manager may have changed the GPUs and saved its layout.
    """
    if job.request.repairs:
        # The layout's own run follows.
        return
    if outcome.state is model.State.SUCCESS:
        status, gpus = job.status, outcome.verified_gpus
        if why := job.saved_layout.save(
            gpus,
            config=status.config,
            config_hash=status.config_hash,
            covered={gpu.uuid for gpu in gpus} - job.journal.record.gpus_outside(gpus),
        ):
            _log.warning("layout_not_saved", error=why)
    elif any(gpu.has_pending_mode for gpu in job.status.gpus):
        rebooting.keep_pending_modes(job, job.status.gpus)


def _steps(job: jobs.Job) -> outcomes.Outcome:
    """Execute the steps listed at the top of this module."""
    try:
        target = resolving.resolve(job)
    except (errors.ConfigError, errors.LayoutError) as error:
        return verification.verify_unchanged(job, resolving.keep_verified(job, error))
    job.deps.standby.prepare()
    gpus = resolving.observe_once(job, target)
    if isinstance(target, resolving.Resolved):
        resolving.note_content(job, target, gpus)
    change = preparing.plan_change(job, target, gpus)
    if change.plan.is_empty:
        snapshots = change.unrestored_snapshots(change.gpus, job.journal.entries.snapshot)
        return verification.verify_unchanged(job, change.gpus, snapshots)
    is_new = job.request.attempt == 1 and job.may_evict and not job.request.repairs
    if is_new and job.journal.entries.is_empty:
        # Asking kubelet may take long, and the label's author should see a reaction.
        job.journal.enter(model.Phase.RESOLVE, "checking which pods use the GPUs")
    change = preparing.require_possible(job, change)
    slots.require(job)
    host.start_hooks(job, change.plan)
    draining.taint(job, change)
    change = preparing.follow_pods(job, change)
    pod_drain = drain.Drain.begin(job, change.order)
    usage = pod_drain.run(change.usage)
    paused = draining.pause_clients(job, change, pod_drain, usage)
    host.stop_services(job, change.services, change.plan)
    gpus = execution.execute(job, change, paused)
    forced = pod_drain.evictions.forced
    notes = [f" Deleted by force: {messages.list_names(forced)}."] if forced else []
    notes += [
        f" Note: {messages.with_full_stop(warning)}"
        for warning in vgpus.host_warnings(gpus, change.plan)
    ]
    return verification.resume_and_verify(job, paused, gpus, notes)


def _is_resumed_next(job: jobs.Job, error: errors.MigManagerError) -> bool:
    """Check whether to leave a change as it is, because the API does not answer for the moment.

    A rollback would cost a second change of the GPUs, and a failure would be published only to be
    replaced by the next attempt.
    """
    has_begun = job.status.phase in _MID_CHANGE
    return _is_outage(error) and has_begun and job.request.attempt == 1


def _is_outage(error: errors.MigManagerError) -> bool:
    """Check whether the API does not answer."""
    return _is_of_api(error) and error.reason is errors.Reason.API_UNAVAILABLE


def _is_of_api(error: errors.MigManagerError) -> bool:
    """Check whether the API refuses or fails, which may pass; kubelet does not count."""
    return (
        isinstance(error, errors.ClusterError)
        and error.reason is not errors.Reason.POD_RESOURCES_UNAVAILABLE
    )


def _is_final(job: jobs.Job, error: errors.MigManagerError) -> bool:
    """Check whether not to retry after a temporary error.

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
