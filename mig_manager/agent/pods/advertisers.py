"""Who advertises a node's devices, and whether they advertise what the GPUs have.

NVIDIA's device plugin registers devices with kubelet, and NVIDIA's DRA driver publishes
ResourceSlices. Each lists the devices only when it starts. A node may have either, or both.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from mig_manager import errors
from mig_manager.core import model, ports
from mig_manager.core.node import claims, clients, cluster, phantoms, resources
from mig_manager.core.records import status

DEPLOY_LABELS = (cluster.PLUGIN_DEPLOY_LABEL, claims.DEPLOY_LABEL)

_REFUSAL_PAUSE_S = 10.0

_log = structlog.get_logger()

_Pods = tuple[cluster.Pod, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Advertisers:
    """What advertises the devices of one node; neither: there is nothing to restart or verify."""

    has_plugin: bool
    has_dra_driver: bool
    old_uids: frozenset[str] = frozenset()
    """Pods from before the change: the devices that they advertise are stale."""
    kept_uids: frozenset[str] = frozenset()
    """DRA driver pods that are not restarted: they advertise what the GPUs have."""

    @property
    def is_any(self) -> bool:
        """Whether there is one."""
        return self.has_plugin or self.has_dra_driver

    @property
    def names(self) -> str:
        """The names of those that are restarted, in a sentence."""
        restarts_driver = self.has_dra_driver and not self.kept_uids
        known = {"device plugin": self.has_plugin, "DRA driver": restarts_driver}
        return " and ".join(f"the {name}" for name, has in known.items() if has)


def is_advertiser(pod: cluster.Pod) -> bool:
    """Return whether a pod is the device plugin or the DRA driver."""
    return clients.is_device_plugin(pod) or claims.is_driver(pod)


class Advertising:
    """What device plugin and DRA driver advertise of one node.

    Raises:
        ClusterError: From each method, where the API refuses or does not answer.
    """

    def __init__(self, deps: ports.Dependencies) -> None:
        self._deps = deps
        self._expects_plugin = False
        """Whether a plugin pod without a deploy label was deleted, and has no successor yet."""
        self._expects_driver = False  # the same of the DRA driver
        self._may_remove_at_s = -math.inf
        """When a refused removal of phantom devices is tried again."""

    def expect(self, *, plugin: bool = False, dra_driver: bool = False) -> None:
        """Expect new pods of them, because their old ones were ended."""
        self._expects_plugin |= plugin
        self._expects_driver |= dra_driver

    def expect_none(self) -> None:
        """Expect no pod that is not there: its owner may have removed it."""
        self._expects_plugin = self._expects_driver = False

    def expects_driver(self, journal: status.Journal, pods: Iterable[cluster.Pod]) -> bool:
        """Return whether a DRA driver belongs on the node, although it may have no pod now.

        A device by a ResourceClaim shows it too: only a driver hands one out.
        """
        if self._expects_driver or journal.has_dra_driver:
            return True
        return any(pod.claimed_ids or claims.is_driver(pod) for pod in pods) or _has_label(
            self._deps.node.read().labels
        )

    def current_drivers(
        self, gpus: Sequence[model.Gpu], pods: Iterable[cluster.Pod]
    ) -> frozenset[str]:
        """Return the UIDs of the DRA driver's pods, if one is ready and the slices match."""
        drivers = tuple(filter(claims.is_driver, pods))
        if not _is_any_ready(drivers) or self._deps.slices is None:
            return frozenset()
        slices = self._deps.slices.list()
        if slices is None or claims.why_not_advertised(gpus, slices):
            return frozenset()
        return frozenset(pod.uid for pod in drivers if not pod.is_terminating)

    def lacks_driver(
        self, pods: Iterable[cluster.Pod], *, gpus: Sequence[model.Gpu], needs_slices: bool
    ) -> bool:
        """Return whether no DRA driver pod is ready, or the slices are needed and do not match."""
        return not has_ready_driver(pods) or (needs_slices and bool(self._why_not_in_slices(gpus)))

    def find(self, pods: Iterable[cluster.Pod], gpus: Sequence[model.Gpu]) -> Advertisers:
        """Return who advertises the node's devices, with their present pods as old ones.

        Phantom devices are removed from the node: they look like those of a lost plugin.
        """
        known = tuple(pods)
        node, _ = self.without_phantoms(gpus, known)
        # Any value but "true" is another program's decision to keep it away, and no failure.
        wanted = {key for key in DEPLOY_LABELS if node.labels.get(key) == "true"}
        has_plugin = any(map(clients.is_device_plugin, known)) or self._expects_plugin
        has_driver = any(map(claims.is_driver, known)) or self._expects_driver
        return Advertisers(
            has_plugin=has_plugin
            or cluster.PLUGIN_DEPLOY_LABEL in wanted
            or self._lost_its_plugin(node),
            has_dra_driver=has_driver or claims.DEPLOY_LABEL in wanted,
            old_uids=frozenset(pod.uid for pod in known if is_advertiser(pod)),
        )

    def paused(self, journal: status.Journal, pods: Iterable[cluster.Pod]) -> Advertisers:
        """Return those that a pause ended, according to the journal; ``pods`` are from before."""
        has_plugin = journal.has_plugin or self._expects_plugin
        return Advertisers(
            has_plugin=has_plugin or self._lost_its_plugin(self._deps.node.read()),
            has_dra_driver=journal.has_dra_driver or self._expects_driver,
            old_uids=frozenset(pod.uid for pod in pods if is_advertiser(pod)),
        )

    def missing(
        self,
        who: Advertisers,
        gpus: Sequence[model.Gpu],
        pods: Iterable[cluster.Pod],
        *,
        changed: frozenset[str] = frozenset(),
    ) -> errors.NotReadyError | None:
        """Return what keeps pods from getting the GPUs' devices; None where nothing does.

        ``changed`` are the UUIDs of the GPUs all of whose devices must be healthy.
        """
        new = tuple(pod for pod in pods if pod.uid not in who.old_uids)
        plugins = tuple(filter(clients.is_device_plugin, new))
        drivers = tuple(filter(claims.is_driver, new))
        if who.has_plugin and not _is_any_ready(plugins):
            return _not_ready("device plugin", plugins, _possible_causes(gpus))
        if who.has_dra_driver and not _is_any_ready(drivers):
            return _not_ready("DRA driver", drivers)
        if who.has_plugin:
            healthy = self._allocatable()
            node, refused = self.without_phantoms(gpus, plugins, lambda: healthy)
            if refused is not None:
                return refused
            why = resources.why_not_schedulable(gpus, healthy, node, changed=changed)
            if why:
                return errors.NotReadyError(why, reason=errors.Reason.NOT_ALLOCATABLE)
        why = self._why_not_in_slices(gpus) if who.has_dra_driver else ""
        return errors.NotReadyError(why, reason=errors.Reason.NOT_ALLOCATABLE) if why else None

    def without_phantoms(
        self,
        gpus: Sequence[model.Gpu],
        pods: Iterable[cluster.Pod],
        kubelet: Callable[[], Mapping[str, frozenset[str]] | None] | None = None,
    ) -> tuple[cluster.NodeView, errors.NotReadyError | None]:
        """Remove the devices that the node offers and no GPU has.

        Returns:
            The node, and the error with the devices that the API server keeps us from removing;
            None if there are none.
        """
        node = self._deps.node.read()
        if self._deps.is_advertiser:
            return node, None
        plugins = [pod for pod in pods if clients.is_device_plugin(pod)]
        strategy = resources.plugin_strategy(plugins, node.labels)
        advertised = phantoms.find(gpus, node, strategy, kubelet or self._allocatable)
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

    def stale_pods(
        self, who: Advertisers, gpus: Sequence[model.Gpu], pods: Iterable[cluster.Pod]
    ) -> _Pods:
        """Return the pods of those that are ready and do not know the GPUs' devices.

        An unhealthy device is no reason: a new plugin would report it again.
        """
        known = tuple(pods)
        plugins = tuple(filter(clients.is_device_plugin, known))
        drivers = tuple(filter(claims.is_driver, known))
        stale: _Pods = ()
        if _is_any_ready(plugins):
            node = self._deps.node.read()
            if resources.is_plugin_stale(gpus, self._allocatable(), node):
                stale += plugins
        if who.has_dra_driver and _is_any_ready(drivers) and self._why_not_in_slices(gpus):
            stale += drivers
        return stale

    def withdraw(self, who: Advertisers) -> None:
        """Keep pods from stale devices until new ones are advertised."""
        if who.has_plugin:
            self._deps.node.withdraw_devices()
        if who.has_dra_driver and not who.kept_uids and self._deps.slices is not None:
            self._deps.slices.withdraw()

    def require_served(
        self,
        layouts: Sequence[resources.GpuLayout],
        pods: Iterable[cluster.Pod],
        *,
        plugin_config: str | None,
    ) -> None:
        """Return if neither exits over what the GPUs will have, as far as known.

        Raises:
            LayoutError: STRATEGY_MISMATCH: one would exit.
        """
        why, refusals = claims.why_not_served(layouts), resources.strategy_refusals(layouts)
        if not (why or refusals):
            return
        known, labels = tuple(pods), self._deps.node.read().labels
        has_driver = self._expects_driver or _has_label(labels)
        if why and (has_driver or any(map(claims.is_driver, known))):
            raise errors.LayoutError(
                f"the DRA driver would not start: {why}", reason=errors.Reason.STRATEGY_MISMATCH
            )
        if plugin_config not in (None, labels.get(cluster.PLUGIN_CONFIG_LABEL)):
            # The new config may set another strategy.
            return
        plugins = [pod for pod in known if clients.is_device_plugin(pod)]
        strategy = resources.plugin_strategy(plugins, labels)
        if strategy and strategy in refusals:
            raise errors.LayoutError(
                f"the device plugin has MIG strategy {strategy.value} and would not start: "
                f"{refusals[strategy]}",
                reason=errors.Reason.STRATEGY_MISMATCH,
            )

    def _lost_its_plugin(self, node: cluster.NodeView) -> bool:
        """Return whether a plugin was there just now: its DaemonSet may be replacing its pod.

        Kubelet keeps the devices of a plugin that ended for five minutes, all of them unhealthy
        (``endpointStopGracePeriod`` of its device manager). A deploy label that keeps the plugin
        away says more.
        """
        if self._deps.is_advertiser or cluster.PLUGIN_DEPLOY_LABEL in node.labels:
            return False
        counted = {name for name, count in node.capacity.items() if count}
        # A plugin's config may give its resources any name.
        names = set(filter(resources.is_device_or_shared, counted)) or counted
        if not names:
            return False
        healthy = self._allocatable()
        return healthy is not None and not any(healthy.get(name) for name in names)

    def _why_not_in_slices(self, gpus: Sequence[model.Gpu]) -> str:
        """Return why the ResourceSlices do not match; empty also where they cannot be listed."""
        slices = self._deps.slices.list() if self._deps.slices else None
        if slices is None:
            _log.warning("resource_slices_not_verified")
            return ""
        return claims.why_not_advertised(gpus, slices)

    def _allocatable(self) -> Mapping[str, frozenset[str]] | None:
        """Return the healthy devices; None where kubelet does not answer."""
        try:
            return self._deps.allocations.allocatable()
        except errors.ClusterError as error:
            _log.info("pod_resources_unavailable", error=error.message)
            return None


