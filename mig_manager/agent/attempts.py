"""One attempt at a request, and the state that its phases share."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import layout_request, node_context, outcomes, run_recorder
from mig_manager.change import change_recorder, hook_points, plan_executor, transaction
from mig_manager.core import messages, pod_rights, ports, timing
from mig_manager.core.objects import pod_object
from mig_manager.core.records import journals, node_entries, requests, run_status

_Problem = TypeVar("_Problem")

_log = structlog.get_logger()

_NOT_RETRIED = "Request a layout that keeps what is in use; the agent does not retry."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(node_context.NodeContext):
    """One attempt at a request; what it changes is in the recorder and in the memory.

    A drift check, the undo of an interrupted run and the end of a pending one are attempts too,
    with the default options: they take over the same journal, and use steps of a run.

    A function that takes it waits, writes the journal, or acts as the request says.
    """

    request: layout_request.Request
    options: layout_request.AttemptOptions
    cancel: ports.Cancellation  # can cancel the attempt until GPUs are touched
    recorder: run_recorder.RunRecorder
    hooks: hook_points.HookPoints

    @property
    def status(self) -> run_status.RunStatus:
        """The status, with the GPUs as last observed in this attempt; empty before."""
        return self.recorder.status

    @property
    def journal(self) -> journals.Journal:
        """The journal's entries now; the recorder changes them."""
        return self.recorder.journal

    @property
    def record(self) -> requests.RequestRecord:
        """The record of the request now; the recorder changes it."""
        return self.recorder.record

    @property
    def is_first(self) -> bool:
        """Whether this is no retry of a run: so a drift check is always the first."""
        return self.options.attempt == 1

    @property
    def is_repair(self) -> bool:
        """Whether the attempt resets GPUs; if not, it applies the layout."""
        return self.options.is_repair

    @property
    def rights(self) -> pod_rights.AttemptRights:
        """What the attempt may do with pods; its layout's content also decides, once resolved."""
        return pod_rights.decide(
            self.record,
            self.settings.policy.drain,
            is_repair=self.is_repair,
            is_heal=self.options.is_heal,
            content_hash=self.status.content_hash,
            boot_id=self.deps.boot_id,
        )

    @property
    def plugin_config(self) -> str | None:
        """The device plugin's config for this layout; None keeps the present one."""
        return None if self.is_repair else self.settings.policy.plugin_config(self.request.layout)

    def failure(
        self, reason: reasons.Reason, *parts: str, is_final: bool = False, remedy: str = ""
    ) -> outcomes.Outcome:
        """Return the failure of this attempt, with unreachable GPUs.

        It is retried if its reason is temporary, unless it ``is_final``. It is also retried if
        GPUs or host services are in neither the requested nor the previous state.
        """
        message = messages.join(*parts)
        is_about_gpu = reason is reasons.Reason.GPU_UNREACHABLE
        lost = () if is_about_gpu else self.status.gpus.unreachable
        remaining = self.journal.remaining(node_entries.RunEnd.RESTORED)
        is_undone = remaining.remainder is not journals.Remainder.CHANGE
        is_final = is_final and is_undone
        return outcomes.failure(
            reason,
            messages.join(message, *(gpu.sentence for gpu in lost if gpu.message not in message)),
            should_retry=not is_undone or (reason.is_transient and not is_final),
            remedy=_NOT_RETRIED if is_final else remedy,
        )

    def forget_former_layout(self) -> None:
        """Forget the former layout: an undo no longer restores it, unless a repair kept it."""
        if not self.is_repair:
            self.recorder.set_journal(applied_before="")

    def new_wait(self, timeout_s: float) -> timing.Wait:
        """Return a wait that a newer request ends."""
        return timing.Wait(
            clock=self.deps.clock,
            timeout_s=timeout_s,
            sleep=self.cancel.wait,
            backoff=self.settings.backoff,
        )

    @contextlib.contextmanager
    def hold_journal(self, doing: str, wait: timing.Wait | None = None) -> Iterator[None]:
        """Hold the node's lock in the context as ``hold_lock``, with the entries of earlier runs.

        Raises:
            ClusterError: On entering: the API refused or does not answer.
            LockedError: On entering: another manager had the lock until the deadline.
            Superseded: On entering: the wait was interrupted.
        """
        with self.hold_lock(doing, wait):
            self.recorder.take_over()
            self._forget_outdated_change()
            yield

    def _forget_outdated_change(self) -> None:
        """Forget an interrupted change if ``apply`` has verified a layout on its GPUs since."""
        before = self.journal.gpus.snapshots
        if not before:
            return
        with contextlib.suppress(errors.HardwareError):
            gpus = self.deps.gpus.observe()
            rest, since = self.verified_layout.without_verified_since(before, gpus)
            if since:
                _log.warning("interrupted_change_outdated", verified_since=since)
                entries = dataclasses.replace(self.journal.gpus, snapshots=rest)
                self.recorder.set_journal(applied_before="", gpus=entries)

    def until_solved(
        self, find: Callable[[pod_object.Pods], _Problem], timeout_s: float
    ) -> tuple[_Problem, pod_object.Pods]:
        """Wait until ``find`` finds no problem with the node's pods.

        A list confirms the watch's report, because a watch may lag behind.

        Returns:
            The problem at the deadline, if it remains, and the pods as last listed.

        Raises:
            ClusterError: The API refused or does not answer.
            Superseded: Another layout is requested, or the agent stops.
        """
        workloads = self.deps.workloads
        tries = dataclasses.replace(self.new_wait(timeout_s), sleep=self.cancel.pause).tries()
        while True:
            is_late = next(tries)
            watched = None if is_late else workloads.from_watch()
            if watched is None or not find(watched):
                pods = workloads.list()
                if not (problem := find(pods)) or is_late:
                    return problem, pods

    def new_transaction(
        self,
        idle_wait: timing.Wait | None = None,
        require_unused: plan_executor.RequireUnused | None = None,
    ) -> transaction.Transaction:
        """Return a transaction on the node's GPUs."""
        return transaction.Transaction(
            executor=plan_executor.PlanExecutor(
                gpus=self.deps.gpus,
                reset=self.deps.reset,
                record_persistence=functools.partial(
                    change_recorder.record_persistence, self.recorder
                ),
                clock=self.deps.clock,
                require_unused=require_unused,
            ),
            recorder=self.recorder,
            refresh_files=self.deps.refresh_files,
            idle_wait=idle_wait or timing.Wait(clock=self.deps.clock),
        )
