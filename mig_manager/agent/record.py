"""What one run writes to its node: state, phase, reason, journal, and what goes with them.

Labels, annotations and taint travel in one patch, so that the journal and the thing it speaks of
can never disagree: the API server takes both or neither. What a phase takes or restores is decided
for the node as it is when the API server accepts it: a label that its owner wrote a moment before
stays theirs.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping

import structlog

from mig_manager import errors
from mig_manager.agent import outcomes
from mig_manager.change import instrumentation
from mig_manager.core import model, ports, timing
from mig_manager.core.node import cluster
from mig_manager.core.records import gpu_codec, status

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One of the tries at a wish."""

    number: int = 1
    retry_after_s: float = 0.0
    """When the next one is made, should this one fail for a reason that can pass."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a phase takes from the node, or restores."""

    message: str
    """What happens, for people."""
    journal: status.Journal
    """How the journal must read once ``change`` is made."""
    change: cluster.NodePatch = dataclasses.field(default_factory=cluster.NodePatch)
    """Taint and labels to write in the same patch."""


class Record:
    """The record of one run; the only writer of state, status and journal."""

    def __init__(
        self,
        node: ports.Node,
        clock: timing.Clock,
        *,
        journal: status.Journal,
        attempt: Try | None = None,
        telemetry: instrumentation.Telemetry | None = None,
    ) -> None:
        """Begin a record.

        Args:
            node: Where it is written.
            clock: For its times.
            journal: Names the layout that is wanted and the present boot, and lists what an
                interrupted run has taken already: this one carries on with it.
            attempt: Which try at the wish this is; None: the first.
            telemetry: Told of states and phases.
        """
        self._node = node
        self._clock = clock
        self._telemetry = telemetry or instrumentation.Telemetry()
        self._began = self._phase_began = clock.monotonic()
        self._try = attempt or Try()
        self._published_gpus: model.ObservedGpus = model.NO_GPUS
        self.journal = journal
        self._status = status.Status(
            config=journal.config,
            config_hash="",
            state=model.State.PENDING,
            phase=model.Phase.RESOLVE,
            reason=None,
            message="",
            attempt=self._try.number,
            started_at=clock.now_iso(),
            finished_at=None,
        )

    @property
    def attempt(self) -> int:
        """Which try at the wish this is, from 1."""
        return self._status.attempt

    @property
    def gpus(self) -> model.ObservedGpus:
        """The GPUs as they were last noted; none before."""
        return self._status.gpus

    def proven(self, due: tuple[model.GpuSnapshot, ...] = ()) -> None:
        """Remember that the change is in force on the GPUs: no way leads back from here.

        Args:
            due: What an earlier change has to restore on unreachable GPUs, once they are back.
        """
        self.journal = dataclasses.replace(self.journal, snapshot=due, applied="")

    def undone(self, due: tuple[model.GpuSnapshot, ...] = ()) -> None:
        """Remember that the GPUs have again what they had before the change.

        Args:
            due: What GPUs had that became unreachable: they are restored once they are back.
        """
        self.journal = dataclasses.replace(self.journal, snapshot=due)

    def started(self, service: str) -> None:
        """Remember that a service of the host runs again."""
        left = tuple(name for name in self.journal.host_services if name != service)
        self.journal = dataclasses.replace(self.journal, host_services=left)

    def exit_passed(self) -> None:
        """Remember that no hook is due any more at the end of the change."""
        self.journal = dataclasses.replace(self.journal, exit_hook=False)

    def draining(self, *, is_so: bool = True) -> None:
        """Remember whether pods were evicted for this layout and others must still leave."""
        self.journal = dataclasses.replace(self.journal, draining=is_so)

    def rebooted(self, *, is_so: bool = True) -> None:
        """Remember whether this wish has had its reboot, also once the journal is gone."""
        self._status = dataclasses.replace(self._status, is_rebooted=is_so)

    def note(
        self, *, config_hash: str | None = None, gpus: model.ObservedGpus = model.NO_GPUS
    ) -> None:
        """Remember facts for the next write."""
        self._status = dataclasses.replace(
            self._status,
            config_hash=self._status.config_hash if config_hash is None else config_hash,
            gpus=gpus or self._status.gpus,
        )

    def enter(
        self,
        phase: model.Phase,
        message: str,
        *,
        take: status.Journal | None = None,
        change: cluster.NodePatch | None = None,
        state: model.State = model.State.PENDING,
        reason: errors.Reason | None = None,
    ) -> cluster.NodeView:
        """Publish a new phase, together with what the phase takes.

        Args:
            phase: The phase that begins.
            message: What happens in it, for people.
            take: The journal as it must read once ``change`` is made; None: unchanged.
            change: Taint and labels to write in the same patch.
            state: ``pending``, or ``rebooting``.
            reason: What the run waits for, where that has a name.

        Raises:
            ClusterError: The API refused or does not answer; the journal lists what may have been
                taken nevertheless.
        """
        if take is not None or change is not None:
            step = Step(
                message=message,
                journal=self.journal if take is None else take,
                change=change or cluster.NodePatch(),
            )
            return self.take(phase, lambda _view: step, state=state)
        self._end_phase()
        self._say(phase, message, state=state, reason=reason)
        view = self._node.patch(_merge(None, self._labels(), self._annotations(None)))
        self._published(state)
        return view

    def announce(self, phase: model.Phase, message: str) -> None:
        """Publish a new phase without waiting for the API: what follows is more urgent."""
        self._end_phase()
        self._say(phase, message, state=model.State.PENDING)
        annotations = {cluster.STATUS_ANNOTATION: self._status.to_json()}
        self._node.announce(_merge(None, self._labels(), annotations))
        self._telemetry.state_published(model.State.PENDING)

    def take(
        self,
        phase: model.Phase,
        decide: Callable[[cluster.NodeView], Step],
        *,
        state: model.State = model.State.PENDING,
    ) -> cluster.NodeView:
        """Publish a new phase that takes something which depends on the node, or restores it.

        Args:
            phase: The phase that begins.
            decide: Returns what to take from the node as it is; called again where somebody else
                has written meanwhile.
            state: ``pending``, or ``rebooting``.

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
            self._say(phase, step.message, state=state)
            return _merge(step.change, self._labels(), self._annotations(journal))

        try:
            view = self._node.update(patch)
        except errors.ClusterError as error:
            # Whatever may have been taken must be given back.
            if error.may_be_done:
                self.journal = journal
            raise
        self.journal = journal
        self._published(state)
        return view

    def resume(
        self, keys: Collection[str], *, what: str = "", plugin_config: str | None = None
    ) -> frozenset[str]:
        """Restore some paused labels before the run ends, and let pods on the node again.

        Args:
            keys: The labels; one that somebody has written since the pause is theirs.
            what: What happens, for people; empty: it names the labels.
            plugin_config: The device plugin's config to switch to in the same patch; None: leave
                it as it is.

        Returns:
            The labels that have their value from before the pause.

        Raises:
            ClusterError: The API refused or does not answer; the journal still lists it all.
        """
        had = self.journal
        restored: dict[str, str] = {}

        def decide(view: cluster.NodeView) -> Step:
            ours = still_taken(had, view)
            restored.clear()
            restored.update({k: v for k, v in ours.paused_labels.items() if k in keys})
            switch = _switch(view, plugin_config)
            labels: dict[str, str | None] = dict(restored)
            if switch:
                labels[cluster.PLUGIN_CONFIG_LABEL] = switch.now
            names = ", ".join(key.removeprefix(cluster.DEPLOY_LABEL_PREFIX) for key in restored)
            return Step(
                message=what or f"resuming {names or 'nothing'}",
                journal=dataclasses.replace(
                    had,
                    paused_labels={k: v for k, v in had.paused_labels.items() if k not in keys},
                    hold_taint=False,
                    cordoned=False,
                    plugin_config=switch or had.plugin_config,
                ),
                change=dataclasses.replace(opening(ours), labels=labels),
            )

        try:
            self.take(model.Phase.RESUME, decide)
        except errors.ClusterError:
            # What may not have been given back is given back again at the end.
            self.journal = dataclasses.replace(
                had, plugin_config=self.journal.plugin_config or had.plugin_config
            )
            raise
        return frozenset(restored)

    def finish(self, outcome: outcomes.Outcome) -> None:
        """Publish the end of the run and give back all that the journal still lists.

        Raises:
            ClusterError: The API refused or does not answer; the journal stays for the next run.
        """
        self._end_phase()
        self._status = dataclasses.replace(
            self._status,
            state=outcome.state,
            reason=outcome.reason,
            message=outcome.message,
            finished_at=self._clock.now_iso(),
            retry_at=self._clock.now_iso(after_s=self._try.retry_after_s)
            if outcome.should_retry
            else None,
            phase=model.Phase.DONE if outcome.state is model.State.SUCCESS else self._status.phase,
        )
        labels = self._labels()
        if outcome.state is model.State.SUCCESS:
            labels[cluster.APPLIED_LABEL] = self._status.config
            # It goes with the layout that is now in force.
            self.journal = dataclasses.replace(self.journal, plugin_config=None)
        elif outcome.reason is errors.Reason.DRIFTED:
            labels[cluster.APPLIED_LABEL] = None
        self._settle(labels, keeps_closed=outcome.keeps_closed)
        is_failure = outcome.state is model.State.FAILED
        write = _log.warning if is_failure else _log.info
        seconds = self._clock.monotonic() - self._began
        write(
            "run_finished",
            state=outcome.state.value,
            reason=outcome.reason.value,
            seconds=round(seconds, 3),
        )
        self._telemetry.state_published(outcome.state)
        self._telemetry.run_ended(outcome.state, outcome.reason, seconds)
        if outcome.state is model.State.SUCCESS:
            self._telemetry.layout_applied(self._status.config, self._status.config_hash)
        self._node.emit(
            reason=outcome.reason.value, message=outcome.message, is_warning=is_failure
        )
        if outcome.unreachable:
            self._node.emit(
                reason=errors.Reason.GPU_UNREACHABLE.value,
                message=". ".join(
                    (
                        *(gpu.sentence for gpu in outcome.unreachable),
                        errors.Reason.GPU_UNREACHABLE.remedy,
                    )
                ),
                is_warning=True,
            )

    def abandon(self) -> None:
        """Give everything back and leave the state to the run that follows at once.

        Raises:
            ClusterError: The API refused or does not answer; the journal stays for that run.
        """
        self._end_phase()
        due = self.journal.remaining
        text = None if due.is_empty else due.to_json()
        self._node.update(
            lambda view: _merge(
                giving_back(still_taken(self.journal, view)),
                {},
                {cluster.JOURNAL_ANNOTATION: text},
            )
        )
        self.journal = due
        self._telemetry.run_superseded()

    def _end_phase(self) -> None:
        now = self._clock.monotonic()
        self._telemetry.phase_ended(self._status.phase, now - self._phase_began)
        self._phase_began = now

    def _say(
        self,
        phase: model.Phase,
        message: str,
        *,
        state: model.State,
        reason: errors.Reason | None = None,
    ) -> None:
        _log.info("phase_entered", phase=phase.value, message=message)
        self._status = dataclasses.replace(
            self._status, state=state, phase=phase, message=message, reason=reason
        )

    def _published(self, state: model.State) -> None:
        self._published_gpus = self._status.gpus
        self._telemetry.state_published(state)

    def _settle(self, labels: Mapping[str, str | None], *, keeps_closed: bool) -> None:
        """Restore what was taken, in one patch with how the run ended."""
        had = self.journal
        kept = had.closed if keeps_closed else had.remaining
        taken = dataclasses.replace(had, cordoned=False, hold_taint=False) if keeps_closed else had
        self._node.update(
            lambda view: _merge(
                giving_back(still_taken(taken, view)), labels, self._annotations(kept)
            )
        )
        self.journal = kept
        self._published_gpus = self._status.gpus

    def _labels(self) -> dict[str, str | None]:
        return {cluster.STATE_LABEL: self._status.state.value}

    def _annotations(self, journal: status.Journal | None) -> dict[str, str | None]:
        annotations: dict[str, str | None] = {cluster.STATUS_ANNOTATION: self._status.to_json()}
        if self._status.gpus is not self._published_gpus:
            annotations[cluster.GPUS_ANNOTATION] = gpu_codec.to_json(self._status.gpus)
        if journal is not None:
            text = None if journal.is_empty else journal.to_json()
            annotations[cluster.JOURNAL_ANNOTATION] = text
        return annotations


def giving_back(journal: status.Journal) -> cluster.NodePatch:
    """Return the patch that gives back everything a journal lists, and nothing else."""
    labels: dict[str, str | None] = dict(journal.paused_labels)
    if journal.plugin_config:
        labels[cluster.PLUGIN_CONFIG_LABEL] = journal.plugin_config.before
    if journal.applied and not journal.snapshot:
        labels[cluster.APPLIED_LABEL] = journal.applied
    return dataclasses.replace(opening(journal), labels=labels)


def opening(journal: status.Journal) -> cluster.NodePatch:
    """Return the patch that lets new pods on the node again, as far as a journal closed it.

    ``cordoned`` is what an agent of an older version did; people's cordons are never ours.
    """
    return cluster.NodePatch(
        annotations={cluster.CORDON_ANNOTATION: None} if journal.cordoned else {},
        unschedulable=False if journal.cordoned else None,
        hold_taint=False if journal.hold_taint else None,
    )


def still_taken(journal: status.Journal, view: cluster.NodeView) -> status.Journal:
    """Return the journal without the labels that somebody else has written since."""
    paused = {
        key: value
        for key, value in journal.paused_labels.items()
        if view.labels.get(key) == cluster.PAUSED_VALUE
    }
    switch = journal.plugin_config
    is_ours = switch and view.labels.get(cluster.PLUGIN_CONFIG_LABEL) == switch.now
    return dataclasses.replace(
        journal, paused_labels=paused, plugin_config=switch if is_ours else None
    )


def _switch(view: cluster.NodeView, plugin_config: str | None) -> status.PluginConfig | None:
    """Return the change of the label for a config of the device plugin; None: there is none."""
    before = view.labels.get(cluster.PLUGIN_CONFIG_LABEL)
    if plugin_config in (None, before):
        return None
    return status.PluginConfig(before=before, now=str(plugin_config))


def _merge(
    change: cluster.NodePatch | None,
    labels: Mapping[str, str | None],
    annotations: Mapping[str, str | None],
) -> cluster.NodePatch:
    base = change or cluster.NodePatch()
    return dataclasses.replace(
        base,
        labels={**base.labels, **labels},
        annotations={**base.annotations, **annotations},
    )
