"""A GPU node without GPUs: kubelet, device plugin and PodResources, and a tiny control plane.

One thread does everything; watches, timers and the status tick wake it.
"""

import contextlib
import dataclasses
import enum
import logging
import pathlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from mig_manager import errors
from mig_manager.catalogue import hardware
from mig_manager.core.node import well_known
from mig_manager.sandbox.apiserver import store
from mig_manager.sandbox.driver import state_file, states
from mig_manager.sandbox.node import (
    cluster_view,
    control_plane,
    device_manager,
    device_plugin,
    objects,
)

_log = logging.getLogger(__name__)

_RETRY_S = 0.2
_JOIN_S = 10.0
_CRASH_BACKOFF_S = 10.0
"""Kubelet's first pause before it restarts a crashed container; it doubles up to the longest."""
_CRASH_BACKOFF_MAX_S = 300.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """How one sandbox node behaves; durations in seconds."""

    name: str = "sandbox-node"
    strategy: device_plugin.Strategy = device_plugin.Strategy.MIXED
    deploy_style: objects.DeployStyle = objects.DeployStyle.GPU_OPERATOR
    tick_s: float = 10.0
    """How often kubelet writes the node's status; 10 is kubelet's nodeStatusUpdateFrequency."""
    pod_start_s: float = 0.2
    """From the binding of a pod to its containers running."""
    pod_stop_s: float = 0.1
    """How long a pod needs to stop, unless its annotation has another time."""
    plugin_start_s: float = 0.3
    """From the start of the plugin's container to its registration."""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    controllers: Sequence[Callable[[cluster_view.ClusterView], None]] = (
        control_plane.sync_nodes,
        control_plane.sync_daemon_sets,
        control_plane.sync_scheduler,
    )
    """Controllers to run beside kubelet; in a cluster of several nodes, on one of them."""


class SandboxNode:
    """A node of a cluster; a context manager.

    Args:
        cluster: An open view of the cluster.
        path: The state file of the simulated NVML.
        socket: Where to serve PodResources; at most 107 bytes.
        options: How the node behaves.
    """

    def __init__(
        self,
        cluster: cluster_view.ClusterView,
        path: pathlib.Path,
        socket: pathlib.Path,
        *,
        options: NodeOptions,
    ) -> None:
        self.options = options
        self.devices = device_manager.DeviceManager()
        self._cluster = cluster
        self._socket = socket
        self._state = state_file.SharedState(path)
        self._exits = contextlib.ExitStack()
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._reboots: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        """Register the node, deploy the device plugin, and start.

        Raises:
            ClusterError: The API refused or does not answer.
            HardwareError: The simulated NVML failed.
            UsageError: The PodResources socket's path is too long.
        """
        with contextlib.ExitStack() as undo:
            self._start(undo)
            self._exits = undo.pop_all()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._exits.close()

    def reboot(self) -> None:
        """Reboot the machine; return when kubelet has synced every pod.

        Stop the node's agent before.

        Raises:
            NotReadyError: The API does not answer kubelet.
        """
        is_up = threading.Event()
        self._reboots.put(is_up)
        self._wake.set()
        if not is_up.wait(_JOIN_S):
            raise errors.NotReadyError(
                f"sandbox node {self.options.name} did not come back",
                reason=errors.Reason.API_UNAVAILABLE,
            )

    def _start(self, undo: contextlib.ExitStack) -> None:
        options, cluster = self.options, self._cluster
        kubelet = Kubelet(
            options,
            cluster=cluster,
            manager=self.devices,
            program_of=self._program_of,
            node_labels=_node_labels([board.product for board in self._state.boards], options),
        )
        kubelet.register()
        daemon_set = objects.plugin_daemon_set(options.deploy_style)
        cluster.create(cluster_view.Kind.DAEMON_SET, daemon_set)
        undo.enter_context(device_manager.serving_pod_resources(self._socket, self.devices))
        undo.callback(cluster.listen(lambda *_: self._wake.set()))
        thread = threading.Thread(
            target=self._run, args=(kubelet,), name=f"sandbox-{options.name}"
        )
        undo.callback(thread.join, _JOIN_S)
        undo.callback(self._wake.set)
        undo.callback(self._stopping.set)
        thread.start()

    def _program_of(
        self, pod: objects.JsonObject, allocation: device_manager.Allocation
    ) -> device_plugin.Program:
        if objects.is_plugin(pod):
            return device_plugin.Plugin(
                state=self._state,
                manager=self.devices,
                strategy=self.options.strategy,
                start_s=self.options.plugin_start_s,
            )
        is_monitor = objects.annotations(pod).get(objects.MONITORS) == "true"

        def device_ids() -> list[str]:
            if is_monitor:
                return [gpu.uuid for gpu in device_plugin.observe(self._state)]
            return sorted(allocation.device_ids)

        return device_plugin.DeviceUser(
            state=self._state,
            name=f"{objects.namespace(pod)}/{objects.name(pod)}",
            device_ids=device_ids,
            kind=states.ClientKind.MONITOR if is_monitor else states.ClientKind.COMPUTE,
        )

    def _run(self, kubelet: "Kubelet") -> None:
        tick_at = time.monotonic()
        waiting: list[threading.Event] = []
        try:
            while not self._stopping.is_set():
                self._wake.clear()
                now = time.monotonic()
                if not self._reboots.empty():
                    waiting.append(self._reboots.get())
                    kubelet.stop()
                    self.devices.lose_power()
                    self._state.reboot()
                    tick_at = now
                try:
                    if now >= tick_at:
                        kubelet.tick()
                        tick_at = now + self.options.tick_s
                    for sync in self.options.controllers:
                        sync(self._cluster)
                    kubelet.sync(now)
                except errors.ClusterError as error:
                    _log.warning("sandbox node %s retries: %s", self.options.name, error)
                    self._stopping.wait(_RETRY_S)
                else:
                    while waiting:
                        waiting.pop().set()
                    next_at = min(tick_at, kubelet.next_at() or tick_at)
                    self._wake.wait(max(0.0, next_at - time.monotonic()))
        finally:
            kubelet.stop()


