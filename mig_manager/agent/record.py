"""How a run ended, and its publication on the Node: state, phase, reason, and the journal.

Labels, annotations and taint travel in one patch, so the journal always matches what it lists: the
API server takes both or neither. What a phase takes or restores is decided for the node as it is
when the API server accepts the patch, so a label that another program wrote meanwhile is kept.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.agent import requests as asking
from mig_manager.core import messages, model, ports
from mig_manager.core.layout import custom as customs
from mig_manager.core.node import cluster
from mig_manager.core.records import gpu_codec, journals, readiness, status

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    state: model.State
    reason: errors.Reason
    message: str
    """For people, remedy included."""
    is_unfinished: bool = False
    """Whether GPUs or host services are still neither as requested nor as before."""
    keeps_closed: bool = False
    """Whether the node stays closed until the next attempt, because its drain has begun."""
    gpus: model.ObservedGpus = model.NO_GPUS
    """The GPUs as verified; none after a failure. The layout is applied to unreachable ones once
    they are back."""
    is_final: bool = False  # whether not even a reason that may pass is retried

    @property
    def should_retry(self) -> bool:
        """Whether another attempt may succeed without anything being changed by a person."""
        return self.state is model.State.FAILED and (
            (self.reason.is_transient and not self.is_final) or self.is_unfinished
        )


def failed(
    reason: errors.Reason,
    message: str,
    *,
    is_unfinished: bool = False,
    keeps_closed: bool = False,
    is_final: bool = False,
) -> Outcome:
    """Return the outcome of a failure, with its remedy."""
    remedy = reason.remedy
    if is_final:
        remedy = "Request a layout that keeps what is in use; the agent does not retry."
    text = f"{messages.ended(message)} {remedy}".rstrip()
    return Outcome(
        state=model.State.FAILED,
        reason=reason,
        message=messages.fit(text, messages.LONGEST_BYTES),
        is_unfinished=is_unfinished,
        keeps_closed=keeps_closed,
        is_final=is_final,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a phase takes from the node, or restores."""

    message: str
    journal: journals.Journal
    """The journal once ``change`` is made."""
    change: cluster.NodePatch = dataclasses.field(default_factory=cluster.NodePatch)
    """Taint and labels to write in the same patch."""


