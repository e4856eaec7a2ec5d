"""The node's device plugin: whether it offers the devices that the GPUs have."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import dependencies, run_limits
from mig_manager.core import model, ports
from mig_manager.core.node import clients, cluster, mig_strategy, resources
from mig_manager.core.records import status

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """The GPU clients that were paused."""

    plugin_uids: frozenset[str]
    """Device-plugin pods from before the change: the devices that they offer are stale."""
    has_plugin: bool
    """False: no device plugin serves this node, so there is nothing to restart or to verify."""
    labels_with_pods: frozenset[str] = frozenset()
    """Deploy labels that placed a pod here, whose successor is worth a wait."""
    extra_clients: tuple[clients.ExtraClient, ...] = ()
    """GPU clients beside NVIDIA's that were paused."""
    changed: frozenset[str] = frozenset()
    """UUIDs of the changed GPUs: all of their devices must be schedulable."""


ANY_PLUGIN = Paused(plugin_uids=frozenset(), has_plugin=True)
"""Any plugin pod will do."""


class DevicePlugin:
    """Finds, restarts and verifies the device plugin.

    Raises:
        ClusterError: From each method, where the API refuses or does not answer.
    """

    def __init__(self, deps: dependencies.Dependencies, limits: run_limits.Limits) -> None:
        self._deps = deps
        self._timeout_s = limits.plugin_timeout_s
        self._backoff = limits.backoff
        self._expects_successor = False
        """Whether a plugin pod without a deploy label was deleted, and has no successor yet."""

    @property
    def expects_successor(self) -> bool:
        """Whether a deleted plugin pod has no successor yet."""
        return self._expects_successor

    def expect_successor(self) -> None:
        """Take the node as one with a plugin, although its pod was deleted."""
        self._expects_successor = True

    def find(self) -> Paused:
        """Return the plugin's pods, as if they had been paused."""
        return self._find(self._deps.workloads.list())

    def find_paused(self, journal: status.Journal) -> Paused:
        """Return what an interrupted run paused, as far as its journal lists it."""
        found = self.find()
        return dataclasses.replace(
            found,
            has_plugin=found.has_plugin or journal.has_plugin,
            changed=frozenset(gpu.uuid for gpu in journal.snapshot),
        )

    def has_config(self, plugin_config: str | None) -> bool:
        """Check whether the plugin reads the config that belongs to the layout."""
        named = self._deps.node.read().labels.get(cluster.PLUGIN_CONFIG_LABEL)
        return plugin_config in (None, named)

    def require_strategy(
        self,
        layouts: Sequence[mig_strategy.GpuLayout],
        pods: Iterable[cluster.Pod],
        *,
        plugin_config: str | None = None,
    ) -> None:
        """Return if the plugin's MIG strategy serves a layout, as far as that is known before.

        Args:
            layouts: What the GPUs will have.
            pods: The node's pods.
            plugin_config: The plugin config that belongs to the layout; None: the present one.

        Raises:
            LayoutError: STRATEGY_MISMATCH: the plugin would exit.
            ClusterError: The API refused or does not answer.
        """
        refusals = mig_strategy.refusals(layouts)
        if not refusals:
            return
        labels = self._deps.node.read().labels
        if plugin_config not in (None, labels.get(cluster.PLUGIN_CONFIG_LABEL)):
            # The new config may set another strategy.
            return
        strategy = mig_strategy.of_plugin(pods, labels)
        if strategy and strategy in refusals:
            raise errors.LayoutError(
                f"the device plugin has MIG strategy {strategy.value} and would not start: "
                f"{refusals[strategy]}",
                reason=errors.Reason.STRATEGY_MISMATCH,
            )

    def is_schedulable(self, gpus: Sequence[model.Gpu]) -> bool:
        """Check, without a wait, whether the node offers the devices that the GPUs have."""
        pods = self._deps.workloads.list()
        found = self._find(pods)
        return not found.has_plugin or not self._missing(ANY_PLUGIN, gpus, pods)[1]

    def restart_if_stale(self, gpus: Sequence[model.Gpu]) -> Paused:
        """Delete the plugin's pods if they are ready and do not know the GPUs' devices.

        An unhealthy device is no reason: a new plugin would report it again.

        Returns:
            What ``wait_schedulable`` waits for: a new plugin, or the one that is starting.
        """
        pods = self._deps.workloads.list()
        found = self._find(pods)
        reason, _ = self._missing(ANY_PLUGIN, gpus, pods)
        node = resources.NodeDevices.of(self._deps.node.read())
        if reason is errors.Reason.PLUGIN_NOT_READY or not resources.is_plugin_stale(
            gpus, self._allocatable(), node
        ):
            return dataclasses.replace(found, plugin_uids=frozenset())
        for pod in pods:
            if pod.uid in found.plugin_uids and not pod.is_terminating:
                self._deps.workloads.delete(pod)
        return found

    def wait_schedulable(
        self, paused: Paused, gpus: Sequence[model.Gpu], request: ports.Cancellation
    ) -> None:
        """Wait until a new plugin pod is ready and the node offers the GPUs' devices.

        Raises:
            NotReadyError: PLUGIN_NOT_READY or NOT_ALLOCATABLE, with what is missing.
            ClusterError: The API refused or does not answer.
            Superseded: Another layout is requested; the next run verifies this change.
        """
        if not paused.has_plugin:
            _log.info("no_device_plugin_found")
            return
        clock, workloads = self._deps.clock, self._deps.workloads
        deadline = clock.monotonic() + self._timeout_s
        checks = 0
        while True:
            is_late = clock.monotonic() >= deadline
            seen = None if is_late else workloads.watched()
            pods = workloads.list() if seen is None else seen
            reason, missing = self._missing(paused, gpus, pods)
            if not missing and seen is not None:
                reason, missing = self._missing(paused, gpus, workloads.list())
            if not missing or is_late:
                # After the deadline its owner may have removed it.
                self._expects_successor = False
            if not missing:
                return
            if is_late:
                if reason is errors.Reason.PLUGIN_NOT_READY:
                    missing += _possible_causes(gpus)
                raise errors.NotReadyError(
                    f"{missing} (waited {self._timeout_s:g} s)", reason=reason
                )
            request.pause(self._backoff.delay_s(checks))
            checks += 1

    def _find(self, pods: Iterable[cluster.Pod]) -> Paused:
        plugins = tuple(pod for pod in pods if clients.is_device_plugin(pod))
        # Any value but "true" is another program's decision to keep it away, and no failure.
        deploy = self._deps.node.read().labels.get(cluster.PLUGIN_DEPLOY_LABEL)
        has_plugin = bool(plugins) or deploy == "true" or self._expects_successor
        return Paused(plugin_uids=frozenset(p.uid for p in plugins), has_plugin=has_plugin)

    def _missing(
        self, paused: Paused, gpus: Sequence[model.Gpu], pods: Iterable[cluster.Pod]
    ) -> tuple[errors.Reason, str]:
        plugins = [
            pod
            for pod in pods
            if clients.is_device_plugin(pod) and pod.uid not in paused.plugin_uids
        ]
        if not any(pod.is_ready and not pod.is_terminating for pod in plugins):
            names = ", ".join(pod.key for pod in plugins) or "none has started"
            return errors.Reason.PLUGIN_NOT_READY, f"no new device plugin pod is ready: {names}"
        node = resources.NodeDevices.of(self._deps.node.read())
        why = resources.why_not_schedulable(
            gpus, self._allocatable(), node, changed=paused.changed
        )
        return errors.Reason.NOT_ALLOCATABLE, why

    def _allocatable(self) -> Mapping[str, frozenset[str]] | None:
        """Return the healthy devices; None where kubelet does not answer."""
        try:
            return self._deps.allocations.allocatable()
        except errors.ClusterError as error:
            _log.info("pod_resources_unavailable", error=error.message)
            return None


def _possible_causes(gpus: Iterable[model.Gpu]) -> str:
    """Return what of the layout may keep a device plugin from starting."""
    layouts = mig_strategy.of_node(gpus, {})
    causes = [
        f"with MIG strategy {strategy.value} it does not start: {why}"
        for strategy, why in mig_strategy.refusals(layouts).items()
    ]
    empty = mig_strategy.empty(layouts)
    if empty:
        causes.append(f"with mixed older ones do not start: no MIG device on {empty}")
    return "".join(f"; {cause}" for cause in causes)
