"""The attempts at a node's requests, one after the other, and what each leaves to the next."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import (
    attempts,
    intake,
    interrupted_runs,
    layout_request,
    node_context,
    node_patches,
    outcomes,
    run_recorder,
)
from mig_manager.agent.phases import failures, services_and_hooks
from mig_manager.change import hook_points
from mig_manager.core import messages, model, pod_rights, ports
from mig_manager.core.layout import custom_layouts
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import gpu_repair, journals, requests, run_status

_FOLLOWED = (errors.SupersededBy.OTHER_LAYOUT, errors.SupersededBy.SAME_LAYOUT)
"""Another run follows, and publishes its own state."""

_log = structlog.get_logger()


class AttemptSeries:
    """The journal and the record of the request, which every attempt takes over and leaves.

    Raises:
        ClusterError: From every method: the API refused or does not answer.
    """

    def __init__(
        self, context: node_context.NodeContext, on_gpus: Callable[[model.ObservedGpus], object]
    ) -> None:
        self._context = context
        self._on_gpus = on_gpus
        """Called after each attempt, with the GPUs as last observed in it."""
        self._record: requests.RequestRecord | None = None
        """None: not read yet."""
        self.journal = journals.NONE
        """The journal of earlier runs, from which the next run resumes."""
        self.is_current = False
        """Whether the Node's journal was read since the start, or since an API request failed."""
        self.lacks_outcome = False
        """Whether the last attempt may have ended without an outcome, with the Node pending."""

    @property
    def record(self) -> requests.RequestRecord:
        """The current request and its results."""
        return self._record or requests.NONE

    def record_request(
        self, request: layout_request.Request, options: layout_request.AttemptOptions
    ) -> requests.RequestRecord:
        """Record that a request is served; return its record with earlier results."""
        if options.attempt == 1:
            self._context.memory.begin_request()
        now_s = self._context.deps.clock.unix_s()
        current = custom_layouts.request_for(request.layout, request.custom)
        self._record = self.record.continued_as(current, is_new=options.is_new, now_s=now_s)
        return self._record

    def forget_request(self) -> None:
        """Record that nothing is requested: the next layout is always a new request."""
        self._context.memory.begin_request()
        before = self.record
        repairs = gpu_repair.postpone(before.repairs, self._context.deps.clock.unix_s())
        self._record = dataclasses.replace(
            requests.NONE,
            awaited=before.awaited,
            applied_fingerprints=before.applied_fingerprints,
            repairs=repairs,
        )
        self._save_on_host()

    def publish_record(self) -> None:
        """Publish the record of the request before an attempt at it."""
        self._context.publisher.annotate(node_patches.of_record(self.record))
        self._save_on_host()

    def _save_on_host(self) -> None:
        self._context.publisher.save_on_host(self.record, self.journal)

    def recover(self, request: layout_request.Request) -> None:
        """Take over from an interrupted run; undo it unless the same layout is requested.

        Raises:
            LockedError: Another manager is at work; nothing was undone.
        """
        deps, publisher = self._context.deps, self._context.publisher
        view = publisher.read()
        saved = interrupted_runs.read_saved(deps.host_copy_file, view)
        self.journal = journal = interrupted_runs.read_journal(self._context, view)
        if self._record is None:
            self._record = interrupted_runs.find_record(saved, view, journal)
        if journal.remainder is journals.Remainder.CHANGE:
            self._resume_or_undo(request)
        self.is_current = True

    def _resume_or_undo(self, request: layout_request.Request) -> None:
        deps, journal = self._context.deps, self.journal
        is_resumed = bool(request.layout) and journal.key == request.key
        _log.warning(
            "interrupted_run_found",
            config=journal.layout,
            has_rebooted=bool(journal.boot_id) and journal.boot_id != deps.boot_id,
            is_resumed=is_resumed,
        )
        if not is_resumed:
            self.undo()
            return
        message = f"resuming {request.layout} after an interruption"
        deps.node.emit(reason="Recovered", message=message, is_warning=False)

    def has_remainder(self, view: node_object.NodeView) -> bool:
        """Return whether anything remains of a change, by the journal here or by the Node."""
        return (
            self.journal.remainder is not journals.Remainder.NOTHING
            or well_known.JOURNAL_ANNOTATION in view.annotations
            or well_known.RECONFIGURING_TAINT in view.taint_keys
        )

    def mark_outdated(self) -> None:
        """Note that the Node may have another journal than the last attempt, until ``recover``."""
        self.is_current = False

    @contextlib.contextmanager
    def start_attempt(
        self,
        request: layout_request.Request,
        cancel: ports.Cancellation | None = None,
        options: layout_request.AttemptOptions = layout_request.DEFAULT_OPTIONS,
    ) -> Iterator[attempts.Attempt]:
        """Yield an attempt that takes over the journal; keep its record, and what it leaves.

        The attempt is ended if it is superseded. After another error its journal is still on the
        Node, from which ``recover`` reads it; after one of the API, ours lets ``stop`` end it. No
        error releases the slot: if another manager has the lock, it may be another agent's.
        """
        attempt = self._new_attempt(
            request, cancel or intake.Uninterrupted(self._context.deps), options
        )
        self.lacks_outcome = True
        try:
            yield attempt
        except errors.Superseded as end:
            try:
                _supersede(attempt, end)
            finally:
                self._keep_journal(attempt)
            raise
        except errors.ClusterError:
            self.journal = attempt.journal
            raise
        else:
            self._keep_journal(attempt)
            self.lacks_outcome = False
        finally:
            self._context.deps.pod_watch.dismiss()
            self._record = attempt.record
            if attempt.status.observed_gpus is not None:
                self._on_gpus(attempt.status.observed_gpus)

    def _new_attempt(
        self,
        request: layout_request.Request,
        cancel: ports.Cancellation,
        options: layout_request.AttemptOptions,
    ) -> attempts.Attempt:
        """Return an attempt at a request, with the journal of earlier attempts."""
        context, deps, record = self._context, self._context.deps, self.record
        at_start = functools.partial(
            journals.Journal.at_start,
            key=request.key,
            boot_id=deps.boot_id,
            # Without evictions, the node must not stay tainted until pods are gone.
            may_drain=not pod_rights.is_passive(record, is_repair=options.is_repair),
        )
        return attempts.Attempt(
            deps=deps,
            settings=context.settings,
            publisher=context.publisher,
            memory=context.memory,
            request=request,
            options=options,
            cancel=cancel,
            recorder=run_recorder.RunRecorder(
                context,
                self._first_status(request, options.attempt),
                journal=at_start(self.journal),
                take_over_journal=lambda: at_start(self._journal_now()),
                record=record,
                retry_after_s=options.retry_after_s,
            ),
            hooks=hook_points.HookPoints(
                deps.hooks,
                variables={"MIG_PARTED_SELECTED_CONFIG": request.layout},
                telemetry=deps.telemetry,
            ),
        )

    def _first_status(self, request: layout_request.Request, attempt: int) -> run_status.RunStatus:
        # A failure before the layout is resolved must not cause a second reboot.
        rebooted = self.record.rebooted_hash if self.record.layout == request.layout else None
        return run_status.RunStatus(
            layout=request.layout,
            content_hash=rebooted or "",
            state=run_status.State.PENDING,
            phase=run_status.Phase.RESOLVE,
            reason=None,
            message="",
            attempt=attempt,
            started_at=self._context.deps.clock.now_iso(),
            finished_at=None,
            annotation_hash=request.key.annotation_hash,
            is_rebooted=rebooted is not None or bool(self.journal.node.rebooted_from),
        )

    def _journal_now(self) -> journals.Journal:
        """Read the Node, resume its GPU clients that no journal lists, and return its journal."""
        context = self._context
        view = context.publisher.read()
        interrupted_runs.resume_unlisted(context, view)
        if not self.has_remainder(view):
            # A copy on the host is outdated.
            return self.journal
        return interrupted_runs.read_journal(context, view)

    def _keep_journal(self, attempt: attempts.Attempt) -> None:
        """Keep the journal for the next attempt, and release the slot if workloads may run."""
        self.journal = attempt.journal
        slots = self._context.deps.slots
        blocks_workloads = attempt.journal.node.blocks_workloads
        if slots is not None and attempt.recorder.has_had_lock and not blocks_workloads:
            slots.release()

    def undo(self) -> None:
        """Roll back and restore all entries of the journal.

        Raises:
            LockedError: Another manager is at work; nothing was undone.
        """
        with self.start_attempt(layout_request.Request(layout=self.journal.layout)) as attempt:
            failures.undo_interrupted(attempt)

    def end_pending(self, why: str, key: run_status.RequestKey = run_status.NO_REQUEST) -> None:
        """Publish the end of a run that no attempt continues, and restore node and host.

        ``key`` is the request's, if it remains.

        Raises:
            LockedError: Another manager is at work; nothing was restored.
        """
        request = layout_request.Request(layout=key.layout, annotation_hash=key.annotation_hash)
        with self.start_attempt(request) as attempt, attempt.hold_journal(why):
            why = messages.join(why, services_and_hooks.restore(attempt))
            attempt.recorder.finish(outcomes.failure(reasons.Reason.INTERRUPTED, why))


def _supersede(attempt: attempts.Attempt, end: errors.Superseded) -> None:
    """Restore the node after a run that was superseded, unless it goes down."""
    _log.info("run_superseded", why=end.why)
    if end.by in _FOLLOWED:
        attempt.recorder.abandon(is_retried=end.by is errors.SupersededBy.SAME_LAYOUT)
        attempt.deps.telemetry.run_superseded()
    elif not isinstance(end, errors.Rebooting):
        attempt.recorder.finish(attempt.failure(reasons.Reason.INTERRUPTED, end.why))
