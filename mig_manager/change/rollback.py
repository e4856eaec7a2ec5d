"""Roll back a change: restore the GPUs to their snapshots, and verify them.

A rollback removes only instances that the change created. It names and keeps instances of other
programs.
"""

import contextlib
import dataclasses

import structlog

from mig_manager import errors, reasons
from mig_manager.change import plan_executor
from mig_manager.core import model, steps
from mig_manager.core.planner import planner

_log = structlog.get_logger()

_PAUSES_S = (1.0, 2.0)
"""The pause before the second and third try, however long the previous one took: the driver
may need time to recover."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RollbackOutcome:
    """The outcome of a rollback."""

    is_complete: bool  # whether the reachable GPUs have exactly their former instances
    message: str  # as a part of a sentence
    has_begun: bool = False  # whether a step may have been executed
    unowned: tuple[str, ...] = ()
    """Instances that were kept because the change did not create them."""
    unrestored: model.Snapshots = ()
    """Snapshots of unreachable GPUs, to be restored once they are back."""
    gpus: model.ObservedGpus = model.NO_GPUS  # as last observed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """One rollback."""

    executor: plan_executor.PlanExecutor
    snapshots: model.Snapshots
    keep_pending: bool
    requires_idle: bool

    def run(self) -> RollbackOutcome:
        """Restore the GPUs, and verify them."""
        now = model.NO_GPUS
        has_begun = False
        pauses_s = iter(_PAUSES_S)
        while True:
            is_executing = False
            try:
                now = self.executor.gpus.observe()
                plan = self._plan(now)
                if not plan.is_empty:
                    is_executing = True
                    now = self._execute(plan, now, has_begun=has_begun)
                    has_begun = True
                    self._verify(now)
                result = self._success(now, has_begun=has_begun)
                return dataclasses.replace(result, has_begun=has_begun)
            except errors.MigManagerError as error:
                has_begun |= is_executing and not isinstance(error, plan_executor.REFUSALS)
                pause_s = next(pauses_s, None)
                if pause_s is None or not _is_retried(error):
                    return dataclasses.replace(self._failure(error, now), has_begun=has_begun)
            self.executor.clock.wait(pause_s)

    def _success(self, now: model.ObservedGpus, *, has_begun: bool) -> RollbackOutcome:
        """Return the success, with the snapshots of unreachable GPUs."""
        message = "the former instances are restored"
        if not has_begun:
            message = (
                "only the new mode stays pending" if self.keep_pending else "nothing was changed"
            )
        result = _conclude(message, now, self.snapshots)
        if not result.unrestored:
            return result
        lost = "; ".join(gpu.sentence for gpu in now.unreachable)
        described = "; ".join(map(_describe, result.unrestored))
        message += f" on the reachable GPUs; {lost}; still to restore: {described}"
        return dataclasses.replace(result, message=message)

    def _execute(
        self, plan: steps.Plan, now: model.ObservedGpus, *, has_begun: bool
    ) -> model.ObservedGpus:
        guarded = dataclasses.replace(plan, requires_idle=self.requires_idle and not has_begun)
        after, was_reset = self.executor.run(guarded, now)
        rest = self._plan(after)
        if was_reset and not rest.is_empty:
            return after.with_newer(self.executor.gpus.execute(rest, after))
        return after

    def _verify(self, now: model.ObservedGpus) -> None:
        if not self._plan(now).is_empty:
            raise errors.HardwareError(
                "every step succeeded, but the former instances are not restored",
                reason=reasons.Reason.VERIFY_FAILED,
            )

    def _failure(self, error: errors.MigManagerError, now: model.ObservedGpus) -> RollbackOutcome:
        """Return the failure, with the remaining steps if the GPUs can be observed."""
        _log.warning("rollback_failed", reason=error.reason.value, error=error.message)
        message = f"the rollback failed as well: {error.message}"
        # A driver that has just hung would hang again.
        if error.reason is not reasons.Reason.NVML_TIMEOUT:
            with contextlib.suppress(errors.MigManagerError):
                now = self.executor.gpus.observe()
                if remaining := "; ".join(
                    f"GPU {gpu.gpu_index}: {', '.join(map(steps.describe, gpu.steps))}"
                    for gpu in self._plan(now).gpus
                    if gpu.steps
                ):
                    message += f"; still to do: {remaining}"
        return RollbackOutcome(
            is_complete=False,
            message=message,
            unowned=planner.unowned_instances(now, self.snapshots),
            gpus=now,
        )

    def _plan(self, now: model.ObservedGpus) -> steps.Plan:
        return planner.restore(now, self.snapshots, keep_pending=self.keep_pending)


def _is_retried(error: errors.MigManagerError) -> bool:
    """Return whether to restore again after an error.

    The run itself waits for processes that use instances to be removed. A hung driver costs a
    whole deadline for each attempt, so a later run retries.
    """
    is_in_use = isinstance(error, errors.GpuInUseError)
    is_hung = error.reason is reasons.Reason.NVML_TIMEOUT
    return error.reason.is_transient and not (is_in_use or is_hung)


def verify_without_steps(now: model.ObservedGpus, snapshots: model.Snapshots) -> RollbackOutcome:
    """Return the outcome for GPUs that need no step; an unowned instance makes it incomplete."""
    result = _conclude("the former instances are restored", now, snapshots)
    return result if result.unowned else dataclasses.replace(result, message="")


def _conclude(
    message: str, now: model.ObservedGpus, snapshots: model.Snapshots
) -> RollbackOutcome:
    """Return the outcome for GPUs that need no further step."""
    unowned = planner.unowned_instances(now, snapshots)
    if not unowned:
        unrestored = now.unreachable_snapshots(snapshots)
        return RollbackOutcome(is_complete=True, message=message, unrestored=unrestored, gpus=now)
    _log.warning("unowned_instances_kept", instances=unowned)
    why = (
        "is new, and is kept because this change did not create it"
        if len(unowned) == 1
        else "are new, and are kept because this change did not create them"
    )
    return RollbackOutcome(
        is_complete=False,
        message=f"{message}; {', '.join(unowned)} {why}",
        unowned=unowned,
        gpus=now,
    )


def _describe(gpu: model.GpuSnapshot) -> str:
    mode = gpu.current_mode.value if gpu.current_mode else "unsupported"
    instances = ", ".join(f"{each.profile} at {each.placement}" for each in gpu.gpu_instances)
    return f"{gpu.uuid}: MIG {mode}, {instances or 'no instance'}"
