"""Act on a check of the layout at rest: publish a drift, restore the layout, or do nothing."""

import dataclasses
import enum
from collections.abc import Hashable
from typing import Self

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts, drift_checks, outcomes
from mig_manager.agent.pods import advertising, device_plugin, device_usage, withdrawing
from mig_manager.core import model
from mig_manager.core.node import device_ids, node_object, schedulable
from mig_manager.core.records import readiness

_MAX_FAILED_CHECKS = 3  # failed checks in a row before unknown readiness is published

_DRIVER_AWAY = (reasons.Reason.DRIVER_NOT_LOADED, reasons.Reason.DRIVER_LIBRARY_MISMATCH)
"""The driver is unloaded, or was upgraded on the host and must be reloaded."""

_log = structlog.get_logger()


class Action(enum.Enum):
    """What to do after a drift check."""

    REST = "rest"  # nothing: wait for the next check
    HEAL = "heal"  # run the pipeline without evicting a pod
    RUN = "run"  # run the pipeline as for a new attempt at a request that failed, or for a repair


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DriftMemory:
    """Observations since the last run ended."""

    outcome: outcomes.Outcome | None = None
    baseline: Hashable = None
    failed_checks: int = 0  # in a row: no GPU could be observed
    was_driver_away: bool = False  # in one of these checks
    is_unknown: bool = False  # whether it is published that no GPU can be observed
    description: str = ""
    """Words for the drift, by the last check or a run; empty: no drift is published."""
    has_phantoms: bool = False
    """Whether phantom devices were published that the agent may not remove."""

    @property
    def is_drifted(self) -> bool:
        """Whether a drift is published. No check follows one that begins a run instead."""
        return bool(self.description)

    @property
    def max_failed_checks(self) -> int:
        """How many checks in a row may fail before that is published.

        The driver may be away for ten minutes, as during its upgrade.
        """
        return outcomes.MAX_QUICK_ATTEMPTS if self.was_driver_away else _MAX_FAILED_CHECKS

    @property
    def awaits_driver(self) -> bool:
        """Whether to check soon: until the layout is back, pods may get whole GPUs."""
        return self.was_driver_away and 0 < self.failed_checks < self.max_failed_checks

    def since(self, outcome: outcomes.Outcome, gpus: model.ObservedGpus) -> Self:
        """Return the memory since a run with this outcome: a new one after another run."""
        if outcome is self.outcome:
            return self
        is_drifted = outcome.reason is reasons.Reason.DRIFTED
        last = outcome.gpus_after_failure
        return type(self)(
            outcome=outcome,
            baseline=_deciding_facts(gpus if last is None else last),
            description=outcome.description if is_drifted else "",
        )


class _Verdict(enum.Enum):
    """The result of a check, compared with the last run and the checks since."""

    CHANGED = "a failed run may now succeed, or a GPU was lost or is back"
    UNKNOWN = "it is unknown whether the layout is active, or the run has failed"
    RELOADED = "the driver was reloaded, and the layout is restored as after a reboot"
    DRIFTED = "the layout is not active"
    STALE = "the layout is active, and the plugin or driver has other devices"
    ACTIVE_AGAIN = "the layout is active, which this agent did not restore"
    ACTIVE = "the layout is active"


