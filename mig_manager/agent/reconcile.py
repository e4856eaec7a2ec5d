"""From one node's wish to its outcome: take over, run, rest, and look again.

A run that was killed is carried on by the next one if the wish is still the same, with all that
it had taken; otherwise the GPUs are brought back first, and everything is given back.
"""

import contextlib
import dataclasses

import structlog

from mig_manager import errors
from mig_manager.agent import dependencies, gpu_clients, outcomes, record
from mig_manager.agent import run as runs
from mig_manager.core import model, ports
from mig_manager.core.node import cluster
from mig_manager.core.records import gpu_codec, status

_MAX_KEPT_CHARACTERS = 16 * 1024
"""Of a journal that makes no sense: enough to look into, and no load on the Node object."""

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is left."""

    journal: status.Journal | None
    """None: nothing is."""
    unreadable: str = ""
    """The journal's text if it makes no sense."""
    why_unreadable: str = ""
    """Empty: it does make sense, or there is none."""

    @property
    def set_aside(self) -> cluster.NodePatch:
        """The patch that keeps an unreadable journal elsewhere."""
        return cluster.NodePatch(
            annotations={
                cluster.JOURNAL_ANNOTATION: None,
                cluster.UNREADABLE_JOURNAL_ANNOTATION: self.unreadable[:_MAX_KEPT_CHARACTERS],
            }
        )


def find(view: cluster.NodeView) -> Found:
    """Return what an interrupted run left taken.

    Without a journal, or with one that cannot be read, that is what is marked by its very value
    (paused labels, the hold taint, a cordon with our annotation): NVIDIA's manager, whose place
    we may have taken, keeps no journal. Any other cordon may be somebody else's.
    """
    text = view.annotations.get(cluster.JOURNAL_ANNOTATION)
    why = ""
    if text is not None:
        try:
            return Found(journal=record.still_taken(status.Journal.from_json(text), view))
        except ValueError as error:
            why = str(error)
            _log.warning("journal_unreadable", error=why)
    marked = _marked(view)
    return Found(
        journal=None if marked.is_empty else marked,
        unreadable=text or "",
        why_unreadable=why,
    )


def _marked(view: cluster.NodeView) -> status.Journal:
    paused = {
        key: "true"
        for key, value in view.labels.items()
        if key.startswith(cluster.DEPLOY_LABEL_PREFIX) and value == cluster.PAUSED_VALUE
    }
    return status.Journal(
        config="",
        cordoned=view.is_unschedulable and cluster.CORDON_ANNOTATION in view.annotations,
        hold_taint=cluster.HOLD_TAINT in view.taint_keys,
        paused_labels=paused,
    )


_UNDER_WAY = (model.State.PENDING.value, model.State.REBOOTING.value)


