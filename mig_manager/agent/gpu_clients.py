"""Pause the daemons that must not see the change, restart them, and prove what they offer."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import record
from mig_manager.core import model, ports, steps, timing
from mig_manager.core.node import clients, cluster, mig_strategy
from mig_manager.core.records import status

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """What a pause found; the resume needs it."""

    plugin_uids: frozenset[str]
    """Device-plugin pods from before the change: whatever they offer is stale."""
    has_plugin: bool
    """False: no device plugin serves this node, so there is nothing to restart or to prove."""
    staffed: frozenset[str] = frozenset()
    """Deploy labels that placed a pod here: its successor is worth waiting for."""
    table: tuple[clients.ExtraClient, ...] = ()
    """The owner's daemons that were sent away."""
    changed: frozenset[str] = frozenset()
    """UUIDs of the GPUs that the change is about: all of their devices must be offered."""


ANY_PLUGIN = Paused(plugin_uids=frozenset(), has_plugin=True)
"""Whichever plugin is there will do."""


class Daemons:
    """The daemons of one node, above all its device plugin."""

    def __init__(
        self,
        node: ports.Node,
        workloads: ports.Workloads,
        allocations: ports.DeviceAllocations,
        clock: timing.Clock,
        *,
        timeout_s: float,
        pace: timing.Backoff,
    ) -> None:
        self._node = node
        self._workloads = workloads
        self._allocations = allocations
        self._clock = clock
        self._timeout_s = timeout_s
        self._pace = pace
        self._stuck: set[str] = set()
        """UIDs of pods that a pause waited for in vain."""
        self._is_plugin_due = False
        """Whether an ungated device plugin was deleted, and its successor is still due."""

    def pause(
        self,
        plan: steps.Plan,
        journal: record.Record,
        wish: ports.Cancellation,
        table: tuple[clients.ExtraClient, ...] = (),
    ) -> Paused:
        """Take the daemons off the GPUs: by deploy label, or by taint and deletion.

        Args:
            plan: What is going to change.
            journal: Where it is written what is taken.
            wish: Asked while waiting.
            table: Daemons beside NVIDIA's.

        Raises:
            ClusterError: The API refused or does not answer.
            NotReadyError: Paused pods did not go before the deadline.
            Superseded: The run is no longer wanted.
        """
        pods = tuple(pod for pod in self._workloads.list() if not pod.is_finished)
        had = journal.journal
        pause = _Pause.of(self._node.read(), pods, plan, table)

        def decide(view: cluster.NodeView) -> record.Step:
            nonlocal pause
            pause = _Pause.of(view, pods, plan, table)
            return record.Step(
                message=pause.message,
                journal=dataclasses.replace(
                    had,
                    paused_labels={**pause.labels, **had.paused_labels},
                    hold_taint=bool(pause.loose) or had.hold_taint,
                    has_plugin=pause.has_plugin or had.has_plugin,
                ),
                change=cluster.NodePatch(
                    labels=dict.fromkeys(pause.labels, cluster.PAUSED_VALUE),
                    hold_taint=True if pause.loose else None,
                ),
            )

        if pause.labels or pause.loose:
            journal.take(model.Phase.PAUSE, decide)
        self._is_plugin_due |= any(pod in pause.loose for pod in pause.plugins)
        for pod in pause.loose:
            self._workloads.delete(pod)
        self._wait_gone(frozenset(pod.uid for pod in (*pause.gated, *pause.loose)), wish)
        return Paused(
            plugin_uids=frozenset(pod.uid for pod in pause.plugins),
            has_plugin=pause.has_plugin or had.has_plugin or self._is_plugin_due,
            staffed=frozenset(key for key in pause.labels if clients.gated_by(pods, (key,))),
            table=table,
            changed=frozenset(one.gpu_uuid for one in plan.gpus if one.steps),
        )

    def require_no_stuck(self, pods: Iterable[cluster.Pod]) -> None:
        """Refuse a change while a pod is there that an earlier pause waited for in vain.

        Raises:
            NotReadyError: IN_USE: it still has not stopped; nothing was touched.
        """
        names = [pod.key for pod in pods if pod.uid in self._stuck and not pod.is_finished]
        if names:
            raise errors.NotReadyError(
                f"paused daemons have not stopped since the last try: {', '.join(names)}",
                reason=errors.Reason.IN_USE,
            )

    def _wait_gone(self, uids: Collection[str], wish: ports.Cancellation) -> None:
        deadline = self._clock.monotonic() + self._timeout_s
        turn = 0
        while uids:
            is_late = self._clock.monotonic() >= deadline
            left = () if is_late else _running(self._workloads.watched() or (), uids)
            left = left or _running(self._workloads.list(), uids)
            if not left:
                return
            if is_late:
                self._stuck |= {pod.uid for pod in left}
                raise errors.NotReadyError(
                    f"paused daemons did not stop within {self._timeout_s:g} s: "
                    + ", ".join(pod.key for pod in left),
                    reason=errors.Reason.IN_USE,
                )
            wish.pause(self._pace.delay_s(turn))
            turn += 1

    def resume_plugin(
        self, paused: Paused, journal: record.Record, *, plugin_config: str | None = None
    ) -> Paused:
        """Let the device plugin come back, and make sure that it is a new one.

        Args:
            paused: What the pause found.
            journal: What was taken.
            plugin_config: The plugin config that goes with the layout; None: leave it.

        Returns:
            ``paused`` with every plugin pod that may have seen less than the whole change.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        # One that tolerates every taint came back during the change: it is as stale as the old.
        pods = self._workloads.list()
        early = (
            *(pod for pod in pods if clients.is_device_plugin(pod)),
            *clients.members(pods, paused.table),
        )
        key = cluster.PLUGIN_DEPLOY_LABEL
        had = journal.journal
        if key in had.paused_labels or had.hold_taint or had.cordoned or plugin_config:
            journal.resume({key}, what="restarting the device plugin", plugin_config=plugin_config)
        for pod in early:
            if not pod.is_terminating:
                self._workloads.delete(pod)
        stale = paused.plugin_uids | {pod.uid for pod in early}
        return dataclasses.replace(paused, plugin_uids=stale)

    def has_config(self, plugin_config: str | None) -> bool:
        """Tell whether the plugin reads the config that goes with the layout.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        named = self._node.read().labels.get(cluster.PLUGIN_CONFIG_LABEL)
        return plugin_config in (None, named)

    def is_proven(self, gpus: Sequence[model.Gpu]) -> bool:
        """Tell whether the node offers what the GPUs have, now and without waiting.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        pods = self._workloads.list()
        found = self._plugins_among(pods)
        return not found.has_plugin or not self._missing(ANY_PLUGIN, gpus, pods)[1]

    def restart_stale_plugin(self, gpus: Sequence[model.Gpu]) -> Paused:
        """Delete the plugin's pods if they are up and do not know the devices that there are.

        A device that is merely unhealthy is no reason: a new plugin would offer it again.

        Returns:
            What ``prove`` needs to wait for the plugin: a new one, or the one that is starting.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        pods = self._workloads.list()
        found = self._plugins_among(pods)
        reason, _ = self._missing(ANY_PLUGIN, gpus, pods)
        node = clients.NodeDevices.of(self._node.read())
        if reason is errors.Reason.PLUGIN_NOT_READY or not clients.is_plugin_stale(
            gpus, self._offered(), node
        ):
            return dataclasses.replace(found, plugin_uids=frozenset())
        for pod in pods:
            if pod.uid in found.plugin_uids and not pod.is_terminating:
                self._workloads.delete(pod)
        return found

    def find_plugins(self) -> Paused:
        """Return the plugin's pods as they are, as if they had been paused.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        return self._plugins_among(self._workloads.list())

    def _plugins_among(self, pods: Iterable[cluster.Pod]) -> Paused:
        plugins = tuple(pod for pod in pods if clients.is_device_plugin(pod))
        # Any other value than "true" keeps it away: somebody else's decision, and no failure.
        deploy = self._node.read().labels.get(cluster.PLUGIN_DEPLOY_LABEL)
        has_plugin = bool(plugins) or deploy == "true" or self._is_plugin_due
        return Paused(plugin_uids=frozenset(p.uid for p in plugins), has_plugin=has_plugin)

    def require_served(
        self,
        layouts: Sequence[mig_strategy.GpuLayout],
        pods: Iterable[cluster.Pod],
        *,
        plugin_config: str | None = None,
    ) -> None:
        """Return if the device plugin serves a layout, as far as that is known before.

        Args:
            layouts: What the GPUs will have.
            pods: The node's.
            plugin_config: The plugin config that goes with the layout; None: the present one.

        Raises:
            LayoutError: STRATEGY_MISMATCH: the plugin would exit.
            ClusterError: The API refused or does not answer.
        """
        refusals = mig_strategy.refusals(layouts)
        if not refusals:
            return
        labels = self._node.read().labels
        if plugin_config not in (None, labels.get(cluster.PLUGIN_CONFIG_LABEL)):
            # The config that the plugin gets may have another strategy.
            return
        strategy = mig_strategy.of_plugin(pods, labels)
        if strategy and strategy in refusals:
            raise errors.LayoutError(
                f"the device plugin has MIG strategy {strategy.value} and would not start: "
                f"{refusals[strategy]}",
                reason=errors.Reason.STRATEGY_MISMATCH,
            )

    def still_paused(self, left: status.Journal) -> Paused:
        """Return what an interrupted run paused, as far as its journal tells.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        found = self.find_plugins()
        return dataclasses.replace(
            found,
            has_plugin=found.has_plugin or left.has_plugin,
            changed=frozenset(gpu.uuid for gpu in left.snapshot),
        )

    def prove(self, paused: Paused, gpus: Sequence[model.Gpu], wish: ports.Cancellation) -> None:
        """Wait until a new device plugin is ready and the node offers what the GPUs have.

        Raises:
            NotReadyError: PLUGIN_NOT_READY or NOT_ALLOCATABLE, with what is missing.
            ClusterError: The API refused or does not answer.
            Superseded: The run is no longer wanted; what it changed is the next run's to prove.
        """
        if not paused.has_plugin:
            _log.info("no_device_plugin_found")
            return
        deadline = self._clock.monotonic() + self._timeout_s
        turn = 0
        while True:
            is_late = self._clock.monotonic() >= deadline
            seen = None if is_late else self._workloads.watched()
            pods = self._workloads.list() if seen is None else seen
            reason, missing = self._missing(paused, gpus, pods)
            if not missing and seen is not None:
                reason, missing = self._missing(paused, gpus, self._workloads.list())
            if not missing or is_late:
                # Once it was waited for in vain, its owner may have taken it away.
                self._is_plugin_due = False
            if not missing:
                return
            if is_late:
                if reason is errors.Reason.PLUGIN_NOT_READY:
                    missing += _suspicion(gpus)
                raise errors.NotReadyError(
                    f"{missing} (waited {self._timeout_s:g} s)", reason=reason
                )
            wish.pause(self._pace.delay_s(turn))
            turn += 1

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
        offered, node = self._offered(), clients.NodeDevices.of(self._node.read())
        why = clients.why_not_schedulable(gpus, offered, node, changed=paused.changed)
        return errors.Reason.NOT_ALLOCATABLE, why

    def _offered(self) -> Mapping[str, frozenset[str]] | None:
        """Return the healthy devices; None where kubelet cannot be asked."""
        try:
            return self._allocations.allocatable()
        except errors.ClusterError as error:
            _log.info("pod_resources_unavailable", error=error.message)
            return None


