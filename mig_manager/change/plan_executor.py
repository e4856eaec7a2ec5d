"""Execute one plan, and reset its GPUs with a pending mode, or to be repaired."""

import dataclasses
from collections.abc import Callable, Collection, Iterable

import structlog

from mig_manager import errors, reasons
from mig_manager.core import model, ports, steps, timing

_log = structlog.get_logger()

REFUSALS = (errors.GpuInUseError, errors.OutdatedPlanError)
"""Errors that are raised before the first step of a plan."""

RequireUnused = Callable[[Collection[str], model.ObservedGpus], object]
"""Raises ``GpuInUseError`` if pods have, or may have, one of the devices with these ids."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanExecutor:
    """Executes plans, one after the other."""

    gpus: ports.Gpus
    reset: ports.GpuReset | None
    """Resets GPUs with a pending mode; None: the mode stays pending, and no GPU is repaired."""
    record_persistence: ports.RecordPersistence
    clock: timing.Clock
    require_unused: RequireUnused | None = None  # asks kubelet; None: nothing to check
    in_use_timeout_s: float | None = None
    """How long to retry what the driver refuses as in use, with ``require_unused`` before each
    retry; None: the executor retries."""
    may_stay_pending: bool = False  # whether a mode may stay pending until a reset or a reboot

    def run(
        self, plan: steps.Plan, observed: model.ObservedGpus
    ) -> tuple[model.ObservedGpus, bool]:
        """Execute a plan, and reset its GPUs with a pending mode, or to be repaired.

        A mode that the driver reports as in use is pending as well: ``nvidia-persistenced`` and
        the kernel's persistence mode keep an Ampere GPU open. They close it only for a reset by
        nvidia-smi (gpu-operator#118). The reset names any other process that blocks it, and kills
        none.

        Returns:
            The GPUs afterwards, and whether the rest of the plan remains after a reset. GPUs
            without steps are not observed again.

        Raises:
            GpuInUseError: Processes or pods use devices to be destroyed; nothing was touched.
            OutdatedPlanError: An instance that the plan creates exists; nothing was touched.
            HardwareError: A step failed; RESET_REQUIRED: a mode stays pending.
            HostError: A reset was refused.
        """
        is_repair = any(gpu_plan.is_repair for gpu_plan in plan.gpus)
        for gpu_plan in plan.gpus:
            for step in gpu_plan.steps:
                _log.debug(
                    "step_planned",
                    gpu=gpu_plan.gpu_uuid,
                    index=gpu_plan.gpu_index,
                    step=steps.describe(step),
                )
        try:
            after = observed.with_newer(self._execute(plan, observed))
            _log.debug("plan_executed", gpus=[gpu_plan.gpu_uuid for gpu_plan in plan.gpus])
            return (self._repair(plan, observed), True) if is_repair else (after, False)
        except REFUSALS:
            raise
        except errors.HardwareError as error:
            if is_repair and error.reason is not reasons.Reason.IN_USE:
                # The reset removes the instances that the fault kept the driver from destroying.
                _log.warning("reset_with_instances", error=error.message)
                return self._repair(plan, observed), True
            is_put_off = error.reason.is_mode_pending or error.reason is reasons.Reason.IN_USE
            if self.may_stay_pending and is_put_off:
                now = self._observe_again(plan, observed)
                if _lacks_only_modes(plan, now):
                    return now, False
            if self._are_unused(plan, observed, error):
                self._reset_pending(plan, error)
                return self._observe_again(plan, observed), True
            raise

    def _execute(self, plan: steps.Plan, observed: model.ObservedGpus) -> model.ObservedGpus:
        """Execute a plan; while instances are in use, ask which pods have them before each retry.

        The executor's own retries take long enough for a plugin that is not paused to give a pod a
        device.
        """
        if plan.requires_idle and self.require_unused is not None:
            self.require_unused(plan.affected_ids(observed), observed)
        if not plan.requires_idle or self.in_use_timeout_s is None:
            return self.gpus.execute(plan, observed)
        remaining = dataclasses.replace(plan, in_use_timeout_s=0.0)
        tries = timing.Wait(clock=self.clock, timeout_s=self.in_use_timeout_s).tries()
        while True:
            is_last = next(tries)
            try:
                return self.gpus.execute(remaining, observed)
            except REFUSALS:
                raise
            except errors.HardwareError as error:
                is_final = is_last or error.reason is not reasons.Reason.IN_USE
                if is_final or not self._are_unused(plan, observed, error):
                    raise
            # Its own steps may have created instances.
            remaining = dataclasses.replace(remaining, requires_idle=False)

    def _are_unused(
        self, plan: steps.Plan, observed: model.ObservedGpus, error: errors.HardwareError
    ) -> bool:
        """Return whether no pod has got a device since; else add the pods to the error."""
        if self.require_unused is None or not plan.requires_idle:
            return True
        try:
            self.require_unused(plan.affected_ids(observed), observed)
        except errors.GpuInUseError as refusal:
            if refusal.message not in error.additions:
                error.add(refusal.message)
            return False
        return True

    def _reset_pending(self, plan: steps.Plan, error: errors.HardwareError) -> None:
        """Reset the GPUs of a plan whose mode is pending; raise its error if that cannot help."""
        is_in_use = error.reason is reasons.Reason.IN_USE
        may_help = is_in_use or error.reason is reasons.Reason.RESET_REQUIRED
        if self.reset is None or not may_help:
            raise error
        uuids = {gpu_plan.gpu_uuid for gpu_plan in plan.gpus if gpu_plan.takes_whole_gpu}
        pending = tuple(
            gpu for gpu in self.gpus.observe() if gpu.uuid in uuids and gpu.has_pending_mode
        )
        if is_in_use and not pending:
            raise error
        _log.info("reset_pending", gpus=[gpu.uuid for gpu in pending])
        try:
            if pending:
                self.reset.reset(pending, self.record_persistence)
        except errors.HostError as refused:
            if not is_in_use:
                raise
            error.add(f"the reset failed as well: {refused.message}")
            raise error from refused

    def _observe_again(self, plan: steps.Plan, observed: model.ObservedGpus) -> model.ObservedGpus:
        return observed.with_newer(self.gpus.observe().only(plan.gpu_uuids))

    def _repair(self, plan: steps.Plan, observed: model.ObservedGpus) -> model.ObservedGpus:
        uuids = {gpu_plan.gpu_uuid for gpu_plan in plan.gpus if gpu_plan.is_repair}
        remembered = {gpu.uuid: gpu for gpu in observed.only(uuids) if gpu.is_remembered}
        now = self.gpus.observe()
        # One that answers again has been reset by a person, and may have new pods.
        silent = [
            remembered[gpu.uuid]
            for gpu in now.unreachable
            if gpu.recovers_by_reset and gpu.uuid in remembered
        ]
        faulty = (*now.only(uuids - remembered.keys()), *silent)
        if self.reset is not None and faulty:
            self.reset.reset(faulty, self.record_persistence, is_repair=True)
        return self._observe_again(plan, observed)


def _lacks_only_modes(plan: steps.Plan, now: model.ObservedGpus) -> bool:
    """Return whether every mode is set or pending, and every other GPU has its new instances.

    An error of several GPUs has the reason of one, so the GPUs themselves decide.
    """
    gpus = {gpu.uuid: gpu for gpu in now}
    return all(
        each.gpu_uuid in gpus and _is_gpu_done_or_pending(each, gpus[each.gpu_uuid])
        for each in plan.gpus
    )


def _is_gpu_done_or_pending(plan: steps.GpuPlan, gpu: model.Gpu) -> bool:
    if modes := plan.of(steps.SetMode):
        return all(gpu.pending_mode is step.mode for step in modes)
    return _geometry(gpu.gpu_instances) == _geometry(plan.instances)


def _geometry(instances: Iterable[model.GpuInstance]) -> list[tuple[object, ...]]:
    return sorted(
        (
            (str(each.placement), str(each.profile)),
            sorted(
                (str(inside.placement), str(inside.profile)) for inside in each.compute_instances
            ),
        )
        for each in instances
    )