def _has_label(labels: Mapping[str, str]) -> bool:
    """Return whether a label deploys the DRA driver, or did before it was paused."""
    return labels.get(claims.DEPLOY_LABEL) in ("true", cluster.PAUSED_VALUE)


def has_ready_driver(pods: Iterable[cluster.Pod]) -> bool:
    """Return whether a DRA driver pod is ready, without which no pod with a claim can end."""
    return _is_any_ready(filter(claims.is_driver, pods))


def _is_any_ready(pods: Iterable[cluster.Pod]) -> bool:
    return any(pod.is_ready and not pod.is_terminating for pod in pods)


class PodWaitsError(errors.NotReadyError):
    """A container of a plugin or driver pod cannot start."""

    def __init__(self, message: str, *, why: str) -> None:
        super().__init__(message, reason=errors.Reason.PLUGIN_NOT_READY)
        self.why = why
        """Pods and kubelet's reasons, without details that change."""


def _not_ready(name: str, pods: _Pods, causes: str = "") -> errors.NotReadyError:
    waiting = [pod for pod in pods if pod.waiting is not None]
    names = ", ".join(
        f"{pod.key} ({pod.waiting})" if pod.waiting is not None else pod.key for pod in pods
    )
    message = f"no new {name} pod is ready: {names or 'none has started'}{causes}"
    if waiting:
        why = ", ".join(f"{pod.key} {pod.waiting.reason}" for pod in waiting if pod.waiting)
        return PodWaitsError(message, why=why)
    return errors.NotReadyError(message, reason=errors.Reason.PLUGIN_NOT_READY)


def _possible_causes(gpus: Iterable[model.Gpu]) -> str:
    """Return what of the layout may keep a device plugin from starting."""
    layouts = resources.gpu_layouts(gpus, {})
    causes = [
        f"with MIG strategy {strategy.value} it does not start: {why}"
        for strategy, why in resources.strategy_refusals(layouts).items()
    ]
    empty = resources.without_devices(layouts)
    if empty:
        causes.append(f"with mixed older ones do not start: no MIG device on {empty}")
    return "".join(f"; {cause}" for cause in causes)
