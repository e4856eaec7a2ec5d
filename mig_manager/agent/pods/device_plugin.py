"""NVIDIA's device plugin: its devices in kubelet, and phantom devices of former plugins."""

from collections.abc import Callable, Mapping, Sequence

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts, node_context
from mig_manager.agent.pods import device_advertiser
from mig_manager.core import messages, model, ports
from mig_manager.core.node.daemons import clients
from mig_manager.core.node.devices import phantoms, resources, schedulable, strategies
from mig_manager.core.objects import node_object, pod_object, well_known

_log = structlog.get_logger()

_Healthy = Mapping[str, frozenset[str]] | None


class DevicePlugin(device_advertiser.Advertiser):
    """Implements ``Advertiser`` for devices registered with kubelet."""

    name = "device plugin"
    deploy_label = well_known.PLUGIN_DEPLOY_LABEL

    def owns(self, pod: pod_object.Pod) -> bool:
        return clients.is_device_plugin(pod)

    def hide_devices(self, deps: ports.Dependencies) -> None:
        """Remove kubelet's devices from the node until a new plugin registers."""
        deps.node.hide_devices()

    def correct_and_compare(
        self,
        context: node_context.NodeContext,
        gpus: model.ObservedGpus,
        pods: pod_object.Pods,
        changed: frozenset[str],
    ) -> errors.NotReadyError | None:
        """Correct the node's counts; return the devices that kubelet lacks, or that no GPU has."""
        healthy = _healthy(context.deps.allocations)
        strategy = strategies.of_plugin(pods, {})
        view, refused = remove_phantoms(context, gpus, pods, lambda: healthy)
        if refused is not None:
            return refused
        if counts := schedulable.unreported_counts(gpus, healthy, view, strategy=strategy):
            context.deps.node.report_devices(counts)
            view = context.deps.node.latest()
        return device_advertiser.not_allocatable(
            schedulable.why_not(gpus, healthy, view, strategy=strategy, changed=changed)
        )

    def is_stale(self, deps: ports.Dependencies, gpus: model.ObservedGpus) -> bool:
        """Return whether a ready plugin advertises stale devices.

        An unhealthy device does not count: a new plugin would report it again.
        """
        view = deps.node.latest()
        strategy = strategies.of_plugin(deps.workloads.present(), {})
        healthy = _healthy(deps.allocations)
        return schedulable.is_plugin_stale(gpus, healthy, view, strategy=strategy)

    def destroyed_devices(
        self, deps: ports.Dependencies, gpus: model.ObservedGpus, pods: pod_object.Pods
    ) -> frozenset[str] | None:
        """Return kubelet's devices that no GPU has; None if kubelet does not answer."""
        if deps.advertises_simulated:
            return frozenset()
        healthy = _healthy(deps.allocations)
        strategy = strategies.of_plugin(pods, {}) or strategies.from_labels(
            deps.node.latest().labels
        )
        return None if healthy is None else schedulable.destroyed_devices(gpus, healthy, strategy)

    def why_unrestartable(
        self, deps: ports.Dependencies, gpus: model.ObservedGpus
    ) -> errors.NotReadyError | None:
        """Return the error that a plugin without a pod to restart advertises destroyed devices.

        It may be a static pod, a service of the host, or a pod of another controller than a
        DaemonSet.
        """
        gone = self.destroyed_devices(deps, gpus, ())
        if not gone:
            return None
        return errors.NotReadyError(
            f"kubelet has {messages.count(len(gone), 'allocatable device')} that no GPU has, and "
            "the agent found no device plugin pod to restart: restart the plugin",
            reason=reasons.Reason.NOT_ALLOCATABLE,
        )

    def contradicts_label(
        self, attempt: attempts.Attempt, gpus: model.ObservedGpus, pods: pod_object.Pods
    ) -> bool:
        """Return whether a ready plugin of unknown strategy has other devices than the label says.

        The label of GPU feature discovery may show the strategy before a new plugin config. So
        this is a reason for one restart, not for a failure.
        """
        plugins = tuple(filter(self.owns, pods))
        view = attempt.deps.node.latest()
        labelled = strategies.from_labels(view.labels)
        is_known = (
            strategies.of_plugin(plugins, {}) is not None or attempt.plugin_config is not None
        )
        if labelled is None or is_known or self.name in attempt.memory.restarted:
            return False
        return device_advertiser.is_any_ready(plugins) and schedulable.is_plugin_stale(
            gpus, _healthy(attempt.deps.allocations), view, strategy=labelled
        )

    def why_refused(
        self,
        attempt: attempts.Attempt,
        layouts: Sequence[strategies.GpuLayout],
        pods: pod_object.Pods,
    ) -> str:
        labels = attempt.node_labels
        if attempt.plugin_config not in (None, labels.get(well_known.PLUGIN_CONFIG_LABEL)):
            # The new config may set another strategy.
            return ""
        strategy = strategies.of_plugin(pods, labels)
        if strategy and (why := strategies.refusal(layouts, strategy, labels)):
            return (
                f"the device plugin has MIG strategy {strategy.value} and would not start: {why}"
            )
        return ""

    def why_not_starting(self, gpus: model.ObservedGpus) -> str:
        layouts = strategies.gpu_layouts(gpus, {})
        causes = [
            f"with MIG strategy {strategy.value} it does not start: {why}"
            for strategy, why in strategies.refusals(layouts).items()
        ]
        empty = strategies.without_devices(layouts)
        if empty:
            causes.append(f"with mixed older ones do not start: no MIG device on {empty}")
        return "".join(f"; {cause}" for cause in causes)


