"""The published status of a run: state, phase, reason, message and GPUs."""

import dataclasses

import structlog

from mig_manager import errors
from mig_manager.agent import outcomes
from mig_manager.core import messages, model, ports, timing
from mig_manager.core.node import node_object, well_known
from mig_manager.core.records import gpu_recovery, requests, status

_log = structlog.get_logger()


def in_phase(before: status.RunStatus, phase: model.Phase, message: str) -> status.RunStatus:
    """Return the status in a new phase."""
    is_reboot = phase is model.Phase.REBOOT
    return dataclasses.replace(
        before,
        state=model.State.REBOOTING if is_reboot else model.State.PENDING,
        phase=phase,
        message=message,
        reason=errors.Reason.SLOTS_TAKEN if phase is model.Phase.WAIT else None,
    )


def with_outcome(
    before: status.RunStatus,
    outcome: outcomes.Outcome,
    clock: timing.Clock,
    *,
    retry_after_s: float,
) -> status.RunStatus:
    """Return the status with the outcome of the run."""
    is_success = outcome.state is model.State.SUCCESS
    retry_after_s = outcome.retry_after_s(before.attempt, retry_after_s)
    return dataclasses.replace(
        before,
        state=outcome.state,
        phase=model.Phase.DONE if is_success else before.phase,
        reason=outcome.reason,
        message=outcome.message,
        finished_at=clock.now_iso(),
        retry_at=clock.now_iso(after_s=retry_after_s) if outcome.should_retry else None,
    )


def patch(published: status.RunStatus) -> node_object.NodePatch:
    """Return the label and the annotation with a status."""
    return node_object.NodePatch(
        labels={well_known.STATE_LABEL: published.state.value},
        annotations={well_known.STATUS_ANNOTATION: published.to_json()},
    )


def verification(
    published: status.RunStatus, boot_id: str, *, is_from_owner: bool
) -> requests.Verified:
    """Return the record that the layout is active."""
    return requests.Verified(
        config_hash=published.config_hash,
        boot_id=boot_id,
        is_from_owner=is_from_owner,
        gpus=requests.fingerprint(published.gpus),
        listed={gpu.uuid: str(gpu) for gpu in published.gpus},
    )


def success(
    published: status.RunStatus,
    reason: errors.Reason,
    what: str,
    *,
    gpus: model.ObservedGpus,
    is_from_owner: bool,
    more: str = "",
) -> outcomes.Outcome:
    """Return the outcome of a layout that is active on all reachable GPUs."""
    missing = "".join(
        f" {gpu.sentence}; once it is back, it gets what the layout has for it."
        for gpu in gpus.unreachable
    )
    if problem := published.config_problem:
        missing += f" It stays, but the file cannot be used: {messages.with_full_stop(problem)}"
    return outcomes.Outcome(
        state=model.State.SUCCESS,
        reason=reason,
        description=f"Layout {published.title} {what}.{more}{missing}",
        verified_gpus=gpus,
        is_from_owner=is_from_owner,
    )


def report(
    deps: ports.Dependencies,
    published: status.RunStatus,
    outcome: outcomes.Outcome,
    *,
    seconds: float,
) -> None:
    """Log and count the outcome, and emit its Events."""
    is_failure = outcome.state is model.State.FAILED
    write = _log.warning if is_failure else _log.info
    write(
        "run_finished",
        state=outcome.state.value,
        reason=outcome.reason.value,
        seconds=round(seconds, 3),
    )
    deps.telemetry.run_ended(outcome.state, outcome.reason, seconds)
    if not is_failure:
        deps.telemetry.layout_applied(published.config, published.config_hash)
    deps.node.emit(reason=outcome.reason.value, message=outcome.message, is_warning=is_failure)
    if lost := outcome.verified_gpus.unreachable:
        sentences = (messages.with_full_stop(gpu.sentence) for gpu in lost)
        # Equal remedies once.
        remedies = dict.fromkeys(map(gpu_recovery.remedy, lost))
        deps.node.emit(
            reason=errors.Reason.GPU_UNREACHABLE.value,
            message=" ".join((*sentences, *remedies)),
            is_warning=True,
        )