class Record:
    """The record of one run; the only writer of state, status and journal."""

    def __init__(  # noqa: PLR0913 - each is named where it is called
        self,
        deps: ports.Dependencies,
        journal: journals.Journal,
        *,
        requests: asking.Requests | None = None,
        custom: customs.Custom | None = None,
        attempt: int = 1,
        retry_after_s: float = 0.0,
        startup_taints: frozenset[str] = frozenset(),
    ) -> None:
        self._node = deps.node
        self._startup_taints = startup_taints
        self._clock = deps.clock
        self._telemetry = deps.telemetry
        self._began = self._phase_began = deps.clock.monotonic()
        self._retry_after_s = retry_after_s
        self._published_gpus: model.ObservedGpus = model.NO_GPUS
        self._status = status.Status(
            config=journal.config,
            config_hash="",
            state=model.State.PENDING,
            phase=model.Phase.RESOLVE,
            reason=None,
            message="",
            attempt=attempt,
            started_at=deps.clock.now_iso(),
            finished_at=None,
            annotation_hash=journal.annotation_hash,
        )
        self.requests = requests or asking.Requests(deps)
        self.is_owners = False  # whether the owner wrote the layout
        self.custom = custom  # what is requested as ``custom``; None: the layout is not that
        self.is_final = False  # as in ``Outcome``
        self.journal = journal
        self.has_rolled_back = False

    @property
    def config(self) -> str:
        """Name of the requested layout."""
        return self._status.config

    @property
    def title(self) -> str:
        """The name, with the hash where many layouts have the same name."""
        name, content_hash = self.request
        return f"{name} ({content_hash})" if self.custom and content_hash else name

    @property
    def request(self) -> tuple[str, str]:
        """Name and hash of the requested layout; the hash is empty until it is resolved."""
        return self._status.config, self._status.config_hash

    @property
    def is_rebooted(self) -> bool:
        """Whether the node was rebooted for this request already."""
        return self._status.is_rebooted

    @property
    def attempt(self) -> int:
        """Which attempt at the request this is, from 1."""
        return self._status.attempt

    @property
    def gpus(self) -> model.ObservedGpus:
        """The GPUs as last noted; none before."""
        return self._status.gpus

    def note(self, **facts: Any) -> None:
        """Set fields of the status for the next patch."""
        self._status = dataclasses.replace(self._status, **facts)

    def note_journal(self, **facts: Any) -> None:
        """Set fields of the journal for the next patch."""
        self.journal = dataclasses.replace(self.journal, **facts)

    def succeeded(
        self, reason: errors.Reason, what: str, *, gpus: model.ObservedGpus, more: str = ""
    ) -> Outcome:
        """Return the outcome of a layout that is active on all reachable GPUs."""
        missing = "".join(
            f" {gpu.sentence}; the layout is applied to it once it is back."
            for gpu in gpus.unreachable
        )
        if problem := self._status.config_problem:
            missing += f" It stays, but the file cannot be used: {messages.ended(problem)}"
        return Outcome(
            state=model.State.SUCCESS,
            reason=reason,
            message=f"Layout {self.title} {what}.{more}{missing}",
            gpus=gpus,
        )

    def failed(self, reason: errors.Reason, *parts: str) -> Outcome:
        """Return the failure of this run, with unreachable GPUs and what remains to restore."""
        message = messages.joined(*parts)
        lost = () if reason is errors.Reason.GPU_UNREACHABLE else self.gpus.unreachable
        return failed(
            reason,
            messages.joined(
                message, *(gpu.sentence for gpu in lost if gpu.message not in message)
            ),
            is_unfinished=not self.journal.remaining.is_restored,
            # Evicted pods must not start here again before the others have left.
            keeps_closed=self.journal.draining and reason.is_transient,
            is_final=self.is_final and self.journal.remaining.is_restored,
        )

    def enter(
        self,
        phase: model.Phase,
        message: str,
        *,
        journal: journals.Journal | None = None,
        change: cluster.NodePatch | None = None,
        state: model.State = model.State.PENDING,
        reason: errors.Reason | None = None,
    ) -> None:
        """Publish a new phase, together with what the phase takes; raises as ``take``."""
        if journal is not None:
            step = Step(message=message, journal=journal, change=change or cluster.NodePatch())
            self.take(phase, lambda _view: step, state=state)
            return
        self._end_phase()
        self._set(phase, message, state=state, reason=reason)
        self._node.patch(_merge(cluster.NodePatch(), self._labels, self._annotations(None)))
        self._published(state)

    def begin_rollback(self) -> None:
        """Publish the rollback, once, without waiting for the API: a rollback is more urgent."""
        if self.has_rolled_back:
            return
        self.has_rolled_back = True
        self._end_phase()
        message, state = "restoring the instances from before", model.State.PENDING
        self._set(model.Phase.ROLL_BACK, message, state=state)
        annotations = {cluster.STATUS_ANNOTATION: self._status.to_json()}
        self._node.announce(_merge(cluster.NodePatch(), self._labels, annotations))
        self._telemetry.state_published(state)

    def announce_journal(self, **facts: Any) -> None:
        """Set fields of the journal and publish it, without waiting for the API."""
        self.note_journal(**facts)
        annotations = {cluster.JOURNAL_ANNOTATION: _text(self.journal)}
        self._node.announce(cluster.NodePatch(annotations=annotations))

    def take(
        self,
        phase: model.Phase,
        decide: Callable[[cluster.NodeView], Step],
        *,
        state: model.State = model.State.PENDING,
    ) -> None:
        """Publish a new phase that takes or restores something that depends on the node.

        ``decide`` is called again where another program wrote to the node meanwhile.

        Raises:
            ClusterError: The API refused or does not answer; the journal lists what may have been
                taken nevertheless.
        """
        self._end_phase()
        journal = self.journal

        def patch(view: cluster.NodeView) -> cluster.NodePatch:
            nonlocal journal
            step = decide(view)
            journal = step.journal
            self._set(phase, step.message, state=state)
            return _merge(step.change, self._labels, self._annotations(journal))

        try:
            self._node.update(patch)
        except errors.ClusterError as error:
            if error.may_be_done:
                self.journal = journal
            raise
        self.journal = journal
        self._published(state)

    def resume(
        self, keys: Collection[str], *, what: str = "", plugin_config: str | None = None
    ) -> frozenset[str]:
        """Restore some paused labels before the run ends, and reopen the node.

        Args:
            keys: The labels; one that another program wrote since the pause is kept.
            what: The message; empty: it names the labels.
            plugin_config: The device plugin's config to set in the same patch; None: keep it.

        Returns:
            The labels that have their value from before the pause.

        Raises:
            ClusterError: The API refused or does not answer; the journal still lists all.
        """
        before = self.journal
        restored: dict[str, str] = {}

        def decide(view: cluster.NodeView) -> Step:
            ours = journals.without_foreign_labels(before, view)
            restored.clear()
            restored.update({k: v for k, v in ours.paused_labels.items() if k in keys})
            labels: dict[str, str | None] = dict(restored)
            old = view.labels.get(cluster.PLUGIN_CONFIG_LABEL)
            changed = None
            if plugin_config not in (None, old):
                changed = journals.PluginConfig(before=old, now=str(plugin_config))
                labels[cluster.PLUGIN_CONFIG_LABEL] = changed.now
            names = ", ".join(key.removeprefix(cluster.DEPLOY_LABEL_PREFIX) for key in restored)
            return Step(
                message=what or f"resuming {names or 'nothing'}",
                journal=dataclasses.replace(
                    before,
                    paused_labels={k: v for k, v in before.paused_labels.items() if k not in keys},
                    hold_taint=False,
                    plugin_config=changed or before.plugin_config,
                ),
                change=cluster.NodePatch(
                    labels=labels, hold_taint=False if ours.hold_taint else None
                ),
            )

        try:
            self.take(model.Phase.RESUME, decide)
        except errors.ClusterError:
            # The end of the run restores what this patch may not have restored.
            changed = self.journal.plugin_config or before.plugin_config
            self.journal = dataclasses.replace(before, plugin_config=changed)
            raise
        return frozenset(restored)

    def finish(
        self, outcome: Outcome, annotations: Mapping[str, str | None] | None = None
    ) -> None:
        """Publish the outcome, and restore in the same patch what the journal still lists.

        ``annotations`` are further ones for this patch.

        Raises:
            ClusterError: The API refused or does not answer; the journal stays for the next run.
        """
        self._end_phase()
        is_success = outcome.state is model.State.SUCCESS
        self._status = dataclasses.replace(
            self._status,
            state=outcome.state,
            reason=outcome.reason,
            message=outcome.message,
            finished_at=self._clock.now_iso(),
            retry_at=self._clock.now_iso(after_s=self._retry_after_s)
            if outcome.should_retry
            else None,
            phase=model.Phase.DONE if is_success else self._status.phase,
        )
        labels = self._labels
        if is_success:
            content_hash = self._status.config_hash
            self.requests.verify(content_hash, self._status.gpus, is_owners=self.is_owners)
            labels[cluster.APPLIED_LABEL] = self._status.config
            # It belongs to the layout that is now active.
            self.note_journal(plugin_config=None)
        elif outcome.reason is errors.Reason.DRIFTED:
            labels[cluster.APPLIED_LABEL] = None
        taken = self.journal
        kept = taken.remaining
        if outcome.reason is errors.Reason.INTERRUPTED:
            # The next agent must not take a plugin that has no new pod yet for none.
            kept = taken.unverified
        if outcome.keeps_closed:
            kept = taken.closed
            taken = dataclasses.replace(taken, hold_taint=False)
        written = {**(annotations or {}), **self._annotations(kept)}
        removed = self._startup_taints if is_success else frozenset()
        self._node.update(
            lambda view: dataclasses.replace(
                _merge(journals.restoring(taken, view), labels, written), removed_taints=removed
            )
        )
        self.journal = kept
        self._published(outcome.state)
        self._report(outcome)

    def abandon(self) -> None:
        """Restore everything and leave the state to the next run; raises as ``finish``."""
        self._end_phase()
        remaining = self.journal.remaining
        annotations = {cluster.JOURNAL_ANNOTATION: _text(remaining)}
        self._node.update(
            lambda view: _merge(journals.restoring(self.journal, view), {}, annotations)
        )
        self.journal = remaining
        self._telemetry.run_superseded()

    def _report(self, outcome: Outcome) -> None:
        """Log and count the outcome, and emit its Events."""
        seconds = self._clock.monotonic() - self._began
        is_failure = outcome.state is model.State.FAILED
        write = _log.warning if is_failure else _log.info
        write(
            "run_finished",
            state=outcome.state.value,
            reason=outcome.reason.value,
            seconds=round(seconds, 3),
        )
        self._telemetry.run_ended(outcome.state, outcome.reason, seconds)
        if not is_failure:
            self._telemetry.layout_applied(*self.request)
        self._node.emit(
            reason=outcome.reason.value, message=outcome.message, is_warning=is_failure
        )
        if outcome.gpus.unreachable:
            sentences = (messages.ended(gpu.sentence) for gpu in outcome.gpus.unreachable)
            self._node.emit(
                reason=errors.Reason.GPU_UNREACHABLE.value,
                message=" ".join((*sentences, errors.Reason.GPU_UNREACHABLE.remedy)),
                is_warning=True,
            )

    def _end_phase(self) -> None:
        now = self._clock.monotonic()
        self._telemetry.phase_ended(self._status.phase, now - self._phase_began)
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

    def _published(self, state: model.State) -> None:
        self._published_gpus = self._status.gpus
        self.requests.published()
        self._node.set_condition(readiness.condition(self._status))
        self._telemetry.state_published(state)

    @property
    def _labels(self) -> dict[str, str | None]:
        return {cluster.STATE_LABEL: self._status.state.value}

    def _annotations(self, journal: journals.Journal | None) -> dict[str, str | None]:
        self.requests.note_reboot(self._status)
        annotations = self.requests.annotations()
        annotations[cluster.STATUS_ANNOTATION] = self._status.to_json()
        if self._status.gpus is not self._published_gpus:
            annotations[cluster.GPUS_ANNOTATION] = gpu_codec.to_json(self._status.gpus)
        if journal is not None:
            annotations[cluster.JOURNAL_ANNOTATION] = _text(journal)
        return annotations


def _text(journal: journals.Journal) -> str | None:
    return None if journal.is_empty else journal.to_json()


def _merge(
    change: cluster.NodePatch,
    labels: Mapping[str, str | None],
    annotations: Mapping[str, str | None],
) -> cluster.NodePatch:
    return dataclasses.replace(
        change,
        labels={**change.labels, **labels},
        annotations={**change.annotations, **annotations},
    )
