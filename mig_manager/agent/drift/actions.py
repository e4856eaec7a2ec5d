"""Act on a check of the layout at rest: publish a drift, restore the layout, or do nothing."""

import dataclasses
import enum

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts, outcomes
from mig_manager.agent.drift import checks, verdicts
from mig_manager.agent.pods import device_plugin, device_usage, schedulability, stale_devices
from mig_manager.core.objects import node_object
from mig_manager.core.records import journals, node_entries, readiness, run_status

_DRIVER_AWAY = (reasons.Reason.DRIVER_NOT_LOADED, reasons.Reason.DRIVER_LIBRARY_MISMATCH)
"""The driver is unloaded, or was upgraded on the host and must be reloaded."""

_log = structlog.get_logger()


class Action(enum.Enum):
    """What to do after a drift check."""

    REST = "rest"  # nothing: wait for the next check
    HEAL = "heal"  # run the pipeline without evicting a pod
    RUN = "run"  # run the pipeline as for a new attempt at a request that failed, or for a repair


def act(
    attempt: attempts.Attempt,
    memory: verdicts.DriftMemory,
    observation: checks.Observation,
    view: node_object.NodeView,
) -> tuple[Action, verdicts.DriftMemory]:
    """Publish changes since the last run; return the action and the new memory.

    ``view`` is the Node as last reported.

    Raises:
        ClusterError: The API refused or does not answer.
        HardwareError: The driver does not list the processes of pods whose devices no GPU has.
    """
    gpus, outcome = observation.gpus, memory.outcome
    is_success = outcome.state is run_status.State.SUCCESS
    if not (is_success or outcome.reason is reasons.Reason.DRIFTED):
        # A run that failed early has not verified the devices.
        stale_devices.remove(attempt, gpus, view)
    next_memory = dataclasses.replace(
        memory,
        description="",
        failed_checks=0,
        was_driver_away=False,
        is_unknown=False,
    )
    action = Action.REST
    verdict = verdicts.compare(
        observation,
        memory,
        applied=attempt.record.applied_fingerprints,
        view=view,
        is_stale=lambda: bool(
            schedulability.find_stale(attempt, attempt.deps.workloads.present(), gpus)
        ),
    )
    match verdict:
        case verdicts.Verdict.CHANGED:
            _log.info("hardware_changed", config=attempt.request.layout)
            # A GPU that is back must not cause evictions on another GPU.
            action, next_memory = (Action.HEAL if is_success else Action.RUN), memory
        case verdicts.Verdict.UNKNOWN:
            next_memory = _count_failure(attempt, memory, observation)
        case verdicts.Verdict.RELOADED | verdicts.Verdict.STALE:
            action = Action.HEAL
        case verdicts.Verdict.DRIFTED:
            description = _handle_drift(attempt, observation, memory, view)
            if description:
                stale_devices.remove(attempt, gpus, view)
            next_memory = dataclasses.replace(next_memory, description=description)
            action = Action.REST if description else Action.HEAL
        case verdicts.Verdict.ACTIVE_AGAIN:
            attempt.deps.telemetry.drift_found(is_drifted=False)
            _finish_active_again(attempt)
            # A next drift may destroy the same devices.
            attempt.memory.set_checked(None)
            next_memory = dataclasses.replace(next_memory, has_phantoms=False)
        case verdicts.Verdict.ACTIVE:
            has_phantoms = is_success and _remove_phantoms(attempt, next_memory, observation, view)
            next_memory = dataclasses.replace(next_memory, has_phantoms=has_phantoms)
    return action, next_memory


def _count_failure(
    attempt: attempts.Attempt,
    memory: verdicts.DriftMemory,
    observation: checks.Observation,
) -> verdicts.DriftMemory:
    """Count a check that observed no GPU; publish that readiness is unknown after several."""
    if observation.error is None or observation.gpus:
        return dataclasses.replace(memory, failed_checks=0)
    memory = dataclasses.replace(
        memory,
        failed_checks=memory.failed_checks + 1,
        was_driver_away=memory.was_driver_away or observation.error in _DRIVER_AWAY,
    )
    is_success = memory.outcome.state is run_status.State.SUCCESS
    is_ready = is_success and not (memory.is_drifted or memory.has_phantoms or memory.is_unknown)
    is_unknown = is_ready and memory.failed_checks >= memory.max_failed_checks
    if is_unknown:
        name, reason = attempt.request.layout, observation.error
        condition = readiness.unknown(name, reason, observation.message)
        attempt.deps.node.set_condition(condition)
        attempt.deps.node.emit(reason=reason.value, message=condition.message, is_warning=True)
    return dataclasses.replace(memory, is_unknown=memory.is_unknown or is_unknown)


def _handle_drift(
    attempt: attempts.Attempt,
    observation: checks.Observation,
    memory: verdicts.DriftMemory,
    view: node_object.NodeView,
) -> str:
    """Describe the drift, and publish the description if it is new; empty: restore the layout.

    ``memory`` is as of the last check, or of the run.
    """
    affected = ""
    plan = observation.plan
    missing = observation.missing
    if attempt.settings.heals_drift and plan is not None and not missing:
        try:
            affected = device_usage.name_users(attempt, plan, observation.gpus)
        except errors.KubeletError as error:
            affected = error.message
        if not affected:
            return ""
    message = (
        outcomes.missing_message(attempt.status.title, missing)
        if missing
        else outcomes.drift_message(attempt.status.title, affected, observation.message)
    )
    if memory.description == memory.outcome.description:
        # The run has published the drift, maybe in more words.
        is_same = memory.outcome.missing_gpus == missing
    else:
        is_same = memory.description == message
    if not (is_same and verdicts.shows(view, run_status.State.FAILED)):
        attempt.deps.telemetry.drift_found(is_drifted=True)
        _log.warning("drift_found", config=attempt.request.layout, pods=affected)
        attempt.recorder.finish(outcomes.failure(reasons.Reason.DRIFTED, message))
    return message


def _remove_phantoms(
    attempt: attempts.Attempt,
    memory: verdicts.DriftMemory,
    observation: checks.Observation,
    view: node_object.NodeView,
) -> bool:
    """Remove phantom devices from the node; return whether the API refuses."""
    refused = device_plugin.remove_reported_phantoms(attempt, observation.gpus, view)
    if refused is not None and not memory.has_phantoms:
        failed = attempt.failure(refused.reason, refused.message)
        # If the layout is active, no run is needed, and the next drift check retries.
        remaining = attempt.journal.remaining(node_entries.RunEnd.RESTORED)
        should_retry = remaining.remainder is journals.Remainder.CHANGE
        attempt.recorder.finish(dataclasses.replace(failed, should_retry=should_retry))
    elif refused is None and memory.has_phantoms:
        _finish_active_again(attempt)
    return refused is not None


def _finish_active_again(attempt: attempts.Attempt) -> None:
    attempt.recorder.finish(
        outcomes.success(
            attempt.status,
            reasons.Reason.ALREADY_APPLIED,
            "is active again",
            gpus=attempt.status.gpus,
        )
    )
