"""Pause the node's GPU clients before a change, and resume them after it.

GPU clients are the device plugin, the operator's other operands, and those that the owner lists.
A client with a deploy label is paused by it; any other is deleted while the node has our taint.
"""

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import dependencies, record, settings
from mig_manager.core import model, ports, steps
from mig_manager.core.node import clients, cluster, resources
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

    def __init__(self, deps: dependencies.Dependencies, limits: settings.Limits) -> None:
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
        layouts: Sequence[resources.GpuLayout],
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
        refusals = resources.strategy_refusals(layouts)
        if not refusals:
            return
        labels = self._deps.node.read().labels
        if plugin_config not in (None, labels.get(cluster.PLUGIN_CONFIG_LABEL)):
            # The new config may set another strategy.
            return
        plugins = [pod for pod in pods if clients.is_device_plugin(pod)]
        strategy = resources.plugin_strategy(plugins, labels)
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
    layouts = resources.gpu_layouts(gpus, {})
    causes = [
        f"with MIG strategy {strategy.value} it does not start: {why}"
        for strategy, why in resources.strategy_refusals(layouts).items()
    ]
    empty = resources.without_devices(layouts)
    if empty:
        causes.append(f"with mixed older ones do not start: no MIG device on {empty}")
    return "".join(f"; {cause}" for cause in causes)


