"""NVIDIA's device plugin: its devices in kubelet, and phantom devices of former plugins."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent.pods import advertisers
from mig_manager.core import model, ports
from mig_manager.core.node import node_object, phantoms, pod_object, resources, well_known

_REFUSAL_PAUSE_S = 10.0

_log = structlog.get_logger()

_Pods = tuple[pod_object.Pod, ...]


class DevicePlugin:
    """Implements ``advertisers.Advertiser`` for devices registered with kubelet."""

    kind = advertisers.PLUGIN

    def __init__(self, deps: ports.Dependencies) -> None:
        self._deps = deps
        self._may_remove_at_s = -math.inf
        """When to retry a refused removal of phantom devices: waits check more often, and every
        try is a request."""

    def withdraw(self) -> None:
        """Remove kubelet's devices from the node until a new plugin registers."""
        self._deps.node.withdraw_devices()

    def missing(
        self, gpus: Sequence[model.Gpu], pods: _Pods, changed: frozenset[str]
    ) -> errors.NotReadyError | None:
        """Return the devices that kubelet lacks, or has although no GPU has them."""
        healthy = self._healthy()
        node, refused = self.without_phantoms(gpus, pods, lambda: healthy)
        if refused is not None:
            return refused
        return advertisers.not_allocatable(
            resources.why_not_schedulable(gpus, healthy, node, changed=changed)
        )

    def is_stale(self, gpus: Sequence[model.Gpu]) -> bool:
        """Check whether a ready plugin advertises outdated devices.

        An unhealthy device does not count: a new plugin would report it again.
        """
        node = self._deps.node.latest()
        return resources.is_plugin_stale(gpus, self._healthy(), node)

    def why_refused(
        self,
        layouts: Sequence[resources.GpuLayout],
        pods: _Pods,
        read_node: Callable[[], node_object.NodeView],
        *,
        plugin_config: str | None,
    ) -> str:
        """Return why it would exit with the new devices; empty if it would not, or if unknown."""
        refusals = resources.strategy_refusals(layouts)
        if not refusals:
            return ""
        labels = read_node().labels
        if plugin_config not in (None, labels.get(well_known.PLUGIN_CONFIG_LABEL)):
            # The new config may set another strategy.
            return ""
        strategy = resources.plugin_strategy(list(filter(self.kind.owns, pods)), labels)
        if not strategy or strategy not in refusals:
            return ""
        return (
            f"the device plugin has MIG strategy {strategy.value} and would not start: "
            f"{refusals[strategy]}"
        )

    def without_phantoms(
        self,
        gpus: Sequence[model.Gpu],
        pods: Iterable[pod_object.Pod],
        kubelet: Callable[[], Mapping[str, frozenset[str]] | None] | None = None,
    ) -> tuple[node_object.NodeView, errors.NotReadyError | None]:
        """Remove phantom devices from the node.

        Returns:
            The node, and an error with the devices whose removal the API server refuses, if any.
        """
        node = self._deps.node.latest()
        if self._deps.is_advertiser:
            return node, None
        plugins = [pod for pod in pods if self.kind.owns(pod)]

        def phantoms_of(node: node_object.NodeView) -> dict[str, int]:
            strategy = resources.plugin_strategy(plugins, node.labels)
            return phantoms.find(gpus, node, strategy, kubelet or self._healthy)

        advertised = phantoms_of(node)
        if advertised:
            # The watch may lag behind, but a removal needs the current state.
            node = self._deps.node.read()
            advertised = phantoms_of(node)
        if not advertised:
            self._deps.telemetry.phantoms_found({}, are_removed=False)
            return node, None
        what = phantoms.message(advertised)
        refused = errors.NotReadyError(
            f"{what}, and the agent could not remove them: "
            + phantoms.remedy(node.name, advertised),
            reason=errors.Reason.PHANTOM_DEVICES,
        )
        if self._deps.clock.monotonic() < self._may_remove_at_s:
            return node, refused
        try:
            node = self._deps.node.remove_resources(advertised.keys())
        except errors.ClusterError as error:
            self._may_remove_at_s = self._deps.clock.monotonic() + _REFUSAL_PAUSE_S
            _log.warning(
                "phantom_devices_not_removed",
                resources=advertised,
                reason=error.reason.value,
                detail=error.message,
            )
            self._deps.telemetry.phantoms_found(advertised, are_removed=False)
            return node, refused
        _log.warning("phantom_devices_removed", resources=advertised)
        self._deps.telemetry.phantoms_found(advertised, are_removed=True)
        self._deps.node.emit(
            reason="PhantomDevicesRemoved",
            message=f"{what}: removed from its capacity. A pod that was started with one has no "
            "device.",
            is_warning=True,
        )
        return node, None

    def is_being_replaced(self, node: node_object.NodeView) -> bool:
        """Return whether a plugin ran until recently: its DaemonSet may be replacing its pod.

        Kubelet keeps a stopped plugin's devices for five minutes, all of them unhealthy
        (``endpointStopGracePeriod`` of its device manager). A deploy label that keeps the plugin
        away takes precedence.
        """
        if self._deps.is_advertiser or well_known.PLUGIN_DEPLOY_LABEL in node.labels:
            return False
        counted = {name for name, count in node.capacity.items() if count}
        # A plugin's config may give its resources any name.
        names = set(filter(resources.is_device_or_shared, counted)) or counted
        if not names:
            return False
        healthy = self._healthy()
        return healthy is not None and not any(healthy.get(name) for name in names)

    def _healthy(self) -> Mapping[str, frozenset[str]] | None:
        """Return the healthy devices; None if kubelet does not answer."""
        try:
            return self._deps.allocations.allocatable()
        except errors.ClusterError as error:
            _log.info("pod_resources_unavailable", error=error.message)
            return None
