"""The ports of the cluster in memory: each call is logged, and can be made to fail."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping

from mig_manager import errors, reasons
from mig_manager.core.fleet import slots
from mig_manager.core.node import eviction_rules
from mig_manager.core.node.devices import claims, resources
from mig_manager.core.objects import node_object, pod_object, well_known
from mig_manager.core.records import readiness
from tests.rigs import contract
from tests.rigs.node import node_rig

_CONFLICTS = 20  # after so many an update ends


class FakePort:
    def __init__(self, rig: node_rig.NodeRig) -> None:
        self._rig = rig

    def _succeeds(self, call: str) -> bool:
        """Log a call whose refusal its port does not raise; return whether it is carried out."""
        try:
            self._rig.record_call(call)
        except errors.ClusterError:
            return False
        return True


class FakeNode(FakePort):
    def __init__(self, rig: node_rig.NodeRig) -> None:
        super().__init__(rig)
        self._unwritten: dict[str, readiness.Condition] = {}

    def read(self) -> node_object.NodeView:
        self._rig.record_call("node.read")
        return self._view()

    def latest(self, *, is_at_rest: bool = False) -> node_object.NodeView:
        # As over HTTP with a watch that was silent for long. While reads fail, none runs.
        is_watched = "node.read" not in self._rig.failures
        return self._view() if is_at_rest and is_watched else self.read()

    def _view(self) -> node_object.NodeView:
        rig = self._rig
        shown = {
            name: 0 if rig.kubelet.schedulable is rig.kubelet.hidden else len(ids)
            for name, ids in rig.kubelet.schedulable.items()
        }
        capacity = {
            name: len(ids | rig.plugin.unhealthy.get(name, frozenset()))
            for name, ids in rig.kubelet.schedulable.items()
        }
        if rig.clock.monotonic() < rig.kubelet.reports_from_s:
            shown = rig.kubelet.reported_devices
            capacity |= {name: count for name, count in shown.items() if count}
        closing = rig.node_object.taints | (
            {well_known.RECONFIGURING_TAINT} if rig.node_object.has_reconfiguring_taint else set()
        )
        return node_object.NodeView(
            name="node-a",
            uid=rig.node_object.uid,
            labels=dict(rig.node_object.labels),
            annotations=dict(rig.node_object.annotations),
            is_unschedulable=rig.node_object.is_unschedulable,
            taint_keys=frozenset(closing),
            closing_taints=frozenset(closing),
            # Kubelet copies the capacity of a resource that it has forgotten into allocatable.
            allocatable=rig.kubelet.phantoms | shown,
            capacity=rig.kubelet.phantoms | capacity,
        )

    def patch(self, change: node_object.NodePatch) -> node_object.NodeView:
        # As over HTTP: what depends on the node is written only for the node that was decided for.
        assert change.reconfiguring_taint is None
        assert not change.removed_taints
        self._rig.record_call("node.patch")
        return self._write(change)

    def announce(self, change: node_object.NodePatch) -> None:
        with contextlib.suppress(errors.ClusterError):
            self.patch(change)

    def hide_devices(self) -> None:
        if self._succeeds("node.hide_devices"):
            self._rig.kubelet.hidden = self._rig.kubelet.schedulable
            self._rig.kubelet.reported_devices = dict.fromkeys(self._rig.kubelet.schedulable, 0)

    def report_devices(self, counts: Mapping[str, int]) -> None:
        if self._succeeds("node.report_devices"):
            self._rig.kubelet.reported_devices |= counts

    def remove_resources(self, names: Collection[str]) -> node_object.NodeView:
        self._rig.record_call("node.remove_resources")
        for name in names:
            self._rig.kubelet.phantoms.pop(name, None)
        return self._view()

    def update(
        self, decide: Callable[[node_object.NodeView], node_object.NodePatch]
    ) -> node_object.NodeView:
        view = self._view()
        for _ in range(_CONFLICTS):
            change = decide(view)
            # As ``patch``: tests do not depend on which of the two writes labels and annotations.
            self._rig.record_call("node.patch")
            if self._view() == view:
                return self._write(change)
            self._rig.record_call("node.read")
            view = self._view()
            if change.is_in(view):
                return view
        raise errors.ClusterError("conflicts", reason=reasons.Reason.API_UNAVAILABLE)

    def _write(self, change: node_object.NodePatch) -> node_object.NodeView:
        rig = self._rig
        _merge(rig.node_object.labels, change.labels)
        _merge(rig.node_object.annotations, change.annotations)
        for key, value in change.annotations.items():
            contract.check_annotation(key, value)
        if change.reconfiguring_taint is not None:
            rig.node_object.has_reconfiguring_taint = change.reconfiguring_taint
        rig.node_object.taints -= change.removed_taints
        text = change.annotations.get(well_known.STATUS_ANNOTATION)
        if text:
            rig.node_object.status_messages.append(str(json.loads(text)["message"]))
        state = change.labels.get(well_known.STATE_LABEL)
        if state and (not rig.node_object.states or rig.node_object.states[-1] != state):
            rig.node_object.states.append(state)
        rig.stop_daemons()
        rig.record_answer()
        return self._view()

    @property
    def has_unwritten_condition(self) -> bool:
        return bool(self._unwritten)

    def set_condition(self, condition: readiness.Condition) -> None:
        is_about_recovery = condition.type == well_known.RECOVERY_CONDITION
        node = self._rig.node_object
        present = node.recovery_condition if is_about_recovery else node.ready_condition
        entry = condition.entry(present, self._rig.clock.now_iso())
        self._unwritten[condition.type] = condition
        if entry is not None and not self._succeeds("node.set_condition"):
            return
        del self._unwritten[condition.type]
        if entry is None:
            return
        if is_about_recovery:
            node.recovery_condition = entry
        else:
            node.ready_condition = entry
            node.ready_reasons.append(entry["reason"])

    def retry_condition(self) -> None:
        for condition in list(self._unwritten.values()):
            self.set_condition(condition)

    def emit(self, *, reason: str, message: str, is_warning: bool) -> None:
        if self._succeeds("node.emit"):
            self._rig.node_object.events.append(reason)
            self._rig.node_object.event_messages.append(message)

    def flush_events(self, timeout_s: float) -> bool:
        return True


def _merge(target: dict[str, str], change: Mapping[str, str | None]) -> None:
    for key, value in change.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = value


class FakeWorkloads(FakePort):
    def list(self) -> pod_object.Pods:
        self._rig.record_call("workloads.list")
        return tuple(self._rig.pods.values())

    def from_watch(self) -> pod_object.Pods | None:
        return self._rig.pods.watched()

    def present(self) -> pod_object.Pods:
        watched = self._rig.pods.watched()
        return self.list() if watched is None else watched

    def unbound(self, bound: pod_object.Pods) -> pod_object.Pods:
        self._rig.record_call("workloads.unbound")
        return tuple(
            dataclasses.replace(pod, is_unbound=True)
            for pod in self._rig.pods.elsewhere.values()
            if not pod.node_name and pod.claimed_ids
        )

    def evict(self, pod: pod_object.Pod) -> eviction_rules.EvictionResponse:
        self._rig.record_call("workloads.evict")
        verdict = self._verdict(pod)
        if verdict.answer is eviction_rules.EvictionAnswer.ACCEPTED:
            self._rig.pods.terminate(pod.uid)
            self._rig.record_answer()
        return verdict

    def can_evict(self, pod: pod_object.Pod) -> eviction_rules.EvictionResponse:
        self._rig.record_call("workloads.can_evict")
        return self._verdict(pod)

    def budgets(self, namespaces: Collection[str]) -> tuple[eviction_rules.Budget, ...]:
        self._rig.record_call("workloads.budgets")
        return tuple(
            budget.with_status(self._rig.pods.everywhere)
            for budget in self._rig.disruptions.budgets
            if budget.namespace in namespaces
        )

    def covered_by(self, budget: eviction_rules.Budget) -> pod_object.Pods:
        self._rig.record_call("workloads.covered_by")
        return tuple(filter(budget.covers, self._rig.pods.everywhere))

    def _verdict(self, listed: pod_object.Pod) -> eviction_rules.EvictionResponse:
        pod = self._rig.pods.get(listed.uid)
        if pod is None:
            return eviction_rules.EvictionResponse(answer=eviction_rules.EvictionAnswer.GONE)
        why = self._rig.disruptions.refusals.get(pod.name, "")
        # The API server ignores budgets for a pod that does not run.
        runs = not (pod.phase == "Pending" or pod.is_finished or pod.is_terminating)
        everywhere = self._rig.pods.everywhere
        budgets = (one.with_status(everywhere) for one in self._rig.disruptions.budgets)
        guards = [budget for budget in budgets if runs and budget.covers(pod)]
        if len(guards) > 1:
            why = "more than one budget"
        elif guards and guards[0].is_used_by(pod) and not guards[0].allowed:
            why = guards[0].refusal
        if not why:
            return eviction_rules.EvictionResponse(answer=eviction_rules.EvictionAnswer.ACCEPTED)
        return eviction_rules.EvictionResponse(
            answer=eviction_rules.EvictionAnswer.BLOCKED,
            why=why,
            retry_after_s=self._rig.disruptions.retry_after_s,
        )

    def delete(self, pod: pod_object.Pod) -> None:
        self._rig.record_call("workloads.delete")
        if pod.uid in self._rig.pods:
            self._rig.pods.terminate(pod.uid)
        self._rig.record_answer()


class FakeAllocations(FakePort):
    def assigned_devices(self) -> tuple[pod_object.PodDevices, ...]:
        self._answer("allocations.assigned_devices")
        rig, kubelet, now_s = self._rig, self._rig.kubelet, self._rig.clock.now_s
        if now_s < kubelet.all_listed_from_s:
            return ()
        # It lists a pod without its devices before it has allocated them.
        listed_uids = {uid for uid in rig.pods if now_s >= kubelet.pod_listed_from_s.get(uid, 0.0)}
        drivers = frozenset({well_known.GPU_CLAIM_DRIVER})
        return tuple(
            pod_object.PodDevices(
                namespace=pod.namespace,
                name=pod.name,
                device_ids=resources.without_replicas(ids),
                claim_drivers=drivers if uid in listed_uids & kubelet.claims else frozenset(),
                gpu_resources=frozenset(pod.gpu_resources if ids else ()),
            )
            for uid, pod in rig.pods.items()
            for ids in [
                kubelet.devices_by_pod.get(uid, frozenset()) if uid in listed_uids else frozenset()
            ]
        ) + tuple(
            pod_object.PodDevices(
                namespace="default",
                name=name,
                device_ids=ids,
                gpu_resources=frozenset({resources.GPU}),
            )
            for name, ids in kubelet.devices_of_unlisted_pods.items()
        )

    def allocatable(self) -> Mapping[str, frozenset[str]]:
        self._answer("allocations.allocatable")
        return self._rig.kubelet.schedulable

    def _answer(self, name: str) -> None:
        self._rig.record_call(name)
        if self._rig.kubelet.is_silent:
            raise errors.KubeletError("no socket")


class FakeSlices(FakePort):
    def list(self) -> tuple[claims.Slice, ...] | None:
        self._rig.record_call("slices.list")
        return self._rig.dra_driver.slices

    def delete(self) -> tuple[claims.Slice, ...]:
        slices = self._rig.dra_driver.slices
        if not self._succeeds("slices.delete") or slices is None:
            return ()
        self._rig.dra_driver.slices = ()
        return slices


class FakeSlots(FakePort):
    """One agent's access to the slots: it may use only a slot that it has taken itself."""

    def __init__(self, rig: node_rig.NodeRig) -> None:
        super().__init__(rig)
        self._is_fresh = False

    def take(self) -> slots.Denial | None:
        state = self._rig.slots
        self._rig.record_call("slots.take")
        if state.denials:
            return state.denials.pop(0)
        if state.next_errors:
            raise state.next_errors.pop(0)
        is_late = not state.is_taken and self._rig.node_object.has_reconfiguring_taint
        assert not is_late, "a slot comes before the disruption"
        state.is_taken = self._is_fresh = True
        return None

    def check(self) -> None:
        self._rig.record_call("slots.check")
        if self._rig.slots.is_stale or not self._is_fresh:
            raise errors.NotReadyError("stale", reason=reasons.Reason.SLOTS_TAKEN)

    def release(self) -> None:
        assert not self._rig.node_object.has_reconfiguring_taint, (
            "a slot may go when its node is whole again"
        )
        self._is_fresh = False
        self._succeeds("slots.release")  # else it expires
        self._rig.slots.is_taken = False
