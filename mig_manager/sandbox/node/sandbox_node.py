"""A GPU node without GPUs: kubelet, device plugin and PodResources, and a tiny control plane.

One thread does everything; watches, timers and the status tick wake it.
"""

import contextlib
import dataclasses
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from mig_manager import errors
from mig_manager.adapters import host
from mig_manager.catalogue import product_table
from mig_manager.core.node.devices import strategies
from mig_manager.core.objects import discovery_labels, well_known
from mig_manager.sandbox.driver import state_file, states
from mig_manager.sandbox.node import (
    cluster_view,
    control_plane,
    device_manager,
    device_plugin,
    kubelet,
    manifests,
    objects,
)

_log = logging.getLogger(__name__)

_RETRY_S = 0.2
_JOIN_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions(kubelet.KubeletOptions):
    """How one sandbox node behaves; durations in seconds."""

    strategy: strategies.Strategy = strategies.Strategy.MIXED
    deploy_style: objects.DeployStyle = objects.DeployStyle.GPU_OPERATOR
    tick_s: float = 10.0
    """How often kubelet writes the node's status; 10 is kubelet's nodeStatusUpdateFrequency."""
    plugin_start_s: float = 0.3  # from the start of the plugin's container to its registration
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
        fail: Called in the node's thread if a file cannot be written; the node has then ended.
    """

    def __init__(
        self,
        cluster: cluster_view.ClusterView,
        path: pathlib.Path,
        socket: pathlib.Path,
        *,
        options: NodeOptions,
        fail: Callable[[OSError], None],
    ) -> None:
        self.options = options
        self._fail = fail
        self.devices = device_manager.DeviceManager(host.SystemClock())
        self._cluster = cluster
        self._socket = socket
        self._state = state_file.SharedState(path)
        self._exits = contextlib.ExitStack()
        self._wake = threading.Event()

    def __enter__(self) -> Self:
        """Register the node, deploy the device plugin, and start.

        Raises:
            ClusterError: The API refused or does not answer.
            HardwareError: The simulated NVML failed.
            UsageError: The PodResources socket's path is too long.
        """
        daemon_set = manifests.plugin_daemon_set(self.options.deploy_style)
        self._cluster.create(cluster_view.WatchedKind.DAEMON_SET, daemon_set)
        self._boot()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._exits.close()

    def reboot(self) -> None:
        """Reboot the machine; return when kubelet has synced every pod.

        Stop the node's agent before. Exceptions are as of ``__enter__``.
        """
        self._exits.close()
        self._state.reboot()
        self._boot()

    def _boot(self) -> None:
        with contextlib.ExitStack() as undo:
            self._start(undo)
            self._exits = undo.pop_all()

    def _start(self, undo: contextlib.ExitStack) -> None:
        options, cluster = self.options, self._cluster
        daemon = kubelet.Kubelet(
            options,
            cluster=cluster,
            manager=self.devices,
            program_of=self._program_of,
            node_labels=_node_labels([board.product for board in self._state.boards], options),
        )
        daemon.register()
        undo.enter_context(device_manager.serving_pod_resources(self._socket, self.devices))
        undo.callback(cluster.listen(lambda *_: self._wake.set()))
        undo.callback(daemon.stop)
        daemon.sync(time.monotonic())
        stopping = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(daemon, stopping), name=f"sandbox-{options.name}"
        )
        undo.callback(thread.join, _JOIN_S)
        undo.callback(self._wake.set)
        undo.callback(stopping.set)
        thread.start()

    def _program_of(
        self, pod: objects.JsonObject, allocation: device_manager.Allocation
    ) -> device_plugin.PodProgram:
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
                return [gpu.uuid for gpu in device_plugin.enumerate_gpus(self._state)]
            return sorted(allocation.device_ids)

        return device_plugin.DeviceUser(
            state=self._state,
            name=f"{objects.namespace(pod)}/{objects.name(pod)}",
            device_ids=device_ids,
            kind=states.ClientKind.MONITOR if is_monitor else states.ClientKind.COMPUTE,
        )

    def _run(self, daemon: kubelet.Kubelet, stopping: threading.Event) -> None:
        tick_at = time.monotonic()
        while not stopping.is_set():
            self._wake.clear()
            now = time.monotonic()
            try:
                if now >= tick_at:
                    daemon.tick()
                    tick_at = now + self.options.tick_s
                for sync in self.options.controllers:
                    sync(self._cluster)
                daemon.sync(now)
            except errors.ClusterError as error:
                _log.warning("sandbox node %s retries: %s", self.options.name, error)
                stopping.wait(_RETRY_S)
            except OSError as error:
                self._fail(error)
                return
            else:
                next_at = min(tick_at, daemon.next_at() or tick_at)
                self._wake.wait(max(0.0, next_at - time.monotonic()))


def _node_labels(gpus: Sequence[product_table.Product], options: NodeOptions) -> dict[str, str]:
    """Return the labels by kubelet and GPU feature discovery, and the extra labels.

    Feature discovery follows a change of layout up to a minute late; labels that depend on the
    layout are omitted.
    """
    labels = {"kubernetes.io/hostname": options.name, "kubernetes.io/os": "linux"}
    if gpus:
        labels |= {
            discovery_labels.PRESENT: "true",
            discovery_labels.COUNT: str(len(gpus)),
            discovery_labels.PRODUCT: gpus[0].name.replace(" ", "-"),
            "nvidia.com/gpu.memory": str(gpus[0].memory_mib),
            discovery_labels.MIG_CAPABLE: str(any(gpu.is_mig_capable for gpu in gpus)).lower(),
            discovery_labels.STRATEGY: options.strategy.value,
        }
        if options.deploy_style is objects.DeployStyle.GPU_OPERATOR:
            labels[well_known.PLUGIN_DEPLOY_LABEL] = "true"
    return {**labels, **options.labels}
