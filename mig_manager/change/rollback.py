"""Restore what GPUs had before a change, in several attempts where a failure can pass.

A rollback removes only what the change created. An instance that another program made meanwhile
is named and kept.
"""

import dataclasses
from collections.abc import Callable, Sequence

import structlog

from mig_manager import errors
from mig_manager.core import model, ports, steps, timing
from mig_manager.core.planner import planner

_ATTEMPTS = 3
_PAUSE_S = 1.0

_log = structlog.get_logger()

Snapshot = Sequence[model.GpuSnapshot]
Execute = Callable[[steps.Plan, model.ObservedGpus], tuple[model.ObservedGpus, bool]]
"""Executes a plan, resets included; see ``transaction.Transaction.execute``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """How a rollback went."""

    is_complete: bool
    """Whether the reachable GPUs are as they were, without another instance."""
    message: str
    """As a part of a sentence."""
    foreign: tuple[str, ...] = ()
    """Instances that were kept because the change did not create them."""
    unrestored: tuple[model.GpuSnapshot, ...] = ()
    """What GPUs had that are unreachable now, to be restored once they are back."""


def without_steps(now: model.ObservedGpus, before: Snapshot) -> Rollback:
    """Return the rollback of GPUs that need no step; another instance leaves it incomplete."""
    foreign = planner.unowned_instances(now, before)
    if foreign:
        return _with_foreign("the instances from before are back", foreign)
    return Rollback(is_complete=True, message="", unrestored=now.missing(before))


class Restore:
    """One rollback."""

    def __init__(
        self,
        gpus: ports.Gpus,
        execute: Execute,
        clock: timing.Clock,
        before: Snapshot,
        *,
        keep_pending: bool,
        requires_idle: bool,
    ) -> None:
        self._gpus = gpus
        self._execute = execute
        self._clock = clock
        self._before = before
        self._keep_pending = keep_pending
        self._requires_idle = requires_idle
        self._foreign: tuple[str, ...] = ()
        self._now = model.NO_GPUS
        self._is_begun = False

    @property
    def is_begun(self) -> bool:
        """Whether any step may have been executed."""
        return self._is_begun

    def run(self) -> Rollback:
        """Restore the GPUs, and verify them."""
        try:
            message = self._retry()
        except errors.MigManagerError as error:
            _log.warning("rollback_failed", reason=error.reason.value, error=error.message)
            # A driver that has just hung would hang again when asked what remains.
            hangs = error.reason is errors.Reason.NVML_TIMEOUT
            message = f"the rollback failed as well: {error.message}"
            message += "" if hangs else self._remaining()
            return Rollback(is_complete=False, message=message, foreign=self._foreign)
        if self._foreign:
            return _with_foreign(message, self._foreign)
        unrestored = self._now.missing(self._before)
        if unrestored:
            lost = "; ".join(gpu.sentence for gpu in self._now.unreachable)
            described = "; ".join(map(_described, unrestored))
            message += f" on the GPUs that answer; {lost}; to restore once it is back: {described}"
        return Rollback(is_complete=True, message=message, unrestored=unrestored)

    def _retry(self) -> str:
        attempt = 1
        while True:
            try:
                return self._restore()
            except errors.MigManagerError as error:
                if attempt == _ATTEMPTS or not _may_pass(error):
                    raise
            self._clock.wait(_PAUSE_S * 2 ** (attempt - 1))
            attempt += 1

    def _restore(self) -> str:
        """Restore and verify once; return how it went.

        Raises:
            MigManagerError: Something is not restored.
        """
        now = self._gpus.observe()
        plan = self._plan(now)
        if plan.is_empty and not self._is_begun:
            return (
                "only the new mode stays pending" if self._keep_pending else "nothing was changed"
            )
        if not plan.is_empty:
            now, was_reset = self._execute_idle(plan, now)
            plan = self._plan(now)
            if was_reset and not plan.is_empty:
                plan = self._plan(now.updated(self._gpus.execute(plan, now)))
        if plan.is_empty:
            return "the instances from before are back"
        raise errors.HardwareError(
            "every step succeeded, but the instances from before are not back",
            reason=errors.Reason.VERIFY_FAILED,
        )

    def _execute_idle(
        self, plan: steps.Plan, now: model.ObservedGpus
    ) -> tuple[model.ObservedGpus, bool]:
        requires_idle = self._requires_idle and not self._is_begun
        try:
            result = self._execute(dataclasses.replace(plan, requires_idle=requires_idle), now)
        except errors.GpuInUseError:
            raise
        except BaseException:
            self._is_begun = True
            raise
        self._is_begun = True
        return result

    def _remaining(self) -> str:
        """Return the steps that remain; empty where the GPUs cannot be observed."""
        try:
            plan = self._plan(self._gpus.observe())
        except errors.MigManagerError:
            return ""
        remaining = [
            f"GPU {gpu.gpu_index}: {', '.join(map(steps.describe, gpu.steps))}"
            for gpu in plan.gpus
            if gpu.steps
        ]
        return f"; still to do: {'; '.join(remaining)}" if remaining else ""

    def _plan(self, now: model.ObservedGpus) -> steps.Plan:
        self._now = now
        self._foreign = planner.unowned_instances(now, self._before)
        return planner.restore(now, self._before, keep_pending=self._keep_pending)


def _described(gpu: model.GpuSnapshot) -> str:
    mode = gpu.current_mode.value if gpu.current_mode else "unsupported"
    instances = ", ".join(f"{each.profile} at {each.placement}" for each in gpu.gpu_instances)
    return f"{gpu.uuid}: MIG {mode}, {instances or 'no instance'}"


def _with_foreign(message: str, foreign: tuple[str, ...]) -> Rollback:
    _log.warning("foreign_instances_kept", instances=foreign)
    return Rollback(
        is_complete=False,
        message=f"{message}; {', '.join(foreign)} was not there before, and is kept because this "
        "change did not create it",
        foreign=foreign,
    )


def _may_pass(error: errors.MigManagerError) -> bool:
    # A driver that hangs costs a whole deadline at each attempt: a later run tries again. The same
    # run waits for processes that use what the rollback would remove.
    return (
        error.reason.is_transient
        and error.reason is not errors.Reason.NVML_TIMEOUT
        and not isinstance(error, errors.GpuInUseError)
    )