class GpuClients:
    """The GPU clients of one node."""

    def __init__(self, deps: dependencies.Dependencies, limits: settings.Limits) -> None:
        self._deps = deps
        self._limits = limits
        self.plugin = DevicePlugin(deps, limits)
        self._stuck: set[str] = set()
        """UIDs of pods that did not stop before the deadline of an earlier pause."""

    def pause(
        self,
        plan: steps.Plan,
        written: record.Record,
        request: ports.Cancellation,
        extra_clients: tuple[clients.ExtraClient, ...] = (),
    ) -> Paused:
        """Pause the clients that must not see the change, and wait until they have stopped.

        Raises:
            ClusterError: The API refused or does not answer.
            NotReadyError: IN_USE: paused pods did not stop before the deadline.
            Superseded: Another layout is requested, or the agent stops.
        """
        pods = tuple(pod for pod in self._deps.workloads.list() if not pod.is_finished)
        before = written.journal
        pause = _Pause.of(self._deps.node.read(), pods, plan, extra_clients)

        def decide(view: cluster.NodeView) -> record.Step:
            nonlocal pause
            pause = _Pause.of(view, pods, plan, extra_clients)
            return record.Step(
                message=pause.message,
                journal=dataclasses.replace(
                    before,
                    paused_labels={**pause.labels, **before.paused_labels},
                    hold_taint=bool(pause.loose) or before.hold_taint,
                    has_plugin=pause.has_plugin or before.has_plugin,
                ),
                change=cluster.NodePatch(
                    labels=dict.fromkeys(pause.labels, cluster.PAUSED_VALUE),
                    hold_taint=True if pause.loose else None,
                ),
            )

        if pause.labels or pause.loose:
            written.take(model.Phase.PAUSE, decide)
        if any(pod in pause.loose for pod in pause.plugins):
            self.plugin.expect_successor()
        for pod in pause.loose:
            self._deps.workloads.delete(pod)
        self._wait_stopped(frozenset(pod.uid for pod in (*pause.gated, *pause.loose)), request)
        return Paused(
            plugin_uids=frozenset(pod.uid for pod in pause.plugins),
            has_plugin=pause.has_plugin or before.has_plugin or self.plugin.expects_successor,
            labels_with_pods=frozenset(
                key for key in pause.labels if clients.gated_by(pods, (key,))
            ),
            extra_clients=extra_clients,
            changed=frozenset(one.gpu_uuid for one in plan.gpus if one.steps),
        )

    def require_none_stuck(self, pods: Iterable[cluster.Pod]) -> None:
        """Fail while a pod is there that did not stop before the deadline of an earlier pause.

        Raises:
            NotReadyError: IN_USE; nothing was touched.
        """
        names = [pod.key for pod in pods if pod.uid in self._stuck and not pod.is_finished]
        if names:
            raise errors.NotReadyError(
                f"paused daemons have not stopped since the last try: {', '.join(names)}",
                reason=errors.Reason.IN_USE,
            )

    def resume_plugin(
        self,
        paused: Paused,
        written: record.Record,
        *,
        plugin_config: str | None = None,
    ) -> Paused:
        """Resume the device plugin with new pods.

        Args:
            paused: What was paused.
            written: The record, whose journal lists it.
            plugin_config: The plugin config that belongs to the layout; None: keep it.

        Returns:
            ``paused`` with every plugin pod that may have seen less than the whole change.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        # One that tolerates every taint came back during the change, and is as stale as the old.
        pods = self._deps.workloads.list()
        early = (
            *(pod for pod in pods if clients.is_device_plugin(pod)),
            *clients.members(pods, paused.extra_clients),
        )
        key = cluster.PLUGIN_DEPLOY_LABEL
        before = written.journal
        if key in before.paused_labels or before.hold_taint or before.cordoned or plugin_config:
            written.resume({key}, what="restarting the device plugin", plugin_config=plugin_config)
        for pod in early:
            if not pod.is_terminating:
                self._deps.workloads.delete(pod)
        stale = paused.plugin_uids | {pod.uid for pod in early}
        return dataclasses.replace(paused, plugin_uids=stale)

    def resume_monitors(
        self, paused: Paused, written: record.Record, request: ports.Cancellation
    ) -> None:
        """Restore the other deploy labels one by one, and have the operator validate again.

        The layout is active and verified by then, so a monitor that does not get ready is a
        warning. A newer request, or an API that fails, ends the wait; the end of the run restores
        the remaining labels.
        """
        try:
            self._resume_monitors(paused, written, request)
        except errors.Superseded as end:
            _log.info("monitors_not_waited_for", why=end.why)
        except errors.ClusterError as error:
            _log.warning("monitors_not_waited_for", error=error.message)
        # Feature discovery with a deploy label is new already.
        is_old = clients.DISCOVERY_DEPLOY_LABEL not in paused.labels_with_pods
        with _warn_on_error():
            for pod in self._deps.workloads.list():
                is_meant = clients.is_validator(pod) or (
                    is_old and clients.is_feature_discovery(pod)
                )
                if is_meant and not pod.is_terminating:
                    with _warn_on_error():
                        self._deps.workloads.delete(pod)

    def _resume_monitors(
        self, paused: Paused, written: record.Record, request: ports.Cancellation
    ) -> None:
        timeout_s = self._limits.monitor_timeout_s
        labels = written.journal.paused_labels
        waited_for = [key for key in labels if key in paused.labels_with_pods]
        others = labels.keys() - waited_for
        for key in waited_for:
            is_ours = key in written.resume({key, *others})
            others = set()
            if is_ours and not self._wait_ready(key, request, timeout_s):
                self._deps.node.emit(
                    reason="MonitorNotReady",
                    message=f"{key}: no pod is ready after {timeout_s:g} s",
                    is_warning=True,
                )

    def _wait_ready(self, key: str, request: ports.Cancellation, timeout_s: float) -> bool:
        workloads, clock = self._deps.workloads, self._deps.clock
        deadline = clock.monotonic() + timeout_s
        checks = 0
        while True:
            is_late = clock.monotonic() >= deadline
            seen = None if is_late else workloads.watched()
            may_be_ready = seen is None or _are_ready(seen, key)
            if may_be_ready and _are_ready(workloads.list(), key):
                return True
            if is_late:
                return False
            request.pause(self._limits.backoff.delay_s(checks))
            checks += 1

    def _wait_stopped(self, uids: Collection[str], request: ports.Cancellation) -> None:
        workloads, clock = self._deps.workloads, self._deps.clock
        timeout_s = self._limits.plugin_timeout_s
        deadline = clock.monotonic() + timeout_s
        checks = 0
        while uids:
            is_late = clock.monotonic() >= deadline
            running = () if is_late else _running(workloads.watched() or (), uids)
            running = running or _running(workloads.list(), uids)
            if not running:
                return
            if is_late:
                self._stuck |= {pod.uid for pod in running}
                raise errors.NotReadyError(
                    f"paused daemons did not stop within {timeout_s:g} s: "
                    + ", ".join(pod.key for pod in running),
                    reason=errors.Reason.IN_USE,
                )
            request.pause(self._limits.backoff.delay_s(checks))
            checks += 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Pause:
    """Which GPU clients to pause, and how."""

    labels: Mapping[str, str]
    """Deploy labels to pause, with their values."""
    gated: tuple[cluster.Pod, ...]
    """Pods that those labels place."""
    loose: tuple[cluster.Pod, ...]
    """Pods to delete."""
    plugins: tuple[cluster.Pod, ...]
    """The device plugin's pods, gated or loose."""

    @staticmethod
    def of(
        view: cluster.NodeView,
        pods: tuple[cluster.Pod, ...],
        plan: steps.Plan,
        extra_clients: tuple[clients.ExtraClient, ...],
    ) -> "_Pause":
        """Choose them for the node as it is."""
        labels = clients.labels_to_pause(view.labels, plan, extra_clients)
        gated = clients.gated_by(pods, labels)
        plugins = tuple(pod for pod in pods if clients.is_device_plugin(pod))
        every = {pod.uid: pod for pod in (*plugins, *clients.members(pods, extra_clients))}
        return _Pause(
            labels=labels,
            gated=gated,
            loose=tuple(pod for pod in every.values() if pod not in gated),
            plugins=plugins,
        )

    @property
    def has_plugin(self) -> bool:
        """Whether a device plugin serves the node, or would if it were not paused."""
        return bool(self.plugins) or cluster.PLUGIN_DEPLOY_LABEL in self.labels

    @property
    def message(self) -> str:
        """What is paused, for people."""
        names = [key.removeprefix(cluster.DEPLOY_LABEL_PREFIX) for key in self.labels]
        names += [pod.key for pod in self.loose]
        return "pausing " + ", ".join(names or ["nothing"])


def _running(pods: Iterable[cluster.Pod], uids: Collection[str]) -> tuple[cluster.Pod, ...]:
    return tuple(pod for pod in pods if pod.uid in uids and not pod.is_finished)


def _are_ready(pods: tuple[cluster.Pod, ...], key: str) -> bool:
    placed = clients.gated_by(pods, (key,))
    return bool(placed) and all(pod.is_ready and not pod.is_terminating for pod in placed)


@contextlib.contextmanager
def _warn_on_error() -> Iterator[None]:
    try:
        yield
    except errors.ClusterError as error:
        _log.warning("pod_not_restarted", error=error.message)
