"""The pipeline: from the requested layout to an outcome.

    resolve -> observe -> plan -> taint -> drain -> pause -> execute -> resume -> verify

The hooks run before the node is tainted, within the execution, and before the resume.

Steps that can fail without disturbing a pod come before steps that disturb one. The journal lists
every action first; the end of a run undoes the entries and publishes one final state with one
reason. Until GPUs are touched, a newer request ends the run. After that the change is finished or
rolled back first, and only its verification may be left to the next run.
"""

import contextlib

import structlog

from mig_manager import errors
from mig_manager.agent import jobs, outcomes
from mig_manager.agent.phases import (
    draining,
    execution,
    failures,
    host,
    preparing,
    rebooting,
    resolving,
    slots,
    verification,
)
from mig_manager.agent.pods import drain
from mig_manager.core import messages, model
from mig_manager.core.planner import vgpus

_log = structlog.get_logger()


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
        end.add(failures.undo(job))
        raise
    except errors.MigManagerError as error:
        if execution.is_resumed_next(job, error):
            raise
        return failures.conclude(job, error)
    except Exception as error:  # noqa: BLE001 - a bug must not leave the node pending
        _log.exception("run_crashed")
        problem = f"{type(error).__name__}: {error}"
        failures.note_costs(job, errors.MigManagerError(problem, reason=errors.Reason.INTERNAL))
        return job.journal.failure(errors.Reason.INTERNAL, problem, failures.undo(job))


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
        snapshots = change.target.unrestored_snapshots(change.gpus, job.journal.entries.snapshot)
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
