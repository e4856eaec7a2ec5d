"""Pause the daemons that must not see the change, restart them, and prove what they offer."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

import structlog

from mig_manager import clocks, errors, ports, record
from mig_manager.core import clients, cluster, extras, model, status
from mig_manager.core import pace as pacing

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
    table: tuple[extras.ExtraClient, ...] = ()
    """The owner's daemons that were sent away."""


ANY_PLUGIN = Paused(plugin_uids=frozenset(), has_plugin=True)
"""Whichever plugin is there will do."""


class Daemons:
    """The daemons of one node, above all its device plugin."""

    def __init__(
        self,
        node: ports.Node,
        workloads: ports.Workloads,
        allocations: ports.DeviceAllocations,
        clock: clocks.Clock,
        *,
        timeout_s: float,
        pace: pacing.Pace,
    ) -> None:
        self._node = node
        self._workloads = workloads
        self._allocations = allocations
        self._clock = clock
        self._timeout_s = timeout_s
        self._pace = pace

    def pause(
        self,
        plan: model.Plan,
        journal: record.Record,
        wish: ports.Wish,
        table: tuple[extras.ExtraClient, ...] = (),
    ) -> Paused:
        """Take the daemons off the GPUs: by deploy label, or by hold taint and deletion.

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
        view = self._node.read()
        pods = tuple(pod for pod in self._workloads.list() if not pod.is_finished)
        plugins = tuple(pod for pod in pods if clients.is_device_plugin(pod))
        labels = clients.labels_to_pause(view.labels, plan, table)
        gated = clients.gated_by(pods, labels)
        has_plugin = (
            bool(plugins) or cluster.PLUGIN_DEPLOY_LABEL in labels or journal.journal.has_plugin
        )
        held = {pod.uid: pod for pod in (*plugins, *extras.members(pods, table))}
        loose = tuple(pod for pod in held.values() if pod not in gated)
        if labels or loose:
            journal.enter(
                model.Phase.PAUSE,
                _pause_message(labels, loose),
                take=dataclasses.replace(
                    journal.journal,
                    paused_labels={**labels, **journal.journal.paused_labels},
                    hold_taint=bool(loose) or journal.journal.hold_taint,
                    has_plugin=has_plugin,
                ),
                change=cluster.NodePatch(
                    labels=dict.fromkeys(labels, cluster.PAUSED_VALUE),
                    hold_taint=True if loose else None,
                ),
            )
        for pod in loose:
            self._workloads.delete(pod)
        self._wait_gone(frozenset(pod.uid for pod in (*gated, *loose)), wish)
        return Paused(
            plugin_uids=frozenset(pod.uid for pod in plugins),
            has_plugin=has_plugin,
            staffed=frozenset(key for key in labels if clients.gated_by(pods, (key,))),
            table=table,
        )

    def _wait_gone(self, uids: Collection[str], wish: ports.Wish) -> None:
        deadline = self._clock.monotonic() + self._timeout_s
        turn = 0
        while uids:
            left = [p for p in self._workloads.list() if p.uid in uids and not p.is_finished]
            if not left:
                return
            if self._clock.monotonic() >= deadline:
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
            *extras.members(pods, paused.table),
        )
        key = cluster.PLUGIN_DEPLOY_LABEL
        labels = journal.journal.paused_labels
        if key in labels or journal.journal.hold_taint or plugin_config:
            known = self._node.read().labels
            is_ours = key in labels and known.get(key) == cluster.PAUSED_VALUE
            journal.give_back(
                {key: labels[key]} if is_ours else {},
                "restarting the device plugin",
                plugin_config=_switch(known, plugin_config),
            )
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
        return plugin_config is None or _switch(self._node.read().labels, plugin_config) is None

    def is_proven(self, gpus: Iterable[model.Gpu]) -> bool:
        """Tell whether the node offers what the GPUs have, now and without waiting.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        found = self.find_plugins()
        return not found.has_plugin or not self._missing(ANY_PLUGIN, tuple(gpus))[1]

    def restart_stale_plugin(self, gpus: Iterable[model.Gpu]) -> Paused:
        """Delete the plugin's pods if they are up and offer something else than there is.

        Returns:
            What ``prove`` needs to wait for the plugin: a new one, or the one that is starting.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        found = self.find_plugins()
        reason, _ = self._missing(ANY_PLUGIN, tuple(gpus))
        if reason is errors.Reason.PLUGIN_NOT_READY:
            return dataclasses.replace(found, plugin_uids=frozenset())
        for pod in self._workloads.list():
            if pod.uid in found.plugin_uids and not pod.is_terminating:
                self._workloads.delete(pod)
        return found

    def find_plugins(self) -> Paused:
        """Return the plugin's pods as they are, as if they had been paused.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        plugins = tuple(p for p in self._workloads.list() if clients.is_device_plugin(p))
        # Any other value than "true" keeps it away: somebody else's decision, and no failure.
        deploy = self._node.read().labels.get(cluster.PLUGIN_DEPLOY_LABEL)
        has_plugin = bool(plugins) or deploy == "true"
        return Paused(plugin_uids=frozenset(p.uid for p in plugins), has_plugin=has_plugin)

    def still_paused(self, left: status.Journal) -> Paused:
        """Return what an interrupted run paused, as far as its journal tells.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        found = self.find_plugins()
        return dataclasses.replace(found, has_plugin=found.has_plugin or left.has_plugin)

    def prove(self, paused: Paused, gpus: Iterable[model.Gpu], wish: ports.Wish) -> None:
        """Wait until a new device plugin is ready and the node offers what the GPUs have.

        Raises:
            NotReadyError: PLUGIN_NOT_READY or NOT_ALLOCATABLE, with what is missing.
            ClusterError: The API refused or does not answer.
            Superseded: The run is no longer wanted; what it changed is the next run's to prove.
        """
        if not paused.has_plugin:
            _log.info("no_device_plugin_found")
            return
        known = tuple(gpus)
        deadline = self._clock.monotonic() + self._timeout_s
        turn = 0
        while True:
            reason, missing = self._missing(paused, known)
            if not missing:
                return
            if self._clock.monotonic() >= deadline:
                raise errors.NotReadyError(
                    f"{missing} (waited {self._timeout_s:g} s)", reason=reason
                )
            wish.pause(self._pace.delay_s(turn))
            turn += 1

    def _missing(self, paused: Paused, gpus: tuple[model.Gpu, ...]) -> tuple[errors.Reason, str]:
        plugins = [
            pod
            for pod in self._workloads.list()
            if clients.is_device_plugin(pod) and pod.uid not in paused.plugin_uids
        ]
        if not any(pod.is_ready and not pod.is_terminating for pod in plugins):
            names = ", ".join(pod.key for pod in plugins) or "none has started"
            return errors.Reason.PLUGIN_NOT_READY, f"no new device plugin pod is ready: {names}"
        try:
            offered: Mapping[str, frozenset[str]] | None = self._allocations.allocatable()
        except errors.ClusterError as error:
            _log.info("pod_resources_unavailable", error=error.message)
            offered = None
        why = clients.why_not_offered(gpus, offered, self._node.read().allocatable)
        return errors.Reason.NOT_ALLOCATABLE, why


def _switch(labels: Mapping[str, str], plugin_config: str | None) -> status.PluginConfig | None:
    before = labels.get(cluster.PLUGIN_CONFIG_LABEL)
    if plugin_config in (None, before):
        return None
    return status.PluginConfig(before=before, now=str(plugin_config))


def _pause_message(labels: Mapping[str, str], loose: Collection[cluster.Pod]) -> str:
    names = [key.removeprefix(cluster.DEPLOY_LABEL_PREFIX) for key in labels]
    names += [pod.key for pod in loose]
    return "pausing " + ", ".join(names)
