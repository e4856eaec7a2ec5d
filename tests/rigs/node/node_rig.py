"""A small GPU node in memory, whose every port call can be made to fail."""

import copy
import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import Self

from mig_manager.core import model
from mig_manager.core.node import policies
from mig_manager.core.node.daemons import clients
from mig_manager.core.node.devices import claims as dra
from mig_manager.core.objects import well_known
from tests.rigs.node import cluster_parts, driver_rules, fakes, gpu_values, parts, samples
from tests.rigs.node.kept_file import FakeKeptFile


@dataclasses.dataclass(slots=True)
class NodeRig:
    """The whole node: its GPUs, the parts around them, and the calls that an agent makes.

    ``nodes`` builds the usual ones. A test sets attributes of the node and of its parts before an
    agent starts; and while it runs, with ``strikes`` or by a callback in ``clock.on_wait``.
    """

    gpus: tuple[model.Gpu, ...]
    clock: fakes.FakeClock = dataclasses.field(default_factory=fakes.FakeClock)
    policy: policies.Policy = dataclasses.field(default_factory=policies.Policy)
    extra_clients: str = ""  # the owner's file of GPU clients; empty: none is configured

    # -- its parts ----------------------------------------------------------------------------

    node_object: cluster_parts.NodeObject = dataclasses.field(
        default_factory=cluster_parts.NodeObject
    )
    pods: cluster_parts.Pods = dataclasses.field(init=False)
    disruptions: cluster_parts.Disruptions = dataclasses.field(
        default_factory=cluster_parts.Disruptions
    )
    kubelet: parts.Kubelet = dataclasses.field(default_factory=parts.Kubelet)
    plugin: parts.Plugin = dataclasses.field(default_factory=parts.Plugin)
    dra_driver: parts.DraDriver = dataclasses.field(default_factory=parts.DraDriver)
    daemons: parts.Daemons = dataclasses.field(default_factory=parts.Daemons)
    driver: parts.Driver = dataclasses.field(default_factory=parts.Driver)
    resets: parts.Resets = dataclasses.field(default_factory=parts.Resets)
    host: parts.Host = dataclasses.field(default_factory=parts.Host)
    hooks: parts.Hooks = dataclasses.field(default_factory=parts.Hooks)
    slots: parts.Slots = dataclasses.field(default_factory=parts.Slots)
    owner: parts.Owner = dataclasses.field(default_factory=parts.Owner)
    verified_layout_file: FakeKeptFile = dataclasses.field(default_factory=FakeKeptFile)
    host_copy_file: FakeKeptFile = dataclasses.field(default_factory=FakeKeptFile)

    # -- the calls of ports -------------------------------------------------------------------

    log: list[str] = dataclasses.field(default_factory=list)
    on_call: Callable[[], object] = lambda: None
    fail_once_at: dict[int | str, BaseException] = dataclasses.field(default_factory=dict)
    """Index into ``log``, or name of a port call -> the error that the call raises, once."""
    fail_always: dict[str, Exception] = dataclasses.field(default_factory=dict)
    """Name of a port call -> the error that each of them raises, for as long as it stands here."""
    lose_answer_at: dict[int, Exception] = dataclasses.field(default_factory=dict)
    """Index into ``log`` -> the error that answers this patch although it was carried out."""

    def __post_init__(self) -> None:
        self.pods = cluster_parts.Pods(self.kubelet, self.clock)
        self.clock.on_wait.append(self.advance)
        self.verified_layout_file.on_save = functools.partial(
            self.record_call, "verified_layout_file.save"
        )
        self.host_copy_file.on_save = functools.partial(self.record_call, "host_copy_file.save")

    def fork(self, *immutable: object) -> Self:
        """Return a copy that has the GPUs and other immutable values in common with this node."""
        # A copied method acts on the copy; any other function would still act on this node.
        assert all(isinstance(each, types.MethodType) for each in self.clock.on_wait)
        return copy.deepcopy(self, {id(each): each for each in (self.gpus, *immutable)})

    # -- what happens to it -------------------------------------------------------------------

    def start_plugin(self) -> None:
        """Start a device plugin, which looks at the GPUs only once."""
        selector = {well_known.PLUGIN_DEPLOY_LABEL: "true"} if self.plugin.is_label_managed else {}
        self.pods.add(
            "nvidia-device-plugin",
            labels=samples.PLUGIN_LABELS,
            node_selector=selector,
            **samples.OF_PLUGIN,
            is_ready=not self.plugin.is_broken,
            waiting=self.plugin.waiting,
        )
        if not self.plugin.is_broken:
            self.register_devices()

    def start_driver(self) -> None:
        """Start a DRA driver, which looks at the GPUs only once."""
        self.pods.add(
            "nvidia-dra-driver-kubelet-plugin",
            container_names=("gpus",),
            node_selector={dra.DEPLOY_LABEL: "true"} if self.dra_driver.is_label_managed else {},
            owner_kind="DaemonSet",
            mounts_driver_sockets=True,
            is_ready=not self.dra_driver.is_broken,
        )
        if self.dra_driver.is_broken:
            return
        uuids = sorted(gpu_values.device_uuids(self.gpus))
        self.dra_driver.slices = (
            dra.Slice(
                name=f"node-a-gpu.nvidia.com-{self.pods.serial}",
                pool="node-a",
                generation=self.pods.serial,
                count=1,
                uuids={f"gpu-{number}": uuid for number, uuid in enumerate(uuids)},
                for_machines=frozenset(),
            ),
        )

    def register_devices(self) -> None:
        """Have the plugin register the devices that it finds now."""
        self.kubelet.schedulable = self.plugin_devices

    def restart_machine(self) -> None:
        """Reboot: all instances are lost; pending modes become active, or MIG is off."""
        self.host.boot_id = f"boot-{int(self.host.boot_id.removeprefix('boot-')) + 1}"
        self.gpus = tuple(map(driver_rules.reboot, self.gpus))
        self.lose_pods()

    def lose_pods(self) -> None:
        """Lose all pods, as in a reboot; kubelet starts the daemons again."""
        self.kubelet.schedulable = {}
        self.pods.clear()
        self.kubelet.devices_by_pod.clear()
        self.advance()

    @property
    def plugin_devices(self) -> dict[str, frozenset[str]]:
        """The devices that a plugin finds on the GPUs, by resource."""
        return {"nvidia.com/gpu": gpu_values.device_uuids(self.gpus)}

    # -- the calls of ports -------------------------------------------------------------------

    def fail_once(self, call: int | str, error: BaseException) -> None:
        """Have one call fail: the next with a name, or that with an index into ``log``."""
        self.fail_once_at[call] = error

    def fail_next(self, error: BaseException) -> None:
        """Have the next call fail, whatever it is."""
        self.fail_once(len(self.log), error)

    def record_call(self, name: str) -> None:
        self.log.append(name)
        self.on_call()
        once = self.fail_once_at
        error = once.pop(len(self.log) - 1, None) or once.pop(name, None)
        error = error or self.fail_always.get(name)
        if error is not None:
            # Of its own for each call, because the product adds to an error that it catches.
            copied_error = type(error).__new__(type(error), *error.args)
            vars(copied_error).update(vars(error))
            raise copied_error

    def forget_past(self) -> None:
        """Clear the notes of what happened so far."""
        self.node_object.forget_past()
        self.clock.forget_waits()
        self.log.clear()
        self.driver.executed_steps.clear()

    # -- what time brings ---------------------------------------------------------------------

    def advance(self) -> None:
        """End terminating pods, and have the DaemonSet controller and the plugin work."""
        for uid, pod in list(self.pods.items()):
            listed_from_s = self.kubelet.pod_listed_from_s.get(uid, math.inf)
            ends_from_s = self.kubelet.pod_ends_from_s.get(uid, self.kubelet.all_end_from_s)
            # Kubelet ends a pod with claims only once the driver has unprepared them.
            has_let_go = pod.claimed_ids is None or self.pods.has_dra_driver
            if pod.is_terminating and has_let_go and self.clock.now_s >= ends_from_s:
                self.pods.remove(uid)
                if clients.is_device_plugin(pod) and not self.pods.plugins:
                    # Kubelet calls the devices of a plugin that has ended unhealthy.
                    self.kubelet.schedulable = dict.fromkeys(self.kubelet.schedulable, frozenset())
            elif pod.phase == "Pending" and self.clock.now_s >= listed_from_s:
                self.pods.change(uid, phase="Running")
        self.stop_daemons()
        self._start_daemons()

    def stop_daemons(self) -> None:
        """Stop the daemons whose node selector does not match the node."""
        if self._is_controller_away:
            return
        for uid, pod in list(self.pods.items()):
            if any(
                self.node_object.labels.get(key) != value
                for key, value in pod.node_selector.items()
            ):
                self.pods.terminate(uid)

    def _start_daemons(self) -> None:
        # No daemon starts on a node with a taint that it does not tolerate.
        if self._is_controller_away or self.node_object.has_reconfiguring_taint:
            return
        names = self.pods.names
        for key, is_ready in self.daemons.is_ready_by_label.items():
            name = key.rpartition(".")[2]
            if self.node_object.labels.get(key) == "true" and name not in names:
                self.pods.add(
                    name,
                    labels={"app": name},
                    node_selector={key: "true"},
                    owner_kind="DaemonSet",
                    is_ready=is_ready,
                    # Monitors of a DRA cluster have every GPU by a claim with admin access.
                    claimed_ids=frozenset() if name.endswith("-dra") else None,
                )
        for name in self.daemons.without_label - names:
            self.pods.add(name, labels={"app": name}, owner_kind="DaemonSet")
        if self._plugin_is_selected() and not self.pods.plugins:
            self.start_plugin()
        is_selected = (
            self.node_object.labels.get(dra.DEPLOY_LABEL) == "true"
            or not self.dra_driver.is_label_managed
        )
        if self.dra_driver.is_installed and is_selected and not self.pods.dra_drivers:
            self.start_driver()

    @property
    def _is_controller_away(self) -> bool:
        return self.clock.now_s < self.daemons.controller_away_until_s

    def _plugin_is_selected(self) -> bool:
        is_selected = self.node_object.labels.get(well_known.PLUGIN_DEPLOY_LABEL) == "true"
        return is_selected or not self.plugin.is_label_managed
