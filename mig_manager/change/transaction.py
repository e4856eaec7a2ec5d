"""One change of the GPUs, all or nothing: journal, execute, verify, roll back on failure.

Agent, ``apply``, ``restore`` and ``boot`` all use this transaction. They differ before and after
it, in the target, and in where they keep the journal: in a file or on the Node.
"""

import dataclasses
from collections.abc import Callable

import structlog

from mig_manager import errors, reasons
from mig_manager.change import change_plans, change_recorder, hook_points, plan_executor, rollback
from mig_manager.core import messages, model, steps, timing
from mig_manager.core.planner import planner, vgpus

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True)
class ChangeTarget:
    """The target of a change: the steps towards it, and which instances may stay unrestored."""

    plan: Callable[[model.ObservedGpus], steps.Plan]
    """Plans the steps that remain; without any, the target is reached. LayoutError: impossible."""
    unrestored_snapshots: Callable[[model.ObservedGpus, model.Snapshots], model.Snapshots]
    """Returns the GPUs that the journal keeps for a later change, if this one succeeds; gets the
    GPUs now, and before the change."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """Changes GPUs, or rolls them back; the caller holds the node's lock (``node_lock.hold``)."""

    executor: plan_executor.PlanExecutor
    recorder: change_recorder.ChangeRecorder
    refresh_files: Callable[[], object] | None
    """Brings device nodes and CDI specs up to date; None: the caller does, after more changes."""
    idle_wait: timing.Wait  # for processes that use instances to be destroyed
    kept_snapshots: model.Snapshots = ()
    """Snapshots of other changes in the same journal; after ``run`` its target keeps them."""

    def run(
        self,
        first_plan: steps.Plan,
        target: ChangeTarget,
        *,
        observed: model.ObservedGpus,
        interrupted: model.Snapshots = (),
        points: hook_points.HookPoints | None = None,
        is_resumed: Callable[[errors.MigManagerError], bool] = lambda _error: False,
    ) -> tuple[model.ObservedGpus, tuple[change_plans.ExecutedPlan, ...]]:
        """Execute a plan, and a second one if the driver reports profiles only with MIG on.

        The caller then calls ``refresh``, if anything was executed.

        Args:
            first_plan: The plan. If it is empty, nothing is executed.
            target: Plans the rest; an empty plan verifies that it is reached.
            observed: The GPUs that the plan was made for. GPUs without steps are not observed
                again: the drift check detects changes by other programs.
            interrupted: The GPUs before an interrupted change, which a rollback restores.
            points: Where hooks run; None: no hooks.
            is_resumed: Returns whether a later change goes on from the journal after an error, so
                that nothing is rolled back.

        Returns:
            The GPUs afterwards, and the plans that were executed.

        Raises:
            GpuInUseError: Processes or pods use devices to be destroyed; nothing was touched.
            OutdatedPlanError: An instance that the plan creates exists; nothing was touched.
            HardwareError: A step failed, or the layout is not active although all succeeded
                (VERIFY_FAILED). The message says how the rollback went. A mode that needs a reset
                (RESET_REQUIRED) stays pending.
            HostError: A reset was refused, and the mode stays pending; or a hook failed.
            LayoutError: The second plan is impossible.
            MigManagerError: The journal cannot be written.
            Superseded: The change was superseded before its first step, or while a hook ran.
        """
        points = points or hook_points.HookPoints()
        current = self._begin(first_plan, observed, interrupted)
        if part := points.first_part(first_plan):
            current = dataclasses.replace(current, plan=part, is_first_part=True)
        has_begun = False
        try:
            while not current.plan.is_empty:
                points.before(current.plan)
                has_begun = True
                current = self._execute(current, target)
                has_begun = False
        except errors.Superseded as end:
            _log.info("change_superseded", why=end.why)
            self._undo_plan(current, has_begun=False)
            raise
        except errors.MigManagerError as error:
            if not is_resumed(error):
                has_begun = has_begun and not isinstance(error, plan_executor.REFUSALS)
                self._roll_back_after(error, current, first_plan, observed, has_begun=has_begun)
            # The error of the change, with what became of the rollback.
            raise
        unrestored = target.unrestored_snapshots(current.gpus, current.snapshots)
        self._keep(unrestored, is_verified=True, is_stale=bool(current.executed))
        return current.gpus, current.executed

    def _begin(
        self,
        plan: steps.Plan,
        gpus: model.ObservedGpus,
        earlier: model.Snapshots,
        executed: tuple[change_plans.ExecutedPlan, ...] = (),
    ) -> change_plans.NextPlan:
        """Write the snapshots that a rollback restores once a plan is executed."""
        snapshots = planner.baseline(plan, gpus, earlier)
        if snapshots != earlier or not (executed or plan.is_empty):
            self.recorder.begin_execution(self._with_kept(snapshots), plan)
        return change_plans.NextPlan(
            plan=plan,
            gpus=gpus,
            snapshots=snapshots,
            earlier=planner.trim(gpus, earlier),
            executed=executed,
        )

    def _execute(
        self, current: change_plans.NextPlan, target: ChangeTarget
    ) -> change_plans.NextPlan:
        """Execute a plan once no process or pod uses the instances that it destroys.

        The executor checks processes in the NVML session of the change, so no process can start in
        between.
        """
        guarded = dataclasses.replace(current.plan, requires_idle=True)
        after, was_reset = self.idle_wait.retry(
            lambda: self.executor.run(guarded, current.gpus),
            may_pass=lambda error: isinstance(error, errors.GpuInUseError),
        )
        rest = target.plan(after)
        if not rest.is_empty:
            current.require_progress(after, rest, was_reset=was_reset)
        executed = (
            *current.executed,
            change_plans.ExecutedPlan(plan=current.plan, gpus=current.gpus),
        )
        return self._begin(rest, after, current.snapshots, executed)

    def _roll_back_after(
        self,
        error: errors.MigManagerError,
        current: change_plans.NextPlan,
        first_plan: steps.Plan,
        observed: model.ObservedGpus,
        *,
        has_begun: bool,
    ) -> None:
        """Roll back, and add the outcome to the error of the change.

        Raises:
            HardwareError: VERIFY_FAILED: another program has created instances.
        """
        _log.info("change_failed", reason=error.reason.value, error=error.message)
        # A reboot activates a pending mode; cancelling the mode would waste the reboot.
        result = (
            self._undo_instances(current.snapshots, first_plan, observed)
            if error.reason.is_mode_pending
            else self._undo_plan(current, has_begun=has_begun)
        )
        for text in (result.message, *vgpus.host_warnings(observed, first_plan)):
            error.add(text)
        if result.unowned and not error.reason.is_mode_pending:
            raise errors.HardwareError(
                error.message, reason=reasons.Reason.VERIFY_FAILED
            ) from error

    def _undo_plan(
        self, current: change_plans.NextPlan, *, has_begun: bool
    ) -> rollback.RollbackOutcome:
        """Roll back; ``has_begun`` is whether a step of the plan may have been executed."""
        if has_begun:
            return self.roll_back(current.snapshots)
        nothing = rollback.RollbackOutcome(is_complete=True, message="nothing was changed")
        earlier = self._with_kept(current.earlier)
        result = _with_failure(nothing, lambda: self._keep(earlier))
        if not current.earlier:
            return result
        # The devices of an interrupted change may be in use by now.
        return self.roll_back(current.earlier, requires_idle=not current.executed)

    def _undo_instances(
        self, snapshots: model.Snapshots, first_plan: steps.Plan, observed: model.ObservedGpus
    ) -> rollback.RollbackOutcome:
        """Roll back, but keep the modes that wait for a reset or a reboot.

        The reset or reboot would also activate a mode that is restored now. So where an
        interrupted change has set a mode that this plan keeps, the GPU returns to how it was
        ``observed``. The journal keeps its snapshot for a later rollback.
        """
        at_start = {gpu.uuid: gpu.snapshot for gpu in observed}
        new_modes = {step.gpu_uuid: step.mode for step in first_plan.of(steps.SetMode)}
        target = tuple(
            dataclasses.replace(at_start[gpu.uuid], created=gpu.created)
            if gpu.uuid in at_start
            and gpu.current_mode not in (at_start[gpu.uuid].current_mode, new_modes.get(gpu.uuid))
            else gpu
            for gpu in snapshots
        )
        result = self.roll_back(target, keep_pending=True)
        if target == snapshots:
            return result
        unrestored = self._with_kept(planner.trim(result.gpus, snapshots))
        return _with_failure(result, lambda: self._keep(unrestored))

    def roll_back(
        self,
        snapshots: model.Snapshots,
        *,
        keep_pending: bool = False,
        requires_idle: bool = False,
    ) -> rollback.RollbackOutcome:
        """Restore snapshots, and retry if the failure is transient."""
        self.recorder.begin_rollback()
        result = rollback.Rollback(
            executor=self.executor,
            snapshots=snapshots,
            keep_pending=keep_pending,
            requires_idle=requires_idle,
        ).run()
        if result.gpus != model.NO_GPUS:
            self.recorder.set_status(observed_gpus=result.gpus)
        if result.has_begun or result.is_complete:
            return self.conclude(result)
        # Instances that others create from now on must not count as the change's.
        unrestored = planner.trim(result.gpus, self.recorder.journal.gpus.snapshots)
        return _with_failure(result, lambda: self._keep(unrestored))

    def conclude(self, result: rollback.RollbackOutcome) -> rollback.RollbackOutcome:
        """Record the end of a rollback and refresh device files; return it with their failures."""
        unrestored = (
            self._with_kept(result.unrestored)
            if result.is_complete
            else planner.trim(result.gpus, self.recorder.journal.gpus.snapshots)
        )
        result = _with_failure(result, lambda: self._keep(unrestored, is_stale=True))
        return _with_failure(result, self.refresh)

    def _with_kept(self, snapshots: model.Snapshots) -> model.Snapshots:
        """Add the kept snapshots, of other GPUs."""
        uuids = {gpu.uuid for gpu in snapshots}
        return (*(gpu for gpu in self.kept_snapshots if gpu.uuid not in uuids), *snapshots)

    def _keep(
        self, snapshots: model.Snapshots, *, is_verified: bool = False, is_stale: bool = False
    ) -> None:
        """Record snapshots for a later rollback, and whether device files became stale."""
        gpus = self.recorder.journal.gpus
        self.recorder.set_journal(
            gpus=dataclasses.replace(
                gpus,
                snapshots=snapshots,
                is_verified=is_verified or gpus.is_verified,
                has_stale_files=is_stale or gpus.has_stale_files,
            )
        )

    def refresh(self) -> None:
        """Refresh device nodes and CDI specs; HostError (DEVICE_FILES_FAILED) if that fails."""
        if self.refresh_files is not None:
            self.refresh_files()
            gpus = dataclasses.replace(self.recorder.journal.gpus, has_stale_files=False)
            self.recorder.set_journal(gpus=gpus)


def _with_failure(
    result: rollback.RollbackOutcome, act: Callable[[], object]
) -> rollback.RollbackOutcome:
    """Act after a rollback, and add a failure to its outcome.

    Raised, it would replace the failure of the change. The journal keeps the snapshots
    that ``begin_execution`` wrote.
    """
    try:
        act()
    except errors.MigManagerError as error:
        if error.message not in result.message:
            message = messages.join(result.message, error.message)
            return dataclasses.replace(result, message=message)
    return result
