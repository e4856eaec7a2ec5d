"""The node of the soak over simulated GPUs, and the people and programs beside its agent."""

from collections.abc import Callable, Mapping

from mig_manager.core.node import eviction_rules
from mig_manager.core.node.daemons import clients
from mig_manager.core.objects import pod_object, well_known
from mig_manager.sandbox.driver import simulated_nvml, states
from testkit import nvml_faults
from tests.rigs.node import fake_cluster, simulated_rig
from tests.soak import driver, evictions, script

MONITOR_LABEL = well_known.DEPLOY_LABEL_PREFIX + "dcgm"
_VALUES = ("true", "false", None)  # what an owner may decide about a deploy label


class SoakRig(simulated_rig.SimulatedRig):
    """One node: its GPUs, its pods and their devices, and what its owners want of it."""

    def __init__(self, spec: str, *, label_managed: bool, script_: script.Script) -> None:
        self.desired_labels: dict[str, str | None] = {MONITOR_LABEL: "true"}
        if label_managed:
            self.desired_labels[well_known.PLUGIN_DEPLOY_LABEL] = "true"
        options = states.Options(swapped_gpus=(0,))
        super().__init__(
            driver.MemoryState(spec, options=options),
            {key: value for key, value in self.desired_labels.items() if value},
        )
        self.script = script_
        script_.acts |= {
            script.StrikeKind.POD_STARTS: self.start_pod,
            script.StrikeKind.POD_ENDS: self.end_pod,
            script.StrikeKind.SILENCE: lambda _pick: self.silence_kubelet(),
            script.StrikeKind.CORDON: lambda _pick: self.cordon(is_on=True),
            script.StrikeKind.UNCORDON: lambda _pick: self.cordon(is_on=False),
            script.StrikeKind.DECIDE_MONITOR: lambda pick: self.decide(MONITOR_LABEL, pick),
            script.StrikeKind.DECIDE_PLUGIN: lambda pick: self.decide(
                well_known.PLUGIN_DEPLOY_LABEL, pick
            ),
        }
        self.plugin.is_label_managed = label_managed
        self.wants_cordon = False
        self.other_clients: list[states.Client] = []
        """Processes on the GPUs that no pod owns."""
        self.violations: list[str] = []
        self.evictions: list[evictions.Eviction] = []
        """Those granted since this was last cleared."""
        self.daemons.is_ready_by_label = {MONITOR_LABEL: True}
        self.advance()

    # -- what time brings ----------------------------------------------------------------------

    def advance(self) -> None:
        super().advance()
        for uid, pod in self.pods.items():
            is_monitor = clients.is_device_plugin(pod) or pod.labels.get("app") == "dcgm"
            if is_monitor and uid not in self.client_of:
                self.client_of[uid] = self.state.add_client(
                    self.state.boards[0].uuid, name=pod.name, kind=states.ClientKind.MONITOR
                )

    def reboot(self) -> None:
        self.other_clients.clear()
        super().reboot()

    # -- what happens to GPUs -----------------------------------------------------------------

    def note_destruction(self, function: str, gone: Mapping[str, str]) -> None:
        """Note the pods from which a change of a GPU took a device, whatever our code thinks."""
        for uid, pod in self.pods.items():
            lost = self.kubelet.devices_by_pod.get(uid, frozenset()) & gone.keys()
            if lost and not pod.is_finished:
                self.violations.append(f"{function} took {sorted(lost)} from {pod.name}")

    @property
    def schedulable_devices(self) -> frozenset[str]:
        """The devices that kubelet offers to pods."""
        return frozenset().union(*self.kubelet.schedulable.values())

    # -- other people -------------------------------------------------------------------------

    def start_pod(self, pick: int) -> bool:
        """Schedule a pod, as kubelet would admit it: on a free device that the plugin offers."""
        if self.node_object.is_unschedulable or self.node_object.has_reconfiguring_taint:
            return False
        if not any(pod.is_ready and not pod.is_terminating for pod in self.pods.plugins):
            return False
        in_use = self.kubelet.devices_in_use
        real = simulated_rig.devices(self.state)
        free = sorted(
            device
            for ids in self.kubelet.schedulable.values()
            for device in ids
            if device in real and device not in in_use
        )
        if not free:
            return False
        device = free[pick % len(free)]
        name = f"pod-{self.pods.serial}"
        uid = self.pods.add(name, devices=frozenset({device}), is_kept=pick % 11 == 3)
        if pick % 7 == 5:
            self.disruptions.refusals[name] = "its budget allows no disruption"
        # The others were given a device and do not use it yet: no driver protects them.
        if pick % 3 == 0:
            self.client_of[uid] = self.state.add_client(device, name=name)
        return True

    def end_pod(self, pick: int) -> bool:
        uids = [uid for uid in self.kubelet.devices_by_pod if uid in self.pods]
        if not uids:
            return False
        uid = uids[pick % len(uids)]
        self.pods.change(uid, phase="Succeeded")
        del self.kubelet.devices_by_pod[uid]
        if uid in self.client_of:
            self.state.remove_client(self.client_of.pop(uid))
        return True

    def silence_kubelet(self) -> bool:
        """Have kubelet answer no more until the end of the step."""
        self.kubelet.is_silent = True
        return True

    def cordon(self, *, is_on: bool) -> bool:
        """Cordon or uncordon, whatever is under way."""
        self.node_object.is_unschedulable = self.wants_cordon = is_on
        return True

    def decide(self, key: str, pick: int) -> bool:
        if key not in self.desired_labels:
            return False
        value = _VALUES[pick % len(_VALUES)]
        self.desired_labels[key] = value
        if value is None:
            self.node_object.labels.pop(key, None)
        else:
            self.node_object.labels[key] = value
        self.stop_daemons()
        return True

    def start_other_client(self, pick: int) -> bool:
        """Let a process beside all pods hold a device."""
        free = sorted(simulated_rig.devices(self.state).keys() - self.kubelet.devices_in_use)
        if not free:
            return False
        kind = states.ClientKind.COMPUTE if pick % 2 else states.ClientKind.MONITOR
        client = self.state.add_client(free[pick % len(free)], name="other", kind=kind)
        self.other_clients.append(client)
        return True

    def end_other_clients(self) -> None:
        """Stop the processes beside all pods."""
        for client in self.other_clients:
            self.state.remove_client(client)
        self.other_clients.clear()

    def remove_obstacles(self) -> None:
        """Remove everything that may rightly keep a layout from being applied."""
        self.end_other_clients()
        self.state.clear_faults()
        self.disruptions.refusals.clear()
        for uid in self.pods:
            self.pods.change(uid, is_kept=False)


