"""Pause the node's GPU clients before a change, resume them after it, verify the device plugin.

GPU clients are the device plugin, the operator's other operands, and those that the owner lists.
A client with a deploy label is paused by it; any other is deleted while the node has our taint.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import structlog

from mig_manager import errors
from mig_manager.agent import record, settings
from mig_manager.core import model, ports, steps
from mig_manager.core.node import clients, cluster, resources
from mig_manager.core.records import status

_log = structlog.get_logger()

_Pods = tuple[cluster.Pod, ...]
_Problem = TypeVar("_Problem")


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
    changed: frozenset[str] = frozenset()
    """UUIDs of the changed GPUs: all of their devices must be schedulable."""


ANY_PLUGIN = Paused(plugin_uids=frozenset(), has_plugin=True)
"""Any plugin pod will do."""


class GpuClients:
    """The GPU clients of one node.

    Raises:
        ClusterError: From each method, where the API refuses or does not answer.
    """

    def __init__(self, deps: ports.Dependencies, limits: settings.Limits) -> None:
        self._deps = deps
        self._limits = limits
        self._stuck: set[str] = set()
        """UIDs of pods that did not stop before the deadline of an earlier pause."""
        self._expects_successor = False
        """Whether a plugin pod without a deploy label was deleted, and has no successor yet."""

    def expect_plugin(self) -> None:
        """Wait for a new device plugin, because an earlier agent ended the old one."""
        self._expects_successor = True

    def pause(
        self,
        plan: steps.Plan,
        written: record.Record,
        request: ports.Cancellation,
        extra_clients: tuple[clients.ExtraClient, ...] = (),
    ) -> Paused:
        """Pause the clients that must not see the change, and wait until they have stopped.

        Raises:
            NotReadyError: IN_USE: paused pods did not stop before the deadline.
            Superseded: Another layout is requested, or the agent stops.
        """
        pods = tuple(pod for pod in self._deps.workloads.list() if not pod.is_finished)
        before = written.journal
        pause = _Pause.of(self._deps.node.read(), pods, plan, extra_clients)

        def decide(view: cluster.NodeView) -> record.Step:
            nonlocal pause
            pause = _Pause.of(view, pods, plan, extra_clients)
            names = [key.removeprefix(cluster.DEPLOY_LABEL_PREFIX) for key in pause.labels]
            names += [pod.key for pod in pause.loose]
            return record.Step(
                message="pausing " + ", ".join(names or ["nothing"]),
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
        self._expects_successor |= any(pod in pause.loose for pod in pause.plugins)
        for pod in pause.loose:
            self._deps.workloads.delete(pod)
        uids = {pod.uid for pod in (*pause.gated, *pause.loose)}

        def running(pods: _Pods) -> _Pods:
            return tuple(pod for pod in pods if pod.uid in uids and not pod.is_finished)

        timeout_s = self._limits.plugin_timeout_s
        stuck = self._wait(running, timeout_s, request) if uids else ()
        if stuck:
            self._stuck |= {pod.uid for pod in stuck}
            raise errors.NotReadyError(
                f"paused daemons did not stop within {timeout_s:g} s: "
                + ", ".join(pod.key for pod in stuck),
                reason=errors.Reason.IN_USE,
            )
        return Paused(
            plugin_uids=frozenset(pod.uid for pod in pause.plugins),
            has_plugin=pause.has_plugin or before.has_plugin or self._expects_successor,
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
        self, paused: Paused, written: record.Record, *, plugin_config: str | None = None
    ) -> Paused:
        """Resume the device plugin with new pods, and with the layout's plugin config, if any.

        Returns:
            ``paused`` with every plugin pod that may have seen less than the whole change.
        """
        # One that tolerates every taint came back during the change, and is as stale as the old.
        pods = self._deps.workloads.list()
        early = (
            *(pod for pod in pods if clients.is_device_plugin(pod)),
            *clients.members(pods, paused.extra_clients),
        )
        key = cluster.PLUGIN_DEPLOY_LABEL
        before = written.journal
        if paused.has_plugin:
            self._deps.node.withdraw_devices()
        if key in before.paused_labels or before.hold_taint or plugin_config:
            written.resume({key}, what="restarting the device plugin", plugin_config=plugin_config)
        self._delete(early)
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
        timeout_s = self._limits.monitor_timeout_s
        labels = written.journal.paused_labels
        waited_for = [key for key in labels if key in paused.labels_with_pods]
        others = labels.keys() - waited_for
        try:
            for key in waited_for:

                def is_unready(pods: _Pods, key: str = key) -> bool:
                    placed = clients.gated_by(pods, (key,))
                    return not placed or any(not p.is_ready or p.is_terminating for p in placed)

                is_ours = key in written.resume({key, *others})
                others = set()
                if is_ours and self._wait(is_unready, timeout_s, request):
                    self._deps.node.emit(
                        reason="MonitorNotReady",
                        message=f"{key}: no pod is ready after {timeout_s:g} s",
                        is_warning=True,
                    )
        except errors.Superseded as end:
            _log.info("monitors_not_waited_for", why=end.why)
        except errors.ClusterError as error:
            _log.warning("monitors_not_waited_for", error=error.message)
        # Feature discovery with a deploy label is new already.
        is_old = clients.DISCOVERY_DEPLOY_LABEL not in paused.labels_with_pods
        with _warn_on_error():
            for pod in self._deps.workloads.list():
                if clients.is_validator(pod) or (is_old and clients.is_feature_discovery(pod)):
                    with _warn_on_error():
                        self._delete([pod])

    # -- the device plugin -----------------------------------------------------------------------

    def find_plugin(self, journal: status.Journal) -> Paused:
        """Return the plugin's pods and what the journal lists, as if they had been paused."""
        found = self._find(self._deps.workloads.list())
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
        plugin_config: str | None,
    ) -> None:
        """Return if the plugin's MIG strategy serves what the GPUs will have, as far as known.

        Raises:
            LayoutError: STRATEGY_MISMATCH: the plugin would exit.
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
        return not self._find(pods).has_plugin or not self._missing(ANY_PLUGIN, gpus, pods)

    def restart_if_stale(self, gpus: Sequence[model.Gpu]) -> Paused:
        """Delete the plugin's pods if they are ready and do not know the GPUs' devices.

        An unhealthy device is no reason: a new plugin would report it again.

        Returns:
            What ``wait_schedulable`` waits for: a new plugin, or the one that is starting.
        """
        pods = self._deps.workloads.list()
        found = self._find(pods)
        missing = self._missing(ANY_PLUGIN, gpus, pods)
        node = self._deps.node.read()
        is_starting = missing and missing.reason is errors.Reason.PLUGIN_NOT_READY
        if is_starting or not resources.is_plugin_stale(gpus, self._allocatable(), node):
            return dataclasses.replace(found, plugin_uids=frozenset())
        self._delete(pod for pod in pods if pod.uid in found.plugin_uids)
        return found

    def wait_schedulable(
        self, paused: Paused, gpus: Sequence[model.Gpu], request: ports.Cancellation
    ) -> None:
        """Wait until a new plugin pod is ready and the node offers the GPUs' devices.

        Raises:
            NotReadyError: PLUGIN_NOT_READY or NOT_ALLOCATABLE, with what is missing.
            Superseded: Another layout is requested; the next run verifies this change.
        """
        if not paused.has_plugin:
            _log.info("no_device_plugin_found")
            return
        timeout_s = self._limits.plugin_timeout_s
        missing = self._wait(lambda pods: self._missing(paused, gpus, pods), timeout_s, request)
        # After the deadline its owner may have removed it.
        self._expects_successor = False
        if missing:
            is_unready = missing.reason is errors.Reason.PLUGIN_NOT_READY
            causes = _possible_causes(gpus) if is_unready else ""
            raise errors.NotReadyError(
                f"{missing.message}{causes} (waited {timeout_s:g} s)", reason=missing.reason
            )

    def _find(self, pods: Iterable[cluster.Pod]) -> Paused:
        plugins = tuple(pod for pod in pods if clients.is_device_plugin(pod))
        # Any value but "true" is another program's decision to keep it away, and no failure.
        deploy = self._deps.node.read().labels.get(cluster.PLUGIN_DEPLOY_LABEL)
        has_plugin = bool(plugins) or deploy == "true" or self._expects_successor
        return Paused(plugin_uids=frozenset(p.uid for p in plugins), has_plugin=has_plugin)

    def _missing(
        self, paused: Paused, gpus: Sequence[model.Gpu], pods: Iterable[cluster.Pod]
    ) -> errors.NotReadyError | None:
        """Return what keeps pods from getting the GPUs' devices; None where nothing does."""
        plugins = [
            pod
            for pod in pods
            if clients.is_device_plugin(pod) and pod.uid not in paused.plugin_uids
        ]
        if not any(pod.is_ready and not pod.is_terminating for pod in plugins):
            names = ", ".join(pod.key for pod in plugins) or "none has started"
            return errors.NotReadyError(
                f"no new device plugin pod is ready: {names}",
                reason=errors.Reason.PLUGIN_NOT_READY,
            )
        node = self._deps.node.read()
        why = resources.why_not_schedulable(
            gpus, self._allocatable(), node, changed=paused.changed
        )
        return errors.NotReadyError(why, reason=errors.Reason.NOT_ALLOCATABLE) if why else None

    def _allocatable(self) -> Mapping[str, frozenset[str]] | None:
        """Return the healthy devices; None where kubelet does not answer."""
        try:
            return self._deps.allocations.allocatable()
        except errors.ClusterError as error:
            _log.info("pod_resources_unavailable", error=error.message)
            return None

    # -- pods ------------------------------------------------------------------------------------

    def _delete(self, pods: Iterable[cluster.Pod]) -> None:
        for pod in pods:
            if not pod.is_terminating:
                self._deps.workloads.delete(pod)

    def _wait(
        self, find: Callable[[_Pods], _Problem], timeout_s: float, request: ports.Cancellation
    ) -> _Problem:
        """Wait until the node's pods have no problem; return the one at the deadline.

        A list confirms what the watch reports, because a watch may lag behind.
        """
        workloads, clock = self._deps.workloads, self._deps.clock
        deadline = clock.monotonic() + timeout_s
        checks = 0
        while True:
            is_late = clock.monotonic() >= deadline
            seen = None if is_late else workloads.watched()
            if seen is None or not find(seen):
                problem = find(workloads.list())
                if is_late or not problem:
                    return problem
            request.pause(self._limits.backoff.delay_s(checks))
            checks += 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Pause:
    """Which GPU clients to pause, and how."""

    labels: Mapping[str, str]
    gated: _Pods
    loose: _Pods
    plugins: _Pods
    """The device plugin's pods, gated or loose."""

    @staticmethod
    def of(
        view: cluster.NodeView,
        pods: _Pods,
        plan: steps.Plan,
        extra_clients: tuple[clients.ExtraClient, ...],
    ) -> "_Pause":
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


@contextlib.contextmanager
def _warn_on_error() -> Iterator[None]:
    try:
        yield
    except errors.ClusterError as error:
        _log.warning("pod_not_restarted", error=error.message)
