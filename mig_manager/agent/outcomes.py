"""The outcome of a run, and its report as log line, metrics and Events."""

import dataclasses
from collections.abc import Sequence

import structlog

from mig_manager import reasons
from mig_manager.core import messages, model, ports, timing
from mig_manager.core.records import gpu_recovery, run_status

MAX_DRIVER_PAUSE_S = 15.0
MAX_QUICK_ATTEMPTS = 40
"""For ten minutes, in which a driver container may compile the driver: until the layout is back
after a reboot, pods may get whole GPUs. After that each attempt costs too many requests."""

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a run."""

    state: run_status.State
    reason: reasons.Reason
    description: str  # what happened, for people
    remedy: str = ""  # what follows from it: an action by a person, or the agent's next one
    should_retry: bool = False  # whether another attempt may succeed without action by a person
    verified_gpus: model.ObservedGpus = model.NO_GPUS
    """Empty after a failure. Unreachable GPUs get the layout once they are back."""
    missing_gpus: tuple[str, ...] = ()
    """Names of the GPUs that the driver no longer lists, if that is the failure."""
    gpus_after_failure: model.ObservedGpus | None = None
    """As a failure that is not retried left them, empty if none can be observed; None: they were
    not observed."""

    @property
    def message(self) -> str:
        """The description with the remedy, as it is published."""
        text = f"{messages.with_full_stop(self.description)} {self.remedy}".rstrip()
        return messages.fit(text, messages.MAX_BYTES)

    def status_after(
        self, status: run_status.RunStatus, clock: timing.Clock, backoff_s: float
    ) -> run_status.RunStatus:
        """Return the status of a run with this outcome; ``backoff_s`` as in ``retry_after_s``."""
        is_success = self.state is run_status.State.SUCCESS
        retry_after_s = self.retry_after_s(status.attempt, backoff_s)
        return dataclasses.replace(
            status,
            state=self.state,
            phase=run_status.Phase.DONE if is_success else status.phase,
            reason=self.reason,
            message=self.message,
            finished_at=clock.now_iso(),
            retry_at=clock.now_iso(after_s=retry_after_s) if self.should_retry else None,
        )

    def retry_after_s(self, attempt: int, backoff_s: float) -> float:
        """Return the pause before the next attempt: a short one while the driver is loading."""
        is_loading = self.reason is reasons.Reason.DRIVER_NOT_LOADED
        is_quick = is_loading and attempt <= MAX_QUICK_ATTEMPTS
        return min(backoff_s, MAX_DRIVER_PAUSE_S) if is_quick else backoff_s


def success(
    status: run_status.RunStatus,
    reason: reasons.Reason,
    what: str,
    *,
    gpus: model.ObservedGpus,
    more: str = "",
) -> Outcome:
    """Return the outcome of a layout that is active on all reachable GPUs."""
    missing = "".join(
        f" {gpu.sentence}; once it is back, it gets what the layout has for it."
        for gpu in gpus.unreachable
    )
    if uuids := status.absent_uuids:
        missing += f" It names GPUs that this node lacks: {messages.list_names(uuids)}."
    if problem := status.file_problem:
        missing += f" It stays, but the file cannot be used: {messages.with_full_stop(problem)}"
    return Outcome(
        state=run_status.State.SUCCESS,
        reason=reason,
        description=f"Layout {status.title} {what}.{more}{missing}",
        verified_gpus=gpus,
    )


def failure(
    reason: reasons.Reason,
    description: str,
    *,
    should_retry: bool | None = None,
    remedy: str = "",
) -> Outcome:
    """Return the outcome of a failure.

    ``should_retry`` and ``remedy`` default to the reason's.
    """
    return Outcome(
        state=run_status.State.FAILED,
        reason=reason,
        description=description,
        remedy=remedy or reason.remedy,
        should_retry=reason.is_transient if should_retry is None else should_retry,
    )


def report(
    deps: ports.Dependencies,
    status: run_status.RunStatus,
    outcome: Outcome,
    *,
    seconds: float,
) -> None:
    """Log and count the outcome, and emit its Events."""
    is_failure = outcome.state is run_status.State.FAILED
    write = _log.warning if is_failure else _log.info
    write(
        "run_finished",
        state=outcome.state.value,
        reason=outcome.reason.value,
        seconds=round(seconds, 3),
    )
    deps.telemetry.run_ended(outcome.state, outcome.reason, seconds)
    if not is_failure:
        deps.telemetry.layout_applied(status.layout, status.content_hash)
    deps.node.emit(reason=outcome.reason.value, message=outcome.message, is_warning=is_failure)
    if lost := outcome.verified_gpus.unreachable:
        sentences = (messages.with_full_stop(gpu.sentence) for gpu in lost)
        # Equal remedies once.
        remedies = dict.fromkeys(map(gpu_recovery.remedy, lost))
        deps.node.emit(
            reason=reasons.Reason.GPU_UNREACHABLE.value,
            message=" ".join((*sentences, *remedies)),
            is_warning=True,
        )


def drift_message(name: str, pods: str, problem: str = "") -> str:
    """Say that the GPUs lack a layout that is no new request, and what blocks it."""
    why = f"; it cannot be restored: {problem}" if problem else ""
    if pods:
        why = f"; it is not applied while pods use devices that would be removed: {pods}"
    return f"the GPUs do not have layout {name}, and this agent did not change them{why}"


def returned_gpus_message(name: str, gpus: str, pods: str) -> str:
    """Say which GPUs were unreachable and still need the layout, and which pods block it."""
    return f"layout {name} is applied to {gpus} once no pod uses devices to be removed: {pods}"


def failed_changes_message(name: str, count: int, problem: str, pods: str) -> str:
    """Say that a layout has cost enough evictions, and which pods it would cost now."""
    return (
        f"{messages.count(count, 'change')} to layout {name} failed after evicting pods, the last "
        f"one because {problem}; so the agent evicts no more pods for it until the label is "
        f"removed and set again; it is applied once no pod uses devices to be removed: {pods}"
    )


def missing_message(name: str, gpus: Sequence[str]) -> str:
    """Say that GPUs are gone, which had the layout when it was verified."""
    return (
        f"the driver no longer lists {messages.list_names(gpus)}, "
        f"which it listed when layout {name} was verified"
    )
