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

from mig_manager import errors, reasons
from mig_manager.agent import attempts, outcomes
from mig_manager.agent.phases import (
    change_checks,
    draining,
    execution,
    failures,
    planning,
    rebooting,
    resolving,
    rolling_back,
    services_and_hooks,
    slots,
    targets,
    verification,
)
from mig_manager.core import messages, pod_rights
from mig_manager.core.planner import vgpus
from mig_manager.core.records import journals, run_status

_log = structlog.get_logger()


def run(attempt: attempts.Attempt) -> outcomes.Outcome:
    """Apply the layout or repair GPUs, or roll back; return the outcome without publishing it.

    Raises:
        ClusterError: API_UNAVAILABLE: in mid-change; the next attempt resumes from the journal.
        Rebooting: The machine goes down; nothing is restored.
        Superseded: Another layout is requested, or the agent stops.
    """
    with contextlib.ExitStack() as locked:
        try:
            slots.wait(attempt)
            wait = attempt.new_wait(attempt.settings.lock_timeout_s)
            locked.enter_context(
                attempt.hold_journal(f"applying layout {attempt.request.layout}", wait)
            )
            # The interrupted run may be another agent's, unknown before.
            slots.take_again(attempt)
        except (errors.ClusterError, errors.LockedError) as error:
            return attempt.failure(error.reason, error.message)
        with attempt.deps.workers_ready():
            outcome = _run_locked(attempt)
        _save_for_boot(attempt, outcome)
        return outcome


def _run_locked(attempt: attempts.Attempt) -> outcomes.Outcome:
    """Execute the steps, and undo them after an error."""
    try:
        return _steps(attempt)
    except errors.Rebooting:
        raise
    except errors.Superseded as end:
        end.add(failures.undo(attempt))
        raise
    except errors.MigManagerError as error:
        if execution.is_resumed_next(attempt, error):
            raise
        return failures.conclude(attempt, error)
    except Exception as error:  # noqa: BLE001 - a bug must not leave the node pending
        _log.exception("run_crashed")
        problem = f"{type(error).__name__}: {error}"
        failures.record_costs(
            attempt, errors.MigManagerError(problem, reason=reasons.Reason.INTERNAL)
        )
        return attempt.failure(reasons.Reason.INTERNAL, problem, failures.undo(attempt))


def _save_for_boot(attempt: attempts.Attempt, outcome: outcomes.Outcome) -> None:
    """Save a verified layout for the next boot; a failure is logged.

    Once the lock is released, another manager may have changed the GPUs and saved its layout.
    """
    if attempt.is_repair:
        # The layout's own run follows.
        return
    if outcome.state is run_status.State.SUCCESS:
        status = attempt.status
        gpus = outcome.verified_gpus
        covered = {gpu.uuid for gpu in gpus} - attempt.record.gpus_outside(gpus)
        try:
            attempt.verified_layout.save(
                gpus, layout=status.layout, content_hash=status.content_hash, covered=covered
            )
        except errors.ConfigError as error:
            _log.warning("layout_not_saved", error=error.message)
    elif any(gpu.has_pending_mode for gpu in attempt.status.gpus):
        rebooting.keep_pending_modes(attempt, attempt.status.gpus)


def _steps(attempt: attempts.Attempt) -> outcomes.Outcome:
    """Execute the steps listed at the top of this module."""
    try:
        target = resolving.resolve(attempt)
    except (errors.ConfigError, errors.LayoutError) as error:
        gpus = resolving.keep_verified(attempt, error)
        return verification.verify_unchanged(attempt, gpus, attempt.journal.gpus.snapshots)
    gpus = resolving.observed_for(attempt, target)
    if isinstance(target, targets.LayoutTarget):
        resolving.record_content(attempt, target, gpus)
    attempt.hooks.load()
    rolling_back.restore_persistence(attempt, gpus)
    inputs = planning.plan_unused(attempt, target, gpus)
    if inputs.plan.is_empty:
        snapshots = target.unrestored_snapshots(gpus, attempt.journal.gpus.snapshots)
        return verification.verify_unchanged(attempt, gpus, snapshots)
    only_restores = isinstance(attempt.rights.pods, pod_rights.RestoreOnly)
    is_new = attempt.is_first and not (only_restores or attempt.is_repair)
    if is_new and attempt.journal.remainder is journals.Remainder.NOTHING:
        # Asking kubelet may take long, and the label's author should see a reaction.
        attempt.recorder.enter(run_status.Phase.RESOLVE, "checking which pods use the GPUs")
    change = change_checks.require_possible(attempt, inputs)
    slots.require(attempt)
    services_and_hooks.start_hooks(attempt, change.plan)
    draining.taint(attempt, change)
    change, pod_drain = draining.drain_pods(attempt, change)
    change, paused = draining.pause_clients(attempt, change, pod_drain)
    services_and_hooks.stop_services(attempt, inputs.services, change.plan)
    gpus = execution.execute(attempt, change, paused)
    forced = pod_drain.evictions.removals.forced
    notes = [f" Deleted by force: {messages.list_names(forced)}."] if forced else []
    notes += [
        f" Note: {messages.with_full_stop(warning)}"
        for warning in vgpus.host_warnings(gpus, change.plan)
    ]
    return verification.resume_and_verify(attempt, paused, gpus, notes)
