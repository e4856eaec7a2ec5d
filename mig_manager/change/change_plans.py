"""The plans of one change: those executed, and the next one."""

import dataclasses

from mig_manager import errors, reasons
from mig_manager.core import model, steps

_MAX_PLANS = 3  # the mode, then instances whose profiles are known only then, and one to spare


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedPlan:
    """A plan that was executed."""

    plan: steps.Plan
    gpus: model.ObservedGpus  # before the plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NextPlan:
    """The next plan of a change; without steps, if the target is reached."""

    plan: steps.Plan
    gpus: model.ObservedGpus  # before the plan
    snapshots: model.Snapshots  # the GPUs that a rollback restores once the plan has begun
    earlier: model.Snapshots
    """``snapshots`` without this plan: the rollback until it has begun. The instances that a stale
    plan would create belong to another program."""
    executed: tuple[ExecutedPlan, ...] = ()
    is_first_part: bool = False  # whether it only changes the MIG mode, because hooks run after it

    def require_progress(
        self, after: model.ObservedGpus, rest: steps.Plan, *, was_reset: bool
    ) -> None:
        """Fail unless the remaining steps were impossible before this plan.

        Raises:
            HardwareError: GPU_NEEDS_RESET, although it was reset; VERIFY_FAILED.
        """
        if was_reset and any(gpu_plan.is_repair for gpu_plan in rest.gpus):
            raise errors.HardwareError(
                "the GPU still needs a reset, although it was reset",
                reason=reasons.Reason.GPU_NEEDS_RESET,
            )
        is_more_known = self.plan.is_provisional and not rest.is_provisional
        is_last = len(self.executed) + 1 == _MAX_PLANS
        if is_last or not (was_reset or is_more_known or self.is_first_part):
            raise errors.HardwareError(
                "the layout is not active, although every step succeeded, on "
                + ", ".join(str(gpu) for gpu in after if gpu.uuid in rest.gpu_uuids),
                reason=reasons.Reason.VERIFY_FAILED,
            )
