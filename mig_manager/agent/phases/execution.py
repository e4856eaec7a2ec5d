"""Execute a plan on the GPUs, all or nothing."""

import contextlib
import functools

from mig_manager import errors, reasons
from mig_manager.agent import attempts
from mig_manager.agent.phases import (
    change_checks,
    draining,
    planning,
    rebooting,
    rolling_back,
    services_and_hooks,
)
from mig_manager.agent.pods import device_usage, paused_clients, resuming
from mig_manager.change import transaction
from mig_manager.core import model
from mig_manager.core.records import run_status

_MID_CHANGE = (
    run_status.Phase.EXECUTE,
    run_status.Phase.ROLL_BACK,
    run_status.Phase.RESUME,
    run_status.Phase.VERIFY,
)


def execute(
    attempt: attempts.Attempt, change: planning.PlannedChange, paused: paused_clients.PausedClients
) -> model.ObservedGpus:
    """Execute and verify the plan, or roll back; reboot if nothing else helps.

    After an API outage before or between plans, GPUs and clients stay as they are for the next
    attempt.

    Raises:
        MigManagerError: As ``transaction.Transaction.run`` and ``refresh``, and as
            ``rebooting.reboot`` returns.
        Rebooting: The machine goes down.
        Superseded: Another layout is requested, or the agent stops; the GPUs are as before.
    """
    gpu_change = attempt.new_transaction(
        change_checks.idle_wait(attempt),
        functools.partial(device_usage.require_unallocated, attempt.deps),
    )
    is_resumed = functools.partial(is_resumed_next, attempt)
    # If this fails, the end of the run rolls back while clients and services are still paused.
    interrupted = _take_over_snapshots(attempt, change.inputs.gpus)
    try:
        after, _ = gpu_change.run(
            change.plan,
            transaction.ChangeTarget(change.plan_rest, change.inputs.target.unrestored_snapshots),
            observed=change.inputs.gpus,
            interrupted=interrupted,
            points=attempt.hooks,
            is_resumed=is_resumed,
        )
        attempt.recorder.set_status(observed_gpus=after)
        attempt.forget_former_layout()
        gpu_change.refresh()
    except errors.MigManagerError as error:
        if is_resumed(error):
            raise
        machine = attempt.deps.reboot
        if machine is None or not rebooting.may_help(attempt, error):
            _resume_after_failure(attempt, paused, error)
            raise
        failure = rebooting.reboot(
            attempt, machine, error, lambda: draining.drain_whole_node(attempt, change, paused)
        )
        _resume_after_failure(attempt, paused, failure)
        raise failure from error
    return after


def _take_over_snapshots(attempt: attempts.Attempt, gpus: model.ObservedGpus) -> model.Snapshots:
    """Take over an interrupted change's snapshots; only of unreachable GPUs, if pods use them."""
    interrupted = attempt.journal.gpus.snapshots
    if not interrupted or rolling_back.can_roll_back(attempt, gpus, interrupted):
        return interrupted
    # Without these GPUs, the previous layout cannot be restored completely.
    attempt.recorder.set_journal(applied_before="")
    return gpus.unreachable_snapshots(interrupted)


def is_resumed_next(attempt: attempts.Attempt, error: errors.MigManagerError) -> bool:
    """Return whether to leave a change as it is, because the API does not answer for the moment.

    A rollback would cost a second change of the GPUs, and a failure would be published only to be
    replaced by the next attempt.
    """
    is_of_api = isinstance(error, errors.ClusterError)
    is_outage = is_of_api and error.reason is reasons.Reason.API_UNAVAILABLE
    return is_outage and attempt.status.phase in _MID_CHANGE and attempt.is_first


def _resume_after_failure(
    attempt: attempts.Attempt, paused: paused_clients.PausedClients, error: errors.MigManagerError
) -> None:
    """Resume host services and device plugin, but report the original failure."""
    failed = services_and_hooks.restore(attempt)
    if failed:
        error.add(failed)
    # If the API fails now, the end of the run restores the rest.
    with contextlib.suppress(errors.ClusterError):
        resuming.resume_advertisers(attempt, paused)
