"""The ports of the machine in memory and of its GPUs: each call is logged, and can fail."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from mig_manager import errors, reasons
from mig_manager.core import gpu_processes, model, ports, steps
from mig_manager.core.files import hook_files, service_files
from tests.rigs.node import driver_rules, fake_cluster, gpu_values


class FakeGpus(fake_cluster.FakePort):
    """Knows unreachable GPUs from before, as the agent's worker does."""

    def observe(self) -> model.ObservedGpus:
        self._rig.record_call("gpus.observe")
        return gpu_values.seen_of(self._gpus_as_listed(), self._rig.driver.lost)

    def _gpus_as_listed(self) -> tuple[model.Gpu, ...]:
        is_hidden = self._rig.driver.hides_profiles
        return tuple(
            dataclasses.replace(gpu, profiles=None)
            if is_hidden and gpu.current_mode is model.MigMode.DISABLED
            else gpu
            for gpu in self._rig.gpus
        )

    def processes(self) -> gpu_processes.Processes:
        driver = self._rig.driver
        listed = (gpu.uuid for gpu in self._rig.gpus if gpu.uuid not in driver.lost)
        return {uuid: driver.processes.get(uuid, ()) for uuid in listed}

    def execute(self, plan: steps.Plan, observed: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        self._rig.record_call("gpus.execute")
        users = self._rig.driver.clients if plan.requires_idle else ""
        if plan.destroys_instances:
            users += ", ".join(name for name, is_on in self._rig.host.services.items() if is_on)
        if users:
            raise errors.GpuInUseError(f"GPU 0 is in use by {users}")
        if plan.requires_idle:
            for gpu_plan in plan.gpus:
                self._require_idle(gpu_plan)
                self._require_fresh(gpu_plan)
        failed: list[Exception] = []
        for gpu_plan in plan.gpus:
            try:
                self._execute_on_one(gpu_plan)
            except errors.MigManagerError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return gpu_values.of_plan(self._gpus_as_listed(), plan, self._rig.driver.lost)

    def _require_idle(self, plan: steps.GpuPlan) -> None:
        processes = self._rig.driver.processes.get(plan.gpu_uuid, ())
        if users := gpu_processes.blocking(plan, processes):
            raise errors.GpuInUseError(f"{plan} is in use by {', '.join(map(str, users))}")

    def _require_fresh(self, plan: steps.GpuPlan) -> None:
        (gpu,) = (gpu for gpu in self._rig.gpus if gpu.uuid == plan.gpu_uuid)
        destroyed = [
            (step.gpu_instance_id, step.placement) for step in plan.of(steps.DestroyGpuInstance)
        ]
        kept = [gi for gi in gpu.gpu_instances if (gi.instance_id, gi.placement) not in destroyed]
        for step in plan.of(steps.CreateGpuInstance):
            if _is_created(kept, step):
                raise errors.OutdatedPlanError(
                    f"{plan} has {step.profile} at {step.placement} already"
                )

    def _execute_on_one(self, plan: steps.GpuPlan) -> None:
        for step in plan.steps:
            self._rig.begin_step(step)
            if step.gpu_uuid in self._rig.driver.lost:
                return
            self._rig.driver.executed_steps.append(step)
            if isinstance(step, steps.SetMode) and self._rig.driver.mode_waits:
                self._put_off(step)
            self._rig.gpus = tuple(
                driver_rules.execute(gpu, [step])
                if gpu.uuid == step.gpu_uuid and not _is_done(gpu, step)
                else gpu
                for gpu in self._rig.gpus
            )

    def _put_off(self, step: steps.SetMode) -> None:
        self._rig.gpus = gpu_values.pending(self._rig.gpus, step)
        (changed,) = (gpu for gpu in self._rig.gpus if gpu.uuid == step.gpu_uuid)
        if changed.pending_mode is not changed.current_mode:
            raise errors.HardwareError(
                "the mode waits for a reset", reason=reasons.Reason.RESET_REQUIRED
            )


def _is_done(gpu: model.Gpu, step: steps.Step) -> bool:
    """Return whether a step creates an instance that exists, or destroys one that does not."""
    instances = gpu.gpu_instances
    match step:
        case steps.DestroyGpuInstance():
            destroyed = (step.gpu_instance_id, step.profile, step.placement)
            return destroyed not in {
                (gi.instance_id, gi.profile, gi.placement) for gi in instances
            }
        case steps.DestroyComputeInstance():
            return step.uuid not in {ci.uuid for gi in instances for ci in gi.compute_instances}
        case steps.CreateGpuInstance():
            return _is_created(instances, step)
        case steps.CreateComputeInstance():
            return any(
                (ci.profile, ci.placement) == (step.profile, step.placement)
                for gi in instances
                if gi.placement == step.gpu_instance_placement
                for ci in gi.compute_instances
            )
        case _:
            return False


def _is_created(instances: Iterable[model.GpuInstance], step: steps.CreateGpuInstance) -> bool:
    return (step.profile, step.placement) in {(gi.profile, gi.placement) for gi in instances}


class FakeHost(fake_cluster.FakePort):
    """Implements the ports of the machine underneath, all in one.

    No service stops along with another.
    """

    def running(self, names: Sequence[str]) -> tuple[str, ...]:
        self._rig.record_call("services.running")
        running = [name for name in names if self._rig.host.services.get(name)]
        return service_files.stop_order(running)

    def stop(self, name: str) -> None:
        self._switch(name, "services.stop", is_on=False)

    def may_have_stopped(self, name: str, listed: Collection[str]) -> bool:
        return name in listed

    def start(self, name: str) -> bool:
        was_down = not self._rig.host.services.get(name)
        self._switch(name, "services.start", is_on=True)
        return was_down

    def _switch(self, name: str, call: str, *, is_on: bool) -> None:
        self._rig.record_call(call)
        if name in self._rig.host.broken_services:
            raise errors.HostError(
                f"{name} does not answer", reason=reasons.Reason.HOST_SERVICE_FAILED
            )
        self._rig.host.services[name] = is_on

    def restore_persistence(self, gpus: Sequence[model.Gpu]) -> bool:
        if not self._rig.resets.keep_persistence_off:
            self._rig.resets.without_persistence -= {gpu.uuid for gpu in gpus}
        return not self._rig.resets.keep_persistence_off

    def reset(
        self,
        gpus: Sequence[model.Gpu],
        record_persistence: ports.RecordPersistence,
        *,
        is_repair: bool = False,
    ) -> None:
        for gpu in gpus:
            _require_resettable(gpu, is_repair=is_repair)
        uuids = {gpu.uuid for gpu in gpus}
        silent = uuids & self._rig.driver.lost
        if self._rig.resets.need_persistence_off:
            record_persistence([gpu.uuid for gpu in gpus], is_on=False)
            self._rig.resets.without_persistence |= uuids
        try:
            self._rig.record_call("reset.reset")
        except errors.MigManagerError:
            self._end_without_persistence(gpus, record_persistence)
            raise
        self._end_without_persistence(gpus, record_persistence)
        if self._rig.resets.action_after is model.RecoveryAction.NONE:
            self._rig.driver.lost -= silent
        self._rig.gpus = tuple(
            dataclasses.replace(
                gpu,
                current_mode=gpu.pending_mode,
                gpu_instances=(),
                recovery_action=self._rig.resets.action_after
                if gpu.recovers_by_reset
                else gpu.recovery_action,
            )
            if gpu.uuid in uuids
            else gpu
            for gpu in self._rig.gpus
        )

    def _end_without_persistence(
        self, gpus: Sequence[model.Gpu], record_persistence: ports.RecordPersistence
    ) -> None:
        if self._rig.resets.need_persistence_off and self.restore_persistence(gpus):
            record_persistence([gpu.uuid for gpu in gpus], is_on=True)

    def check(self) -> None:
        self._rig.record_call("reboot.check")

    def request(self, why: str) -> None:
        assert why
        self._rig.record_call("reboot.request")
        self._rig.host.reboots += 1

    def refresh(self) -> None:
        self._rig.record_call("refresh_files")
        self._rig.host.refreshes += 1


def _require_resettable(gpu: model.Gpu, *, is_repair: bool) -> None:
    """Refuse a reset as ``ports.GpuReset`` says."""
    is_resettable = is_repair or (gpu.has_pending_mode and not gpu.gpu_instances)
    reason = None if is_resettable else reasons.Reason.RESET_REQUIRED
    # The GPU's host resets it, whatever state it is in.
    if gpu.virtualization is model.Virtualization.PASSTHROUGH:
        reason = reasons.Reason.REBOOT_REQUIRED
    elif gpu.virtualization is model.Virtualization.VGPU:
        reason = reasons.Reason.NOT_SUPPORTED
    if reason is not None:
        raise errors.HostError(f"{gpu} is not reset", reason=reason)


class FakeHooks(fake_cluster.FakePort):
    variables: Mapping[str, str] = {"MIG_PARTED_HOOKS_FILE": "hooks.yaml"}

    def read(self) -> hook_files.Table:
        self._rig.record_call("hooks.read")
        return hook_files.parse(self._rig.hooks.text, source="hooks.yaml")

    def missing(self, hook: hook_files.Hook) -> str:
        is_missing = hook.command in self._rig.hooks.missing
        return f"{hook.location}: program {hook.command} is not found" if is_missing else ""

    def run(
        self,
        point: hook_files.Point,
        hook: hook_files.Hook,
        environment: Mapping[str, str],
        *,
        check: Callable[[], object],
    ) -> None:
        self._rig.record_call("hooks.run")
        if why := self.missing(hook):
            raise errors.HostError(why, reason=reasons.Reason.HOOK_FAILED)
        check()
        self._rig.hooks.commands.append(hook.command)
        self._rig.hooks.environment = environment
        is_broken_once = hook.command in self._rig.hooks.broken_once
        self._rig.hooks.broken_once.discard(hook.command)
        if is_broken_once or hook.command in self._rig.hooks.broken:
            raise errors.HostError(f"{hook.command} failed", reason=reasons.Reason.HOOK_FAILED)
        if point in (hook_files.Point.APPLY_START, hook_files.Point.APPLY_EXIT):
            self._rig.hooks.pending_exit = point is hook_files.Point.APPLY_START
