"""Repair GPUs by a reset.

A drift check, or a layout that failed, begins a repair in the record of the request. Before the
layout's next run, a run of its own resets the GPU. Its pods are evicted, the clients pause, and
the instances return to their placements, whatever the layout.
"""

import contextlib
import dataclasses

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempt_series, attempts, layout_request, node_context, outcomes, run
from mig_manager.agent.pods import unreachable_gpus
from mig_manager.core import messages, model, ports
from mig_manager.core.node.devices import claims
from mig_manager.core.records import gpu_recovery, gpu_repair, journals, requests, run_status
from mig_manager.core.settings import node_settings

DRIFTED = "the GPUs do not have the requested layout"
NOT_REQUESTED = "no layout is requested"

_OBSTACLES = (
    reasons.Reason.SLOTS_TAKEN,
    reasons.Reason.API_UNAVAILABLE,
    reasons.Reason.POD_RESOURCES_UNAVAILABLE,
)
"""Failures that say nothing about the GPU."""

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Which GPUs to repair now, and why not the others."""

    gpus: tuple[model.Gpu, ...] = ()
    why_not: str = ""  # for people: a sentence about the others

    @property
    def uuids(self) -> list[str]:
        """UUIDs of the GPUs to repair."""
        return [gpu.uuid for gpu in self.gpus]


NOTHING = Decision()


def repair(
    series: attempt_series.AttemptSeries,
    request: layout_request.Request,
    cancel: ports.Cancellation,
    options: layout_request.AttemptOptions,
) -> None:
    """Run the repairs that have begun, before the run of the requested layout.

    They are postponed if the owner forbids them meanwhile, or leaves the node to another program.

    Raises:
        ClusterError: No outcome was published; the journal is still there.
        LockedError: Another manager was at work until the deadline; the repairs stay open.
        Superseded: Another layout is requested, or the agent stops; all is restored.
    """
    uuids = gpu_repair.open_gpus(series.record.repairs)
    if not uuids:
        return
    of_repair = dataclasses.replace(options, uuids_to_repair=uuids)
    with series.start_attempt(request, cancel, of_repair) as attempt:
        # An earlier agent may have begun it, with other settings.
        if not (why := _why_forbidden(attempt)):
            _repair(attempt)
            return
        _postpone(attempt, why)
    if series.journal.remainder is not journals.Remainder.NOTHING:
        # The layout's run would not restore the instances of a GPU that awaits a reset. It meets
        # the same lock, and reports it.
        with contextlib.suppress(errors.LockedError):
            series.undo()


def _repair(attempt: attempts.Attempt) -> None:
    """Run the repairs, and record their end; raise as ``repair``."""
    outcome = run.run(attempt)
    if outcome.reason is reasons.Reason.LOCKED:
        raise errors.LockedError(outcome.description)
    _end(attempt, outcome)
    attempt.recorder.abandon()


def follow_up(
    attempt: attempts.Attempt, outcome: outcomes.Outcome
) -> tuple[outcomes.Outcome, Decision]:
    """Begin the repairs that a failed layout needs, and decide about others.

    Returns:
        The layout's outcome, with failed repairs, and the decision; a failure is retried after
        the repairs.
    """
    why_not = DRIFTED if outcome.reason is reasons.Reason.DRIFTED else ""
    decision = decide(attempt, attempt.record, attempt.status.gpus, why_not)
    if outcome.state is run_status.State.SUCCESS:
        if not attempt.settings.drift_check_interval_s:
            # A check would begin it.
            decision = dataclasses.replace(decision, gpus=())
        return _with_problems(outcome, attempt.record), decision
    if not decision.gpus:
        if outcome.reason is reasons.Reason.GPU_NEEDS_RESET and decision.why_not:
            later = f"{decision.why_not} The agent resets it once nothing prevents that."
            outcome = dataclasses.replace(outcome, remedy=f"{later} {outcome.remedy}")
        return outcome, decision
    begin_repairs(attempt, decision)
    now = f"To be reset by the agent: {messages.list_names([*map(str, decision.gpus)])}."
    remedy = f"{now} {decision.why_not}".rstrip()
    return dataclasses.replace(outcome, remedy=remedy, should_retry=True), decision


def decide(
    context: node_context.NodeContext,
    record: requests.RequestRecord,
    gpus: model.ObservedGpus,
    why_not: str,
) -> Decision:
    """Decide which GPUs to repair; none if the API fails, or if there is a reason ``why_not``."""
    try:
        return _decide(context, record, gpus, why_not)
    except errors.ClusterError as error:
        # A fault, and a drift beside it, are still published.
        _log.warning("repair_not_decided", reason=error.reason.value, error=error.message)
        return Decision(why_not=f"Not reset now: {messages.with_full_stop(error.message)}")


def _decide(
    context: node_context.NodeContext,
    record: requests.RequestRecord,
    gpus: model.ObservedGpus,
    why_not: str,
) -> Decision:
    if context.settings.repair is not node_settings.RepairPolicy.RESET:
        return NOTHING
    remembered, unknown = unreachable_gpus.recall_verified(context, gpus)
    faulty = tuple(gpu for gpu in remembered if gpu.recovers_by_reset)
    if not (faulty or unknown):
        return NOTHING
    if context.deps.reset is None:
        why_not = "the agent may not reset GPUs"
    why_not = (
        why_not
        or _left_to_others(context)
        or unreachable_gpus.why_unknown(context, remembered, faulty)
    )
    ready = []
    waiting = [
        (f"GPU {gpu.index}", unknown)
        for gpu in gpus.unreachable
        if unknown and gpu.recovers_by_reset
    ]
    for gpu in faulty:
        reason = (
            gpu_repair.why_impossible(gpu)
            or gpu_repair.why_paused(gpu, record.repairs, context.deps.clock)
            or why_not
        )
        if reason:
            waiting.append((f"GPU {gpu.index}", reason))
        else:
            ready.append(gpu)
    message = f"Not reset now: {messages.by_cause(waiting)}." if waiting else ""
    return Decision(gpus=tuple(ready), why_not=message)


def begin_repairs(attempt: attempts.Attempt, decision: Decision) -> None:
    """Record that a repair has begun, for the next run, and report it."""
    record = attempt.record
    uuids = decision.uuids
    names = messages.list_names([*map(str, decision.gpus)])
    repairs = gpu_repair.begin(record.repairs, uuids, attempt.deps.clock.unix_s())
    _log.warning("gpu_repair_begun", gpus=uuids)
    which = "it" if len(uuids) == 1 else "them"
    message = f"The agent evicts the pods of {names}, and resets {which}."
    attempt.deps.node.emit(reason="GpuRepairBegun", message=message, is_warning=True)
    attempt.recorder.set_record(dataclasses.replace(record, repairs=repairs))


def _postpone(attempt: attempts.Attempt, why: str) -> None:
    """End the repairs under way uncounted: a drift check may begin others."""
    _log.info("gpu_repair_postponed", reason=why)
    record = attempt.record
    repairs = gpu_repair.postpone(record.repairs, attempt.deps.clock.unix_s())
    attempt.recorder.set_record(dataclasses.replace(record, repairs=repairs))


def _end(attempt: attempts.Attempt, outcome: outcomes.Outcome) -> None:
    """Record and report how the repair of a run ended; the next patch publishes the record.

    A repair that an obstacle prevented before it evicted a pod is neither counted nor reported:
    the next drift check decides again.
    """
    record = attempt.record
    if outcome.reason in _OBSTACLES and not attempt.journal.has_evicted:
        _postpone(attempt, outcome.reason.value)
        return
    after = {gpu.uuid: gpu for gpu in outcome.verified_gpus}

    def problem(uuid: str) -> str:
        if outcome.state is run_status.State.FAILED:
            # The remedy is about the layout.
            return messages.fit(outcome.description.rstrip(" ."), requests.MAX_PROBLEM)
        gpu = after.get(uuid)
        return gpu_recovery.fault(gpu) if gpu else f"GPU {uuid} is unreachable"

    repairs = gpu_repair.end(record.repairs, problem)
    names = {gpu.uuid: str(gpu) for gpu in attempt.status.gpus}
    problems = {uuid: problem(uuid) for uuid in sorted(attempt.options.uuids_to_repair)}
    success = "was reset"
    if outcome.reason is reasons.Reason.ALREADY_APPLIED and not any(problems.values()):
        # A person reset the GPUs after the drift check.
        success = "no longer needs a reset"
        repairs = gpu_repair.postpone(record.repairs, attempt.deps.clock.unix_s())
    else:
        for why in problems.values():
            attempt.deps.telemetry.repair_ended(is_good=not why)
    for uuid, why in problems.items():
        write = _log.warning if why else _log.info
        write("gpu_repair_ended", gpu=uuid, error=why or None)
        name = names.get(uuid, uuid)
        message = f"The repair of {name} failed: {why}" if why else f"{name} {success}."
        attempt.deps.node.emit(
            reason="GpuRepairFailed" if why else "GpuRepaired",
            message=messages.fit(messages.with_full_stop(message), messages.MAX_BYTES),
            is_warning=bool(why),
        )
    attempt.recorder.set_record(dataclasses.replace(record, repairs=repairs))


def _with_problems(outcome: outcomes.Outcome, record: requests.RequestRecord) -> outcomes.Outcome:
    """Return the outcome of an active layout, with the failed repairs of its GPUs."""
    faulty = {gpu.uuid: gpu for gpu in outcome.verified_gpus if gpu.recovers_by_reset}
    failed = "".join(
        f" The repair of {faulty[each.gpu]} failed: {messages.with_full_stop(each.problem)}"
        for each in record.repairs
        if each.problem and each.gpu in faulty
    )
    return dataclasses.replace(outcome, description=outcome.description + failed)


def _why_forbidden(attempt: attempts.Attempt) -> str:
    """Return why a repair that has begun may not go on, as part of a sentence; empty: it may."""
    if not attempt.may_repair:
        return "the agent may not reset GPUs"
    try:
        if attempt.journal.has_evicted or attempt.journal.gpus.snapshots:
            # It may have evicted the pods that show which taints belong to the node.
            return gpu_repair.why_cordoned(attempt.deps.node.latest())
        return _left_to_others(attempt)
    except errors.ClusterError as error:
        return error.message


def _left_to_others(context: node_context.NodeContext) -> str:
    return gpu_repair.why_left_to_others(
        context.deps.node.latest(),
        context.deps.workloads.present(),
        context.settings.policy.startup_taints,
        claims.tainted_devices(context.deps.slices.list() or ()),
    )
