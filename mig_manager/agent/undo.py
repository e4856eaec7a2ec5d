"""The undo stack of a run, which is the journal.

Every entry is written with the action that it describes, or before it. The next agent finds the
journal on the Node, and resumes or undoes with the same code. There are three kinds of entries:

- undone at every end of a run: taint, paused labels, host services, hooks;
- undone unless the change is complete: GPUs, applied label, plugin config;
- kept until done: verification of new devices, an unreachable GPU's instances, device files.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mig_manager import errors
from mig_manager.agent import outcomes
from mig_manager.agent import progress as progresses
from mig_manager.core import messages, model, steps
from mig_manager.core.node import cluster
from mig_manager.core.records import journals


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A phase's change of the node, with its journal."""

    message: str
    journal: journals.Journal
    """The journal once ``change`` is made."""
    change: cluster.NodePatch = dataclasses.field(default_factory=cluster.NodePatch)
    """Taint and labels to write in the same patch."""


class UndoStack:
    """Implements ``transaction.UndoStack``: the undo stack of one run, on the Node.

    Raises:
        ClusterError: From every method that publishes: the API refused or does not answer; the
            journal still lists changes that may have been made.
    """

    def __init__(self, progress: progresses.Progress, journal: journals.Journal) -> None:
        self._progress = progress
        self._journal = journal

    @property
    def journal(self) -> journals.Journal:
        """The current entries."""
        return self._journal

    @property
    def awaited(self) -> frozenset[str]:
        """Deploy labels of advertisers that must serve the node again."""
        return self._progress.record.awaited

    def note(self, **entries: Any) -> None:
        """Change entries; the next patch writes them."""
        self._journal = dataclasses.replace(self._journal, **entries)

    def announce(self, **entries: Any) -> None:
        """Change entries, and publish them without waiting for the API."""
        self.note(**entries)
        self._progress.announce_annotations(_annotation(self._journal))

    def note_served(self) -> None:
        """Note that no advertiser is expected any more."""
        self._progress.note_served()

    def expect(self, deploy_labels: frozenset[str]) -> None:
        """Note advertisers whose pods are deleted, and which must serve the node again."""
        self._progress.expect(deploy_labels)

    def take(
        self,
        phase: model.Phase,
        decide: Callable[[cluster.NodeView], Step],
        *,
        state: model.State = model.State.PENDING,
    ) -> None:
        """Publish a new phase whose change depends on the Node.

        ``decide`` is called again if another program wrote to the Node meanwhile.
        """
        after = self._journal

        def publish_step(view: cluster.NodeView) -> tuple[str, cluster.NodePatch]:
            nonlocal after
            step = decide(view)
            after = step.journal
            return step.message, _with(step.change, after)

        try:
            self._progress.update(phase, publish_step, state=state)
        except errors.ClusterError as error:
            if error.may_be_done:
                self._journal = after
            raise
        self._journal = after

    def enter(
        self,
        phase: model.Phase,
        message: str,
        *,
        change: cluster.NodePatch | None = None,
        state: model.State = model.State.PENDING,
        **entries: Any,
    ) -> None:
        """Publish a new phase with its new entries."""
        if change is None and not entries:
            self._progress.enter(phase, message, state=state)
            return
        journal = dataclasses.replace(self._journal, **entries)
        step = Step(message=message, journal=journal, change=change or cluster.NodePatch())
        self.take(phase, lambda _view: step, state=state)

    def begin(self, before: tuple[model.GpuSnapshot, ...], plan: steps.Plan) -> None:
        """Record the snapshot for a rollback, and remove the label of the applied layout."""
        self.enter(
            model.Phase.EXECUTE,
            f"running {len(plan.steps)} steps on the GPUs",
            change=cluster.NodePatch(labels={cluster.APPLIED_LABEL: None}),
            snapshot=before,
        )

    def begin_rollback(self) -> None:
        """Publish the rollback, once, without waiting for the API."""
        self._progress.begin_rollback()

    def resume(
        self, keys: Collection[str], *, what: str = "", plugin_config: str | None = None
    ) -> frozenset[str]:
        """Restore some paused labels before the run ends, and reopen the node.

        Args:
            keys: The labels; a label that another program wrote since the pause is kept.
            what: The message; if empty, it names the labels.
            plugin_config: The device plugin's config to set in the same patch; None: keep it.

        Returns:
            The labels that have their original value again.
        """
        before = self._journal
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
            # If this patch was lost, the end of the run restores the labels.
            changed = self._journal.plugin_config or before.plugin_config
            self._journal = dataclasses.replace(before, plugin_config=changed)
            raise
        return frozenset(restored)

    def failure(
        self, reason: errors.Reason, *parts: str, is_final: bool = False
    ) -> outcomes.Outcome:
        """Return the failure of this run, with unreachable GPUs and what remains to restore."""
        message = messages.join(*parts)
        is_about_gpu = reason is errors.Reason.GPU_UNREACHABLE
        lost = () if is_about_gpu else self._progress.gpus.unreachable
        is_restored = self._journal.remaining.is_restored
        return outcomes.failure(
            reason,
            messages.join(message, *(gpu.sentence for gpu in lost if gpu.message not in message)),
            is_unfinished=not is_restored,
            # Evicted pods must not start here again before the other pods are gone.
            keeps_closed=self._journal.draining and reason.is_transient,
            is_final=is_final and is_restored,
        )

    def finish(
        self,
        outcome: outcomes.Outcome,
        annotations: Mapping[str, str | None] | None = None,
    ) -> None:
        """Publish the outcome, and undo the remaining entries in the same patch.

        Args:
            outcome: The outcome.
            annotations: More annotations for this patch.
        """
        if outcome.state is model.State.SUCCESS:
            # The entry belongs to the layout that is now active.
            self.note(plugin_config=None)
        journal = self._journal
        kept = journal.remaining
        if outcome.reason is errors.Reason.INTERRUPTED:
            # The next agent must know that a plugin without a new pod still exists.
            kept = journal.unverified
        if outcome.keeps_closed:
            kept = journal.closed
            journal = dataclasses.replace(journal, hold_taint=False)

        self._progress.finish(
            outcome,
            lambda view: _with(journals.restore_patch(journal, view), kept, annotations),
        )
        self._journal = kept

    def abandon(self) -> None:
        """Undo all entries that a write to the Node can undo, and leave the state unchanged."""
        remaining = self._journal.remaining
        self._progress.abandon(
            lambda view: _with(journals.restore_patch(self._journal, view), remaining)
        )
        self._journal = remaining


def _with(
    change: cluster.NodePatch,
    journal: journals.Journal,
    more: Mapping[str, str | None] | None = None,
) -> cluster.NodePatch:
    annotations = {**change.annotations, **(more or {}), **_annotation(journal)}
    return dataclasses.replace(change, annotations=annotations)


def _annotation(journal: journals.Journal) -> dict[str, str | None]:
    return {cluster.JOURNAL_ANNOTATION: None if journal.is_empty else journal.to_json()}
