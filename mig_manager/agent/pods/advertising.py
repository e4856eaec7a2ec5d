"""Wait until the GPUs' devices are schedulable, and remove obstacles."""

import functools
from collections.abc import Callable, Iterable, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import run_journal, settings
from mig_manager.agent.pods import advertisers, device_plugin, dra_driver, pausing, waiting
from mig_manager.core import model, ports, timing
from mig_manager.core.node import node_object, phantoms, pod_object, resources

_log = structlog.get_logger()

_Pods = tuple[pod_object.Pod, ...]


class Advertising:
    """The devices that device plugin and DRA driver advertise on one node.

    Raises:
        ClusterError: From every method: the API refused or does not answer.
    """

    def __init__(self, deps: ports.Dependencies, limits: settings.Limits) -> None:
        self._deps = deps
        self._limits = limits
        self._wait = waiting.PodWait(deps, limits)
        self._plugin = device_plugin.DevicePlugin(deps)
        self.driver = dra_driver.DraDriver(deps)
        self._all: tuple[advertisers.Advertiser, ...] = (self._plugin, self.driver)

    def expects_driver(self, journal: run_journal.RunJournal, pods: _Pods) -> bool:
        """Return whether a DRA driver belongs on the node, even without a pod now.

        A device allocated by a ResourceClaim proves it: only a driver allocates those.
        """
        return (
            advertisers.DRIVER in advertisers.expected_kinds(journal)
            or any(pod.claimed_ids for pod in pods)
            or self.driver.is_deployed(pods, self._deps.node.latest)
        )

    def with_replaced(
        self, kinds: frozenset[advertisers.Kind], read_node: Callable[[], node_object.NodeView]
    ) -> frozenset[advertisers.Kind]:
        """Return the advertisers, including a device plugin whose pod is being replaced."""
        if advertisers.PLUGIN not in kinds and self._plugin.is_being_replaced(read_node()):
            return kinds | {advertisers.PLUGIN}
        return kinds

    def find(
        self, pods: _Pods, gpus: Sequence[model.Gpu], journal: run_journal.RunJournal
    ) -> frozenset[advertisers.Kind]:
        """Return the programs that advertise the node's devices, or must do so again.

        Phantom devices are removed from the node first: they look like a lost plugin's devices.
        """
        node, _ = self._plugin.without_phantoms(gpus, pods)
        # Any value except "true" is another program's decision to keep it away, not a failure.
        labelled = frozenset(
            kind for kind in advertisers.KINDS if node.labels.get(kind.deploy_label) == "true"
        )
        kinds = advertisers.kinds_of(pods) | labelled | advertisers.expected_kinds(journal)
        return self.with_replaced(kinds, lambda: node)

    def withdraw(self, paused: pausing.Paused) -> None:
        """Keep pods from stale devices until new ones are advertised."""
        for each in self._all:
            if each.kind in paused.restarted:
                each.withdraw()

    def is_schedulable(self, gpus: Sequence[model.Gpu], journal: run_journal.RunJournal) -> bool:
        """Check, without waiting, whether the node advertises the GPUs' devices."""
        pods = self._deps.workloads.list()
        kinds = self.find(pods, gpus, journal)
        return not self._missing(pausing.Paused(kinds=kinds), gpus, pods)

    def find_stale(
        self, gpus: Sequence[model.Gpu], journal: run_journal.RunJournal, *, is_restarted: bool
    ) -> pausing.Paused:
        """Find advertisers with outdated devices, and restart them if requested.

        Returns:
            The argument of ``wait_schedulable``: their new pods, or pods that are starting.
        """
        pods = self._deps.workloads.list()
        kinds = self.find(pods, gpus, journal)
        stale: _Pods = ()
        for each in self._all if is_restarted else ():
            kind_pods = tuple(filter(each.kind.owns, pods))
            if advertisers.is_any_ready(kind_pods) and each.is_stale(gpus):
                stale += kind_pods
        waiting.delete(self._deps.workloads, stale)
        return pausing.Paused(kinds=kinds, old_uids=advertisers.uids(stale))

    def withdraw_phantoms(
        self, gpus: Sequence[model.Gpu], node: node_object.NodeView | None
    ) -> errors.NotReadyError | None:
        """Remove phantom devices from the node; return why that failed.

        If the last known state of the ``node`` has no phantom devices, no request is sent. None:
        unknown.
        """
        if node is not None and not phantoms.is_possible(
            gpus, node, resources.labelled_strategy(node.labels)
        ):
            self._deps.telemetry.phantoms_found({}, are_removed=False)
            return None
        return self._plugin.without_phantoms(gpus, self._deps.workloads.present())[1]

    def wait_schedulable(
        self,
        paused: pausing.Paused,
        gpus: Sequence[model.Gpu],
        journal: run_journal.RunJournal,
        cancel: ports.Cancellation,
    ) -> None:
        """Wait until device plugin and DRA driver are ready and advertise the GPUs' devices.

        Problems that may need a person are published once.

        Raises:
            NotReadyError: PLUGIN_NOT_READY, NOT_ALLOCATABLE or PHANTOM_DEVICES, with what is
                missing.
            Superseded: Another layout is requested; the next run verifies this change.
        """
        if not paused.kinds:
            _log.info("no_device_plugin_found")
            return
        timeout_s = self._limits.plugin_timeout_s
        watch = _ProblemWatch(self._deps.clock, journal)
        missing = self._wait.until_solved(
            lambda pods: watch.see(self._missing(paused, gpus, pods)), cancel, timeout_s=timeout_s
        )
        # By the deadline the owner may have removed it.
        journal.note_awaited(frozenset())
        if missing:
            raise errors.NotReadyError(
                f"{missing.message} (waited {timeout_s:g} s)", reason=missing.reason
            )

    def require_served(
        self,
        layouts: Sequence[resources.GpuLayout],
        pods: Iterable[pod_object.Pod],
        *,
        plugin_config: str | None,
        is_driver_expected: bool,
    ) -> None:
        """Fail if a plugin or driver would exit with the devices that the GPUs will have.

        Raises:
            LayoutError: STRATEGY_MISMATCH.
        """
        present_pods, read_node = tuple(pods), functools.cache(self._deps.node.latest)
        why = self.driver.why_refused(
            layouts, present_pods, read_node, is_expected=is_driver_expected
        ) or self._plugin.why_refused(
            layouts, present_pods, read_node, plugin_config=plugin_config
        )
        if why:
            raise errors.LayoutError(why, reason=errors.Reason.STRATEGY_MISMATCH)

    def _missing(
        self, paused: pausing.Paused, gpus: Sequence[model.Gpu], pods: _Pods
    ) -> errors.NotReadyError | None:
        """Return what keeps pods from getting the GPUs' devices; None if nothing does."""
        new = tuple(pod for pod in pods if pod.uid not in paused.old_uids)
        present = [each for each in self._all if each.kind in paused.kinds]
        for each in present:
            kind_pods = tuple(filter(each.kind.owns, new))
            if not advertisers.is_any_ready(kind_pods):
                return advertisers.not_ready(each.kind, kind_pods, gpus)
        problems = (each.missing(gpus, new, paused.changed) for each in present)
        return next(filter(None, problems), None)


_PHANTOMS_STAY_S = 30.0
"""Kubelet reports within 10 s that a stopped plugin's devices are gone."""


class _ProblemWatch:
    """Reports problems that may need a person, and ends a wait that only a person can end."""

    def __init__(self, clock: timing.Clock, journal: run_journal.RunJournal) -> None:
        self._clock = clock
        self._journal = journal
        self._reported: set[str] = set()
        self._phantoms_since_s: float | None = None

    def see(self, missing: errors.NotReadyError | None) -> errors.NotReadyError | None:
        """Report the problem and return it.

        Raises:
            NotReadyError: PHANTOM_DEVICES that do not disappear.
        """
        if isinstance(missing, advertisers.PodWaitsError) and missing.why not in self._reported:
            self._reported.add(missing.why)
            self._journal.enter(model.Phase.VERIFY, missing.message)
        if missing is None or missing.reason is not errors.Reason.PHANTOM_DEVICES:
            self._phantoms_since_s = None
            return missing
        now_s = self._clock.monotonic()
        if self._phantoms_since_s is None:
            self._phantoms_since_s = now_s
        if now_s - self._phantoms_since_s >= _PHANTOMS_STAY_S:
            raise missing
        return missing
