"""Roll back the change of an interrupted run without evicting a pod.

Right after a failure no pod can use the new instances, because the device plugin is paused. Later,
after a crash or a failed rollback, a pod may use them. So the pods are checked first: if one would
lose its device, the GPUs stay as they are.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import attempts, intake
from mig_manager.agent.phases import services_and_hooks
from mig_manager.agent.pods import device_usage, pausing, resuming
from mig_manager.change import change_recorder, rollback
from mig_manager.core import model, steps
from mig_manager.core.planner import planner
from mig_manager.core.records import run_status

_log = structlog.get_logger()


def can_roll_back(
    attempt: attempts.Attempt,
    now: model.ObservedGpus,
    snapshots: Sequence[model.GpuSnapshot],
) -> bool:
    """Return whether snapshots can be restored without taking a device from a pod.

    Raises:
        ClusterError: The API refused or does not answer.
        HardwareError: The driver does not list the processes of pods whose devices no GPU has.
        KubeletError: As ``device_usage.wait_for_usage``.
        Superseded: Another layout is requested, or the agent stops.
    """
    try:
        plan = planner.restore(now, snapshots)
        return not device_usage.name_users(attempt, plan, now)
    except errors.LayoutError as error:
        _log.warning("rollback_impossible", error=error.message)
        return False


def restore_persistence(attempt: attempts.Attempt, gpus: model.ObservedGpus) -> None:
    """Switch on the persistence mode that a killed agent switched off for a reset.

    The journal keeps the GPUs where that fails, is not allowed, or that are unreachable.
    """
    uuids = attempt.journal.gpus.persistent_gpus
    present = [gpu for gpu in gpus if gpu.uuid in uuids]
    if present and attempt.deps.reset and attempt.deps.reset.restore_persistence(present):
        change_recorder.record_persistence(
            attempt.recorder, [gpu.uuid for gpu in present], is_on=True
        )


def roll_back(attempt: attempts.Attempt) -> str:
    """Restore the snapshots and the persistence mode in the journal, if no pod is affected.

    Returns:
        The result as part of a sentence; empty if there was nothing to do.
    """
    snapshots = attempt.journal.gpus.snapshots
    if not (snapshots or attempt.journal.gpus.persistent_gpus):
        return ""
    try:
        now = attempt.deps.gpus.observe()
        attempt.recorder.set_status(observed_gpus=now)
        restore_persistence(attempt, now)
        # Instances that others create from now on must not count as the change's.
        snapshots = planner.trim(now, snapshots)
        gpus = dataclasses.replace(attempt.journal.gpus, snapshots=snapshots)
        attempt.recorder.set_journal(gpus=gpus)
        change = attempt.new_transaction(
            require_unused=functools.partial(device_usage.require_unallocated, attempt.deps)
        )
        plan = planner.restore(now, snapshots)
        if plan.is_empty:
            return change.conclude(rollback.verify_without_steps(now, snapshots)).message
        uninterrupted = dataclasses.replace(attempt, cancel=intake.Uninterrupted(attempt.deps))
        _require_unused(uninterrupted, plan, now)
        # Else a pod that is bound after the last check could get a device to be destroyed.
        message = "undoing an interrupted change"
        tainted = dataclasses.replace(attempt.journal.node, has_reconfiguring_taint=True)
        attempt.recorder.enter(
            run_status.Phase.ROLL_BACK,
            message,
            node=tainted,
            gpus=attempt.journal.gpus.with_snapshots(snapshots),
        )
        pods = pausing.await_admission(uninterrupted, attempt.deps.workloads.list())
        extra_clients = device_usage.read_extra_clients(attempt.deps)
        pausing.pause_clients(uninterrupted, plan, pods, extra_clients)
        paused = pausing.pause_driver(uninterrupted, plan, pods, extra_clients)
        try:
            # From now on kubelet cannot assign a device.
            _require_unused(uninterrupted, plan, now)
            # If they cannot be stopped, the GPUs may still be idle.
            with contextlib.suppress(errors.ConfigError, errors.HostError):
                services_and_hooks.stop_services(attempt, attempt.deps.service_names(), plan)
            result = change.roll_back(snapshots, requires_idle=True)
        finally:
            # An API failure must not hide the reason; the end of the run resumes the rest.
            with contextlib.suppress(errors.ClusterError):
                resuming.resume_advertisers(attempt, paused)
    except errors.MigManagerError as error:
        _log.warning("older_rollback_failed", reason=error.reason.value, error=error.message)
        return f"the interrupted change could not be rolled back: {error.message}"
    return result.message


def _require_unused(attempt: attempts.Attempt, plan: steps.Plan, now: model.ObservedGpus) -> None:
    pods = device_usage.name_users(attempt, plan, now)
    if pods:
        raise errors.DrainError(f"pods use devices that would be removed: {pods}")
