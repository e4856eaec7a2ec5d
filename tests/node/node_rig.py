"""A small GPU node in memory, whose every port call can be made to fail."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from mig_manager.core import model, ports
from mig_manager.core.node import claims as dra
from mig_manager.core.node import (
    clients,
    pod_object,
    policies,
    well_known,
)
from mig_manager.core.records import inventory_codec, journals
from tests.node import fakes, gpu_values, parts, samples
from tests.node.kept_file import FakeKeptFile


@dataclasses.dataclass(slots=True)
class NodeRig:
    """The whole node: GPUs, pods, plugin, labels; state is public for tests to set and look at.

    ``nodes`` builds the usual ones. A test sets attributes of the node and of its parts before an
    agent starts; and while it runs, with ``strikes`` or by a callback in ``clock.on_wait``.
    """

    gpus: tuple[model.Gpu, ...]
    clock: fakes.FakeClock = dataclasses.field(default_factory=fakes.FakeClock)
    policy: policies.Policy = dataclasses.field(default_factory=policies.Policy)
    extra_clients: str = ""  # the owner's file of GPU clients; empty: none is configured
    slots: ports.Slots | None = None  # of a budget for the changes of many nodes

    # -- its parts ----------------------------------------------------------------------------

    kubelet: parts.Kubelet = dataclasses.field(default_factory=parts.Kubelet)
    plugin: parts.Plugin = dataclasses.field(default_factory=parts.Plugin)
    dra_driver: parts.DraDriver = dataclasses.field(default_factory=parts.DraDriver)
    daemons: parts.Daemons = dataclasses.field(default_factory=parts.Daemons)
    disruptions: parts.Disruptions = dataclasses.field(default_factory=parts.Disruptions)
    driver: parts.Driver = dataclasses.field(default_factory=parts.Driver)
    resets: parts.Resets = dataclasses.field(default_factory=parts.Resets)
    host: parts.Host = dataclasses.field(default_factory=parts.Host)
    hooks: parts.Hooks = dataclasses.field(default_factory=parts.Hooks)
    verified_layout_file: FakeKeptFile = dataclasses.field(default_factory=FakeKeptFile)
    request_file: FakeKeptFile = dataclasses.field(default_factory=FakeKeptFile)

    # -- the Node, and the cluster's other objects --------------------------------------------

    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    annotations: dict[str, str] = dataclasses.field(default_factory=dict)
    node_uid: str = "node-uid"
    is_unschedulable: bool = False
    has_hold_taint: bool = False
    taints: set[str] = dataclasses.field(default_factory=set)  # keys of other taints
    ready_condition: dict[str, str] | None = None  # ``MigReady`` as the node has it
    recovery_condition: dict[str, str] | None = None  # ``GpuRecoveryNeeded`` as the node has it
    schedulable: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    """The devices that the plugin has registered, by resource."""
    pods: dict[str, pod_object.Pod] = dataclasses.field(default_factory=dict)
    watched_pods: Callable[[], pod_object.Pods | None] = lambda: None
    """The pods as a watch reports them; None: there is no watch."""

    # -- what was published, in order ---------------------------------------------------------

    states: list[str] = dataclasses.field(default_factory=list)
    status_messages: list[str] = dataclasses.field(default_factory=list)
    ready_reasons: list[str] = dataclasses.field(default_factory=list)  # those of ``MigReady``
    events: list[str] = dataclasses.field(default_factory=list)  # their reasons
    event_messages: list[str] = dataclasses.field(default_factory=list)

    # -- the calls of ports -------------------------------------------------------------------

    log: list[str] = dataclasses.field(default_factory=list)
    on_call: Callable[[], object] = lambda: None
    fail_once_at: dict[int, BaseException] = dataclasses.field(default_factory=dict)
    """Index into ``log`` -> the error that this call raises, once."""
    fail_always: dict[str, Exception] = dataclasses.field(default_factory=dict)
    """Name of a port call -> the error that each of them raises, for as long as it stands here."""
    lose_answer_at: dict[int, Exception] = dataclasses.field(default_factory=dict)
    """Index into ``log`` -> the error that answers this patch although it was carried out."""
    _serial: int = 0

    def __post_init__(self) -> None:
        self.clock.on_wait.append(self.advance)
        self.verified_layout_file.on_save = functools.partial(
            self.record_call, "verified_layout_file.save"
        )
        self.request_file.on_save = functools.partial(self.record_call, "request_file.save")

    # -- what happens to it -------------------------------------------------------------------

    def add_pod(
        self, name: str, *, devices: frozenset[str] = frozenset(), **fields: object
    ) -> str:
        self._serial += 1
        uid = f"uid-{self._serial}"
        pod = samples.pod(
            name,
            uid=uid,
            gpu_resources={"nvidia.com/gpu": len(devices)} if devices else {},
            node_name="node-a",
        )
        self.pods[uid] = pod
        self.change_pod(uid, **fields)
        if devices:
            self.kubelet.devices_by_pod[uid] = devices
        return uid

    def change_pod(self, uid: str, **fields: object) -> None:
        self.pods[uid] = dataclasses.replace(self.pods[uid], **fields)  # type: ignore[arg-type]

    def terminate(self, uid: str) -> None:
        """Begin the grace period of a pod; one that has finished is gone at once."""
        pod = self.pods[uid]
        if pod.is_finished:
            self.remove_pod(uid)
        elif not pod.is_terminating:
            ends_by_s = self.clock.unix_s() + pod.grace_s
            self.change_pod(uid, is_terminating=True, ends_by_s=ends_by_s)

    def remove_pod(self, uid: str) -> None:
        """Remove a pod that has ended, and free its devices."""
        del self.pods[uid]
        self.kubelet.devices_by_pod.pop(uid, None)

    def start_plugin(self) -> None:
        """Start a device plugin: it sees the GPUs as they are now, and never again."""
        selector = {well_known.PLUGIN_DEPLOY_LABEL: "true"} if self.plugin.is_label_managed else {}
        self.add_pod(
            "nvidia-device-plugin",
            labels=samples.PLUGIN_LABELS,
            node_selector=selector,
            **samples.OF_PLUGIN,
            is_ready=not self.plugin.is_broken,
            waiting=self.plugin.waiting,
        )
        if not self.plugin.is_broken:
            self.register_devices()

    def register_devices(self) -> None:
        """Have the plugin register the devices that it finds now."""
        self.schedulable = self.plugin_devices

    def restart_machine(self) -> None:
        """Reboot: pending modes are active, and no instance is left on the GPUs."""
        self.host.boot_id = f"boot-{int(self.host.boot_id.removeprefix('boot-')) + 1}"
        self.gpus = tuple(
            dataclasses.replace(gpu, current_mode=gpu.pending_mode, gpu_instances=())
            for gpu in self.gpus
        )
        self.lose_pods()

    def lose_pods(self) -> None:
        """Lose all pods, as in a reboot; kubelet starts the daemons again."""
        self.schedulable = {}
        self.pods.clear()
        self.kubelet.devices_by_pod.clear()
        self.advance()

    # -- what tests ask -----------------------------------------------------------------------

    @property
    def pod_names(self) -> set[str]:
        return {pod.name for pod in self.pods.values()}

    def uid_of(self, name: str) -> str:
        (uid,) = (uid for uid, pod in self.pods.items() if pod.name == name)
        return uid

    @property
    def pods_everywhere(self) -> pod_object.Pods:
        return (*self.pods.values(), *self.disruptions.elsewhere.values())

    @property
    def plugins(self) -> list[pod_object.Pod]:
        return [pod for pod in self.pods.values() if clients.is_device_plugin(pod)]

    @property
    def plugin_devices(self) -> dict[str, frozenset[str]]:
        """The devices that a plugin finds on the GPUs, by resource."""
        return {"nvidia.com/gpu": gpu_values.device_uuids(self.gpus)}

    @property
    def drivers(self) -> list[pod_object.Pod]:
        return [pod for pod in self.pods.values() if dra.is_driver(pod)]

    @property
    def driver_runs(self) -> bool:
        return any(pod.is_ready and not pod.is_terminating for pod in self.drivers)

    @property
    def status(self) -> dict[str, Any]:
        """The status that the agent published, empty before the first."""
        text = self.annotations.get(well_known.STATUS_ANNOTATION, "{}")
        status: dict[str, Any] = json.loads(text)
        return status

    @property
    def published_gpus(self) -> model.ObservedGpus:
        return inventory_codec.from_json(self.annotations[well_known.GPUS_ANNOTATION])

    @property
    def open_journal(self) -> journals.Journal:
        return journals.Journal.from_json(self.annotations[well_known.JOURNAL_ANNOTATION])

    @property
    def request_record(self) -> dict[str, Any]:
        """What the agent noted about the request that it serves."""
        record: dict[str, Any] = json.loads(self.annotations[well_known.REQUEST_ANNOTATION])
        return record

    # -- the calls of ports -------------------------------------------------------------------

    def record_call(self, name: str) -> None:
        self.log.append(name)
        self.on_call()
        error = self.fail_once_at.pop(len(self.log) - 1, None) or self.fail_always.get(name)
        if error is not None:
            # Of its own for each call, because the product adds to an error that it catches.
            copied_error = type(error).__new__(type(error), *error.args)
            vars(copied_error).update(vars(error))
            raise copied_error

    def forget_past(self) -> None:
        """Clear the notes of what happened so far."""
        published = (
            self.states,
            self.status_messages,
            self.ready_reasons,
            self.events,
            self.event_messages,
        )
        for notes in (*published, self.log, self.driver.executed_steps):
            notes.clear()

    # -- what time brings ---------------------------------------------------------------------

    def advance(self) -> None:
        """End terminating pods, and have the DaemonSet controller and the plugin work."""
        for uid, pod in list(self.pods.items()):
            listed_from_s = self.kubelet.pod_listed_from_s.get(uid, math.inf)
            ends_from_s = self.kubelet.pod_ends_from_s.get(uid, self.kubelet.all_end_from_s)
            # Kubelet ends a pod with claims only once the driver has unprepared them.
            has_let_go = pod.claimed_ids is None or self.driver_runs
            if pod.is_terminating and has_let_go and self.clock.now_s >= ends_from_s:
                self.remove_pod(uid)
                if clients.is_device_plugin(pod) and not self.plugins:
                    # Kubelet calls the devices of a plugin that has ended unhealthy.
                    self.schedulable = dict.fromkeys(self.schedulable, frozenset())
            elif pod.phase == "Pending" and self.clock.now_s >= listed_from_s:
                self.change_pod(uid, phase="Running")
        if not self.is_controller_away:
            self.stop_daemons()
            self._start_daemons()

    @property
    def is_controller_away(self) -> bool:
        return self.clock.now_s < self.daemons.controller_away_until_s

    def stop_daemons(self) -> None:
        """Stop the daemons whose labels the node has not."""
        if not self.is_controller_away:
            for uid, pod in list(self.pods.items()):
                if any(self.labels.get(key) != value for key, value in pod.node_selector.items()):
                    self.terminate(uid)

    def _start_daemons(self) -> None:
        # No daemon starts on a node with a taint that it does not tolerate.
        if self.has_hold_taint:
            return
        names = self.pod_names
        for key, is_ready in self.daemons.is_ready_by_label.items():
            name = key.rpartition(".")[2]
            if self.labels.get(key) == "true" and name not in names:
                self.add_pod(
                    name,
                    labels={"app": name},
                    node_selector={key: "true"},
                    owner_kind="DaemonSet",
                    is_ready=is_ready,
                    # Monitors of a DRA cluster have every GPU by a claim with admin access.
                    claimed_ids=frozenset() if name.endswith("-dra") else None,
                )
        for name in self.daemons.without_label - names:
            self.add_pod(name, labels={"app": name}, owner_kind="DaemonSet")
        if self._plugin_is_wanted() and not self.plugins:
            self.start_plugin()
        is_selected = (
            self.labels.get(dra.DEPLOY_LABEL) == "true" or not self.dra_driver.is_label_managed
        )
        if self.dra_driver.is_installed and is_selected and not self.drivers:
            self._start_driver()

    def _plugin_is_wanted(self) -> bool:
        is_selected = self.labels.get(well_known.PLUGIN_DEPLOY_LABEL) == "true"
        return is_selected or not self.plugin.is_label_managed

    def _start_driver(self) -> None:
        """Start a DRA driver: it publishes the GPUs as they are now, and never again."""
        self.add_pod(
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
                name=f"node-a-gpu.nvidia.com-{self._serial}",
                pool="node-a",
                generation=self._serial,
                count=1,
                uuids={f"gpu-{number}": uuid for number, uuid in enumerate(uuids)},
                for_machines=frozenset(),
            ),
        )