def _running(pods: Iterable[cluster.Pod], uids: Collection[str]) -> tuple[cluster.Pod, ...]:
    return tuple(pod for pod in pods if pod.uid in uids and not pod.is_finished)


def _suspicion(gpus: Iterable[model.Gpu]) -> str:
    """Say what of the layout may keep a device plugin from starting."""
    layouts = mig_strategy.of_node(gpus, {})
    causes = [
        f"with MIG strategy {strategy.value} it does not start: {why}"
        for strategy, why in mig_strategy.refusals(layouts).items()
    ]
    empty = mig_strategy.empty(layouts)
    if empty:
        causes.append(f"with mixed older ones do not start: no MIG device on {empty}")
    return "".join(f"; {cause}" for cause in causes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Pause:
    """Which GPU clients to pause on a node, and how."""

    labels: Mapping[str, str]
    """Deploy labels to pause, with the values that they have."""
    gated: tuple[cluster.Pod, ...]
    """Pods that go because of those labels."""
    loose: tuple[cluster.Pod, ...]
    """Pods to delete."""
    plugins: tuple[cluster.Pod, ...]
    """The pods of the device plugin, of either kind."""

    @staticmethod
    def of(
        view: cluster.NodeView,
        pods: tuple[cluster.Pod, ...],
        plan: steps.Plan,
        table: tuple[clients.ExtraClient, ...],
    ) -> "_Pause":
        """Choose them for the node as it is."""
        labels = clients.labels_to_pause(view.labels, plan, table)
        gated = clients.gated_by(pods, labels)
        plugins = tuple(pod for pod in pods if clients.is_device_plugin(pod))
        every = {pod.uid: pod for pod in (*plugins, *clients.members(pods, table))}
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
