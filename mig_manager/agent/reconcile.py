"""Bring one node from a request to an outcome: recover, run, rest, and check for drift.

The next run resumes what a killed run took if the same layout is requested. Otherwise the GPUs are
rolled back first, and everything is restored.
"""

import contextlib
import dataclasses

import structlog

from mig_manager import errors
from mig_manager.agent import (
    capacity,
    drift,
    planning,
    record,
    recovery,
    requests,
    served_layouts,
    settings,
)
from mig_manager.agent import run as pipeline
from mig_manager.agent.pods import drain, gpu_clients, survey
from mig_manager.change import local
from mig_manager.core import messages, model, ports, steps
from mig_manager.core.layout import custom as customs
from mig_manager.core.node import cluster
from mig_manager.core.records import gpu_codec, readiness, status

_UNDER_WAY = (model.State.PENDING.value, model.State.REBOOTING.value)

_log = structlog.get_logger()


class Reconciler:
    """Applies requests to one node."""

    def __init__(self, deps: ports.Dependencies, limits: settings.Limits) -> None:
        self._deps = deps
        self._limits = limits
        self._clients = gpu_clients.GpuClients(deps, limits)
        self._drift_check = drift.DriftCheck()
        self._seen_node: cluster.NodeView | None = None
        """The node as the watch last showed it."""
        self._has_phantoms = False
        """Whether the last drift check published phantom devices that it may not remove."""
        self._left: status.Journal | None = None
        """What earlier runs took and have not restored; the next run resumes with it."""
        self._history = pipeline.History()
        self._requests = requests.Requests(deps)
        self._layout_list = served_layouts.LayoutList(deps, limits)
        self.capacity = capacity.CapacityReport(deps)

    def recover(self, name: str | None, custom: customs.Custom | None = None) -> None:
        """Take over from an interrupted run; call before the first run and after a lost one.

        If that run was for the requested layout ``name``, with the same content if that is
        ``custom``, the next run resumes and must follow at once; otherwise its change is undone
        here.

        Raises:
            ClusterError: The API refused or does not answer.
            LockedError: Another manager is at work; nothing was undone.
        """
        view = self._deps.node.read()
        text = view.annotations.get(cluster.STATUS_ANNOTATION)
        self._left = None
        journal = recovery.find_journal(self._deps.node, view)
        self._requests.recover(view, journal)
        rebooted = status.rebooted_layout(text) or self._requests.rebooted_layout
        self._history = dataclasses.replace(self._history, rebooted=rebooted)
        if journal is None:
            return
        if journal.is_restored or (
            status.was_active(status.read_or_none(text))
            and dataclasses.replace(journal, snapshot=()).is_restored
        ):
            # That run has ended: the snapshot waits for an unreachable GPU to be back.
            self._left = journal
            return
        self._clients.advertising.expect_those_in(journal)
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
        self._left = journal
        self._deps.node.emit(
            reason="Recovered",
            message=f"resuming {name} after an interruption",
            is_warning=False,
        )

    def run(  # noqa: PLR0913 - each is named where it is called
        self,
        name: str,
        request: ports.Cancellation,
        *,
        custom: customs.Custom | None = None,
        attempt: int = 1,
        retry_after_s: float = 0.0,
        is_new: bool = False,
        may_evict: bool = True,
    ) -> record.Outcome:
        """Apply the layout ``name``, or what ``custom`` stands for, and publish the outcome.

        ``request`` ends the run early, until GPUs are touched. ``retry_after_s`` is the pause
        before the next attempt, if this one fails. No pod is evicted for a layout that was
        verified and not requested since, as it is unless ``is_new``.

        Raises:
            ClusterError: The outcome could not be published; the journal is still there.
            Superseded: Another layout is requested, or the agent stops; all is restored.
        """
        custom = self._requests.begin(name, custom, is_new=is_new)
        if custom and custom.is_on_demand:
            # Before the owner can remove the label that decides, while this run still waits.
            self._requests.write(self._deps.node)
        journal, self._left = self._left, None
        self._has_phantoms = False
        written = self._new_record(
            name, journal, custom, attempt=attempt, retry_after_s=retry_after_s
        )
        run = pipeline.Run(
            self._deps,
            self._limits,
            self._clients,
            written,
            history=self._history,
            may_evict=may_evict,
        )
        try:
            outcome = run.run(request)
        except errors.Superseded as end:
            _log.info("run_superseded", why=end.why)
            if end.is_replaced and not run.reboot.is_under_way:
                written.abandon()
            elif not run.reboot.is_under_way:
                written.finish(written.failed(errors.Reason.INTERRUPTED, end.why))
            self._keep_remaining(written.journal)
            raise
        finally:
            self._history = dataclasses.replace(self._history, gpus=written.gpus)
            self.capacity.note_gpus(written.gpus, are_published=True)
        is_drifted = outcome.reason is errors.Reason.DRIFTED
        self._deps.telemetry.drift_found(is_drifted=is_drifted)
        annotations = self._layout_list.annotations(written.gpus)
        if not outcome.should_retry:
            annotations |= self.capacity.annotations(written.gpus)
        written.finish(outcome, annotations)
        if not outcome.should_retry:
            self.capacity.published()
        self._keep_remaining(written.journal)
        if outcome.state is model.State.SUCCESS and self._deps.boot_layout is not None:
            _, content_hash = written.request
            try:
                local.save_layout(
                    self._deps.boot_layout,
                    outcome.gpus,
                    config=name,
                    config_hash=content_hash,
                    boot_id=self._deps.boot_id,
                )
            except errors.ConfigError as error:
                _log.warning("layout_not_saved", error=error.message)
        # Last, because it may take several requests, and other nodes wait for the slot.
        self._layout_list.published()
        return outcome

    def check_drift(
        self, name: str, ended: record.Outcome, custom: customs.Custom | None = None
    ) -> drift.Action:
        """Compare the GPUs at rest with the layout, and publish a drift.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        written = self._new_record(name, self._left, custom)
        try:
            with self._locked(f"checking layout {name}"):
                now = drift.observe(planning.Planning(self._deps, self._limits, written))
            self._history = dataclasses.replace(self._history, gpus=written.gpus)
            self.capacity.note_gpus(written.gpus, are_published=False)
        except errors.LockedError:
            # The next check finds what the other manager does to the GPUs.
            return drift.Action.REST
        finding = self._drift_check.judge(ended, now)
        match finding:
            case drift.Finding.AS_BEFORE:
                if ended.state is model.State.SUCCESS and now.plan is not None:
                    self._withdraw_phantoms(written, now.gpus)
                return drift.Action.REST
            case drift.Finding.CHANGED:
                _log.info("hardware_changed", config=name)
                # A GPU that is back is no reason to evict pods of another.
                is_active = ended.state is model.State.SUCCESS
                return drift.Action.HEAL if is_active else drift.Action.RUN
            case drift.Finding.BACK:
                self._deps.telemetry.drift_found(is_drifted=False)
                self._finish_active_again(written)
                return drift.Action.REST
            case drift.Finding.DRIFTED | drift.Finding.STILL_DRIFTED:
                return self._drifted(written, now, is_new=finding is drift.Finding.DRIFTED)

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
        self._requests.end()
        if self._left is not None:
            self._undo(self._left)
        view = self._deps.node.read()
        if self._is_closed or view.labels.get(cluster.STATE_LABEL) in _UNDER_WAY:
            self._end_pending("the label was removed")
        if self._left is None:
            self._release(view)
        if self._deps.slots is not None:
            self._deps.slots.release()
        must_retry = self._publish_gpus(view)
        return must_retry or self._left is not None

    def stop(self) -> None:
        """Reopen a node that is closed until the next attempt; call when the agent stops.

        Raises:
            ClusterError: The API refused or does not answer; the journal is still there.
        """
        if self._is_closed:
            self._end_pending("the agent stopped during a drain")

    def note_node(self, view: cluster.NodeView) -> None:
        """Take the node as the watch shows it; from any thread."""
        self._seen_node = view

    def forget_node(self) -> None:
        """Publish everything again; call where the Node was deleted and registered again."""
        self._layout_list = served_layouts.LayoutList(self._deps, self._limits)
        self._requests.forget_node()
        self.capacity.forget_node()

    @property
    def has_unwritten_condition(self) -> bool:
        """Whether the condition ``MigReady`` could not be written; ``retry_condition`` does."""
        return self._deps.node.has_unwritten_condition

    def retry_condition(self) -> None:
        """Write the condition that could not be written; a failure is logged."""
        self._deps.node.retry_condition()

    @property
    def _is_closed(self) -> bool:
        """Whether the last run left the node closed."""
        return self._left is not None and self._left.is_closed

    def _undo(self, journal: status.Journal) -> None:
        """Roll back and restore what a journal lists; raises as ``recover``."""
        written = self._new_record(journal.config, journal)
        before = written.journal
        run = pipeline.Run(self._deps, self._limits, self._clients, written)
        with self._locked(f"undoing an interrupted change to {journal.config or 'a layout'}"):
            result = run.undo()
        written.abandon()
        self._keep_remaining(written.journal)
        if self._left == before:
            _log.warning("rollback_pending", config=journal.config, why=result)
            return
        name = journal.config or "a layout"
        is_restored = self._left is None or self._left.is_restored
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

    def _release(self, view: cluster.NodeView) -> None:
        """Let workloads start on a node without a request: no layout will come before them."""
        self._deps.node.set_condition(readiness.NO_LAYOUT_REQUESTED)
        taints = self._limits.policy.startup_taints & view.taint_keys
        if taints:
            self._deps.node.update(lambda _view: cluster.NodePatch(removed_taints=taints))

    def _publish_gpus(self, view: cluster.NodeView) -> bool:
        """Publish the GPUs and their layouts, for requests that are planned before a label is set.

        Returns:
            Whether that failed and may succeed later.
        """
        ended: dict[str, str | None] = {cluster.REQUEST_ANNOTATION: None}
        try:
            with self._locked("looking at the GPUs"):
                gpus = self._deps.gpus.observe()
        except (errors.HardwareError, errors.LockedError) as error:
            _log.info("gpus_not_published", reason=error.reason.value, error=error.message)
            if cluster.REQUEST_ANNOTATION in view.annotations:
                self._deps.node.patch(cluster.NodePatch(annotations=ended))
            return error.reason.is_transient
        inventory = ended | {cluster.GPUS_ANNOTATION: gpu_codec.to_json(gpus)}
        lists = self._layout_list.annotations(gpus)
        capacity = self.capacity.annotations(gpus, view.annotations)
        change = cluster.NodePatch(annotations=inventory | lists | capacity)
        if not change.is_in(view):
            self._deps.node.patch(change)
        self.capacity.published()
        self._layout_list.published()
        return False

    def _end_pending(self, why: str) -> None:
        journal = dataclasses.replace(self._left or status.Journal(config=""), config="")
        written = record.Record(self._deps, journal)
        written.finish(record.failed(errors.Reason.INTERRUPTED, why))
        self._left = None if written.journal.is_empty else written.journal

    def _drifted(
        self, written: record.Record, now: drift.Observation, *, is_new: bool
    ) -> drift.Action:
        affected = ""
        if self._limits.heals_drift:
            order = drain.order(self._limits, now.plan or steps.Plan(gpus=()), now.gpus)
            usage = survey.usage_now(self._deps.workloads, self._deps.allocations, now.gpus)
            affected = usage.named(order.affected_pods(usage))
            if not affected:
                return drift.Action.HEAL
        if is_new:
            self._deps.telemetry.drift_found(is_drifted=True)
            _log.warning("drift_found", config=written.config, pods=affected)
            message = drift.drift_message(written.title, affected)
            written.finish(record.failed(errors.Reason.DRIFTED, message))
        return drift.Action.REST

    def _withdraw_phantoms(self, written: record.Record, gpus: model.ObservedGpus) -> None:
        """Remove devices that the node offers and no GPU has; publish if that is refused."""
        refused = self._clients.advertising.withdraw_phantoms(gpus, self._seen_node)
        if refused is not None and not self._has_phantoms:
            failed = written.failed(refused.reason, refused.message)
            # The layout is active: the next drift check tries again, and no run is needed.
            written.finish(dataclasses.replace(failed, is_final=True))
        elif refused is None and self._has_phantoms:
            self._finish_active_again(written)
        self._has_phantoms = refused is not None

    def _finish_active_again(self, written: record.Record) -> None:
        self._has_phantoms = False
        reason = errors.Reason.ALREADY_APPLIED
        written.finish(written.succeeded(reason, "is active again", gpus=written.gpus))

    def _locked(self, doing: str) -> contextlib.AbstractContextManager[None]:
        if self._deps.lock is None:
            return contextlib.nullcontext()
        return self._deps.lock.hold(doing)

    def _keep_remaining(self, journal: status.Journal) -> None:
        self._left = None if journal.is_empty else journal
        if self._deps.slots is not None and not journal.blocks_workloads:
            self._deps.slots.release()

    def _new_record(
        self,
        name: str,
        journal: status.Journal | None,
        custom: customs.Custom | None = None,
        *,
        attempt: int = 1,
        retry_after_s: float = 0.0,
    ) -> record.Record:
        journal = journal or status.Journal(config=name)
        annotation_hash = custom.annotation_hash if custom else ""
        # On demand no pod is to leave, so the node does not stay closed until all have left.
        is_on_demand = custom is not None and custom.is_on_demand
        is_same = journal.request == (name, annotation_hash)
        resumed = dataclasses.replace(
            journal,
            config=name,
            annotation_hash=annotation_hash,
            boot_id=self._deps.boot_id,
            # No reboot keeps persistence mode.
            persistent_gpus=journal.persistent_gpus
            if journal.boot_id == self._deps.boot_id
            else (),
            draining=journal.draining and is_same and not is_on_demand,
        )
        written = record.Record(
            self._deps,
            resumed,
            requests=self._requests,
            custom=custom,
            attempt=attempt,
            retry_after_s=retry_after_s,
            startup_taints=self._limits.policy.startup_taints,
        )
        # Whatever fails before the layout is resolved must not lead to a second reboot.
        rebooted = self._history.rebooted
        if rebooted and rebooted[0] == name:
            written.note(config_hash=rebooted[1], is_rebooted=True)
        elif journal.rebooted_from:
            written.note(is_rebooted=True)
        return written
