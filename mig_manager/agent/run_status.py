"""The published status of a run: state, phase, reason, message and GPUs."""

import dataclasses
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.agent import outcomes
from mig_manager.core import messages, model, ports
from mig_manager.core.node import node_object, well_known
from mig_manager.core.records import gpu_recovery, readiness, requests, status

_log = structlog.get_logger()


class RunStatus:
    """The status of a run: the steps set its fields, and ``RunJournal`` publishes it."""

    def __init__(self, deps: ports.Dependencies, first: status.Status) -> None:
        self._deps = deps
        self.published = first
        self._began = self._phase_began = deps.clock.monotonic()

    @property
    def gpus(self) -> model.ObservedGpus:
        """The GPUs as last observed in this run; empty before."""
        return self.published.gpus

    @property
    def title(self) -> str:
        """The layout's name, with its hash if many layouts share the name."""
        name, config_hash = self.published.config, self.published.config_hash
        is_shared = self.published.annotation_hash and config_hash
        return f"{name} ({config_hash})" if is_shared else name

    def note(self, **fields: Any) -> None:
        """Set fields; the next patch publishes them."""
        self.published = dataclasses.replace(self.published, **fields)

    def end_phase(self) -> None:
        """Count the duration of the current phase."""
        now = self._deps.clock.monotonic()
        self._deps.telemetry.phase_ended(self.published.phase, now - self._phase_began)
        self._phase_began = now

    def enter(self, phase: model.Phase, message: str) -> None:
        """Set a new phase, and log it."""
        _log.info("phase_entered", phase=phase.value, message=message)
        is_reboot = phase is model.Phase.REBOOT
        self.note(
            state=model.State.REBOOTING if is_reboot else model.State.PENDING,
            phase=phase,
            message=message,
            reason=errors.Reason.SLOTS_TAKEN if phase is model.Phase.WAIT else None,
        )

    def finish(self, outcome: outcomes.Outcome, *, retry_after_s: float) -> None:
        """Set the outcome."""
        clock = self._deps.clock
        self.note(
            state=outcome.state,
            reason=outcome.reason,
            message=outcome.message,
            finished_at=clock.now_iso(),
            retry_at=clock.now_iso(after_s=retry_after_s) if outcome.should_retry else None,
        )
        if outcome.state is model.State.SUCCESS:
            self.note(phase=model.Phase.DONE)

    @property
    def patch(self) -> node_object.NodePatch:
        """The label and the annotation with this status."""
        return node_object.NodePatch(
            labels={well_known.STATE_LABEL: self.published.state.value},
            annotations={well_known.STATUS_ANNOTATION: self.published.to_json()},
        )

    def set_condition(self) -> None:
        """Set the Node's condition, and count the published state."""
        self._deps.node.set_condition(readiness.condition(self.published))
        self._deps.telemetry.state_published(self.published.state)

    def new_verification(self, *, is_from_owner: bool) -> requests.Verified:
        """Return the record that the layout is active."""
        return requests.Verified(
            config_hash=self.published.config_hash,
            boot_id=self._deps.boot_id,
            is_from_owner=is_from_owner,
            gpus=requests.fingerprint(self.gpus),
            listed={gpu.uuid: str(gpu) for gpu in self.gpus},
        )

    def success(
        self,
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
        if problem := self.published.config_problem:
            missing += (
                f" It stays, but the file cannot be used: {messages.with_full_stop(problem)}"
            )
        return outcomes.Outcome(
            state=model.State.SUCCESS,
            reason=reason,
            message=f"Layout {self.title} {what}.{more}{missing}",
            gpus=gpus,
            is_from_owner=is_from_owner,
        )

    def report(self, outcome: outcomes.Outcome) -> None:
        """Log and count the outcome, and emit its Events."""
        seconds = self._deps.clock.monotonic() - self._began
        is_failure = outcome.state is model.State.FAILED
        write = _log.warning if is_failure else _log.info
        write(
            "run_finished",
            state=outcome.state.value,
            reason=outcome.reason.value,
            seconds=round(seconds, 3),
        )
        self._deps.telemetry.run_ended(outcome.state, outcome.reason, seconds)
        if not is_failure:
            self._deps.telemetry.layout_applied(self.published.config, self.published.config_hash)
        self._deps.node.emit(
            reason=outcome.reason.value, message=outcome.message, is_warning=is_failure
        )
        if outcome.gpus.unreachable:
            lost = outcome.gpus.unreachable
            sentences = (messages.with_full_stop(gpu.sentence) for gpu in lost)
            # Equal remedies once.
            remedies = dict.fromkeys(map(gpu_recovery.remedy, lost))
            self._deps.node.emit(
                reason=errors.Reason.GPU_UNREACHABLE.value,
                message=" ".join((*sentences, *remedies)),
                is_warning=True,
            )