class Workloads(fake_cluster.FakeWorkloads):
    """Records each granted eviction."""

    _rig: SoakRig

    def __init__(self, rig: SoakRig, served_layout: Callable[[], str | None]) -> None:
        super().__init__(rig)
        self._served_layout = served_layout

    def evict(self, pod: pod_object.Pod) -> eviction_rules.EvictionResponse:
        devices = self._rig.kubelet.devices_by_pod
        remaining = [uid for uid, each in self._rig.pods.items() if not each.is_terminating]
        eviction = evictions.Eviction(
            pod.name,
            self._served_layout(),
            devices.get(pod.uid, frozenset()),
            frozenset().union(*(devices.get(uid, ()) for uid in remaining)),
            self._rig.state.read(),
        )
        verdict = super().evict(pod)
        if verdict.answer is eviction_rules.EvictionAnswer.ACCEPTED:
            self._rig.evictions.append(eviction)
        return verdict


class Library(nvml_faults.CountingLibrary):
    """Reports before and after each change of a GPU."""

    def __init__(self, rig: SoakRig) -> None:
        super().__init__(rig.state)
        self._rig = rig

    def _change(self, attempt: "simulated_nvml.RunningCall") -> None:
        self._rig.script.before_change()
        before = simulated_rig.devices(self.state)
        super()._change(attempt)
        after = simulated_rig.devices(self.state)
        gone = {uuid: name for uuid, name in before.items() if uuid not in after}
        self._rig.note_destruction(attempt.name, gone)
        self._rig.script.after_change()