def act(
    attempt: attempts.Attempt,
    memory: DriftMemory,
    outcome: outcomes.Outcome,
    observation: drift_checks.Observation,
    view: node_object.NodeView,
) -> tuple[Action, DriftMemory]:
    """Publish changes since the last run; return the action and the new memory.

    ``view`` is the Node as last reported.

    Raises:
        ClusterError: The API refused or does not answer.
        HardwareError: The driver does not list the processes of pods whose devices no GPU has.
    """
    before, gpus = memory.since(outcome, observation.gpus), observation.gpus
    is_success = outcome.state is model.State.SUCCESS
    if not (is_success or outcome.reason is reasons.Reason.DRIFTED):
        # A run that failed early has not verified the devices.
        withdrawing.withdraw(attempt, gpus, view)
    now = dataclasses.replace(
        before,
        description="",
        failed_checks=0,
        was_driver_away=False,
        is_unknown=False,
    )
    action = Action.REST
    match _compare(attempt, before, outcome, observation, view):
        case _Verdict.CHANGED:
            _log.info("hardware_changed", config=attempt.request.config)
            # A GPU that is back must not cause evictions on another GPU.
            action, now = (Action.HEAL if is_success else Action.RUN), before
        case _Verdict.UNKNOWN:
            now = _count_failure(attempt, before, observation, is_success=is_success)
        case _Verdict.RELOADED | _Verdict.STALE:
            action = Action.HEAL
        case _Verdict.DRIFTED:
            description = _handle_drift(attempt, observation, before, outcome)
            if description:
                withdrawing.withdraw(attempt, gpus, view)
            now = dataclasses.replace(now, description=description)
            action = Action.REST if description else Action.HEAL
        case _Verdict.ACTIVE_AGAIN:
            attempt.deps.telemetry.drift_found(is_drifted=False)
            _finish_active_again(attempt)
            # A next drift may destroy the same devices.
            attempt.memory.set_checked(None)
            now = dataclasses.replace(now, has_phantoms=False)
        case _Verdict.ACTIVE:
            now = dataclasses.replace(
                now,
                has_phantoms=is_success and _remove_phantoms(attempt, now, observation, view),
            )
    return action, now


def _compare(
    attempt: attempts.Attempt,
    memory: DriftMemory,
    outcome: outcomes.Outcome,
    observation: drift_checks.Observation,
    view: node_object.NodeView,
) -> _Verdict:
    """Compare a check with the run and the checks before; ask kubelet if devices are suspect."""
    gpus = observation.gpus
    is_success = outcome.state is model.State.SUCCESS
    is_drifted = outcome.reason is reasons.Reason.DRIFTED
    if is_success:
        lost = {gpu.index for gpu in gpus.unreachable}
        # Without the layout, a run can apply nothing.
        is_known = observation.error is None or (bool(gpus) and not observation.is_file_unusable)
        has_changed = is_known and lost != {gpu.index for gpu in outcome.verified_gpus.unreachable}
    else:
        has_changed = not is_drifted and _deciding_facts(gpus) != memory.baseline
    if has_changed:
        return _Verdict.CHANGED
    if observation.is_active is None or not (is_success or is_drifted):
        return _Verdict.UNKNOWN
    if observation.is_active:
        is_suspect = _is_suspect(attempt, memory, outcome, observation, view)
        if is_suspect and advertising.find_stale(attempt, attempt.deps.workloads.present(), gpus):
            return _Verdict.STALE
        was_unsure = memory.is_drifted or memory.is_unknown
        return _Verdict.ACTIVE_AGAIN if was_unsure else _Verdict.ACTIVE
    # All GPUs lack instances and can get the layout.
    is_empty = observation.plan is not None and not (
        observation.missing or any(gpu.gpu_instances for gpu in gpus)
    )
    was_reloaded = memory.was_driver_away and not memory.is_drifted and is_empty
    return _Verdict.RELOADED if was_reloaded else _Verdict.DRIFTED


def _is_suspect(
    attempt: attempts.Attempt,
    memory: DriftMemory,
    outcome: outcomes.Outcome,
    observation: drift_checks.Observation,
    view: node_object.NodeView,
) -> bool:
    """Return whether the plugin may advertise other devices than the active layout has."""
    gpus = observation.gpus
    applied = attempt.journal.record.applied
    # The same instances may have another place.
    differs = applied is None or not applied.has_same(gpus)
    # Without a plan, a run can verify only what the last one did.
    may_run = observation.plan is not None or (observation.is_file_unusable and not differs)
    # Another program may have destroyed instances and created equal ones, or changed a GPU outside
    # the layout.
    has_others = device_ids.expected_ids(gpus) != device_ids.expected_ids(outcome.verified_gpus)
    lacks_devices = schedulable.has_too_few(gpus, view)
    is_success = outcome.state is model.State.SUCCESS
    is_suspect = is_success and (differs or has_others or lacks_devices)
    return may_run and (memory.is_drifted or is_suspect)


