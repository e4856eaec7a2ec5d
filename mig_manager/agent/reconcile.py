"""Bring one node from a request to an outcome: recover, run, rest, and check for drift.

The next run resumes what a killed run took if the same layout is requested. Otherwise the GPUs are
rolled back first, and everything is restored.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import structlog

from mig_manager import errors
from mig_manager.agent import (
    capacity,
    drift,
    host,
    outcomes,
    publish,
    recovery,
    resting,
    run,
    served_layouts,
    settings,
)
from mig_manager.agent import job as jobs
from mig_manager.agent.pods import advertisers, gpu_clients
from mig_manager.core import messages, model, ports
from mig_manager.core.layout import custom as customs
from mig_manager.core.node import cluster
from mig_manager.core.records import journals, requests

_UNDER_WAY = (model.State.PENDING.value, model.State.REBOOTING.value)

_log = structlog.get_logger()


class Reconciler:
    """Applies requests to one node."""

    def __init__(self, deps: ports.Dependencies, limits: settings.Limits) -> None:
        self._deps = deps
        self._shared = jobs.Shared(
            deps=deps,
            limits=limits,
            clients=gpu_clients.GpuClients(deps, limits),
            publisher=publish.Publisher(deps.node, deps.request_file),
        )
        self._layouts = served_layouts.LayoutList(deps, limits)
        self._record: requests.Request | None = None
        """The request that is served, and what it has reached; None: not read yet."""
        self._journal = journals.NONE
        """What earlier runs took and have not restored; the next run resumes with it."""
        self._watched_node: cluster.NodeView | None = None
        """The node as the watch last showed it."""
        self._drift = drift.Memory()
        self.capacity = capacity.CapacityReport(deps, self._shared.publisher)

    def recover(self, name: str | None, custom: customs.Custom | None = None) -> None:
        """Take over from an interrupted run; call before the first run and after a lost one.

        If that run was for the requested layout ``name``, with the same content if that is
        ``custom``, the next run resumes and must follow at once; otherwise its change is undone
        here.

        Raises:
            ClusterError: The API refused or does not answer.
            LockedError: Another manager is at work; nothing was undone.
        """
        view = self._shared.publisher.read()
        self._journal = journals.NONE
        journal = recovery.find_journal(self._deps.node, self._shared.publisher, view)
        if self._record is None:
            self._record = recovery.find_record(self._deps.request_file, view, journal)
        if recovery.has_ended(journal, view):
            self._journal = journal
            return
        awaited = {kind.deploy_label for kind in advertisers.kinds_in(journal)}
        self._record = dataclasses.replace(self._record, awaited=self._record.awaited | awaited)
        is_resumed = journal.request == (name, custom.annotation_hash if custom else "")
        _log.warning(
            "interrupted_run_found",
            config=journal.config,
            has_rebooted=bool(journal.boot_id) and journal.boot_id != self._deps.boot_id,
            is_resumed=is_resumed,
        )
        if not is_resumed:
            self._undo(journal)
            return
        self._journal = journal
        self._deps.node.emit(
            reason="Recovered",
            message=f"resuming {name} after an interruption",
            is_warning=False,
        )

    def run(  # noqa: PLR0913 - each is named where it is called
        self,
        name: str,
        cancel: ports.Cancellation,
        *,
        custom: customs.Custom | None = None,
        attempt: int = 1,
        retry_after_s: float = 0.0,
        is_new: bool = False,
        may_evict: bool = True,
    ) -> outcomes.Outcome:
        """Apply the layout ``name``, or what ``custom`` stands for, and publish the outcome.

        ``cancel`` ends the run early, until GPUs are touched. ``retry_after_s`` is the pause
        before the next attempt, if this one fails. No pod is evicted for a layout that was
        verified and not requested since, as it is unless ``is_new``.

        Raises:
            ClusterError: The outcome could not be published; the journal is still there.
            Rebooting: The machine goes down; what is taken stays taken.
            Superseded: Another layout is requested, or the agent stops; all is restored.
        """
        asked = customs.asked(name, custom)
        self._record = (self._record or requests.NONE).begun(asked, is_new=is_new)
        if custom:
            custom = dataclasses.replace(custom, is_on_demand=not self._record.may_evict)
            if custom.is_on_demand and self._record.origin is not requests.Origin.PARTITIONER:
                # Its document does not show that it evicts no pod. Published before the owner can
                # remove the label that decides, while this run still waits.
                self._shared.publisher.annotate(publish.of_record(self._record))
                self._shared.publisher.keep(self._record)
        request = jobs.Request(
            config=name,
            custom=custom,
            may_evict=may_evict,
            attempt=attempt,
            last_gpus=self.capacity.gpus,
        )
        journal, self._journal = self._journal, journals.NONE
        with self._attempt(request, journal, cancel, retry_after_s=retry_after_s) as job:
            try:
                outcome = run.run(job)
            except errors.Superseded as end:
                _log.info("run_superseded", why=end.why)
                if end.is_replaced:
                    job.taken.abandon()
                elif not isinstance(end, errors.Rebooting):
                    job.taken.finish(job.taken.failed(errors.Reason.INTERRUPTED, end.why))
                self._keep_remaining(job.taken.journal)
                raise
            self._deps.telemetry.drift_found(is_drifted=outcome.reason is errors.Reason.DRIFTED)
            fitting = self._layouts.fitting(job.progress.gpus)
            annotations = self._layouts.annotations(fitting)
            if not outcome.should_retry:
                annotations |= self.capacity.annotations(job.progress.gpus)
            job.taken.finish(outcome, annotations)
            self._keep_remaining(job.taken.journal)
            if outcome.state is model.State.SUCCESS:
                host.save_layout(job, outcome.gpus)
        # Last, because it may take several requests, and other nodes wait for the slot.
        self._layouts.write(fitting)
        return outcome

    def check_drift(
        self, name: str, outcome: outcomes.Outcome, custom: customs.Custom | None = None
    ) -> drift.Action:
        """Compare the GPUs at rest with the layout, and publish a drift.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        request = jobs.Request(config=name, custom=custom)
        with self._attempt(request, self._journal) as job:
            try:
                with self._shared.locked(f"checking layout {name}"):
                    observation = drift.observe(job)
            except errors.LockedError:
                # The next check finds what the other manager does to the GPUs.
                return drift.Action.REST
            action, self._drift = drift.act(
                job, self._drift, outcome, observation, self._watched_node
            )
            return action

    def rest(self) -> bool:
        """Restore what is still taken on a node without a request; call without a run.

        A killed run publishes no outcome, and a superseded one leaves the state to the next run,
        which never comes once the label is removed. What could not be rolled back or restored then
        is tried again here.

        Returns:
            Whether to call again, because something failed that may succeed later.

        Raises:
            ClusterError: The API refused or does not answer.
            LockedError: Another manager is at work.
        """
        # Any layout that is requested next is a new request.
        awaited = self._record.awaited if self._record else frozenset()
        self._record = dataclasses.replace(requests.NONE, awaited=awaited)
        self._shared.publisher.keep(self._record)
        if not self._journal.is_empty:
            self._undo(self._journal)
        view = self._shared.publisher.read()
        if self._journal.is_closed or view.labels.get(cluster.STATE_LABEL) in _UNDER_WAY:
            self._end_pending("the label was removed")
        if self._journal.is_empty:
            resting.admit_workloads(self._shared, view)
        if self._deps.slots is not None:
            self._deps.slots.release()
        must_retry = resting.publish_gpus(self._shared, self._layouts, self.capacity, view)
        return must_retry or not self._journal.is_empty

    def stop(self) -> None:
        """Reopen a node that is closed until the next attempt; call when the agent stops.

        One that goes down for a reboot stays as it is, for the agent after the reboot.

        Raises:
            ClusterError: The API refused or does not answer; the journal is still there.
        """
        if self._journal.is_closed and not self._journal.rebooted_from:
            self._end_pending("the agent stopped during a drain")

    def note_node(self, view: cluster.NodeView) -> None:
        """Take the node as the watch shows it; from any thread."""
        self._watched_node = view

    def forget_node(self) -> None:
        """Publish everything again; call where the Node was deleted and registered again."""
        self._shared.publisher.forget()
        self._layouts = served_layouts.LayoutList(self._deps, self._shared.limits)
        self.capacity.forget_node()

    @property
    def has_unwritten_condition(self) -> bool:
        """Whether the condition ``MigReady`` could not be written; ``retry_condition`` does."""
        return self._deps.node.has_unwritten_condition

    def retry_condition(self) -> None:
        """Write the condition that could not be written; a failure is logged."""
        self._deps.node.retry_condition()

    @contextlib.contextmanager
    def _attempt(
        self,
        request: jobs.Request,
        journal: journals.Journal,
        cancel: ports.Cancellation | None = None,
        *,
        retry_after_s: float = 0.0,
    ) -> Iterator[jobs.Job]:
        """Yield an attempt, and keep what it has found out."""
        job = jobs.begun(
            self._shared,
            request,
            self._record or requests.NONE,
            journal,
            cancel or recovery.Uninterrupted(self._deps),
            retry_after_s=retry_after_s,
        )
        try:
            yield job
        finally:
            self._deps.standby.dismiss()
            self._record = job.progress.record
            self.capacity.note_gpus(job.progress.gpus)

    def _undo(self, before: journals.Journal) -> None:
        """Roll back and restore what a journal lists; raises as ``recover``."""
        name = before.config or "a layout"
        with self._attempt(jobs.Request(config=before.config), before) as job:
            resumed = job.taken.journal
            with self._shared.locked(f"undoing an interrupted change to {name}"):
                result = run.undo_interrupted(job)
            job.taken.abandon()
            self._keep_remaining(job.taken.journal)
        if self._journal == resumed:
            _log.warning("rollback_pending", config=before.config, why=result)
            return
        is_restored = self._journal.is_restored
        done = (
            f"restored what an interrupted run for {name} had taken"
            if is_restored
            else f"an interrupted run for {name} is only partly undone"
        )
        self._deps.node.emit(
            reason="Recovered",
            message=messages.joined(done, result),
            is_warning=not is_restored,
        )

    def _end_pending(self, why: str) -> None:
        with self._attempt(jobs.Request(config=""), self._journal) as job:
            job.taken.finish(outcomes.failed(errors.Reason.INTERRUPTED, why))
            self._keep_remaining(job.taken.journal)

    def _keep_remaining(self, journal: journals.Journal) -> None:
        self._journal = journals.NONE if journal.is_empty else journal
        if self._deps.slots is not None and not journal.blocks_workloads:
            self._deps.slots.release()
