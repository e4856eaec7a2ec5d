"""Pause the node's GPU clients before a change, and resume them after it.

GPU clients are device plugin and DRA driver, the operator's other operands, and those that the
owner lists. A client with a deploy label is paused by it; any other is deleted while the node has
our taint. The DRA driver is paused last and resumed first: a pod with a ResourceClaim starts and
ends only while the driver runs (gpu-operator, ``controllers/nodelabeling_controller.go``).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import settings, undo
from mig_manager.agent.pods import advertisers, advertising, dra_driver, pausing, waiting
from mig_manager.core import messages, model, ports, steps
from mig_manager.core.node import clients, cluster
from mig_manager.core.records import journals

_log = structlog.get_logger()

_Pods = tuple[cluster.Pod, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """The GPU clients that were paused."""

    advertisers: advertisers.Advertisers
    labels_with_pods: frozenset[str] = frozenset()
    """Deploy labels that placed a pod here, whose successor is worth a wait."""
    extra_clients: tuple[clients.ExtraClient, ...] = ()


class GpuClients:
    """The GPU clients of one node.

    Raises:
        ClusterError: From each method, where the API refuses or does not answer.
    """

    def __init__(self, deps: ports.Dependencies, limits: settings.Limits) -> None:
        self._deps = deps
        self._limits = limits
        self._wait = functools.partial(waiting.wait, deps, limits)
        self._stuck: set[str] = set()
        """UIDs of pods that did not stop before the deadline of an earlier pause."""
        self.advertising = advertising.Advertising(deps, limits)

    def pause(
        self,
        plan: steps.Plan,
        listed: _Pods,
        taken: undo.Taken,
        request: ports.Cancellation,
        extra_clients: tuple[clients.ExtraClient, ...] = (),
        *,
        drain_late: Callable[[_Pods], object] = lambda _pods: None,
    ) -> Paused:
        """Pause the clients that must not see the change, and wait until they have stopped.

        ``listed`` are the node's pods now. ``drain_late`` is called with its pods before the DRA
        driver is paused, while pods with claims can end.

        Raises:
            NotReadyError: IN_USE: paused pods did not stop before the deadline.
            Superseded: Another layout is requested, or the agent stops.
        """
        pods = tuple(pod for pod in listed if not pod.is_finished)
        clients_of = functools.partial(pausing.Pause.of, pods, plan, extra_clients)
        view = self._deps.node.seen()
        first = self._pause(clients_of, view, taken, request, is_driver=False)
        drain_late(self._wait_stopped(first, request) or listed)
        last = self._pause(clients_of, view, taken, request, is_driver=True)
        self._wait_stopped(last, request)
        changed = frozenset(one.gpu_uuid for one in plan.gpus if one.steps)
        return Paused(
            advertisers=self.advertising.paused(taken.journal, pods, changed=changed),
            labels_with_pods=frozenset(
                key for key in (*first.labels, *last.labels) if clients.gated_by(pods, (key,))
            ),
            extra_clients=extra_clients,
        )

    def _pause(
        self,
        clients_of: Callable[[cluster.NodeView], pausing.Pause],
        view: cluster.NodeView,
        taken: undo.Taken,
        request: ports.Cancellation,
        *,
        is_driver: bool,
    ) -> pausing.Pause:
        """Pause the DRA driver, or all others; raises as ``pause``."""
        before = taken.journal
        pause = clients_of(view).part(is_driver=is_driver)

        def decide(view: cluster.NodeView) -> undo.Step:
            nonlocal pause
            pause = clients_of(view).part(is_driver=is_driver)
            names = [key.removeprefix(cluster.DEPLOY_LABEL_PREFIX) for key in pause.labels]
            names += [pod.key for pod in pause.loose]
            kinds = pause.kinds | advertisers.kinds_in(before)
            return undo.Step(
                message="pausing " + ", ".join(names or ["nothing"]),
                journal=dataclasses.replace(
                    before,
                    paused_labels={**pause.labels, **before.paused_labels},
                    hold_taint=bool(pause.loose) or before.hold_taint,
                    has_plugin=advertisers.PLUGIN in kinds,
                    has_dra_driver=advertisers.DRIVER in kinds,
                ),
                change=cluster.NodePatch(
                    labels=dict.fromkeys(pause.labels, cluster.PAUSED_VALUE),
                    hold_taint=True if pause.loose else None,
                ),
            )

        if pause.labels or pause.loose:
            taken.take(model.Phase.PAUSE, decide)
        self.advertising.expect(advertisers.kinds_of(pause.loose))
        for pod in pause.loose:
            self._deps.workloads.delete(pod)
        return pause

    def _wait_stopped(self, pause: pausing.Pause, request: ports.Cancellation) -> _Pods:
        """Wait until its pods have stopped; return the node's pods, none if it has no pod."""
        uids = {pod.uid for pod in (*pause.gated, *pause.loose)}
        if not uids:
            return ()
        latest: _Pods = ()

        def running(pods: _Pods) -> _Pods:
            nonlocal latest
            latest = pods
            return tuple(pod for pod in pods if pod.uid in uids and not pod.is_finished)

        timeout_s = self._limits.plugin_timeout_s
        stuck = self._wait(running, timeout_s, request)
        if stuck:
            self._stuck |= {pod.uid for pod in stuck}
            raise errors.NotReadyError(
                f"paused daemons did not stop within {timeout_s:g} s: "
                + messages.listed([pod.key for pod in stuck]),
                reason=errors.Reason.IN_USE,
            )
        return latest

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
        self, paused: Paused, taken: undo.Taken, *, plugin_config: str | None = None
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
        before = taken.journal
        self.advertising.withdraw(paused.advertisers)
        is_paused = not before.paused_labels.keys().isdisjoint(keys)
        if is_paused or before.hold_taint or plugin_config:
            what = f"restarting {paused.advertisers.names or 'the device plugin'}"
            taken.resume(keys, what=what, plugin_config=plugin_config)
        waiting.delete(self._deps.workloads, early)
        old = paused.advertisers.old_uids | {pod.uid for pod in early}
        return dataclasses.replace(
            paused, advertisers=dataclasses.replace(paused.advertisers, old_uids=old)
        )

    def resume_monitors(
        self, paused: Paused, taken: undo.Taken, request: ports.Cancellation
    ) -> None:
        """Restore the other deploy labels one by one, and have the operator validate again.

        The layout is active and verified by then, so a monitor that does not get ready is a
        warning. A newer request, or an API that fails, ends the wait; the end of the run restores
        the remaining labels.
        """
        timeout_s = self._limits.monitor_timeout_s
        labels = taken.journal.paused_labels
        waited_for = [key for key in labels if key in paused.labels_with_pods]
        others = labels.keys() - waited_for
        try:
            for key in waited_for:

                def is_unready(pods: _Pods, key: str = key) -> bool:
                    placed = clients.gated_by(pods, (key,))
                    return not placed or any(not p.is_ready or p.is_terminating for p in placed)

                is_ours = key in taken.resume({key, *others})
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
            for pod in self._deps.workloads.present():
                if clients.is_validator(pod) or (is_old and clients.is_feature_discovery(pod)):
                    with _warn_on_error():
                        waiting.delete(self._deps.workloads, [pod])

    def await_driver(
        self,
        affected: _Pods,
        pods: _Pods,
        gpus: Sequence[model.Gpu],
        taken: undo.Taken,
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
        if not claiming or not self.advertising.expects_driver(taken.journal, pods):
            return False
        needs_slices = not all(pod.claimed_ids for pod in claiming)
        driver = self.advertising.driver
        lacks = functools.partial(driver.is_lacking, gpus=gpus, needs_slices=needs_slices)
        if not lacks(pods):
            return False
        if taken.journal.is_closed and not dra_driver.has_ready(pods):
            # Evicted pods may come back, so the drain of an earlier attempt begins again.
            taken.note(draining=False)
            self.resume_plugin(self.find_plugin(taken.journal, gpus), taken)
        taken.enter(model.Phase.RESOLVE, "waiting for the DRA driver, which ends pods' claims")
        timeout_s = self._limits.plugin_timeout_s
        # Slices that do not match in time are no failure: a claim then stands for any GPU.
        if self._wait(lacks, timeout_s, request) and not dra_driver.has_ready(
            self._deps.workloads.list()
        ):
            raise errors.NotReadyError(
                f"no DRA driver pod is ready after {timeout_s:g} s, and without it pods with "
                "ResourceClaims cannot end: " + messages.listed([pod.key for pod in claiming]),
                reason=errors.Reason.PLUGIN_NOT_READY,
            )
        return True

    def find_plugin(self, journal: journals.Journal, gpus: Sequence[model.Gpu]) -> Paused:
        """Return the advertisers, with those in the journal, as if they had been paused.

        A DRA driver that advertises what the GPUs have is kept: its restart changes nothing.
        """
        pods = self._deps.workloads.list()
        found = self.advertising.find(pods, gpus)
        kept = self.advertising.driver.current(gpus, pods)
        return Paused(
            advertisers=dataclasses.replace(
                found,
                kept_uids=kept,
                old_uids=found.old_uids - kept,
                kinds=found.kinds | advertisers.kinds_in(journal),
                changed=frozenset(gpu.uuid for gpu in journal.snapshot),
            )
        )

    def has_config(self, plugin_config: str | None) -> bool:
        """Check whether the plugin reads the config that belongs to the layout."""
        named = self._deps.node.seen().labels.get(cluster.PLUGIN_CONFIG_LABEL)
        return plugin_config in (None, named)


@contextlib.contextmanager
def _warn_on_error() -> Iterator[None]:
    try:
        yield
    except errors.ClusterError as error:
        _log.warning("pod_not_restarted", error=error.message)