def _node_labels(gpus: Sequence[hardware.Product], options: NodeOptions) -> dict[str, str]:
    """Return the labels by kubelet and GPU feature discovery, and the extra labels.

    Feature discovery follows a change of layout up to a minute late; labels that depend on the
    layout are omitted.
    """
    labels = {"kubernetes.io/hostname": options.name, "kubernetes.io/os": "linux"}
    if gpus:
        labels |= {
            "nvidia.com/gpu.present": "true",
            "nvidia.com/gpu.count": str(len(gpus)),
            "nvidia.com/gpu.product": gpus[0].name.replace(" ", "-"),
            "nvidia.com/gpu.memory": str(gpus[0].memory_mib),
            "nvidia.com/mig.capable": str(any(gpu.is_mig_capable for gpu in gpus)).lower(),
            "nvidia.com/mig.strategy": options.strategy.value,
        }
        if options.deploy_style is objects.DeployStyle.GPU_OPERATOR:
            labels[well_known.PLUGIN_DEPLOY_LABEL] = "true"
    return {**labels, **options.labels}


ProgramFactory = Callable[[objects.JsonObject, device_manager.Allocation], device_plugin.Program]


class _Stage(enum.Enum):
    WAITING = enum.auto()
    """For its start, or for its next start after a crash."""
    RUNNING = enum.auto()
    STOPPING = enum.auto()
    STOPPED = enum.auto()


@dataclasses.dataclass(slots=True, kw_only=True)
class _Worker:
    """One admitted pod."""

    uid: str
    program: device_plugin.Program
    stage: _Stage = _Stage.WAITING
    next_at: float | None
    """When the stage ends, in monotonic seconds."""
    restarts: int = 0
    stopping_since: float = 0.0
    status: objects.JsonObject | None = None
    """The status to publish; None: published."""


