"""Record a run on the Node: its journal, which is the undo stack, and its status.

Every entry of the journal is written with the action that it describes, or before it. The next
agent finds the journal on the Node, and resumes or undoes with the same code. The end of a run

- undoes the entries of the Node, in its patch; the plugin's config stays after a success, and the
  taint if a drain is retried;
- leaves in the journal what the run did not undo on the host and the GPUs.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Unpack

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import node_context, node_patches, outcomes
from mig_manager.core import messages, model, steps
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import journals, node_entries, readiness, requests, run_status

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PhaseStart:
    """A phase's message and journal; taint and labels of the node follow from the entries."""

    message: str
    journal: journals.Journal


class RunRecorder:
    """Writes the journal, the status and the record of the request of one run to the Node.

    Implements ``change_recorder.ChangeRecorder``. All three change with the Node's
    taint and labels, so the same patch writes them.

    - ``set_journal``, ``set_status``, ``set_record`` change one of them; the next patch writes it.
    - ``publish`` writes entries now, and ``announce`` without waiting for the API.
    - ``enter``, ``enter_for_view``, ``begin_execution``, ``begin_rollback`` publish a new phase.
    - ``finish`` and ``abandon`` end the run, and undo its entries.

    Raises:
        ClusterError: From every method that publishes: the API refused or does not answer; the
            journal still lists changes that may have been made.
    """

    def __init__(
        self,
        context: node_context.NodeContext,
        first: run_status.RunStatus,
        *,
        journal: journals.Journal,
        take_over_journal: Callable[[], journals.Journal],
        record: requests.RequestRecord,
        retry_after_s: float,
    ) -> None:
        self._deps = deps = context.deps
        self._publisher = context.publisher
        self.status = first
        """The status, which the next patch publishes."""
        self._began = self._phase_began = deps.clock.monotonic()
        self._startup_taints = context.settings.policy.startup_taints
        self._retry_after_s = retry_after_s
        self._take_over_journal = take_over_journal
        """Resumes GPU clients that no journal lists; returns the entries of earlier runs as the
        Node has them now."""
        self._owns_journal = False
        """Whether this run has had the node's lock and journal, whose entries it undoes."""
        self.has_had_lock = False
        """Whether this run has had the node's lock; if not, another agent may use its slot."""
        self.journal = journal
        self.record = record
        """The request and its results, for later runs."""
        self.has_begun_rollback = False
        """Whether a rollback was begun in this run."""

    def take_over(self) -> None:
        """Take over the entries of earlier runs; call once the node's lock is held.

        Before that, their run may be under way in another process: this run then neither undoes
        nor writes them.
        """
        self.has_had_lock = True
        # Even without entries: another agent may have begun a change and been killed since.
        self.journal = self._take_over_journal()
        self._owns_journal = True

    def set_journal(self, **fields: Unpack[journals.Fields]) -> None:
        """Change entries; the next patch writes them."""
        self.journal = dataclasses.replace(self.journal, **fields)

    def announce(self, **fields: Unpack[journals.Fields]) -> None:
        """Change entries, and publish them without waiting for the API."""
        self.set_journal(**fields)
        self._publisher.announce(self._journal_patch(self.journal))
        self._save_on_host()

    def publish(self, **fields: Unpack[journals.Fields]) -> None:
        """Change entries, and publish them."""
        after = dataclasses.replace(self.journal, **fields)
        self._publisher.patch(self._journal_patch(after))
        self.journal = after
        self._save_on_host()

    def set_status(self, **fields: Unpack[run_status.Fields]) -> None:
        """Change fields of the status; the next patch publishes them."""
        self.status = dataclasses.replace(self.status, **fields)

    def set_record(self, record: requests.RequestRecord) -> None:
        """Replace the record of the request; the next patch publishes it."""
        self.record = record

    def enter_for_view(
        self, phase: run_status.Phase, decide: Callable[[node_object.NodeView], PhaseStart]
    ) -> node_object.NodeView:
        """Publish a new phase as ``enter``, with entries for the Node's version that is patched.

        ``decide`` returns them, and is called again if another program wrote to the Node
        meanwhile. Returns the version that was patched.
        """
        before = after = self.journal
        message: str | None = None

        def patch(view: node_object.NodeView) -> node_object.NodePatch:
            nonlocal after, message
            start = decide(view)
            after, message = start.journal, start.message
            status = self.status.in_phase(phase, message)
            record = self.record.with_status(status, self._deps.boot_id)
            shown = node_patches.of_run(status, record, self._deps.boot_id)
            return self._patch_to(after, view).merge(shown)

        self._count_phase()
        try:
            view = self._publisher.update(patch)
        except errors.ClusterError as error:
            if error.may_be_done:
                # If the patch was lost, the end of the run restores what it was to restore.
                node = dataclasses.replace(
                    after.node,
                    has_reconfiguring_taint=before.node.has_reconfiguring_taint
                    or after.node.has_reconfiguring_taint,
                    paused_labels={**after.node.paused_labels, **before.node.paused_labels},
                )
                self.journal = dataclasses.replace(after, node=node)
            raise
        finally:
            # Also after an error: it then counts as one of the new phase.
            if message is not None:
                self._set_phase(phase, message)
        self.journal = after
        self._copy_to_host_and_condition()
        return view

    def enter(
        self, phase: run_status.Phase, message: str, **fields: Unpack[journals.Fields]
    ) -> None:
        """Publish a new phase, with new entries if there are any."""
        if fields:
            after = dataclasses.replace(self.journal, **fields)
            start = PhaseStart(message=message, journal=after)
            self.enter_for_view(phase, lambda _view: start)
            return
        self._count_phase()
        self._set_phase(phase, message)
        self._publisher.patch(self._run_patch().merge(self._journal_patch(self.journal)))
        self._copy_to_host_and_condition()

    def begin_execution(self, before: model.Snapshots, plan: steps.Plan) -> None:
        """Record the snapshot for a rollback, which removes the label of the applied layout."""
        resets = sum(gpu.resets_gpu for gpu in plan.gpus)
        with_resets = f", with {messages.count(resets, 'reset')}" if resets else ""
        message = f"running {len(plan.steps)} steps on the GPUs{with_resets}"
        gpus = self.journal.gpus.with_snapshots(before)
        self.enter(run_status.Phase.EXECUTE, message, is_draining=False, gpus=gpus)

    def begin_rollback(self) -> None:
        """Publish the rollback once, without waiting for the API: the rollback is more urgent."""
        if self.has_begun_rollback:
            return
        self.has_begun_rollback = True
        self._count_phase()
        self._set_phase(run_status.Phase.ROLL_BACK, "restoring the previous instances")
        self._publisher.announce(node_patches.of_status(self.status))
        self._deps.telemetry.state_published(run_status.State.PENDING)

    def finish(
        self,
        outcome: outcomes.Outcome,
        annotations: Mapping[str, str | None] | None = None,
    ) -> None:
        """Publish the outcome, with ``annotations``, and undo the remaining entries."""
        is_success = outcome.state is run_status.State.SUCCESS
        if is_success:
            # The entry belongs to the layout that is now active.
            self.set_journal(node=dataclasses.replace(self.journal.node, plugin_config=None))
        kept = self._journal_to_keep(self._end_of(outcome.reason))
        self._count_phase()
        self._replace_status_and_record(
            outcome.status_after(self.status, self._deps.clock, self._retry_after_s)
        )
        labels: dict[str, str | None] = {}
        if is_success:
            labels = {well_known.APPLIED_LABEL: self.status.layout}
            self.record = self.record.with_success(self.status, self._deps.boot_id)
        elif outcome.reason is reasons.Reason.DRIFTED:
            labels = {well_known.APPLIED_LABEL: None}
        more = node_object.NodePatch(
            labels=labels,
            annotations=annotations or {},
            # Start-up taints kept workloads away until the first layout.
            removed_taints=self._startup_taints if is_success else frozenset(),
        )
        self._undo_all_except(kept, more.merge(self._run_patch()))
        self._copy_to_host_and_condition()
        seconds = self._deps.clock.monotonic() - self._began
        outcomes.report(self._deps, self.status, outcome, seconds=seconds)

    def abandon(self, *, is_retried: bool = False) -> None:
        """Undo all entries that a write to the Node can undo, and keep the published status.

        ``is_retried`` says that a run for the same layout follows, which continues a drain.
        """
        goes_on = is_retried and self.journal.is_draining
        end = node_entries.RunEnd.DRAIN_RETRIED if goes_on else node_entries.RunEnd.RESTORED
        kept = self._journal_to_keep(end)
        self._count_phase()
        boot_id = self._deps.boot_id
        request = node_patches.of_request(self.record, self.status.gpus, boot_id)
        self._undo_all_except(kept, request)
        self._save_on_host()

    def _undo_all_except(self, kept: journals.Journal, shown: node_object.NodePatch) -> None:
        """Undo all entries except the kept ones, in one patch with what is ``shown``."""
        self._publisher.update(lambda view: self._patch_to(kept, view).merge(shown))
        self.journal = kept

    def _count_phase(self) -> None:
        """Count the duration of the current phase."""
        now = self._deps.clock.monotonic()
        self._deps.telemetry.phase_ended(self.status.phase, now - self._phase_began)
        self._phase_began = now

    def _set_phase(self, phase: run_status.Phase, message: str) -> None:
        _log.info("phase_entered", phase=phase.value, message=message)
        self._replace_status_and_record(self.status.in_phase(phase, message))

    def _replace_status_and_record(self, status: run_status.RunStatus) -> None:
        self.status = status
        self.record = self.record.with_status(status, self._deps.boot_id)

    def _end_of(self, reason: reasons.Reason) -> node_entries.RunEnd:
        """Return how a run ends with an outcome of this reason."""
        if self.journal.is_draining and reason.is_transient:
            return node_entries.RunEnd.DRAIN_RETRIED
        is_interrupted = reason is reasons.Reason.INTERRUPTED
        return node_entries.RunEnd.INTERRUPTED if is_interrupted else node_entries.RunEnd.RESTORED

    def _journal_to_keep(self, end: node_entries.RunEnd) -> journals.Journal:
        """Return the entries that stay at an end of the run: all if they are another process'."""
        return self.journal.remaining(end) if self._owns_journal else self.journal

    def _patch_to(
        self, after: journals.Journal, view: node_object.NodeView
    ) -> node_object.NodePatch:
        """Return the new entries, and what changes on the node with them."""
        if not self._owns_journal:
            return node_object.NodePatch()
        changed = journals.patch_between(self.journal, after, view)
        return changed.merge(node_patches.of_journal(after))

    def _journal_patch(self, journal: journals.Journal) -> node_object.NodePatch:
        """Return the patch with the entries: nothing if they are another process'."""
        if not self._owns_journal:
            return node_object.NodePatch()
        return node_patches.of_journal(journal)

    def _run_patch(self) -> node_object.NodePatch:
        return node_patches.of_run(self.status, self.record, self._deps.boot_id)

    def _copy_to_host_and_condition(self) -> None:
        """Save the record on the host; update the Ready condition and metrics."""
        self._save_on_host()
        self._deps.node.set_condition(readiness.condition(self.status))
        self._deps.telemetry.state_published(self.status.state)

    def _save_on_host(self) -> None:
        if self._owns_journal:
            self._publisher.save_on_host(self.record, self.journal)
