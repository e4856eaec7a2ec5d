"""Repair GPUs by a reset: decide when a run of the pipeline does it, and report how it ended.

The run is that of the requested layout, with another plan (``planner.repair``): its pods leave,
its clients pause, the GPU is reset, and the instances return to their placements.
"""

import dataclasses

import structlog

from mig_manager import errors
from mig_manager.agent import jobs, outcomes, settings
from mig_manager.core import messages, model
from mig_manager.core.node import claims
from mig_manager.core.records import gpu_recovery, gpu_repair, requests

_LONGEST_PROBLEM = 600
"""In bytes: each GPU's is kept in an annotation."""

_OBSTACLES = (
    errors.Reason.LOCKED,
    errors.Reason.SLOTS_TAKEN,
    errors.Reason.API_UNAVAILABLE,
    errors.Reason.POD_RESOURCES_UNAVAILABLE,
)
"""Failures that say nothing about the GPU."""

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Which GPUs to repair now, and why not the others."""

    gpus: tuple[model.Gpu, ...] = ()
    note: str = ""
    """For people, in sentences."""


NOTHING = Decision()


def decide(
    shared: jobs.Shared,
    record: requests.Request,
    gpus: model.ObservedGpus,
    *,
    is_active: bool,
) -> Decision:
    """Decide which GPUs to repair; ``is_active`` is whether the requested layout is.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    faulty = tuple(gpu for gpu in gpus if gpu.awaits_reset)
    if not faulty or shared.limits.repair is not settings.Repair.RESET:
        return NOTHING
    why = "" if is_active else "no requested layout is active"
    if shared.deps.reset is None:
        why = "the agent may not reset GPUs"
    why = why or _left_to_others(shared)
    ready, waiting = [], []
    for gpu in faulty:
        reason = (
            gpu_repair.why_impossible(gpu)
            or gpu_repair.why_paused(gpu, record.repairs, shared.deps.clock)
            or why
        )
        if reason:
            waiting.append((f"GPU {gpu.index}", reason))
        else:
            ready.append(gpu)
    now = f"To be reset by the agent: {messages.listed([*map(str, ready)])}." if ready else ""
    later = f"Not reset now: {messages.by_cause(waiting)}." if waiting else ""
    return Decision(gpus=tuple(ready), note=" ".join(filter(None, (now, later))))


def begin(shared: jobs.Shared, record: requests.Request, decision: Decision) -> requests.Request:
    """Return the record with a repair that has begun, and report it."""
    uuids, names = [gpu.uuid for gpu in decision.gpus], messages.listed([*map(str, decision.gpus)])
    repairs = gpu_repair.begun(record.repairs, uuids, shared.deps.clock.unix_s())
    _log.warning("gpu_repair_begun", gpus=uuids)
    message = f"The agent evicts the pods of {names}, and resets it."
    shared.deps.node.emit(reason="GpuRepairBegun", message=message, is_warning=True)
    return dataclasses.replace(record, repairs=repairs)


def end(job: jobs.Job, outcome: outcomes.Outcome) -> None:
    """Record and report how the repair of a run ended; the next patch publishes the record.

    A repair that could not begin is neither counted nor reported: the next drift check decides
    again.
    """
    record = job.journal.record
    if outcome.reason in _OBSTACLES and not job.journal.entries.keeps_pods_away:
        _log.info("gpu_repair_postponed", reason=outcome.reason.value)
        repairs = gpu_repair.postponed(record.repairs, job.deps.clock.unix_s())
        job.journal.note_record(dataclasses.replace(record, repairs=repairs))
        return
    after = {gpu.uuid: gpu for gpu in outcome.gpus}

    def problem(uuid: str) -> str:
        if outcome.state is model.State.FAILED:
            # The remedy is about the layout.
            why = outcome.message.removesuffix(outcome.reason.remedy).rstrip(" .")
            return messages.fit(why, _LONGEST_PROBLEM)
        gpu = after.get(uuid)
        return gpu_recovery.fault(gpu) if gpu else f"GPU {uuid} is unreachable after the reset"

    repairs = gpu_repair.ended(record.repairs, problem)
    names = {gpu.uuid: str(gpu) for gpu in job.status.gpus}
    problems = {uuid: problem(uuid) for uuid in sorted(job.request.repairs)}
    for uuid, why in problems.items():
        job.deps.telemetry.repair_ended(is_good=not why)
        _log.log(30 if why else 20, "gpu_repair_ended", gpu=uuid, error=why or None)
        name = names.get(uuid, uuid)
        message = f"The repair of {name} failed: {why}" if why else f"{name} was reset."
        job.deps.node.emit(
            reason="GpuRepairFailed" if why else "GpuRepaired",
            message=messages.fit(messages.with_full_stop(message), messages.LONGEST_BYTES),
            is_warning=bool(why),
        )
    job.journal.note_record(dataclasses.replace(record, repairs=repairs))


def with_problems(outcome: outcomes.Outcome, record: requests.Request) -> outcomes.Outcome:
    """Return the outcome of an active layout, with the failed repairs of its GPUs."""
    faulty = {gpu.uuid: gpu for gpu in outcome.gpus if gpu.awaits_reset}
    failed = "".join(
        f" The repair of {faulty[each.gpu]} failed: {messages.with_full_stop(each.problem)}"
        for each in record.repairs
        if each.problem and each.gpu in faulty
    )
    message = messages.fit(outcome.message + failed, messages.LONGEST_BYTES)
    return dataclasses.replace(outcome, message=message)


def _left_to_others(shared: jobs.Shared) -> str:
    slices = (shared.deps.slices.list() if shared.deps.slices else None) or ()
    return gpu_repair.why_left_to_others(
        shared.deps.node.latest(),
        shared.deps.workloads.present(),
        shared.limits.policy.startup_taints,
        claims.tainted(slices),
    )
