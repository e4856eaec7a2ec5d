"""Pause the node's GPU clients before a change, resume them after it, verify the devices.

GPU clients are device plugin and DRA driver, the operator's other operands, and those that the
owner lists. A client with a deploy label is paused by it; any other is deleted while the node has
our taint. The DRA driver is paused last and resumed first: a pod with a ResourceClaim starts and
ends only while the driver runs (gpu-operator, ``controllers/nodelabeling_controller.go``).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import structlog

from mig_manager import errors
from mig_manager.agent import record, settings
from mig_manager.agent.pods import advertisers, pausing
from mig_manager.core import messages, model, ports, steps, timing
from mig_manager.core.node import claims, clients, cluster, phantoms, resources
from mig_manager.core.records import status

_log = structlog.get_logger()

_Pods = tuple[cluster.Pod, ...]
_Problem = TypeVar("_Problem")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """The GPU clients that were paused."""

    advertisers: advertisers.Advertisers
    labels_with_pods: frozenset[str] = frozenset()
    """Deploy labels that placed a pod here, whose successor is worth a wait."""
    extra_clients: tuple[clients.ExtraClient, ...] = ()
    changed: frozenset[str] = frozenset()
    """UUIDs of the changed GPUs: all of their devices must be schedulable."""


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
        self._advertising = advertisers.Advertising(deps)

    def expect_advertisers(self, journal: status.Journal) -> None:
        """Wait for a new device plugin or DRA driver, where an earlier agent ended the old one."""
        self._advertising.expect(plugin=journal.has_plugin, dra_driver=journal.has_dra_driver)

    def pause(
        self,
        plan: steps.Plan,
        written: record.Record,
        request: ports.Cancellation,
        extra_clients: tuple[clients.ExtraClient, ...] = (),
        *,
        drain_late: Callable[[], object] = lambda: None,
    ) -> Paused:
        """Pause the clients that must not see the change, and wait until they have stopped.

        ``drain_late`` is called before the DRA driver is paused, while pods with claims can end.

        Raises:
            NotReadyError: IN_USE: paused pods did not stop before the deadline.
            Superseded: Another layout is requested, or the agent stops.
        """
        pods = tuple(pod for pod in self._deps.workloads.list() if not pod.is_finished)
        clients_of = functools.partial(pausing.Pause.of, pods, plan, extra_clients)
        view = self._deps.node.read()
        first = self._pause(clients_of, view, written, request, is_driver=False)
        drain_late()
        last = self._pause(clients_of, view, written, request, is_driver=True)
        return Paused(
            advertisers=self._advertising.paused(written.journal, pods),
            labels_with_pods=frozenset(
                key for key in (*first.labels, *last.labels) if clients.gated_by(pods, (key,))
            ),
            extra_clients=extra_clients,
            changed=frozenset(one.gpu_uuid for one in plan.gpus if one.steps),
        )

    def _pause(
        self,
        clients_of: Callable[[cluster.NodeView], pausing.Pause],
        view: cluster.NodeView,
        written: record.Record,
        request: ports.Cancellation,
        *,
        is_driver: bool,
    ) -> pausing.Pause:
        """Pause the DRA driver, or all others; raises as ``pause``."""
        before = written.journal
        pause = clients_of(view).part(is_driver=is_driver)

        def decide(view: cluster.NodeView) -> record.Step:
            nonlocal pause
            pause = clients_of(view).part(is_driver=is_driver)
            names = [key.removeprefix(cluster.DEPLOY_LABEL_PREFIX) for key in pause.labels]
            names += [pod.key for pod in pause.loose]
            return record.Step(
                message="pausing " + ", ".join(names or ["nothing"]),
                journal=dataclasses.replace(
                    before,
                    paused_labels={**pause.labels, **before.paused_labels},
                    hold_taint=bool(pause.loose) or before.hold_taint,
                    has_plugin=pause.has_plugin or before.has_plugin,
                    has_dra_driver=pause.has_dra_driver or before.has_dra_driver,
                ),
                change=cluster.NodePatch(
                    labels=dict.fromkeys(pause.labels, cluster.PAUSED_VALUE),
                    hold_taint=True if pause.loose else None,
                ),
            )

        if pause.labels or pause.loose:
            written.take(model.Phase.PAUSE, decide)
        self._advertising.expect(
            plugin=any(map(clients.is_device_plugin, pause.loose)),
            dra_driver=any(map(claims.is_driver, pause.loose)),
        )
        for pod in pause.loose:
            self._deps.workloads.delete(pod)
        self._wait_stopped((*pause.gated, *pause.loose), request)
        return pause

    def _wait_stopped(self, paused: _Pods, request: ports.Cancellation) -> None:
        uids = {pod.uid for pod in paused}

        def running(pods: _Pods) -> _Pods:
            return tuple(pod for pod in pods if pod.uid in uids and not pod.is_finished)

        timeout_s = self._limits.plugin_timeout_s
        stuck = self._wait(running, timeout_s, request) if uids else ()
        if stuck:
            self._stuck |= {pod.uid for pod in stuck}
            raise errors.NotReadyError(
                f"paused daemons did not stop within {timeout_s:g} s: "
                + messages.listed([pod.key for pod in stuck]),
                reason=errors.Reason.IN_USE,
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
        """Resume device plugin and DRA driver with new pods, and with the layout's plugin config.

        Returns:
            ``paused`` with each of their pods that may have seen less than the whole change.
        """
        # One that tolerates every taint came back during the change, and is as stale as the old.
        pods = self._deps.workloads.list()
        found = (
            *filter(advertisers.is_advertiser, pods),
            *clients.members(pods, paused.extra_clients),
        )
        early = tuple(pod for pod in found if pod.uid not in paused.advertisers.kept_uids)
        keys = advertisers.DEPLOY_LABELS
        before = written.journal
        self._advertising.withdraw(paused.advertisers)
        is_paused = not before.paused_labels.keys().isdisjoint(keys)
        if is_paused or before.hold_taint or plugin_config:
            what = f"restarting {paused.advertisers.names or 'the device plugin'}"
            written.resume(keys, what=what, plugin_config=plugin_config)
        self._delete(early)
        old = paused.advertisers.old_uids | {pod.uid for pod in early}
        return dataclasses.replace(
            paused, advertisers=dataclasses.replace(paused.advertisers, old_uids=old)
        )

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

    def await_driver(
        self,
        affected: _Pods,
        pods: _Pods,
        gpus: Sequence[model.Gpu],
        written: record.Record,
        request: ports.Cancellation,
    ) -> bool:
        """Wait for a DRA driver, without which affected pods with ResourceClaims cannot end.

        Where a claim's devices are not known, wait for the driver's slices too. A node that was
        left closed is reopened first. Returns whether it waited.

        Raises:
            NotReadyError: PLUGIN_NOT_READY; no pod was evicted.
            Superseded: Another layout is requested, or the agent stops.
        """
        claiming = [pod for pod in affected if pod.may_claim]
        if not claiming or not self._advertising.expects_driver(written.journal, pods):
            return False
        needs_slices = not all(pod.claimed_ids for pod in claiming)
        advertising = self._advertising
        lacks = functools.partial(advertising.lacks_driver, gpus=gpus, needs_slices=needs_slices)
        if not lacks(pods):
            return False
        if written.journal.is_closed and not advertisers.has_ready_driver(pods):
            # Evicted pods may come back, so the drain of an earlier attempt begins again.
            written.note_journal(draining=False)
            self.resume_plugin(self.find_plugin(written.journal, gpus), written)
        written.enter(model.Phase.RESOLVE, "waiting for the DRA driver, which ends pods' claims")
        timeout_s = self._limits.plugin_timeout_s
        # Slices that do not match in time are no failure: a claim then stands for any GPU.
        if self._wait(lacks, timeout_s, request) and not advertisers.has_ready_driver(
            self._deps.workloads.list()
        ):
            raise errors.NotReadyError(
                f"no DRA driver pod is ready after {timeout_s:g} s, and without it pods with "
                "ResourceClaims cannot end: " + messages.listed([pod.key for pod in claiming]),
                reason=errors.Reason.PLUGIN_NOT_READY,
            )
        return True

    def find_plugin(self, journal: status.Journal, gpus: Sequence[model.Gpu]) -> Paused:
        """Return the advertisers, with those in the journal, as if they had been paused.

        A DRA driver that advertises what the GPUs have is kept: its restart changes nothing.
        """
        pods = self._deps.workloads.list()
        found = self._advertising.find(pods, gpus)
        kept = self._advertising.current_drivers(gpus, pods)
        return Paused(
            advertisers=dataclasses.replace(
                found,
                kept_uids=kept,
                old_uids=found.old_uids - kept,
                has_plugin=found.has_plugin or journal.has_plugin,
                has_dra_driver=found.has_dra_driver or journal.has_dra_driver,
            ),
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
        """Return if device plugin and DRA driver serve what the GPUs will have, as far as known.

        Raises:
            LayoutError: STRATEGY_MISMATCH: one would exit.
        """
        self._advertising.require_served(layouts, pods, plugin_config=plugin_config)

    def is_schedulable(self, gpus: Sequence[model.Gpu]) -> bool:
        """Check, without a wait, whether the node offers the devices that the GPUs have."""
        pods = self._deps.workloads.list()
        found = dataclasses.replace(self._advertising.find(pods, gpus), old_uids=frozenset())
        return not found.is_any or not self._advertising.missing(found, gpus, pods)

    def find_stale(self, gpus: Sequence[model.Gpu], *, is_restarted: bool) -> Paused:
        """Find the advertisers that do not know the GPUs' devices, and restart those if asked.

        Returns:
            What ``wait_schedulable`` waits for: new pods of them, or those that are starting.
        """
        pods = self._deps.workloads.list()
        found = self._advertising.find(pods, gpus)
        stale = self._advertising.stale_pods(found, gpus, pods) if is_restarted else ()
        self._delete(stale)
        old = frozenset(pod.uid for pod in stale)
        return Paused(advertisers=dataclasses.replace(found, old_uids=old))

    def withdraw_phantoms(
        self, gpus: Sequence[model.Gpu], seen: cluster.NodeView | None
    ) -> errors.NotReadyError | None:
        """Remove the devices that the node offers and no GPU has; return why that failed.

        The API is asked for nothing if the node as last ``seen`` has none; None: it was not seen.
        """
        if seen is not None and not phantoms.is_possible(
            gpus, seen, resources.labelled_strategy(seen.labels)
        ):
            self._deps.telemetry.phantoms_found({}, are_removed=False)
            return None
        return self._advertising.without_phantoms(gpus, self._deps.workloads.present())[1]

    def wait_schedulable(
        self,
        paused: Paused,
        gpus: Sequence[model.Gpu],
        written: record.Record,
        request: ports.Cancellation,
    ) -> None:
        """Wait until device plugin and DRA driver are ready and offer the GPUs' devices.

        What a person may have to mend meanwhile is published once.

        Raises:
            NotReadyError: PLUGIN_NOT_READY, NOT_ALLOCATABLE or PHANTOM_DEVICES, with what is
                missing.
            Superseded: Another layout is requested; the next run verifies this change.
        """
        who = paused.advertisers
        if not who.is_any:
            _log.info("no_device_plugin_found")
            return
        timeout_s = self._limits.plugin_timeout_s
        watch = _ProblemWatch(self._deps.clock, written)
        missing = self._wait(
            lambda pods: watch.see(
                self._advertising.missing(who, gpus, pods, changed=paused.changed)
            ),
            timeout_s,
            request,
        )
        # After the deadline its owner may have removed it.
        self._advertising.expect_none()
        if missing:
            raise errors.NotReadyError(
                f"{missing.message} (waited {timeout_s:g} s)", reason=missing.reason
            )

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


_PHANTOMS_STAY_S = 30.0
"""Kubelet reports within 10 s that the devices of a stopped plugin are gone."""


class _ProblemWatch:
    """Reports what a person may have to mend, and ends a wait that only a person can end."""

    def __init__(self, clock: timing.Clock, written: record.Record) -> None:
        self._clock = clock
        self._written = written
        self._reported: set[str] = set()
        self._phantoms_since_s: float | None = None

    def see(self, missing: errors.NotReadyError | None) -> errors.NotReadyError | None:
        """Return what is missing.

        Raises:
            NotReadyError: PHANTOM_DEVICES, which have stayed.
        """
        if isinstance(missing, advertisers.PodWaitsError) and missing.why not in self._reported:
            self._reported.add(missing.why)
            self._written.enter(model.Phase.PROVE, missing.message)
        if missing is None or missing.reason is not errors.Reason.PHANTOM_DEVICES:
            self._phantoms_since_s = None
            return missing
        now_s = self._clock.monotonic()
        self._phantoms_since_s = self._phantoms_since_s or now_s
        if now_s - self._phantoms_since_s >= _PHANTOMS_STAY_S:
            raise missing
        return missing


@contextlib.contextmanager
def _warn_on_error() -> Iterator[None]:
    try:
        yield
    except errors.ClusterError as error:
        _log.warning("pod_not_restarted", error=error.message)
