"""Reboot the machine if nothing else activates a pending MIG mode."""

import dataclasses
from collections.abc import Callable

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts
from mig_manager.agent.phases import resolving
from mig_manager.core import model, ports, timing
from mig_manager.core.node import policies
from mig_manager.core.records import run_status

_log = structlog.get_logger()


def may_help(attempt: attempts.Attempt, error: errors.MigManagerError) -> bool:
    """Return whether a reboot can help after an error, and was not done before.

    It helps if a GPU's new MIG mode is pending, or a process prevents a reset.
    """
    was_rebooted = attempt.status.is_rebooted
    # The journal is newer than the status.
    before = attempt.journal.node.rebooted_from
    if before:
        was_rebooted = before != attempt.deps.boot_id
    elif attempt.record.rebooted_from == attempt.deps.boot_id:
        # A reboot was requested, but the machine is still up.
        was_rebooted = False
    drains = attempt.settings.policy.drain is not policies.DrainPolicy.NONE
    if was_rebooted or not drains or attempt.is_repair:
        return False
    if isinstance(error, errors.HostError):
        return error.reason.is_mode_pending or error.reason is reasons.Reason.IN_USE
    try:
        return error.reason.is_mode_pending and any(
            gpu.has_pending_mode for gpu in attempt.deps.gpus.observe()
        )
    except errors.HardwareError:
        return False


def reboot(
    attempt: attempts.Attempt,
    machine: ports.Reboot,
    error: errors.MigManagerError,
    drain_node: Callable[[], object],
) -> errors.MigManagerError:
    """Drain the node, request a reboot, and wait for it.

    Returns:
        The failure ``error``, with why the machine did not reboot. Its reason is REBOOT_REQUIRED,
        except after an API failure or a drain that evicted no pod: a retry may succeed there.

    Raises:
        Rebooting: The agent stops, because the node goes down.
    """
    name = attempt.request.layout
    why = error.message
    reason = reasons.Reason.REBOOT_REQUIRED
    try:
        machine.check()
        drain_node()
        attempt.recorder.set_status(is_rebooted=True)
        boot_id = attempt.deps.boot_id or "unknown"
        attempt.recorder.enter(
            run_status.Phase.REBOOT,
            f"rebooting: {why}",
            is_draining=False,
            node=dataclasses.replace(attempt.journal.node, rebooted_from=boot_id),
        )
        attempt.deps.node.emit(reason="Rebooting", message=f"{name}: {why}", is_warning=True)
        keep_pending_modes(attempt, resolving.observe_at_end(attempt))
        machine.request(f"MIG layout {name} needs it")
        _wait_for_stop(attempt)
        waited_s = attempt.settings.reboot_timeout_s
        refusal = f"the machine is still up {waited_s:g} s after the reboot request"
    except errors.MigManagerError as refused:
        attempt.recorder.set_status(is_rebooted=False)
        refusal = refused.message
        # The node does not stay tainted, so a retry would evict the successors of evicted pods.
        is_drain = isinstance(refused, errors.DrainError)
        may_pass = is_drain and not attempt.journal.is_draining
        if may_pass or isinstance(refused, errors.ClusterError):
            reason = refused.reason
    return errors.MigManagerError(f"{why}; no reboot: {refusal}", reason=reason)


def keep_pending_modes(attempt: attempts.Attempt, gpus: model.ObservedGpus) -> None:
    """Have the boot unit of the host keep the pending modes of GPUs; a failure is logged."""
    try:
        attempt.verified_layout.drop_pending(gpus)
    except errors.ConfigError as error:
        _log.warning("layout_not_saved", error=error.message)


def _wait_for_stop(attempt: attempts.Attempt) -> None:
    """Wait for the signal to stop; another layout does not end the wait.

    A run for that layout would work on a node that is going down.
    """

    def sleep(seconds: float) -> None:
        try:
            attempt.cancel.wait(seconds)
        except errors.Superseded as end:
            if end.by is errors.SupersededBy.STOP:
                raise errors.Rebooting(end.why) from end
            attempt.deps.clock.wait(seconds)

    wait = dataclasses.replace(
        attempt.new_wait(attempt.settings.reboot_timeout_s),
        sleep=sleep,
        backoff=timing.Backoff(first_s=1.0),
    )
    for _ in wait.tries():
        attempt.deps.telemetry.still_working()
