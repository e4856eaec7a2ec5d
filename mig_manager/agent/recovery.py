"""Take over what an interrupted run left, and roll its change back without evicting a pod.

Right after a failure no pod can use what the change created, because the device plugin is paused.
Later, after a crash or a failed rollback, one may. So the pods are checked first, and where one
would lose its device the GPUs stay as they are.
"""

import contextlib
import dataclasses
from collections.abc import Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import record
from mig_manager.agent.pods import gpu_clients, survey
from mig_manager.change import transaction
from mig_manager.core import model, ports, steps, timing
from mig_manager.core.layout import layouts
from mig_manager.core.node import clients, cluster
from mig_manager.core.planner import planner
from mig_manager.core.records import status

_MAX_KEPT_CHARACTERS = 16 * 1024
"""Of an invalid journal: enough to inspect, and no load on the Node object."""

_log = structlog.get_logger()


def find_journal(node: ports.Node, view: cluster.NodeView) -> status.Journal | None:
    """Return what an interrupted run left on the node, if anything.

    An invalid journal is set aside. Without a valid one, the result is what its value marks:
    paused labels, the taint, a cordon with our annotation. NVIDIA's manager, which this agent may
    have replaced, keeps no journal. Any other cordon may belong to a person.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    text = view.annotations.get(cluster.JOURNAL_ANNOTATION)
    if text is not None:
        try:
            return status.without_foreign_labels(status.Journal.from_json(text), view)
        except ValueError as error:
            _log.warning("journal_unreadable", error=str(error))
            node.patch(
                cluster.NodePatch(
                    annotations={
                        cluster.JOURNAL_ANNOTATION: None,
                        cluster.UNREADABLE_JOURNAL_ANNOTATION: text[:_MAX_KEPT_CHARACTERS],
                    }
                )
            )
            node.emit(
                reason="JournalUnreadable",
                message=f"the journal of an interrupted run is invalid ({error}): labels and "
                "taint that are marked as ours are restored; the text is kept in the annotation "
                f"{cluster.UNREADABLE_JOURNAL_ANNOTATION}",
                is_warning=True,
            )
    marked = status.Journal(
        config="",
        hold_taint=cluster.HOLD_TAINT in view.taint_keys,
        paused_labels={
            key: "true"
            for key, value in view.labels.items()
            if key.startswith(cluster.DEPLOY_LABEL_PREFIX) and value == cluster.PAUSED_VALUE
        },
    )
    return None if marked.is_empty else marked


def is_possible(
    deps: ports.Dependencies,
    now: Sequence[model.Gpu],
    snapshot: Sequence[model.GpuSnapshot],
) -> bool:
    """Check whether a snapshot can be restored without taking a device from a pod.

    Raises:
        ClusterError: The API refused or does not answer.
        HardwareError: The driver does not list the processes of pods whose devices no GPU has.
    """
    try:
        return not _affected(deps, planner.restore(now, snapshot), now)
    except errors.LayoutError as error:
        _log.warning("rollback_impossible", error=error.message)
        return False


def rollback_target(
    deps: ports.Dependencies,
    interrupted: status.Journal,
    gpus: model.ObservedGpus,
    applied: str,
) -> tuple[tuple[model.GpuSnapshot, ...], str]:
    """Return what a rollback after an interrupted change restores: GPUs, and the label."""
    if not interrupted.snapshot:
        # An older run may have rolled back without publishing it.
        return (), applied or interrupted.applied
    if is_possible(deps, gpus, interrupted.snapshot):
        return interrupted.snapshot, interrupted.applied
    return gpus.missing(interrupted.snapshot), ""


def restore_persistence(
    deps: ports.Dependencies, written: record.Record, gpus: model.ObservedGpus
) -> None:
    """Switch on the persistence mode that a killed agent switched off for a reset."""
    uuids = written.journal.persistent_gpus
    if uuids and deps.reset:
        deps.reset.restore_persistence([gpu for gpu in gpus if gpu.uuid in uuids])
    written.note_journal(persistent_gpus=())


def run(
    deps: ports.Dependencies,
    change: transaction.Transaction,
    paused_by: gpu_clients.GpuClients,
    written: record.Record,
) -> str:
    """Restore the snapshot in the journal, if there is one and no pod is affected.

    Returns:
        How it went, as a part of a sentence; empty when there was nothing to do.
    """
    snapshot = written.journal.snapshot
    if not snapshot:
        return ""
    try:
        now = deps.gpus.observe()
        written.note(gpus=now)
        restore_persistence(deps, written, now)
        plan = planner.restore(now, snapshot)
        if plan.is_empty:
            result = transaction.without_steps(now, snapshot)
            return change.conclude(result).message if result.is_complete else result.message
        _require_unused(deps, plan, now)
        change.journal.rolling_back()
        paused = paused_by.pause(plan, written, _Uninterrupted(deps.clock, deps.telemetry))
        try:
            # From now on kubelet cannot assign a device.
            _require_unused(deps, plan, now)
            result = change.roll_back(snapshot, requires_idle=True)
            if result.is_complete:
                written.note(gpus=deps.gpus.observe())
        finally:
            # An API that fails now must not hide the reason; the end of the run resumes the rest.
            with contextlib.suppress(errors.ClusterError):
                paused_by.resume_plugin(paused, written)
    except errors.MigManagerError as error:
        _log.warning("older_rollback_failed", reason=error.reason.value, error=error.message)
        return f"the interrupted change could not be rolled back: {error.message}"
    return result.message


def _require_unused(deps: ports.Dependencies, plan: steps.Plan, now: Sequence[model.Gpu]) -> None:
    pods = _affected(deps, plan, now)
    if pods:
        raise errors.DrainError(f"pods use devices that would be removed: {pods}")


def _affected(deps: ports.Dependencies, plan: steps.Plan, now: Sequence[model.Gpu]) -> str:
    """Name the pods that use, or may use, what a plan destroys."""
    usage = survey.usage_now(deps.workloads, deps.allocations, now, deps.processes)
    return usage.named(usage.users(clients.affected_ids(plan, now)))


@dataclasses.dataclass(frozen=True, slots=True)
class RunJournal:
    """Implements ``transaction.Journal`` on the Node, through the record of a run."""

    written: record.Record
    layout: layouts.Layout | None = None
    """None: an interrupted change is rolled back."""
    applied: str = ""
    """The layout that was applied before the change; a rollback restores its label."""

    def begin(self, before: tuple[model.GpuSnapshot, ...], plan: steps.Plan) -> None:
        """Write what a rollback restores, and remove the label of the applied layout.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        self.written.enter(
            model.Phase.EXECUTE,
            f"running {len(plan.steps)} steps on the GPUs",
            journal=dataclasses.replace(
                self.written.journal, snapshot=before, applied=self.applied
            ),
            change=cluster.NodePatch(labels={cluster.APPLIED_LABEL: None}),
        )

    def rolling_back(self) -> None:
        """Publish the phase."""
        self.written.begin_rollback()

    def undone(
        self, unrestored: tuple[model.GpuSnapshot, ...] = (), *, has_changed: bool = True
    ) -> None:
        """Keep what unreachable GPUs had, and whether device files may be outdated."""
        is_stale = has_changed or self.written.journal.stale_files
        self.written.note_journal(snapshot=unrestored, stale_files=is_stale)

    def done(self, gpus: model.ObservedGpus) -> None:
        """Note the GPUs, and keep what unreachable ones had outside the layout."""
        self.written.note(gpus=gpus)
        self.written.note_journal(snapshot=self.unrestored(gpus), applied="", stale_files=True)

    def persistence_off(self, uuids: tuple[str, ...]) -> None:
        """Publish the GPUs, without waiting for the API."""
        self.written.announce_journal(persistent_gpus=uuids)

    def refreshed(self) -> None:
        """Note that the device files are up to date."""
        self.written.note_journal(stale_files=False)

    def unrestored(self, gpus: model.ObservedGpus) -> tuple[model.GpuSnapshot, ...]:
        """Return what unreachable GPUs had outside the layout."""
        snapshot = self.written.journal.snapshot
        return (
            layouts.unrestored_elsewhere(self.layout, gpus, snapshot)
            if self.layout and snapshot
            else ()
        )


class _Uninterrupted:
    """Implements ``ports.Cancellation`` for a rollback, which no request supersedes."""

    def __init__(self, clock: timing.Clock, telemetry: ports.Telemetry) -> None:
        self._clock = clock
        self._telemetry = telemetry

    def check(self) -> None:
        self._telemetry.still_working()

    def wait(self, seconds: float) -> None:
        self._telemetry.still_working()
        self._clock.wait(seconds)

    def pause(self, seconds: float) -> None:
        self.wait(seconds)
