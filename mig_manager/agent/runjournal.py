"""The journal of a change of the GPUs by the agent, kept on its node with the run's record."""

import dataclasses

from mig_manager.agent import record
from mig_manager.core import model
from mig_manager.core.layout import config, selection
from mig_manager.core.node import cluster


class RunJournal:
    """Implements ``change.Journal``.

    Args:
        written: The record of the run.
    """

    def __init__(self, written: record.Record) -> None:
        self._record = written
        self.applied = ""
        """The layout that was verified before the change: its label returns with a rollback."""
        self.has_rolled_back = False
        """Whether a rollback was tried."""
        self.layout: config.Layout | None = None
        """The layout of the run; None: it is not resolved."""

    def begin(self, before: tuple[model.GpuSnapshot, ...], plan: model.Plan) -> None:
        """Write what a rollback restores; from now on the node names no layout as applied.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        self._record.enter(
            model.Phase.EXECUTE,
            f"running {len(plan.steps)} steps on the GPUs",
            take=dataclasses.replace(self._record.journal, snapshot=before, applied=self.applied),
            change=cluster.NodePatch(labels={cluster.APPLIED_LABEL: None}),
        )

    def rolling_back(self) -> None:
        """Publish the phase, once; an API that does not answer does not hold up the rollback."""
        if self.has_rolled_back:
            return
        self.has_rolled_back = True
        self._record.announce(model.Phase.ROLL_BACK, "restoring the instances from before")

    def undone(self, due: tuple[model.GpuSnapshot, ...] = ()) -> None:
        """Remember that there is nothing to roll back but what is due on unreachable GPUs."""
        self._record.undone(due)

    def done(self, gpus: model.ObservedGpus) -> None:
        """Remember that there is nothing to roll back any more, and what there is now."""
        self._record.note(gpus=gpus)
        self._record.proven(self.due_elsewhere(gpus))

    def due_elsewhere(self, gpus: model.ObservedGpus) -> tuple[model.GpuSnapshot, ...]:
        """Return what is due on unreachable GPUs that the layout is not about."""
        due = self._record.journal.snapshot
        return selection.due_elsewhere(self.layout, gpus, due) if self.layout and due else ()
