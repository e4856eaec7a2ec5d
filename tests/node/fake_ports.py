"""The ports of the node in memory: each call is logged, and can be made to fail."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence

from mig_manager import errors
from mig_manager.core import hook_files, model, ports, steps
from mig_manager.core.node import (
    claims,
    clients,
    evictions,
    node_object,
    pod_object,
    well_known,
)
from mig_manager.core.records import readiness
from tests import contract
from tests.node import fakes, gpu_values
from tests.unit import machine


class _Port:
    def __init__(self, rig: "fakes.NodeRig") -> None:
        self._rig = rig


class FakeNode(_Port):
    def read(self) -> node_object.NodeView:
        self._rig.called("node.read")
        return self._view()

    def latest(self) -> node_object.NodeView:
        # As over HTTP without a watch.
        return self.read()

    def _view(self) -> node_object.NodeView:
        rig = self._rig
        return node_object.NodeView(
            name="node-a",
            uid="node-uid",
            labels=dict(rig.labels),
            annotations=dict(rig.annotations),
            is_unschedulable=rig.is_unschedulable,
            taint_keys=frozenset({well_known.HOLD_TAINT} if rig.has_hold_taint else ())
            | rig.taints,
            closing_taints=frozenset(rig.taints),
            # Kubelet copies the capacity of a resource that it has forgotten into allocatable.
            allocatable=rig.phantoms
            | {
                name: 0 if rig.schedulable is rig.withdrawn else len(ids)
                for name, ids in rig.schedulable.items()
            },
            capacity=rig.phantoms
            | {
                name: len(ids | rig.unhealthy.get(name, frozenset()))
                for name, ids in rig.schedulable.items()
            },
        )

    def patch(self, change: node_object.NodePatch) -> node_object.NodeView:
        # As over HTTP: what depends on the node is written only for the node that was decided for.
        assert change.hold_taint is None
        assert not change.removed_taints
        self._rig.called("node.patch")
        return self._write(change)

    def announce(self, change: node_object.NodePatch) -> None:
        with contextlib.suppress(errors.ClusterError):
            self.patch(change)

    def withdraw_devices(self) -> None:
        self._rig.called("node.withdraw")
        self._rig.withdrawn = self._rig.schedulable

    def remove_resources(self, names: Collection[str]) -> node_object.NodeView:
        self._rig.called("node.remove")
        for name in names:
            self._rig.phantoms.pop(name, None)
        return self._view()

    def update(
        self, decide: Callable[[node_object.NodeView], node_object.NodePatch]
    ) -> node_object.NodeView:
        view = self._view()
        while True:
            change = decide(view)
            self._rig.called("node.patch")
            if self._view() == view:
                return self._write(change)
            self._rig.called("node.read")
            view = self._view()

    def _write(self, change: node_object.NodePatch) -> node_object.NodeView:
        rig = self._rig
        _merge(rig.labels, change.labels)
        _merge(rig.annotations, change.annotations)
        for key, value in change.annotations.items():
            contract.check_annotation(key, value)
        if change.hold_taint is not None:
            rig.has_hold_taint = change.hold_taint
        rig.taints -= change.removed_taints
        text = change.annotations.get(well_known.STATUS_ANNOTATION)
        if text:
            rig.statuses.append(str(json.loads(text)["message"]))
        state = change.labels.get(well_known.STATE_LABEL)
        if state and (not rig.states or rig.states[-1] != state):
            rig.states.append(state)
        rig.stop_daemons()
        lost = rig.losing.get(len(rig.log) - 1)
        if lost is not None:
            raise lost
        return self._view()

    @property
    def has_unwritten_condition(self) -> bool:
        return False

    def set_condition(self, condition: readiness.Condition) -> None:
        is_about_recovery = condition.type == well_known.RECOVERY_CONDITION
        present = self._rig.recovery_condition if is_about_recovery else self._rig.condition
        entry = condition.entry(present, self._rig.clock.now_iso())
        if entry is None:
            return
        if is_about_recovery:
            self._rig.recovery_condition = entry
        else:
            self._rig.condition = entry
            self._rig.conditions.append(entry["reason"])

    def retry_condition(self) -> None:
        """Nothing is refused here."""

    def emit(self, *, reason: str, message: str, is_warning: bool) -> None:
        self._rig.events.append(reason)
        self._rig.messages.append(message)

    def flush_events(self, timeout_s: float) -> bool:
        return True


def _merge(target: dict[str, str], change: Mapping[str, str | None]) -> None:
    for key, value in change.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = value


class FakeWorkloads(_Port):
    def list(self) -> tuple[pod_object.Pod, ...]:
        self._rig.called("workloads.list")
        return tuple(self._rig.pods.values())

    def watched(self) -> tuple[pod_object.Pod, ...] | None:
        return self._rig.watched()

    def present(self) -> tuple[pod_object.Pod, ...]:
        watched = self._rig.watched()
        return self.list() if watched is None else watched

    def evict(self, pod: pod_object.Pod) -> evictions.EvictionResponse:
        self._rig.called("workloads.evict")
        if pod.uid not in self._rig.pods:
            return evictions.EvictionResponse(answer=evictions.Eviction.GONE)
        verdict = self._verdict(pod)
        if verdict.answer is evictions.Eviction.ACCEPTED:
            self._end(pod)
        return verdict

    def can_evict(self, pod: pod_object.Pod) -> evictions.EvictionResponse:
        self._rig.called("workloads.can_evict")
        return self._verdict(pod)

    def budgets(self, namespaces: Collection[str]) -> tuple[evictions.Budget, ...]:
        self._rig.called("workloads.budgets")
        known = self._rig.disruption_budgets if "default" in namespaces else ()
        return tuple(budget.observed(self._rig) for budget in known)

    def covered(self, budget: evictions.Budget) -> tuple[pod_object.Pod, ...]:
        self._rig.called("workloads.covered")
        (ours,) = (one for one in self._rig.disruption_budgets if one.name == budget.name)
        pods = (*self._rig.pods.values(), *self._rig.elsewhere.values())
        return tuple(pod for pod in pods if ours.covers(pod))

    def _verdict(self, pod: pod_object.Pod) -> evictions.EvictionResponse:
        why = self._rig.budgets.get(pod.name, "")
        guards = [one for one in self._rig.disruption_budgets if one.covers(pod)]
        if len(guards) > 1:
            why = "more than one budget"
        elif guards and not guards[0].observed(self._rig).allowed:
            why = f"budget {guards[0].name} is used up"
        if not why:
            return evictions.EvictionResponse(answer=evictions.Eviction.ACCEPTED)
        return evictions.EvictionResponse(
            answer=evictions.Eviction.BLOCKED, why=why, retry_after_s=self._rig.retry_after_s
        )

    def delete(self, pod: pod_object.Pod) -> None:
        self._rig.called("workloads.delete")
        self._end(pod)

    def _end(self, pod: pod_object.Pod) -> None:
        if pod.uid in self._rig.pods:
            self._rig.pods[pod.uid] = dataclasses.replace(pod, is_terminating=True)


class FakeAllocations(_Port):
    def assigned(self) -> tuple[pod_object.PodDevices, ...]:
        self._answer("allocations.assigned")
        rig, now_s = self._rig, self._rig.clock.now_s
        if now_s < rig.kubelet_lists_from_s:
            return ()
        drivers = {well_known.GPU_CLAIM_DRIVER}
        hidden = {uid for uid, listed_s in rig.listed_from_s.items() if now_s < listed_s}
        return tuple(
            pod_object.PodDevices(
                namespace="default",
                name=rig.pods[uid].name,
                device_ids=rig.assigned.get(uid, frozenset()),
                claim_drivers=frozenset(drivers if uid in rig.claims else ()),
            )
            for uid in rig.pods
            if uid in (rig.assigned.keys() | rig.claims) - hidden
        ) + tuple(
            pod_object.PodDevices(namespace="default", name=name, device_ids=ids)
            for name, ids in rig.unlisted.items()
        )

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        self._answer("allocations.allocatable")
        return self._rig.schedulable

    def _answer(self, name: str) -> None:
        self._rig.called(name)
        if self._rig.kubelet_is_silent:
            raise errors.ClusterError("no socket", reason=errors.Reason.POD_RESOURCES_UNAVAILABLE)


class FakeSlices(_Port):
    def list(self) -> tuple[claims.Slice, ...] | None:
        self._rig.called("slices.list")
        return self._rig.slices

    def withdraw(self) -> tuple[claims.Slice, ...]:
        self._rig.called("slices.withdraw")
        slices, self._rig.slices = self._rig.slices or (), ()
        return slices


class FakeGpus(_Port):
    def observe(self) -> model.ObservedGpus:
        self._rig.called("gpus.observe")
        return gpu_values.seen_of(self._rig.gpus, self._rig.lost)

    def execute(self, plan: steps.Plan, observed: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        self._rig.called("gpus.execute")
        users = self._rig.gpu_users if plan.requires_idle else ""
        if clients.destroys_instances(plan):
            users += ", ".join(name for name, is_on in self._rig.services.items() if is_on)
        if users:
            raise errors.GpuInUseError(f"GPU 0 is in use by {users}")
        failed: list[Exception] = []
        for gpu_plan in plan.gpus:
            try:
                self._execute_on_one(gpu_plan)
            except errors.MigManagerError as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return gpu_values.of_plan(self._rig.gpus, plan, self._rig.lost)

    def _execute_on_one(self, plan: steps.GpuPlan) -> None:
        for step in plan.steps:
            error = self._rig.step_error(step)
            if error is not None:
                raise error
            if step.gpu_uuid in self._rig.lost:
                return
            self._rig.executed.append(step)
            if isinstance(step, steps.SetMode) and self._rig.mode_waits:
                self._put_off(step)
            self._rig.gpus = tuple(
                machine.run(gpu, [step]) if gpu.uuid == step.gpu_uuid else gpu
                for gpu in self._rig.gpus
            )

    def _put_off(self, step: steps.SetMode) -> None:
        self._rig.gpus = tuple(
            dataclasses.replace(gpu, pending_mode=step.mode) if gpu.uuid == step.gpu_uuid else gpu
            for gpu in self._rig.gpus
        )
        (ours,) = (gpu for gpu in self._rig.gpus if gpu.uuid == step.gpu_uuid)
        if ours.pending_mode is not ours.current_mode:
            raise errors.HardwareError(
                "the mode waits for a reset", reason=errors.Reason.RESET_REQUIRED
            )


class FakeHost(_Port):
    """Implements the ports of the machine underneath, all in one."""

    def running(self, names: Sequence[str]) -> tuple[str, ...]:
        self._rig.called("host.running")
        return tuple(name for name in names if self._rig.services.get(name))

    def stop(self, name: str) -> None:
        self._switch(name, "host.stop", is_on=False)

    def may_have_stopped(self, name: str, listed: Collection[str]) -> bool:
        return name in listed

    def start(self, name: str) -> bool:
        was_down = not self._rig.services.get(name)
        self._switch(name, "host.start", is_on=True)
        return was_down

    def _switch(self, name: str, call: str, *, is_on: bool) -> None:
        self._rig.called(call)
        if name in self._rig.broken_services:
            raise errors.HostError(
                f"{name} does not answer", reason=errors.Reason.HOST_SERVICE_FAILED
            )
        self._rig.services[name] = is_on

    def restore_persistence(self, gpus: Sequence[model.Gpu]) -> bool:
        if not self._rig.refuses_persistence:
            self._rig.without_persistence -= {gpu.uuid for gpu in gpus}
        return not self._rig.refuses_persistence

    def reset(
        self,
        gpus: Sequence[model.Gpu],
        note_persistence: ports.NotePersistence,
        *,
        is_repair: bool = False,
    ) -> None:
        assert is_repair or not any(gpu.gpu_instances for gpu in gpus)
        if self._rig.has_persistence:
            note_persistence([gpu.uuid for gpu in gpus], is_on=False)
            self._rig.without_persistence |= {gpu.uuid for gpu in gpus}
        self._rig.called("host.reset")
        if self._rig.has_persistence and self.restore_persistence(gpus):
            note_persistence([gpu.uuid for gpu in gpus], is_on=True)
        if self._rig.reset_refusal:
            raise errors.HostError(self._rig.reset_refusal, reason=errors.Reason.RESET_REQUIRED)
        chosen = {gpu.uuid for gpu in gpus}
        assert not self._rig.reset_only or chosen == self._rig.reset_only
        self._rig.gpus = tuple(
            dataclasses.replace(
                gpu,
                current_mode=gpu.pending_mode,
                gpu_instances=(),
                recovery_action=self._rig.after_reset if gpu.awaits_reset else gpu.recovery_action,
            )
            if gpu.uuid in chosen
            else gpu
            for gpu in self._rig.gpus
        )

    def request(self, why: str) -> None:
        assert why
        self._rig.called("host.reboot")
        if self._rig.reboot_refusal:
            raise errors.HostError(self._rig.reboot_refusal, reason=errors.Reason.REBOOT_REQUIRED)
        self._rig.reboots += 1

    def refresh(self) -> None:
        self._rig.called("host.refresh")
        self._rig.refreshed += 1

    def save(self, text: str) -> None:
        self._rig.called("host.save")
        self._rig.saved.append(text)

    def read(self) -> str | None:
        return self._rig.saved[-1] if self._rig.saved else None


class FakeRequestFile(_Port):
    def save(self, text: str) -> None:
        self._rig.called("host.keep")
        self._rig.request_text = text

    def read(self) -> str | None:
        return self._rig.request_text


class FakeHooks(_Port):
    variables: Mapping[str, str] = {"MIG_PARTED_HOOKS_FILE": "hooks.yaml"}

    def read(self) -> hook_files.Table:
        self._rig.called("hooks.read")
        return hook_files.parse(self._rig.hooks, source="hooks.yaml")

    def missing(self, hook: hook_files.Hook) -> str:
        is_missing = hook.command in self._rig.missing_hooks
        return f"{hook.location}: program {hook.command} is not found" if is_missing else ""

    def run(
        self,
        point: hook_files.Point,
        hook: hook_files.Hook,
        environment: Mapping[str, str],
        *,
        check: Callable[[], object],
    ) -> None:
        self._rig.called("hooks.run")
        check()
        self._rig.hooked.append(hook.command)
        self._rig.hook_environment = environment
        is_broken_once = hook.command in self._rig.hooks_broken_once
        self._rig.hooks_broken_once.discard(hook.command)
        if is_broken_once or hook.command in self._rig.broken_hooks:
            raise errors.HostError(f"{hook.command} failed", reason=errors.Reason.HOOK_FAILED)
        if point in (hook_files.Point.APPLY_START, hook_files.Point.APPLY_EXIT):
            self._rig.owes_exit = point is hook_files.Point.APPLY_START