def remove_reported_phantoms(
    context: node_context.NodeContext, gpus: model.ObservedGpus, view: node_object.NodeView
) -> errors.NotReadyError | None:
    """Remove phantom devices from the node; return why that failed.

    If the ``view`` of the node has no phantom devices, no request is sent.
    """
    if not phantoms.is_possible(gpus, view, strategies.from_labels(view.labels)):
        context.deps.telemetry.phantoms_found({}, are_removed=False)
        return None
    return remove_phantoms(context, gpus, context.deps.workloads.present())[1]


def remove_phantoms(
    context: node_context.NodeContext,
    gpus: model.ObservedGpus,
    pods: pod_object.Pods,
    kubelet: Callable[[], _Healthy] | None = None,
) -> tuple[node_object.NodeView, errors.NotReadyError | None]:
    """Remove phantom devices from the node.

    Returns:
        The node, and an error with the devices whose removal the API server refuses, if any.
    """
    deps = context.deps
    view = deps.node.latest()
    if deps.advertises_simulated:
        return view, None

    def find(view: node_object.NodeView) -> dict[str, int]:
        strategy = strategies.of_plugin(pods, view.labels)
        return phantoms.find(gpus, view, strategy, kubelet or (lambda: _healthy(deps.allocations)))

    advertised = find(view)
    if advertised:
        # The watch may lag behind, but a removal needs the current state.
        view = deps.node.read()
        advertised = find(view)
    if not advertised:
        deps.telemetry.phantoms_found({}, are_removed=False)
        return view, None
    what = phantoms.message(advertised)
    refused = errors.NotReadyError(
        f"{what}, and the agent could not remove them: " + phantoms.remedy(view.name, advertised),
        reason=reasons.Reason.PHANTOM_DEVICES,
    )
    if not context.memory.may_remove_phantoms(deps.clock.monotonic()):
        return view, refused
    try:
        view = deps.node.remove_resources(advertised.keys())
    except errors.ClusterError as error:
        context.memory.record_refused_removal(deps.clock.monotonic())
        _log.warning(
            "phantom_devices_not_removed",
            resources=advertised,
            reason=error.reason.value,
            detail=error.message,
        )
        deps.telemetry.phantoms_found(advertised, are_removed=False)
        return view, refused
    _log.warning("phantom_devices_removed", resources=advertised)
    deps.telemetry.phantoms_found(advertised, are_removed=True)
    deps.node.emit(
        reason="PhantomDevicesRemoved",
        message=f"{what}: removed from its capacity. A pod that was started with one has no "
        "device.",
        is_warning=True,
    )
    return view, None


def is_being_replaced(deps: ports.Dependencies, view: node_object.NodeView) -> bool:
    """Return whether a plugin ran until recently: its DaemonSet may be replacing its pod.

    Kubelet keeps a stopped plugin's devices for five minutes, all of them unhealthy
    (``endpointStopGracePeriod`` of its device manager). A deploy label that keeps the plugin away
    takes precedence.
    """
    if deps.advertises_simulated or well_known.PLUGIN_DEPLOY_LABEL in view.labels:
        return False
    # Other resources belong to other plugins, such as ``nvidia.com/hostdev``.
    names = resources.devices_of(view.capacity)
    if not names:
        return False
    healthy = _healthy(deps.allocations)
    return healthy is not None and not any(healthy.get(name) for name in names)


def _healthy(allocations: ports.DeviceAllocations) -> _Healthy:
    """Return the healthy devices; None if kubelet does not answer."""
    try:
        return allocations.allocatable()
    except errors.KubeletError as error:
        _log.info("pod_resources_unavailable", error=error.message)
        return None
