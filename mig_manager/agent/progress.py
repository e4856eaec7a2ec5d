"""The published progress of a run: state, phase, reason and message."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.agent import outcomes, publish
from mig_manager.core import messages, model, ports
from mig_manager.core.node import cluster
from mig_manager.core.records import gpu_codec, readiness, requests, status

_log = structlog.get_logger()


class Progress:
    """The published progress of a run.

    Steps record their results here, to be published.
    """

    def __init__(
        self,
        deps: ports.Dependencies,
        publisher: publish.Publisher,
        record: requests.Request,
        first: status.Status,
        *,
        startup_taints: frozenset[str] = frozenset(),
        retry_after_s: float = 0.0,
    ) -> None:
        self._deps = deps
        self._publisher = publisher
        self._record = record
        self._status = first
        self._startup_taints = startup_taints
        self._retry_after_s = retry_after_s
        self._began = self._phase_began = deps.clock.monotonic()
        self._has_rolled_back = False

    @property
    def has_rolled_back(self) -> bool:
        """Whether a rollback was begun in this run."""
        return self._has_rolled_back

    @property
    def record(self) -> requests.Request:
        """The request, and its progress."""
        return self._record

    @property
    def gpus(self) -> model.ObservedGpus:
        """The GPUs as last recorded; empty before."""
        return self._status.gpus

    @property
    def title(self) -> str:
        """The layout's name, with its hash if many layouts share the name."""
        known = self._status
        is_one_of_many = known.annotation_hash and known.config_hash
        return f"{known.config} ({known.config_hash})" if is_one_of_many else known.config

    def note(self, **facts: Any) -> None:
        """Set fields of the status for the next patch."""
        self._status = dataclasses.replace(self._status, **facts)

    def resolve(self, config_hash: str, *, is_owners: bool) -> bool:
        """Note the content of the layout; return whether it was verified for this request."""
        self._record = self._record.resolved(config_hash, is_owners=is_owners)
        return self._record.verified is not None

    def expect(self, deploy_labels: frozenset[str]) -> None:
        """Note advertisers whose pods are deleted; the next patch publishes it."""
        awaited = self._record.awaited | deploy_labels
        self._record = dataclasses.replace(self._record, awaited=awaited)

    def note_served(self) -> None:
        """Note that no advertiser is expected any more."""
        self._record = dataclasses.replace(self._record, awaited=frozenset())

    def success(
        self,
        reason: errors.Reason,
        what: str,
        *,
        gpus: model.ObservedGpus,
        is_owners: bool,
        more: str = "",
    ) -> outcomes.Outcome:
        """Return the outcome of a layout that is active on all reachable GPUs."""
        missing = "".join(
            f" {gpu.sentence}; the layout is applied to it once it is back."
            for gpu in gpus.unreachable
        )
        if problem := self._status.config_problem:
            missing += (
                f" It stays, but the file cannot be used: {messages.with_full_stop(problem)}"
            )
        return outcomes.Outcome(
            state=model.State.SUCCESS,
            reason=reason,
            message=f"Layout {self.title} {what}.{more}{missing}",
            gpus=gpus,
            is_owners=is_owners,
        )

    def enter(
        self,
        phase: model.Phase,
        message: str,
        *,
        state: model.State = model.State.PENDING,
        reason: errors.Reason | None = None,
    ) -> None:
        """Publish a new phase; raises as ``Publisher``."""
        self._end_phase()
        self._set(phase, message, state=state, reason=reason)
        self._publisher.patch(self._completed(cluster.NodePatch()))
        self._published()

    def update(
        self,
        phase: model.Phase,
        decide: Callable[[cluster.NodeView], tuple[str, cluster.NodePatch]],
        *,
        state: model.State = model.State.PENDING,
    ) -> None:
        """Publish a new phase with its change of the Node; raises as ``Publisher``.

        ``decide`` returns the message and the change; it is called again if another program
        wrote to the Node meanwhile.
        """
        self._end_phase()

        def patch(view: cluster.NodeView) -> cluster.NodePatch:
            message, change = decide(view)
            self._set(phase, message, state=state)
            return self._completed(change)

        self._publisher.update(patch)
        self._published()

    def begin_rollback(self) -> None:
        """Publish the rollback once, without waiting for the API: the rollback is more urgent."""
        if self._has_rolled_back:
            return
        self._has_rolled_back = True
        self._end_phase()
        message = "restoring the previous instances"
        self._set(model.Phase.ROLL_BACK, message, state=model.State.PENDING)
        annotations = {cluster.STATUS_ANNOTATION: self._status.to_json()}
        self._publisher.announce(
            cluster.NodePatch(labels=self._state_label, annotations=annotations)
        )
        self._deps.telemetry.state_published(self._status.state)

    def announce_annotations(self, annotations: Mapping[str, str | None]) -> None:
        """Publish annotations without waiting for the API."""
        self._publisher.announce(cluster.NodePatch(annotations=annotations))

    def finish(self, outcome: outcomes.Outcome, restore: publish.Decide) -> None:
        """Publish the outcome and restore the rest in one patch; raises as ``Publisher``."""
        self._end_phase()
        is_success = outcome.state is model.State.SUCCESS
        clock = self._deps.clock
        retry_at = clock.now_iso(after_s=self._retry_after_s) if outcome.should_retry else None
        self.note(
            state=outcome.state,
            reason=outcome.reason,
            message=outcome.message,
            finished_at=clock.now_iso(),
            retry_at=retry_at,
            phase=model.Phase.DONE if is_success else self._status.phase,
        )
        labels: dict[str, str | None] = {}
        if is_success:
            known = self._status
            verified = requests.Verified(
                config_hash=known.config_hash,
                boot_id=self._deps.boot_id,
                is_owners=outcome.is_owners,
                gpus=requests.fingerprint(known.gpus),
            )
            self._record = dataclasses.replace(
                self._record, verified=verified, awaited=frozenset()
            )
            labels[cluster.APPLIED_LABEL] = known.config
        elif outcome.reason is errors.Reason.DRIFTED:
            labels[cluster.APPLIED_LABEL] = None

        # Start-up taints kept workloads away until the first layout.
        removed = self._startup_taints if is_success else frozenset()

        def patch(view: cluster.NodeView) -> cluster.NodePatch:
            change = restore(view)
            labelled = dataclasses.replace(
                change, labels={**change.labels, **labels}, removed_taints=removed
            )
            return self._completed(labelled)

        self._publisher.update(patch)
        self._published()
        self._report(outcome)

    def abandon(self, restore: publish.Decide) -> None:
        """Restore everything and leave the state to the next run; raises as ``Publisher``."""
        self._end_phase()
        self._publisher.update(restore)
        self._deps.telemetry.run_superseded()

    def _report(self, outcome: outcomes.Outcome) -> None:
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
            self._deps.telemetry.layout_applied(self._status.config, self._status.config_hash)
        self._deps.node.emit(
            reason=outcome.reason.value, message=outcome.message, is_warning=is_failure
        )
        if outcome.gpus.unreachable:
            sentences = (messages.with_full_stop(gpu.sentence) for gpu in outcome.gpus.unreachable)
            self._deps.node.emit(
                reason=errors.Reason.GPU_UNREACHABLE.value,
                message=" ".join((*sentences, errors.Reason.GPU_UNREACHABLE.remedy)),
                is_warning=True,
            )

    def _end_phase(self) -> None:
        now = self._deps.clock.monotonic()
        self._deps.telemetry.phase_ended(self._status.phase, now - self._phase_began)
        self._phase_began = now

    def _set(
        self,
        phase: model.Phase,
        message: str,
        *,
        state: model.State,
        reason: errors.Reason | None = None,
    ) -> None:
        _log.info("phase_entered", phase=phase.value, message=message)
        self.note(state=state, phase=phase, message=message, reason=reason)

    @property
    def _state_label(self) -> dict[str, str | None]:
        return {cluster.STATE_LABEL: self._status.state.value}

    def _completed(self, change: cluster.NodePatch) -> cluster.NodePatch:
        """Add this run's published state to a patch."""
        self._record = self._record.with_status(self._status, self._deps.boot_id)
        annotations = {**change.annotations, **publish.of_record(self._record)}
        annotations[cluster.STATUS_ANNOTATION] = self._status.to_json()
        if self._status.gpus is not model.NO_GPUS:
            annotations[cluster.GPUS_ANNOTATION] = gpu_codec.to_json(self._status.gpus)
        labels = {**change.labels, **self._state_label}
        return dataclasses.replace(change, labels=labels, annotations=annotations)

    def _published(self) -> None:
        self._publisher.keep(self._record)
        self._deps.node.set_condition(readiness.condition(self._status))
        self._deps.telemetry.state_published(self._status.state)
