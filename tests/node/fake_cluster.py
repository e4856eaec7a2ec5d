"""The ports of the cluster in memory: each call is logged, and can be made to fail."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping

from mig_manager import errors
from mig_manager.core.node import (
    claims,
    evictions,
    node_object,
    pod_object,
    well_known,
)
from mig_manager.core.records import readiness
from tests import contract
from tests.node import fakes


class Port:
    def __init__(self, rig: "fakes.NodeRig") -> None:
        self._rig = rig


class FakeNode(Port):
    def read(self) -> node_object.NodeView:
        self._rig.called("node.read")
        return self._view()

    def latest(self, *, is_at_rest: bool = False) -> node_object.NodeView:
        # As over HTTP with a watch that was silent for long.
        return self._view() if is_at_rest else self.read()

    def _view(self) -> node_object.NodeView:
        rig = self._rig
        shown = {
            name: 0 if rig.schedulable is rig.kubelet.withdrawn else len(ids)
            for name, ids in rig.schedulable.items()
        }
        if rig.clock.monotonic() < rig.kubelet.reports_from_s:
            shown = rig.kubelet.reported
        return node_object.NodeView(
            name="node-a",
            uid=rig.node_uid,
            labels=dict(rig.labels),
            annotations=dict(rig.annotations),
            is_unschedulable=rig.is_unschedulable,
            taint_keys=frozenset({well_known.HOLD_TAINT} if rig.has_hold_taint else ())
            | rig.taints,
            closing_taints=frozenset(rig.taints),
            # Kubelet copies the capacity of a resource that it has forgotten into allocatable.
            allocatable=rig.kubelet.phantoms | shown,
            capacity=rig.kubelet.phantoms
            | {
                name: len(ids | rig.plugin.unhealthy.get(name, frozenset()))
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
        self._rig.kubelet.withdrawn = self._rig.schedulable
        self._rig.kubelet.reported.clear()

    def report_devices(self, counts: Mapping[str, int]) -> None:
        self._rig.called("node.report")
        if self._rig.kubelet.may_be_reported:
            self._rig.kubelet.reported |= counts

    def remove_resources(self, names: Collection[str]) -> node_object.NodeView:
        self._rig.called("node.remove")
        for name in names:
            self._rig.kubelet.phantoms.pop(name, None)
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


class FakeWorkloads(Port):
    def list(self) -> tuple[pod_object.Pod, ...]:
        self._rig.called("workloads.list")
        return tuple(self._rig.pods.values())

    def from_watch(self) -> tuple[pod_object.Pod, ...] | None:
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
        known = self._rig.disruptions.budgets if "default" in namespaces else ()
        return tuple(budget.observed(self._rig.pods_everywhere) for budget in known)

    def covered_by(self, budget: evictions.Budget) -> tuple[pod_object.Pod, ...]:
        self._rig.called("workloads.covered_by")
        (guard,) = (one for one in self._rig.disruptions.budgets if one.name == budget.name)
        return tuple(pod for pod in self._rig.pods_everywhere if guard.covers(pod))

    def _verdict(self, pod: pod_object.Pod) -> evictions.EvictionResponse:
        why = self._rig.disruptions.refusals.get(pod.name, "")
        guards = [one for one in self._rig.disruptions.budgets if one.covers(pod)]
        if len(guards) > 1:
            why = "more than one budget"
        elif guards and not guards[0].observed(self._rig.pods_everywhere).allowed:
            why = f"budget {guards[0].name} is used up"
        if not why:
            return evictions.EvictionResponse(answer=evictions.Eviction.ACCEPTED)
        return evictions.EvictionResponse(
            answer=evictions.Eviction.BLOCKED,
            why=why,
            retry_after_s=self._rig.disruptions.retry_after_s,
        )

    def delete(self, pod: pod_object.Pod) -> None:
        self._rig.called("workloads.delete")
        self._end(pod)

    def _end(self, pod: pod_object.Pod) -> None:
        if pod.uid in self._rig.pods:
            self._rig.pods[pod.uid] = dataclasses.replace(pod, is_terminating=True)


class UnansweredWorkloads(FakeWorkloads):
    """Evicts and deletes pods, but an error follows instead of the answer."""

    def __init__(self, rig: "fakes.NodeRig", error: BaseException) -> None:
        super().__init__(rig)
        self._error = error

    def evict(self, pod: pod_object.Pod) -> evictions.EvictionResponse:
        verdict = super().evict(pod)
        if verdict.answer is evictions.Eviction.ACCEPTED:
            raise self._error
        return verdict

    def delete(self, pod: pod_object.Pod) -> None:
        super().delete(pod)
        raise self._error


class FakeAllocations(Port):
    def assigned_devices(self) -> tuple[pod_object.PodDevices, ...]:
        self._answer("allocations.assigned_devices")
        rig, now_s = self._rig, self._rig.clock.now_s
        if now_s < rig.kubelet.lists_from_s:
            return ()
        drivers = {well_known.GPU_CLAIM_DRIVER}
        hidden = {uid for uid, listed_s in rig.kubelet.listed_from_s.items() if now_s < listed_s}
        return tuple(
            pod_object.PodDevices(
                namespace="default",
                name=rig.pods[uid].name,
                device_ids=rig.kubelet.assigned.get(uid, frozenset()),
                claim_drivers=frozenset(drivers if uid in rig.kubelet.claims else ()),
            )
            for uid in rig.pods
            if uid in (rig.kubelet.assigned.keys() | rig.kubelet.claims) - hidden
        ) + tuple(
            pod_object.PodDevices(namespace="default", name=name, device_ids=ids)
            for name, ids in rig.kubelet.unlisted.items()
        )

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        self._answer("allocations.allocatable")
        return self._rig.schedulable

    def _answer(self, name: str) -> None:
        self._rig.called(name)
        if self._rig.kubelet.is_silent:
            raise errors.KubeletError("no socket")


class FakeSlices(Port):
    def list(self) -> tuple[claims.Slice, ...] | None:
        self._rig.called("slices.list")
        return self._rig.dra_driver.slices

    def withdraw(self) -> tuple[claims.Slice, ...]:
        self._rig.called("slices.withdraw")
        slices, self._rig.dra_driver.slices = self._rig.dra_driver.slices or (), ()
        return slices
