"""A small GPU node in memory, whose every port call can be made to fail."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Self, TypeVar

from mig_manager.core import model, steps
from mig_manager.core.node.daemons import clients
from mig_manager.core.node.devices import claims as dra
from mig_manager.core.objects import well_known
from tests.rigs.node import cluster_parts, driver_rules, fakes, gpu_values, moments, parts, samples
from tests.rigs.node.saved_file import FakeSavedFile

_T = TypeVar("_T")


@dataclasses.dataclass(slots=True)
class NodeRig:
    """The whole node: its GPUs, the parts around them, and the calls that an agent makes.

    ``nodes`` builds the usual ones. A test sets attributes of the node and of its parts before an
    agent starts; and while it runs, by callbacks at its ``moments``.
    """

    gpus: tuple[model.Gpu, ...]
    clock: fakes.FakeClock = dataclasses.field(default_factory=fakes.FakeClock)

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
    verified_layout_file: FakeSavedFile = dataclasses.field(default_factory=FakeSavedFile)
    host_copy_file: FakeSavedFile = dataclasses.field(default_factory=FakeSavedFile)

    # -- what is planned for calls, and what they were ----------------------------------------

    log: list[str] = dataclasses.field(default_factory=list)
    failures: moments.Plans[BaseException] = dataclasses.field(default_factory=moments.Plans)
    """The errors of calls and steps that fail."""
    lost_answers: moments.Plans[BaseException] = dataclasses.field(default_factory=moments.Plans)
    """The errors that come instead of the answers of patches, evictions and deletions of pods that
    were carried out."""
    callbacks: moments.Plans[Callable[[], object]] = dataclasses.field(
        default_factory=moments.Plans
    )
    """What happens, or is noted, at a moment."""

    def __post_init__(self) -> None:
        self.pods = cluster_parts.Pods(self.kubelet, self.clock)
        self.clock.on_wait.append(self._end_wait)
        self.verified_layout_file.on_save = functools.partial(
            self.record_call, "verified_layout_file.save"
        )
        self.host_copy_file.on_save = functools.partial(self.record_call, "host_copy_file.save")

    def fork(self, *immutable: object) -> Self:
        """Return a copy without its plans, which shares GPUs and other immutable values."""
        plans = (self.failures, self.lost_answers, self.callbacks)
        shared = {id(each): each for each in (self.gpus, *immutable)}
        return copy.deepcopy(self, shared | {id(each): moments.Plans() for each in plans})

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
            feature_gates=self.dra_driver.feature_gates,
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

    def reboot(self) -> None:
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

    def record_call(self, name: str) -> None:
        """Log a call that begins; raise its error if it fails."""
        self.log.append(name)
        self._begin(moments.Call(name, len(self.log) - 1))

    def record_answer(self) -> None:
        """Raise the error that comes instead of the answer to the last call, if it is lost."""
        _raise_first(self.lost_answers.planned_for(moments.Call(self.log[-1], len(self.log) - 1)))

    def begin_step(self, step: steps.Step) -> None:
        """Begin a step of the driver; raise its error if it fails."""
        self.driver.next_step = step
        self._begin(step)

    def _begin(self, moment: moments.Moment) -> None:
        for callback in self.callbacks.planned_for(moment):
            callback()
        _raise_first(self.failures.planned_for(moment))

    def _end_wait(self) -> None:
        self.advance()
        for callback in self.callbacks.planned_for(moments.Wait(self.clock.now_s)):
            callback()

    def note(
        self,
        read: Callable[[], _T],
        *,
        at: moments.MomentSelector = moments.Call,
        when: Callable[[], bool] = lambda: True,
    ) -> list[_T]:
        """Return the values that are read from now on, at moments at which a condition holds."""
        values: list[_T] = []
        self.callbacks.add(at, lambda: values.append(read()), when=when)
        return values

    def set_at(self, at: moments.MomentSelector, part: object, **fields: object) -> None:
        """Set fields of a part of the node whenever such a moment comes."""

        def set_fields() -> None:
            for name, value in fields.items():
                setattr(part, name, value)

        self.callbacks.add(at, set_fields)

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


def _raise_first(planned: Iterator[BaseException]) -> None:
    """Raise the first of some errors, if there is one."""
    for error in planned:
        # Of its own for each call, because the product adds to an error that it catches.
        copied_error = type(error).__new__(type(error), *error.args)
        vars(copied_error).update(vars(error))
        raise copied_error
