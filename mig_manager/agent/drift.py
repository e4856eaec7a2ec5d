"""Check at rest whether the GPUs still have the layout of the last run."""

import dataclasses
import enum
from collections.abc import Hashable

import structlog

from mig_manager import errors
from mig_manager.agent import job as jobs
from mig_manager.agent import outcomes, resolving
from mig_manager.core import model, steps

_log = structlog.get_logger()


class Action(enum.Enum):
    """What to do after a drift check."""

    REST = "rest"
    HEAL = "heal"
    """Run the pipeline without evicting a pod."""
    RUN = "run"


class Finding(enum.Enum):
    """What a drift check found."""

    AS_BEFORE = "as before"
    DRIFTED = "drifted"
    STILL_DRIFTED = "still drifted"
    BACK = "back"
    """The layout is active again, and this agent did not apply it."""
    CHANGED = "changed"
    """A run that failed for good may now end differently, or a GPU was lost or is back."""


def drift_message(name: str, pods: str) -> str:
    """Say that the GPUs have another layout than the one applied, and which pods keep it so."""
    why = f"; it is not applied again while pods use devices that would be removed: {pods}"
    why = why if pods else ""
    return f"the GPUs no longer have layout {name}, and this agent did not change them{why}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The GPUs compared with a layout."""

    gpus: model.ObservedGpus
    plan: steps.Plan | None
    """What the layout would change; None: the check failed."""
    error: errors.Reason | None = None
    is_owners: bool = False  # whether the owner wrote the layout


def observe(job: jobs.Job) -> Observation:
    """Observe the GPUs, and plan the layout of a run without executing anything."""
    try:
        found = resolving.resolve(job)
        gpus = found.observed or resolving.observe(job)
        plan = found.plan(gpus)
    except errors.MigManagerError as error:
        _log.info("drift_check_failed", reason=error.reason.value, error=error.message)
        return Observation(gpus=job.progress.gpus, plan=None, error=error.reason)
    return Observation(gpus=gpus, plan=plan, is_owners=found.is_owners)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What was observed since the last run ended."""

    ended: outcomes.Outcome | None = None
    baseline: Hashable = None
    is_drifted: bool = False


def judge(memory: Memory, ended: outcomes.Outcome, now: Observation) -> tuple[Finding, Memory]:
    """Compare an observation with the end of the last run and with earlier observations."""
    # What the outcome of a run depends on.
    fingerprint = (now.error, *map(_fingerprint, now.gpus))
    if ended is not memory.ended:
        is_drifted = ended.reason is errors.Reason.DRIFTED
        memory = Memory(ended=ended, baseline=fingerprint, is_drifted=is_drifted)
    is_success = ended.state is model.State.SUCCESS
    if is_success and (now.gpus or now.error is None):
        unreachable = {gpu.index for gpu in now.gpus.unreachable}
        if unreachable != {gpu.index for gpu in ended.gpus.unreachable}:
            # A GPU was lost, or is back: apply the layout to it, or publish the loss.
            return Finding.CHANGED, memory
    if not (is_success or ended.reason is errors.Reason.DRIFTED):
        # The first observation after a failure is what the next ones are compared with.
        is_as_before = fingerprint == memory.baseline
        return (Finding.AS_BEFORE if is_as_before else Finding.CHANGED), memory
    if now.plan is None:
        return Finding.AS_BEFORE, memory
    was_drifted, memory = (
        memory.is_drifted,
        dataclasses.replace(memory, is_drifted=not now.plan.is_empty),
    )
    if memory.is_drifted:
        return (Finding.STILL_DRIFTED if was_drifted else Finding.DRIFTED), memory
    return (Finding.BACK if was_drifted else Finding.AS_BEFORE), memory


def _fingerprint(gpu: model.Gpu) -> Hashable:
    return (
        gpu.uuid,
        gpu.current_mode,
        gpu.pending_mode,
        frozenset((info.profile, info.placements) for info in gpu.profiles or ()),
        frozenset(
            (gi.profile, gi.placement, len(gi.compute_instances)) for gi in gpu.gpu_instances
        ),
    )