class Reconciler:
    """Brings one node to one wish."""

    def __init__(self, world: dependencies.Dependencies, limits: dependencies.Limits) -> None:
        self._world = world
        self._limits = limits
        self._daemons = gpu_clients.Daemons(
            world.node,
            world.workloads,
            world.allocations,
            world.clock,
            timeout_s=limits.plugin_timeout_s,
            pace=limits.pace,
        )
        self._lookout = outcomes.Lookout()
        self._left: status.Journal | None = None
        """What the next run carries on with."""
        self._fulfilled: tuple[str, str] | None = None
        """The request that had been fulfilled when this process began, until a run for it, or for
        another one, ends for good."""
        self._rebooted: tuple[str, str] | None = None
        """The wish for which the machine was rebooted."""
        self._remembered: model.ObservedGpus = model.NO_GPUS
        """The GPUs as they were last seen."""

    def recover(self, name: str | None) -> None:
        """Take over from an interrupted run; call before the first run and after a lost one.

        Args:
            name: What is wanted now. If that was wanted then, the next run carries on, so it must
                follow at once; if not, all is undone and given back here.

        Raises:
            ClusterError: The API refused or does not answer.
            LockedError: Another manager is at work; nothing was undone.
        """
        view = self._world.node.read()
        told = view.annotations.get(cluster.STATUS_ANNOTATION)
        self._fulfilled = status.applied_layout(told) or self._fulfilled
        self._rebooted = status.rebooted_layout(told)
        self._left = None
        found = find(view)
        if found.why_unreadable:
            self._set_aside(found)
        left = found.journal
        if left is None:
            return
        if status.applied_layout(told) and dataclasses.replace(left, snapshot=()).is_empty:
            # That run has ended: what is due waits for an unreachable GPU to be back.
            self._left = left
            return
        self._fulfilled = None
        _log.warning(
            "interrupted_run_found",
            config=left.config,
            has_rebooted=bool(left.boot_id) and left.boot_id != self._world.boot_id,
            carries_on=left.config == name,
        )
        if left.config == name:
            self._left = left
            self._world.node.emit(
                reason="Recovered",
                message=f"carrying on with {name} after an interruption",
                is_warning=False,
            )
        else:
            self._undo(left)

    def _set_aside(self, found: Found) -> None:
        self._world.node.patch(found.set_aside)
        self._world.node.emit(
            reason="JournalUnreadable",
            message=f"what an interrupted run had noted makes no sense ({found.why_unreadable}): "
            "what is marked as ours is given back; the text is kept in the annotation "
            f"{cluster.UNREADABLE_JOURNAL_ANNOTATION}",
            is_warning=True,
        )

    def _undo(self, left: status.Journal) -> str:
        """Roll back and restore what a journal lists; return what stays due, and why.

        Raises:
            ClusterError: The API refused or does not answer.
            LockedError: Another manager is at work; nothing was undone.
        """
        undoing = self._new_run(left.config, left=left)
        with self._alone(f"undoing an interrupted change to {left.config or 'a layout'}"):
            said = undoing.settle()
        undoing.record.abandon()
        self._keep_due(undoing)
        if self._left == left:
            _log.warning("still_due", config=left.config, why=said)
            return said
        self._world.node.emit(
            reason="Recovered",
            message=f"gave back what an interrupted run for {left.config or 'a layout'} had taken"
            + (f"; {said}" if said else ""),
            is_warning=False,
        )
        return said if self._left else ""

    def rest(self) -> bool:
        """See to it that a node without a wish is at rest; call without a run.

        A run that was killed could not say how it ended, and one that gave way to a newer wish
        left that to the next run, which never comes once the label is removed. The same goes for
        what could not be undone or restored then: it is tried again here.

        Returns:
            Whether to come again, because something is still due that may succeed later.

        Raises:
            ClusterError: The API refused or does not answer.
            LockedError: Another manager is at work.
        """
        # Whatever is wanted next is a new wish.
        self._fulfilled = None
        if self._left is not None:
            self._undo(self._left)
        view = self._world.node.read()
        if self._is_closed or view.labels.get(cluster.STATE_LABEL) in _UNDER_WAY:
            self._end_pending("the label was removed")
        if self._world.slots is not None:
            self._world.slots.release()
        is_untold = self._tell_gpus(view)
        return is_untold or self._left is not None

    def stop(self) -> None:
        """Reopen a node that is closed until the next try of a drain; call when the agent ends.

        Raises:
            ClusterError: The API refused or does not answer; the journal is still there.
        """
        if self._is_closed:
            self._end_pending("the agent stopped during a drain")

    @property
    def _is_closed(self) -> bool:
        """Whether the last run left the node closed."""
        return self._left is not None and self._left.blocks_workloads

    def _tell_gpus(self, view: cluster.NodeView) -> bool:
        """Publish what GPUs there are: a rollout is planned before anybody has set a label.

        Returns:
            Whether that failed and may succeed later.
        """
        try:
            with self._alone("looking at the GPUs"):
                told = gpu_codec.to_json(self._world.gpus.observe())
        except (errors.HardwareError, errors.LockedError) as error:
            _log.info("gpus_not_told", reason=error.reason.value, error=error.message)
            return error.reason.is_transient
        if view.annotations.get(cluster.GPUS_ANNOTATION) != told:
            self._world.node.patch(cluster.NodePatch(annotations={cluster.GPUS_ANNOTATION: told}))
        return False

    def _end_pending(self, why: str) -> None:
        ended = record.Record(
            self._world.node,
            self._world.clock,
            journal=dataclasses.replace(self._left or status.Journal(config=""), config=""),
            telemetry=self._world.telemetry,
        )
        ended.finish(outcomes.failed(errors.Reason.INTERRUPTED, why))
        self._left = None if ended.journal.is_empty else ended.journal

    def run(
        self,
        name: str,
        wish: ports.Cancellation,
        *,
        attempt: int = 1,
        retry_after_s: float = 0.0,
        spares: bool = False,
    ) -> outcomes.Outcome:
        """Bring the layout ``name`` into force.

        Args:
            name: The layout, as the label names it.
            wish: Ends the run early, while that is free.
            attempt: Counts the tries at one wish, from 1.
            retry_after_s: When the next try is made, should this one fail for a passing reason.
            spares: Whether to let it be rather than make a pod leave. That is also so for a wish
                that had been fulfilled before this process began: nobody has wished anew.

        Returns:
            The outcome that was published.

        Raises:
            ClusterError: The outcome could not be published; the journal is still there.
            Superseded: The run ended early; everything was given back.
        """
        left, self._left = self._left, None
        attempted = record.Try(number=attempt, retry_after_s=retry_after_s)
        run = self._new_run(name, attempt=attempted, left=left)
        run.fulfilled = self._fulfilled
        run.rebooted = self._rebooted
        run.remembered = self._remembered
        if spares:
            run.spare_everybody()
        try:
            outcome = run.attempt(wish)
            self._remembered = run.record.gpus
        except errors.Superseded as end:
            self._remembered = run.record.gpus
            run.end_early(end)
            self._keep_due(run)
            raise
        is_drifted = outcome.reason is errors.Reason.DRIFTED
        self._world.telemetry.drift_found(is_drifted=is_drifted)
        run.record.finish(outcome)
        # A failure that can pass decides nothing: the retry serves the request of before.
        if not (is_drifted or outcome.should_retry):
            self._fulfilled = None
        self._keep_due(run)
        if outcome.state is model.State.SUCCESS:
            run.keep_for_next_boot()
        return outcome

    def look(self, name: str, ended: outcomes.Outcome) -> outcomes.Next:
        """Look at the GPUs at rest, and publish if they drifted from their layout.

        Args:
            name: The layout that the last run was about.
            ended: How that run ended: successfully, or for a reason that does not pass by itself.

        Returns:
            What is due now.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        run = self._new_run(name, left=self._left)
        try:
            with self._alone(f"looking whether {name} is in force"):
                seen = run.look()
            self._remembered = run.record.gpus
        except errors.LockedError:
            # Whatever the other manager makes of the GPUs is for the next look.
            return outcomes.Next.REST
        finding = self._lookout.judge(ended, seen)
        match finding:
            case outcomes.Finding.AS_BEFORE:
                return outcomes.Next.REST
            case outcomes.Finding.CHANGED:
                _log.info("hardware_changed", config=name)
                # For a GPU that is back, no pod of another must go.
                is_active = ended.state is model.State.SUCCESS
                return outcomes.Next.HEAL if is_active else outcomes.Next.RUN
            case outcomes.Finding.BACK:
                self._world.telemetry.drift_found(is_drifted=False)
                run.record.finish(
                    outcomes.succeeded(
                        name,
                        errors.Reason.ALREADY_APPLIED,
                        "is back in force",
                        gpus=run.record.gpus,
                    )
                )
                return outcomes.Next.REST
            case outcomes.Finding.DRIFTED | outcomes.Finding.STILL_DRIFTED:
                return self._drifted(run, is_new=finding is outcomes.Finding.DRIFTED)

    def _drifted(self, run: runs.Run, *, is_new: bool) -> outcomes.Next:
        in_the_way = run.in_the_way() if self._limits.heals_drift else ()
        if self._limits.heals_drift and not in_the_way:
            return outcomes.Next.HEAL
        if is_new:
            self._world.telemetry.drift_found(is_drifted=True)
            _log.warning("drift_found", config=run.name, pods=in_the_way)
            run.record.finish(outcomes.drifted(run.name, in_the_way))
        return outcomes.Next.REST

    def _alone(self, doing: str) -> contextlib.AbstractContextManager[None]:
        if self._world.exclusion is None:
            return contextlib.nullcontext()
        return self._world.exclusion.hold(doing)

    def _keep_due(self, run: runs.Run) -> None:
        journal = run.record.journal
        self._left = None if journal.is_empty else journal
        if self._world.slots is not None and not journal.blocks_workloads:
            self._world.slots.release()

    def _new_run(
        self,
        name: str,
        *,
        attempt: record.Try | None = None,
        left: status.Journal | None = None,
    ) -> runs.Run:
        journal = left or status.Journal(config=name)
        written = record.Record(
            self._world.node,
            self._world.clock,
            journal=dataclasses.replace(
                journal,
                config=name,
                boot_id=self._world.boot_id,
                draining=journal.draining and journal.config == name,
            ),
            attempt=attempt,
            telemetry=self._world.telemetry,
        )
        return runs.Run(self._world, self._limits, self._daemons, name=name, written=written)