def _count_failure(
    attempt: attempts.Attempt,
    memory: DriftMemory,
    observation: drift_checks.Observation,
    *,
    is_success: bool,
) -> DriftMemory:
    """Count a check that observed no GPU; publish that readiness is unknown after several."""
    if observation.error is None or observation.gpus:
        return dataclasses.replace(memory, failed_checks=0)
    memory = dataclasses.replace(
        memory,
        failed_checks=memory.failed_checks + 1,
        was_driver_away=memory.was_driver_away or observation.error in _DRIVER_AWAY,
    )
    is_ready = is_success and not (memory.is_drifted or memory.has_phantoms or memory.is_unknown)
    is_unknown = is_ready and memory.failed_checks >= memory.max_failed_checks
    if is_unknown:
        name, reason = attempt.request.config, observation.error
        condition = readiness.unknown(name, reason, observation.message)
        attempt.deps.node.set_condition(condition)
        attempt.deps.node.emit(reason=reason.value, message=condition.message, is_warning=True)
    return dataclasses.replace(memory, is_unknown=memory.is_unknown or is_unknown)


def _handle_drift(
    attempt: attempts.Attempt,
    observation: drift_checks.Observation,
    before: DriftMemory,
    outcome: outcomes.Outcome,
) -> str:
    """Describe the drift, and publish the description if it is new; empty: restore the layout.

    ``before`` is as of the last check, or of the run with the ``outcome``.
    """
    affected = ""
    plan = observation.plan
    missing = observation.missing
    if attempt.limits.heals_drift and plan is not None and not missing:
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
    if before.description == outcome.description:
        # The run has published the drift, maybe in more words.
        is_same = outcome.missing_gpus == missing
    else:
        is_same = before.description == message
    if not is_same:
        attempt.deps.telemetry.drift_found(is_drifted=True)
        _log.warning("drift_found", config=attempt.request.config, pods=affected)
        attempt.journal.finish(outcomes.failure(reasons.Reason.DRIFTED, message))
    return message


def _remove_phantoms(
    attempt: attempts.Attempt,
    memory: DriftMemory,
    observation: drift_checks.Observation,
    view: node_object.NodeView,
) -> bool:
    """Remove phantom devices from the node; return whether the API refuses."""
    refused = device_plugin.remove_reported_phantoms(attempt, observation.gpus, view)
    if refused is not None and not memory.has_phantoms:
        failed = attempt.failure(refused.reason, refused.message)
        # If the layout is active, no run is needed, and the next drift check retries.
        is_undone = attempt.journal.entries.is_undone_by_patch
        attempt.journal.finish(dataclasses.replace(failed, should_retry=not is_undone))
    elif refused is None and memory.has_phantoms:
        _finish_active_again(attempt)
    return refused is not None


def _finish_active_again(attempt: attempts.Attempt) -> None:
    attempt.journal.finish(
        outcomes.success(
            attempt.status,
            reasons.Reason.ALREADY_APPLIED,
            "is active again",
            gpus=attempt.status.gpus,
        )
    )


def _deciding_facts(gpus: model.ObservedGpus) -> Hashable:
    """Return the facts that decide the outcome of a run."""
    return tuple(
        (
            gpu.uuid,
            gpu.current_mode,
            gpu.pending_mode,
            gpu.awaits_reset,
            frozenset((info.profile, info.placements) for info in gpu.profiles or ()),
            frozenset(
                (gi.profile, gi.placement, len(gi.compute_instances)) for gi in gpu.gpu_instances
            ),
        )
        for gpu in gpus
    )