class Kubelet:
    """Kubelet: registers the node, admits and runs its pods, and reports both.

    Level-triggered: ``sync`` compares the pods with the workers and acts; ``next_at`` is the time
    of the next action. No method waits. Used by one thread.
    """

    def __init__(
        self,
        opts: NodeOptions,
        *,
        cluster: cluster_view.ClusterView,
        manager: device_manager.DeviceManager,
        program_of: ProgramFactory,
        node_labels: Mapping[str, str],
    ) -> None:
        self._opts = opts
        self._cluster = cluster
        self._manager = manager
        self._program_of = program_of
        self._node_labels = node_labels
        self._workers: dict[str, _Worker] = {}

    def register(self) -> None:
        """Create the Node object, or add missing labels.

        Existing labels stay: a pause of the device plugin must survive kubelet.
        """
        kind = cluster_view.Kind.NODE
        node = self._cluster.node(self._opts.name)
        if node is None:
            metadata = {"name": self._opts.name, "labels": dict(self._node_labels)}
            node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}}
            self._cluster.create(kind, node)
        elif missing := self._node_labels.keys() - objects.labels(node).keys():
            labels = {key: self._node_labels[key] for key in missing}
            self._cluster.patch(kind, node, {"metadata": {"labels": labels}})

    def tick(self) -> None:
        """Write the node's status if it differs; register a deleted node again."""
        if self._cluster.node(self._opts.name) is None:
            self.register()
        node = self._cluster.node(self._opts.name)
        status = objects.node_status(
            *self._manager.status(objects.devices(node or {}, "capacity"))
        )
        have = (node or {}).get("status") or {}
        # Others write conditions too, and the API server adds times and empty fields to ours.
        (ready,), conditions = status["conditions"], have.get("conditions") or ()
        info, had = status["nodeInfo"], have.get("nodeInfo") or {}
        have = have | {
            "conditions": [ready for each in conditions if ready.items() <= each.items()],
            "nodeInfo": {key: had.get(key) for key in info},
        }
        if node is not None and any(have.get(key) != value for key, value in status.items()):
            self._cluster.patch_status(cluster_view.Kind.NODE, node, status)

    def next_at(self) -> float | None:
        """Return the time of the next action, in monotonic seconds; None: no action is due."""
        times = [at for w in self._workers.values() for at in (w.next_at, w.program.next_at)]
        return min((at for at in times if at is not None), default=None)

    def sync(self, now: float) -> None:
        """Admit, start, report and end the pods of the node.

        After ``stop`` this is kubelet's start on a booted machine: it admits and starts pods that
        ran. A pod with devices fails if no plugin has registered them by then, as after a real
        reboot (kubernetes/kubernetes#125579).
        """
        pods = {
            objects.uid(pod): pod
            for pod in self._cluster.list(cluster_view.Kind.POD)
            if objects.node_name(pod) == self._opts.name
        }
        for uid in self._workers.keys() - pods.keys():
            self._end(self._workers.pop(uid))
        for uid, pod in pods.items():
            worker = self._workers.get(uid) or self._admit(pod, now)
            if worker is None:
                continue
            self._advance(worker, pod, now)
            if worker.status is not None:
                self._cluster.patch_status(cluster_view.Kind.POD, pod, worker.status)
                worker.status = None

    def stop(self) -> None:
        """End every program at once without a write to the API, as if the power failed."""
        for worker in self._workers.values():
            self._end(worker)
        self._workers.clear()

    def _admit(self, pod: objects.JsonObject, now: float) -> _Worker | None:
        """Admit a pod; None if it does not run."""
        if objects.is_terminating(pod):
            self._cluster.delete(cluster_view.Kind.POD, pod, now=True)
            return None
        if objects.is_finished(pod):
            return None
        try:
            allocation = self._manager.admit(pod)
        except device_manager.ShortageError as error:
            status = {
                "phase": "Failed",
                "reason": "UnexpectedAdmissionError",
                "message": f"Pod was rejected: {error}",
                "startTime": store.timestamp(),
            }
            self._cluster.patch_status(cluster_view.Kind.POD, pod, status)
            return None
        worker = _Worker(
            uid=objects.uid(pod),
            program=self._program_of(pod, allocation),
            next_at=now + self._opts.pod_start_s,
        )
        restarts = objects.restart_count(pod)
        if restarts is not None:
            worker.restarts = restarts + 1
            worker.status = objects.waiting(
                pod, reason="ContainerCreating", message="", restarts=worker.restarts
            )
        self._workers[worker.uid] = worker
        return worker

    def _advance(self, worker: _Worker, pod: objects.JsonObject, now: float) -> None:
        if objects.is_terminating(pod):
            self._terminate(worker, pod, now)
            return
        is_due = worker.next_at is not None and now >= worker.next_at
        try:
            if worker.stage is _Stage.RUNNING and is_due:
                self._end(worker)
                worker.status = objects.succeeded(pod)
            elif worker.stage is _Stage.RUNNING:
                worker.program.poll(now)
            elif worker.stage is _Stage.WAITING and is_due:
                worker.program.start(now)
                run_s = objects.annotations(pod).get(objects.RUN_SECONDS)
                worker.stage = _Stage.RUNNING
                worker.next_at = None if run_s is None else now + float(run_s)
                worker.status = objects.running(pod, restarts=worker.restarts)
        except device_plugin.NotStartedError as error:
            self._back_off(worker, pod, now, reason="RunContainerError", message=str(error))
        except device_plugin.ExitedError as error:
            self._back_off(worker, pod, now, reason="CrashLoopBackOff", message=str(error))

    def _back_off(
        self, worker: _Worker, pod: objects.JsonObject, now: float, *, reason: str, message: str
    ) -> None:
        worker.program.stop()
        delay_s = _CRASH_BACKOFF_S * 2.0**worker.restarts
        worker.restarts += 1
        worker.stage = _Stage.WAITING
        worker.next_at = now + min(delay_s, _CRASH_BACKOFF_MAX_S)
        worker.status = objects.waiting(
            pod, reason=reason, message=message, restarts=worker.restarts
        )

    def _terminate(self, worker: _Worker, pod: objects.JsonObject, now: float) -> None:
        if worker.stage is _Stage.RUNNING:
            worker.stage, worker.stopping_since = _Stage.STOPPING, now
        if worker.stage is _Stage.STOPPING:
            # Computed every time: a second deletion may shorten the grace period.
            grace_s = pod["metadata"]["deletionGracePeriodSeconds"]
            own_s = objects.annotations(pod).get(objects.STOP_SECONDS, self._opts.pod_stop_s)
            worker.next_at = worker.stopping_since + min(float(own_s), float(grace_s))
            if now < worker.next_at:
                return
        self._end(worker)
        worker.status = None
        self._cluster.delete(cluster_view.Kind.POD, pod, now=True)

    def _end(self, worker: _Worker) -> None:
        worker.stage, worker.next_at = _Stage.STOPPED, None
        worker.program.stop()
        self._manager.release(worker.uid)
