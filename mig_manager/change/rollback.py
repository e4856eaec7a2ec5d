"""Roll back a change: restore the GPUs to a snapshot, and verify them.

A rollback removes only instances that the change created. It names and keeps instances of other
programs.
"""

import contextlib
import dataclasses

import structlog

from mig_manager import errors
from mig_manager.change import execution
from mig_manager.core import model, steps, timing
from mig_manager.core.planner import planner

_log = structlog.get_logger()

_PAUSES_S = (1.0, 2.0)
"""Before the second and third attempt, however long the previous one took: the driver may need
time to recover."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """The outcome of a rollback."""

    is_complete: bool  # whether the reachable GPUs have exactly their former instances
    message: str  # as a part of a sentence
    foreign: tuple[str, ...] = ()
    """Instances that were kept because the change did not create them."""
    unrestored: tuple[model.GpuSnapshot, ...] = ()
    """Snapshots of unreachable GPUs, to be restored once they are back."""
    gpus: model.ObservedGpus = model.NO_GPUS  # as last observed


@dataclasses.dataclass(slots=True, kw_only=True)
class Restore:
    """One rollback."""

    executing: execution.Execution
    clock: timing.Clock
    before: tuple[model.GpuSnapshot, ...]
    keep_pending: bool
    requires_idle: bool
    is_begun: bool = False  # whether a step may have been executed
    now: model.ObservedGpus = model.NO_GPUS

    @property
    def foreign(self) -> tuple[str, ...]:
        """Instances that the change did not create, as last observed."""
        return planner.unowned_instances(self.now, self.before)

    def run(self) -> Rollback:
        """Restore the GPUs, and verify them."""
        pauses_s = iter(_PAUSES_S)
        while True:
            try:
                return self._success(self._restore())
            except errors.MigManagerError as error:
                pause_s = next(pauses_s, None)
                # The run itself waits for processes that use instances to be removed. A hung
                # driver costs a whole deadline for each attempt, so a later run retries.
                is_retried = error.reason.is_transient and not isinstance(
                    error, errors.GpuInUseError
                )
                is_hung = error.reason is errors.Reason.NVML_TIMEOUT
                if pause_s is None or is_hung or not is_retried:
                    return self._failure(error)
            self.clock.wait(pause_s)

    def _success(self, message: str) -> Rollback:
        """Return the success, with the snapshots of unreachable GPUs."""
        if self.foreign:
            return _with_foreign(message, self.foreign, self.now)
        unrestored = self.now.unreachable_snapshots(self.before)
        if unrestored:
            lost = "; ".join(gpu.sentence for gpu in self.now.unreachable)
            described = "; ".join(map(_describe, unrestored))
            message += f" on the reachable GPUs; {lost}; still to restore: {described}"
        return Rollback(is_complete=True, message=message, unrestored=unrestored, gpus=self.now)

    def _restore(self) -> str:
        """Restore and verify once; return the outcome as a part of a sentence."""
        gpus = self.executing.gpus
        plan = self._plan(gpus.observe())
        if plan.is_empty and not self.is_begun:
            return (
                "only the new mode stays pending" if self.keep_pending else "nothing was changed"
            )
        if not plan.is_empty:
            requires_idle = self.requires_idle and not self.is_begun
            guarded = dataclasses.replace(plan, requires_idle=requires_idle)
            try:
                now, was_reset = self.executing.run(guarded, self.now)
            except errors.MigManagerError as error:
                self.is_begun |= not isinstance(error, execution.REFUSALS)
                raise
            self.is_begun = True
            plan = self._plan(now)
            if was_reset and not plan.is_empty:
                plan = self._plan(now.with_newer(gpus.execute(plan, now)))
        if plan.is_empty:
            return "the former instances are restored"
        raise errors.HardwareError(
            "every step succeeded, but the former instances are not restored",
            reason=errors.Reason.VERIFY_FAILED,
        )

    def _failure(self, error: errors.MigManagerError) -> Rollback:
        """Return the failure, with the remaining steps if the GPUs can be observed."""
        _log.warning("rollback_failed", reason=error.reason.value, error=error.message)
        message = f"the rollback failed as well: {error.message}"
        # A driver that has just hung would hang again.
        if error.reason is not errors.Reason.NVML_TIMEOUT:
            with contextlib.suppress(errors.MigManagerError):
                plan = self._plan(self.executing.gpus.observe())
                if remaining := "; ".join(
                    f"GPU {gpu.gpu_index}: {', '.join(map(steps.describe, gpu.steps))}"
                    for gpu in plan.gpus
                    if gpu.steps
                ):
                    message += f"; still to do: {remaining}"
        return Rollback(is_complete=False, message=message, foreign=self.foreign, gpus=self.now)

    def _plan(self, now: model.ObservedGpus) -> steps.Plan:
        self.now = now
        return planner.restore(now, self.before, keep_pending=self.keep_pending)


def verify_without_steps(
    now: model.ObservedGpus, before: tuple[model.GpuSnapshot, ...]
) -> Rollback:
    """Return the outcome for GPUs that need no step; a foreign instance makes it incomplete."""
    foreign = planner.unowned_instances(now, before)
    if foreign:
        return _with_foreign("the former instances are restored", foreign, now)
    return Rollback(is_complete=True, message="", unrestored=now.unreachable_snapshots(before))


def _with_foreign(message: str, foreign: tuple[str, ...], now: model.ObservedGpus) -> Rollback:
    _log.warning("foreign_instances_kept", instances=foreign)
    why = (
        "is new, and is kept because this change did not create it"
        if len(foreign) == 1
        else "are new, and are kept because this change did not create them"
    )
    return Rollback(
        is_complete=False,
        message=f"{message}; {', '.join(foreign)} {why}",
        foreign=foreign,
        gpus=now,
    )


def _describe(gpu: model.GpuSnapshot) -> str:
    mode = gpu.current_mode.value if gpu.current_mode else "unsupported"
    instances = ", ".join(f"{each.profile} at {each.placement}" for each in gpu.gpu_instances)
    return f"{gpu.uuid}: MIG {mode}, {instances or 'no instance'}"
