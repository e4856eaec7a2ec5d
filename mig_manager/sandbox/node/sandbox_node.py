"""A GPU node without GPUs: kubelet, device plugin and PodResources, and a tiny control plane.

One thread per node does everything, woken by the watches, by timers and by the status tick.
Several nodes of one cluster share one ``ClusterView`` and its watches.
"""

import contextlib
import logging
import pathlib
import queue
import threading
import time
from typing import Self

from mig_manager import errors
from mig_manager.sandbox.node import (
    cluster_view,
    control_plane,
    device_manager,
    device_plugin,
    kubelet,
    node_options,
    objects,
)

_log = logging.getLogger(__name__)

_RETRY_S = 0.2
_JOIN_S = 10.0
_NO_ANSWER = errors.Reason.API_UNAVAILABLE

NodeOptions = node_options.NodeOptions
Strategy = node_options.Strategy
DeployStyle = node_options.DeployStyle
ClusterView = cluster_view.ClusterView
gpu_pod = objects.gpu_pod


class SandboxNode:
    """A node of a cluster, from ``with`` to its end.

    Args:
        server: URL of the API server, or a connection to it, which is closed at the end.
        state_file: Of the simulated NVML.
        options: How the node behaves.
        cluster: A view of the cluster, to share among nodes; None: one of its own.
        gpus: Other GPUs than those of the state file.
    """

    def __init__(
        self,
        server: cluster_view.Server,
        state_file: pathlib.Path,
        *,
        options: NodeOptions,
        cluster: cluster_view.ClusterView | None = None,
        gpus: node_options.NodeGpus | None = None,
    ) -> None:
        self.options = options
        self.devices = device_manager.DeviceManager(forget_s=options.forget_resource_s)
        self._server = server
        self._shared_cluster = cluster
        self._gpus = gpus or node_options.SimulatedGpus(state_file)
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
        """Reboot the machine; return when kubelet has looked at every pod again.

        An agent on it must have been stopped before.

        Raises:
            NotReadyError: The API does not answer, so kubelet cannot.
        """
        is_up = threading.Event()
        self._reboots.put(is_up)
        self._wake.set()
        if not is_up.wait(_JOIN_S):
            raise errors.NotReadyError(
                f"sandbox node {self.options.name} did not come back", reason=_NO_ANSWER
            )

    def _start(self, undo: contextlib.ExitStack) -> None:
        cluster = self._shared_cluster or undo.enter_context(
            cluster_view.ClusterView(self._server)
        )
        agent = kubelet.Kubelet(
            self.options,
            cluster=cluster,
            manager=self.devices,
            program_of=self._program_of,
            node_labels=objects.node_labels(self._gpus.observe(), self.options),
        )
        agent.register()
        if self.options.is_control_plane:
            cluster.create(
                cluster_view.Kind.DAEMON_SET, objects.plugin_daemon_set(self.options.deploy_style)
            )
        if self.options.pod_resources_socket is not None:
            undo.enter_context(
                device_manager.PodResourcesServer(self.options.pod_resources_socket, self.devices)
            )
        undo.callback(cluster.listen(self._notice))
        thread = threading.Thread(
            target=self._run, args=(cluster, agent), name=f"sandbox-{self.options.name}"
        )
        undo.callback(thread.join, _JOIN_S)
        undo.callback(self._stop)
        thread.start()

    def _stop(self) -> None:
        self._stopping.set()
        self._wake.set()

    def _notice(self, kind: cluster_view.Kind, obj: objects.JsonObject) -> None:
        if self.options.is_control_plane or self._concerns_us(kind, obj):
            self._wake.set()

    def _concerns_us(self, kind: cluster_view.Kind, obj: objects.JsonObject) -> bool:
        match kind:
            case cluster_view.Kind.NODE:
                return objects.name(obj) == self.options.name
            case cluster_view.Kind.POD:
                return objects.node_name(obj) == self.options.name
            case cluster_view.Kind.DAEMON_SET:
                return False

    def _program_of(
        self, pod: objects.JsonObject, allocation: device_manager.Allocation
    ) -> device_plugin.Program:
        if objects.PLUGIN_CONTAINERS.intersection(objects.container_names(pod)):
            return device_plugin.Plugin(
                gpus=self._gpus,
                manager=self.devices,
                strategy=self.options.strategy,
                start_s=self.options.plugin_start_s,
            )
        is_monitor = objects.annotations(pod).get(objects.MONITORS) == "true"
        return device_plugin.DeviceUser(
            gpus=self._gpus,
            name=f"{objects.namespace(pod)}/{objects.name(pod)}",
            device_ids=self._all_gpus if is_monitor else lambda: sorted(allocation.device_ids),
            computes=not is_monitor,
        )

    def _all_gpus(self) -> tuple[str, ...]:
        return tuple(gpu.uuid for gpu in self._gpus.observe())

    def _run(self, cluster: cluster_view.ClusterView, agent: kubelet.Kubelet) -> None:
        controllers = (
            control_plane.NodeLifecycle(cluster),
            control_plane.DaemonSetController(cluster),
            control_plane.Scheduler(cluster),
        )
        tick_at = time.monotonic()
        waiting: list[threading.Event] = []
        try:
            while not self._stopping.is_set():
                self._wake.clear()
                now = time.monotonic()
                if not self._reboots.empty():
                    waiting.append(self._reboots.get())
                    self._switch_off_and_on(agent, now)
                    tick_at = now
                try:
                    if now >= tick_at:
                        agent.tick(now)
                        tick_at = now + self.options.tick_s
                    for controller in controllers if self.options.is_control_plane else ():
                        controller.sync()
                    agent.sync(now)
                except errors.ClusterError as error:
                    _log.warning("sandbox node %s tries again: %s", self.options.name, error)
                    self._stopping.wait(_RETRY_S)
                else:
                    while waiting:
                        waiting.pop().set()
                    next_at = min(tick_at, agent.next_at() or tick_at)
                    self._wake.wait(max(0.0, next_at - time.monotonic()))
        finally:
            agent.stop(time.monotonic())

    def _switch_off_and_on(self, agent: kubelet.Kubelet, now: float) -> None:
        agent.stop(now)
        self.devices.lose_power(now)
        self._gpus.reboot()
