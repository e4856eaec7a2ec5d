"""The journal of a change of the GPUs, on the Node, and the transaction that writes it."""

import dataclasses

from mig_manager.agent import job as jobs
from mig_manager.change import transaction
from mig_manager.core import model, steps, timing
from mig_manager.core.layout import config, layouts
from mig_manager.core.node import cluster


def transaction_of(
    job: jobs.Job, journal: "NodeJournal", idle_wait: timing.Wait | None = None
) -> transaction.Transaction:
    """Return a transaction on the node's GPUs."""
    return transaction.Transaction(
        gpus=job.deps.gpus,
        journal=journal,
        clock=job.deps.clock,
        reset=job.deps.reset.reset if job.deps.reset else None,
        device_files=job.deps.device_files,
        idle_wait=idle_wait or timing.Wait(),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class NodeJournal:
    """Implements ``transaction.Journal`` on the Node."""

    job: jobs.Job
    layout: config.Layout | None = None
    """None: an interrupted change is rolled back."""
    applied: str = ""
    """The layout that was applied before the change; a rollback restores its label."""

    def begin(self, before: tuple[model.GpuSnapshot, ...], plan: steps.Plan) -> None:
        """Write what a rollback restores, and remove the label of the applied layout.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        self.job.taken.enter(
            model.Phase.EXECUTE,
            f"running {len(plan.steps)} steps on the GPUs",
            change=cluster.NodePatch(labels={cluster.APPLIED_LABEL: None}),
            snapshot=before,
            applied=self.applied,
        )

    def rolling_back(self) -> None:
        """Publish the phase."""
        self.job.progress.begin_rollback()

    def undone(
        self, unrestored: tuple[model.GpuSnapshot, ...] = (), *, has_changed: bool = True
    ) -> None:
        """Keep what unreachable GPUs had, and whether device files may be outdated."""
        is_stale = has_changed or self.job.taken.journal.stale_files
        self.job.taken.note(snapshot=unrestored, stale_files=is_stale)

    def done(self, gpus: model.ObservedGpus) -> None:
        """Note the GPUs, and keep what unreachable ones had outside the layout."""
        self.job.progress.note(gpus=gpus)
        self.job.taken.note(snapshot=self.unrestored(gpus), applied="", stale_files=True)

    def persistence_off(self, uuids: tuple[str, ...]) -> None:
        """Publish the GPUs, without waiting for the API."""
        self.job.taken.announce(persistent_gpus=uuids)

    def refreshed(self) -> None:
        """Note that the device files are up to date."""
        self.job.taken.note(stale_files=False)

    def unrestored(self, gpus: model.ObservedGpus) -> tuple[model.GpuSnapshot, ...]:
        """Return what unreachable GPUs had outside the layout."""
        snapshot = self.job.taken.journal.snapshot
        return (
            layouts.unrestored_elsewhere(self.layout, gpus, snapshot)
            if self.layout and snapshot
            else ()
        )
