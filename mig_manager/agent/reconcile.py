"""Bring one node from a request to an outcome: recover, run, rest, and check for drift.

After an interrupted run, the next run resumes if the same layout is requested. Otherwise it rolls
back the GPUs first, and restores everything.
"""

import dataclasses

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import (
    agent_settings,
    attempt_series,
    interrupted_runs,
    layout_request,
    node_context,
    node_patches,
    outcomes,
    publish,
    repairing,
    run,
)
from mig_manager.agent.drift import actions, checks, verdicts
from mig_manager.agent.pods import stale_devices
from mig_manager.agent.reports import capacity_report, faults, gpu_report, layout_report
from mig_manager.core import model, ports
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import journals, readiness, requests, run_status
from mig_manager.core.settings import node_settings

_log = structlog.get_logger()


class Reconciler:
    """Applies requests to one node."""

    def __init__(self, deps: ports.Dependencies, settings: agent_settings.RunSettings) -> None:
        self._deps = deps
        self._context = node_context.NodeContext(
            deps=deps,
            settings=settings,
            publisher=publish.Publisher(deps.node, deps.host_copy_file),
        )
        self._layouts = layout_report.LayoutReport(self._context)
        self._drift: verdicts.DriftMemory | None = None
        """Of the last check; None: there was none."""
        self.node = deps.node
        self.capacity = capacity_report.CapacityReport(self._context)
        self._gpus = gpu_report.GpuReport(self._context, self._layouts, self.capacity)
        self._series = attempt_series.AttemptSeries(self._context, self.capacity.update_gpus)
        is_reported = settings.repair is not node_settings.RepairPolicy.OFF
        self.faults = faults.FaultReport(deps, is_on=is_reported)

    def recover(self, request: layout_request.Request) -> None:
        """Take over from an interrupted run, unless ``is_current``; call before every run.

        If that run was for the same layout (for ``custom``: the same content), the next run
        resumes and must follow at once. Otherwise its change is undone here.

        Raises:
            ClusterError: The API refused or does not answer.
            LockedError: Another manager is at work; nothing was undone.
        """
        if not self._series.is_current:
            self._series.recover(request)

    @property
    def is_current(self) -> bool:
        """Whether the journal of an interrupted run, if any, is known here."""
        return self._series.is_current

    def mark_outdated(self) -> None:
        """Have ``recover`` read the Node again: an API request failed, or may be done."""
        self._series.mark_outdated()

    def run(
        self,
        request: layout_request.Request,
        cancel: ports.Cancellation,
        options: layout_request.AttemptOptions,
    ) -> outcomes.Outcome:
        """Apply the requested layout, and publish the outcome.

        ``cancel`` ends the run until GPUs are touched. Unless the request is new, no pod is
        evicted for a layout that was verified already.

        Raises:
            ClusterError: No outcome was published; the journal is still there.
            LockedError: Another manager is at work, and a repair of an active layout's GPU waits.
            Rebooting: The machine goes down; nothing is restored.
            Superseded: Another layout is requested, or the agent stops; all is restored.
        """
        record = self._series.record_request(request, options)
        if record.origin is requests.Origin.CUSTOM and not record.may_evict:
            # The document does not show that this layout evicts no pod. Publish it before the
            # owner can remove the node's label during a wait of this run.
            self._series.publish_record()
        locked: errors.LockedError | None = None
        try:
            repairing.repair(self._series, request, cancel, options)
        except errors.LockedError as error:
            state = self._context.node_labels.get(well_known.STATE_LABEL)
            if state == run_status.State.SUCCESS.value:
                # The layout stays a success, and the repairs open.
                raise
            locked = error
        with self._series.start_attempt(request, cancel, options) as attempt:
            # With the lock at another manager, the layout's run would wait for it once more.
            outcome = (
                attempt.failure(locked.reason, locked.message) if locked else run.run(attempt)
            )
            outcome, decision = repairing.follow_up(attempt, outcome)
            self._deps.telemetry.drift_found(is_drifted=outcome.reason is reasons.Reason.DRIFTED)
            gpus = attempt.status.observed_gpus
            fitting = self._layouts.fitting(attempt.status.gpus)
            annotations = self._layouts.annotations(fitting)
            if not (outcome.should_retry or gpus is None):
                annotations |= self.capacity.observe_annotations(gpus)
            attempt.recorder.finish(outcome, annotations)
        # Last, because it may take several API requests, and other nodes wait for the slot.
        self._layouts.write(fitting)
        if attempt.status.gpus or not self.faults.publish_failure(outcome.reason, outcome.message):
            self.faults.publish(attempt.status.gpus, decision.why_not, decision.uuids)
        if not outcome.should_retry:
            # The run may have changed which devices are advertised.
            self._context.memory.set_checked(None)
        elif not self._series.journal.node.is_tainted_or_paused:
            # No drift check follows before the next attempt.
            stale_devices.observe_and_remove(self._context)
        return outcome

    def awaits_driver(self, outcome: outcomes.Outcome | None) -> bool:
        """Return whether the last check after a run met no driver: the next should follow soon."""
        memory = self._drift
        return memory is not None and memory.outcome is outcome and memory.awaits_driver

    def check_drift(
        self, request: layout_request.Request, outcome: outcomes.Outcome
    ) -> actions.Action:
        """Compare the GPUs at rest with the layout, and publish a drift and changed GPUs.

        Raises:
            ClusterError: The API refused or does not answer.
            HardwareError: The driver does not list the processes of pods.
        """
        with self._series.start_attempt(request) as attempt:
            try:
                observation = checks.compare_gpus(attempt)
            except errors.LockedError:
                # The next check shows the other manager's change.
                return actions.Action.REST
            view = self._read_node_and_resume_unlisted()
            if self._is_change_put_back(view):
                return actions.Action.HEAL
            # Before a drift is published, with the GPUs and without their use.
            gpus = attempt.status.observed_gpus
            has_changed_gpus = gpus is not None and not self._gpus.is_published(gpus)
            decision = self._publish_checked_faults(observation, outcome)
            memory = self._drift
            if memory is None or memory.outcome is not outcome:
                memory = verdicts.DriftMemory.after(outcome, observation.gpus)
            action, self._drift = actions.act(attempt, memory, observation, view)
            if decision.gpus and action in (actions.Action.REST, actions.Action.RUN):
                repairing.begin_repairs(attempt, decision)
                return actions.Action.RUN
        # A run publishes them itself.
        if action is actions.Action.REST and has_changed_gpus:
            self._gpus.publish(observation.gpus)
        return action

    def _publish_checked_faults(
        self, observation: checks.Observation, outcome: outcomes.Outcome
    ) -> repairing.Decision:
        """Publish the faults that a drift check found; return which GPUs to repair now."""
        if self.faults.publish_failure(observation.error, observation.message):
            return repairing.NOTHING
        has_failed = outcome.state is run_status.State.FAILED
        may_differ = has_failed and outcome.reason is not reasons.Reason.DRIFTED
        is_drifted = observation.is_active is False and not may_differ
        why_not = repairing.DRIFTED if is_drifted else ""
        return self._publish_faults(observation.gpus, why_not=why_not)

    def _read_node_and_resume_unlisted(self) -> node_object.NodeView:
        view = self._deps.node.latest(is_at_rest=True)
        self._context.publisher.assume_written(view)
        interrupted_runs.resume_unlisted(self._context, view)
        return view

    def _is_change_put_back(self, view: node_object.NodeView) -> bool:
        """Return whether another program put back a change that this agent has ended."""
        return self._is_run_open(view) or (
            self._has_empty_journal and self._series.has_remainder(view)
        )

    def _publish_faults(self, gpus: model.ObservedGpus, *, why_not: str) -> repairing.Decision:
        """Publish the faults of GPUs; return which of them to repair now, none if ``why_not``."""
        decision = repairing.decide(self._context, self._series.record, gpus, why_not)
        self.faults.publish(gpus, decision.why_not, decision.uuids)
        return decision

    def restore_without_request(self) -> bool:
        """Restore a node without a request; call between runs.

        An interrupted run publishes no outcome. A superseded run leaves the state to the next run,
        which never comes once the label is removed. This method retries a failed rollback or
        restore.

        Returns:
            Whether to call again, because something failed that may succeed later.

        Raises:
            ClusterError: The API refused or does not answer.
            LockedError: Another manager is at work.
        """
        self._series.forget_request()
        view = self._context.publisher.read()
        if self._series.has_remainder(view):
            self._series.undo()
            view = self._context.publisher.read()
        if self._is_run_open(view):
            self._series.end_pending("the label was removed")
        are_resumed = interrupted_runs.resume_unlisted(self._context, view)
        if self._has_empty_journal:
            self._admit_workloads(view)
        if self._deps.slots is not None:
            self._deps.slots.release()
        gpus, must_retry = gpu_report.observe_or_report(self._context, self.faults)
        if gpus is None:
            self._context.publisher.patch(self._patch_without_request(model.NO_GPUS, view))
        else:
            self._publish_without_request(gpus, view)
        self._deps.telemetry.nothing_requested()
        return must_retry or not (are_resumed and self._has_empty_journal)

    def _admit_workloads(self, view: node_object.NodeView) -> None:
        """Remove start-up taints: without a request, workloads need not wait for a layout."""
        self._deps.node.set_condition(readiness.NO_LAYOUT_REQUESTED)
        taints = self._context.settings.policy.startup_taints & view.taint_keys
        if taints:
            patch = node_object.NodePatch(removed_taints=taints)
            self._context.publisher.update(lambda _view: patch)

    def check_without_request(self) -> actions.Action:
        """Observe the GPUs of a node without a request; publish changes and faults.

        Returns:
            RUN: ``restore_without_request`` is to be called again.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        view = self._read_node_and_resume_unlisted()
        if self._is_change_put_back(view):
            return actions.Action.RUN
        gpus, _ = gpu_report.observe_or_report(self._context, self.faults)
        if gpus is not None:
            stale_devices.remove(self._context, gpus, view)
            is_published = self._gpus.is_published(gpus)
            self._publish_without_request(gpus, None if is_published else view)
        return actions.Action.REST

    def _publish_without_request(
        self, gpus: model.ObservedGpus, view: node_object.NodeView | None
    ) -> None:
        """Publish the faults of GPUs, and the GPUs unless ``view`` is None."""
        self.capacity.update_gpus(gpus)
        if view is not None:
            change = self._patch_without_request(gpus, view)
            self._gpus.publish(gpus, change)
        self._publish_faults(gpus, why_not=repairing.NOT_REQUESTED)

    def _patch_without_request(
        self, gpus: model.ObservedGpus, view: node_object.NodeView
    ) -> node_object.NodePatch:
        patch = node_patches.of_request(self._series.record, gpus, self._deps.boot_id)
        # A label that is already absent needs no write.
        labels = {key: value for key, value in patch.labels.items() if key in view.labels}
        return dataclasses.replace(patch, labels=labels)

    def stop(self) -> None:
        """End a run that was left to the next attempt, and restore node and host; call at the end.

        A node that goes down for a reboot keeps its taint, for the agent after the reboot.

        Raises:
            ClusterError: The API refused or does not answer; the journal is still there.
        """
        journal = self._series.journal
        is_going_down = journal.node.rebooted_from == (self._deps.boot_id or "unknown")
        if is_going_down or (self._has_empty_journal and not self._series.lacks_outcome):
            return
        key = self._series.record.key if self._has_empty_journal else journal.key
        is_host_changed = journal.host != journals.HostEntries()
        if is_host_changed or self._is_run_open(self._context.publisher.read()):
            try:
                self._series.end_pending("the agent stopped during a run", key)
            except errors.LockedError as error:
                # The other manager restores the node, or the next agent does.
                _log.info("recovery_waits", error=error.message)
        elif self._deps.slots is not None:
            # A run that waited for the lock has left it.
            self._deps.slots.release()

    @property
    def _has_empty_journal(self) -> bool:
        """Whether the journal of the last attempt has no entry."""
        return self._series.journal.remainder is journals.Remainder.NOTHING

    def _is_run_open(self, view: node_object.NodeView) -> bool:
        """Return whether the node shows a run under way, or keeps pods away for one."""
        is_under_way = view.labels.get(well_known.STATE_LABEL) in run_status.UNDER_WAY
        is_tainted_or_paused = self._series.journal.node.is_tainted_or_paused
        return (
            is_under_way
            or is_tainted_or_paused
            or well_known.RECONFIGURING_TAINT in view.taint_keys
        )

    def forget_node(self) -> None:
        """Publish everything again; call after the Node was deleted and registered again."""
        self._context.publisher.forget()
        # The new Node lacks the journal of earlier runs.
        self._series.mark_outdated()
        self._layouts.forget_node()
        self.capacity.forget_node()
