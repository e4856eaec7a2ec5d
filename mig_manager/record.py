"""What one run writes to its node: state, phase, reason, journal, and what goes with them.

Labels, annotations, cordon and taint travel in one patch, so that the journal and the thing it
speaks of can never disagree: the API server takes both or neither.
"""

import dataclasses
from collections.abc import Mapping

import structlog

from mig_manager import clocks, errors, outcomes, ports
from mig_manager.core import cluster, inventory, model, status

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One of the tries at a wish."""

    number: int = 1
    retry_after_s: float = 0.0
    """When the next one is made, should this one fail for a reason that can pass."""


class Record:
    """The record of one run; the only writer of state, status and journal."""

    def __init__(
        self,
        node: ports.Node,
        clock: clocks.Clock,
        *,
        journal: status.Journal,
        attempt: Try | None = None,
        telemetry: ports.Telemetry | None = None,
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
        self._telemetry = telemetry or ports.Telemetry()
        self._began = self._phase_began = clock.monotonic()
        self._try = attempt or Try()
        self._told_gpus: model.ObservedGpus = model.NO_GPUS
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

    def proven(self) -> None:
        """Remember that the change is in force on the GPUs: no way leads back from here."""
        self.journal = dataclasses.replace(self.journal, snapshot=(), applied="")

    def undone(self) -> None:
        """Remember that the GPUs have again what they had before the change."""
        self.journal = dataclasses.replace(self.journal, snapshot=())

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
            change: Cordon, taint and labels to write in the same patch.
            state: ``pending``, or ``rebooting``.
            reason: What the run waits for, where that has a name.

        Raises:
            ClusterError: The API refused or does not answer; the journal lists what may have been
                taken nevertheless.
        """
        _log.info("phase_entered", phase=phase.value, message=message)
        self._end_phase()
        self._status = dataclasses.replace(
            self._status, state=state, phase=phase, message=message, reason=reason
        )
        journal = self.journal if take is None else take
        try:
            view = self._node.patch(
                _merge(
                    change, self._labels(), self._annotations(None if take is None else journal)
                )
            )
        except errors.ClusterError as error:
            # Whatever may have been taken must be given back.
            if error.may_be_done:
                self.journal = journal
            raise
        self.journal = journal
        self._telemetry.state_published(state)
        return view

    def give_back(
        self,
        keys: Mapping[str, str],
        message: str,
        *,
        is_uncordoned: bool = False,
        plugin_config: status.PluginConfig | None = None,
    ) -> cluster.NodeView:
        """Give some paused labels (and the hold taint) back before the run ends.

        Args:
            keys: Labels with the values that they get back.
            message: What happens, for people.
            is_uncordoned: Whether to give the cordon back as well.
            plugin_config: Switch the device plugin's config in the same patch.

        Raises:
            ClusterError: The API refused or does not answer; the journal still lists it all.
        """
        had = self.journal
        uncordons = is_uncordoned and had.cordoned
        labels: dict[str, str | None] = dict(keys)
        if plugin_config:
            labels[cluster.PLUGIN_CONFIG_LABEL] = plugin_config.now
        try:
            return self.enter(
                model.Phase.RESUME,
                message,
                take=dataclasses.replace(
                    had,
                    paused_labels={k: v for k, v in had.paused_labels.items() if k not in keys},
                    hold_taint=False,
                    cordoned=had.cordoned and not uncordons,
                    plugin_config=plugin_config or had.plugin_config,
                ),
                change=cluster.NodePatch(
                    labels=labels,
                    hold_taint=False if had.hold_taint else None,
                    unschedulable=False if uncordons else None,
                    annotations={cluster.CORDON_ANNOTATION: None} if uncordons else {},
                ),
            )
        except errors.ClusterError:
            # What may not have been given back is given back again at the end.
            self.journal = dataclasses.replace(
                had, plugin_config=plugin_config or had.plugin_config
            )
            raise

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
        kept = self.journal.closed if outcome.keeps_closed else self.journal.due
        back = self._giving_back(keeps_closed=outcome.keeps_closed)
        self._node.patch(_merge(back, labels, self._annotations(kept)))
        self.journal = kept
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

    def abandon(self) -> None:
        """Give everything back and leave the state to the run that follows at once.

        Raises:
            ClusterError: The API refused or does not answer; the journal stays for that run.
        """
        self._end_phase()
        due = self.journal.due
        text = None if due.is_empty else due.to_json()
        self._node.patch(_merge(self._giving_back(), {}, {cluster.JOURNAL_ANNOTATION: text}))
        self.journal = due
        self._telemetry.run_superseded()

    def _end_phase(self) -> None:
        now = self._clock.monotonic()
        self._telemetry.phase_ended(self._status.phase, now - self._phase_began)
        self._phase_began = now

    def _giving_back(self, *, keeps_closed: bool = False) -> cluster.NodePatch:
        journal = self.journal
        if keeps_closed:
            journal = dataclasses.replace(journal, cordoned=False, hold_taint=False)
        if not (journal.paused_labels or journal.plugin_config):
            return giving_back(journal)
        return giving_back(still_taken(journal, self._node.read()))

    def _labels(self) -> dict[str, str | None]:
        return {cluster.STATE_LABEL: self._status.state.value}

    def _annotations(self, journal: status.Journal | None) -> dict[str, str | None]:
        annotations: dict[str, str | None] = {cluster.STATUS_ANNOTATION: self._status.to_json()}
        if self._status.gpus is not self._told_gpus:
            self._told_gpus = self._status.gpus
            annotations[cluster.GPUS_ANNOTATION] = inventory.to_json(self._told_gpus)
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
    return cluster.NodePatch(
        labels=labels,
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
