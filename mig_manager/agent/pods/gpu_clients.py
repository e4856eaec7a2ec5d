"""Pause the node's GPU clients before a change, and resume them after it.

GPU clients are the device plugin, the DRA driver, the operator's other operands, and clients that
the owner lists. A deploy label pauses its client; clients without one are deleted while the node
has our taint. The DRA driver is paused last and resumed first: a pod with a ResourceClaim starts
and ends only while the driver runs (gpu-operator, ``controllers/nodelabeling_controller.go``).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import run_journal, settings
from mig_manager.agent.pods import advertisers, advertising, dra_driver, pausing, waiting
from mig_manager.core import messages, model, ports, steps
from mig_manager.core.node import clients, node_object, pod_object, well_known

_log = structlog.get_logger()

_Pods = tuple[pod_object.Pod, ...]


class GpuClients:
    """The GPU clients of one node.

    Raises:
        ClusterError: From every method: the API refused or does not answer.
    """

    def __init__(self, deps: ports.Dependencies, limits: settings.Limits) -> None:
        self._deps = deps
        self._limits = limits
        self._wait = waiting.PodWait(deps, limits)
        self._stuck: set[str] = set()
        """UIDs of pods that did not stop by the deadline of an earlier pause. While they remain,
        another attempt would evict pods and fail in the same place."""
        self.advertising = advertising.Advertising(deps, limits)

    def pause(
        self,
        plan: steps.Plan,
        listed: _Pods,
        journal: run_journal.RunJournal,
        cancel: ports.Cancellation,
        extra_clients: tuple[clients.ExtraClient, ...] = (),
        *,
        drain_late: Callable[[_Pods], object] = lambda _pods: None,
    ) -> pausing.Paused:
        """Pause the clients that must not see the change, and wait until they have stopped.

        ``listed`` are the node's pods now. ``drain_late`` is called with the node's pods before
        the DRA driver is paused, while pods with claims can end.

        Raises:
            ClusterError: The API refused or does not answer.
            NotReadyError: IN_USE: paused pods did not stop before the deadline.
            Superseded: Another layout is requested, or the agent stops.
        """
        pods = tuple(pod for pod in listed if not pod.is_finished)
        choose = functools.partial(pausing.Pause.of, pods, plan, extra_clients)
        view = self._deps.node.latest()
        first = self._pause(functools.partial(choose, is_driver=False), view, journal)
        drain_late(self._wait_stopped(first, cancel) or listed)
        last = self._pause(functools.partial(choose, is_driver=True), view, journal)
        self._wait_stopped(last, cancel)
        return pausing.Paused(
            kinds=self.advertising.with_replaced(
                advertisers.expected_kinds(journal), self._deps.node.latest
            ),
            old_uids=advertisers.uids(pods),
            changed=frozenset(one.gpu_uuid for one in plan.gpus if one.steps),
            labels_with_pods=frozenset(
                key for key in (*first.labels, *last.labels) if clients.gated_by(pods, (key,))
            ),
            extra_clients=extra_clients,
        )

    def _pause(
        self,
        choose: Callable[[node_object.NodeView], pausing.Pause],
        view: node_object.NodeView,
        journal: run_journal.RunJournal,
    ) -> pausing.Pause:
        """Pause the clients chosen for the node's current state.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        before = journal.entries
        pause = choose(view)

        def decide(view: node_object.NodeView) -> run_journal.Step:
            nonlocal pause
            pause = choose(view)
            names = [key.removeprefix(well_known.DEPLOY_LABEL_PREFIX) for key in pause.labels]
            names += [pod.key for pod in pause.to_delete]
            kinds = pause.kinds | advertisers.kinds_in(before)
            deleted = {kind.deploy_label for kind in advertisers.kinds_of(pause.to_delete)}
            journal.note_awaited(journal.record.awaited | deleted)
            return run_journal.Step(
                message="pausing " + ", ".join(names or ["nothing"]),
                entries=dataclasses.replace(
                    before,
                    paused_labels={**pause.labels, **before.paused_labels},
                    hold_taint=bool(pause.to_delete) or before.hold_taint,
                    has_plugin=advertisers.PLUGIN in kinds,
                    has_dra_driver=advertisers.DRIVER in kinds,
                ),
                change=node_object.NodePatch(
                    labels=dict.fromkeys(pause.labels, well_known.PAUSED_VALUE),
                    hold_taint=True if pause.to_delete else None,
                ),
            )

        if pause.labels or pause.to_delete:
            journal.publish_step(model.Phase.PAUSE, decide)
        for pod in pause.to_delete:
            self._deps.workloads.delete(pod)
        return pause

    def _wait_stopped(self, pause: pausing.Pause, cancel: ports.Cancellation) -> _Pods:
        """Wait until the paused pods have stopped; return the node's pods."""
        uids = {pod.uid for pod in (*pause.label_managed, *pause.to_delete)}
        if not uids:
            return ()
        latest: _Pods = ()

        def running(pods: _Pods) -> _Pods:
            nonlocal latest
            latest = pods
            return tuple(pod for pod in pods if pod.uid in uids and not pod.is_finished)

        timeout_s = self._limits.plugin_timeout_s
        stuck = self._wait.until_solved(running, cancel, timeout_s=timeout_s)
        if stuck:
            self._stuck |= {pod.uid for pod in stuck}
            raise errors.NotReadyError(
                f"paused daemons did not stop within {timeout_s:g} s: "
                + messages.listed([pod.key for pod in stuck]),
                reason=errors.Reason.IN_USE,
            )
        return latest

    def require_none_stuck(self, pods: Iterable[pod_object.Pod]) -> None:
        """Fail while a pod remains that did not stop by the deadline of an earlier pause.

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
        paused: pausing.Paused,
        journal: run_journal.RunJournal,
        *,
        plugin_config: str | None = None,
    ) -> pausing.Paused:
        """Resume device plugin and DRA driver with new pods, and with the layout's plugin config.

        Returns:
            ``paused`` with all their pods that may have missed a part of the change.
        """
        # A pod that tolerates every taint came back during the change, and is stale too.
        pods = self._deps.workloads.list()
        stale = (
            *filter(advertisers.is_advertiser, pods),
            *clients.members(pods, paused.extra_clients),
        )
        early = tuple(pod for pod in stale if pod.uid not in paused.kept_uids)
        keys = advertisers.DEPLOY_LABELS
        before = journal.entries
        self.advertising.withdraw(paused)
        is_paused = not before.paused_labels.keys().isdisjoint(keys)
        if is_paused or before.hold_taint or plugin_config:
            what = f"restarting {paused.restarted_names or 'the device plugin'}"
            journal.resume(keys, what=what, plugin_config=plugin_config)
        waiting.delete(self._deps.workloads, early)
        old_uids = paused.old_uids | {pod.uid for pod in early}
        return dataclasses.replace(paused, old_uids=old_uids)

    def resume_monitors(
        self, paused: pausing.Paused, journal: run_journal.RunJournal, cancel: ports.Cancellation
    ) -> None:
        """Restore the other deploy labels one by one, and have the operator validate again.

        The layout is already active and verified, so a monitor that does not become ready is only
        a warning. A newer request or an API failure ends the wait; the end of the run restores the
        remaining labels.
        """
        timeout_s = self._limits.monitor_timeout_s
        labels = journal.entries.paused_labels
        waited_for = [key for key in labels if key in paused.labels_with_pods]
        others = labels.keys() - waited_for
        try:
            for key in waited_for:

                def is_unready(pods: _Pods, key: str = key) -> bool:
                    placed = clients.gated_by(pods, (key,))
                    return not placed or any(not p.is_ready or p.is_terminating for p in placed)

                is_ours = key in journal.resume({key, *others})
                others = set()
                if is_ours and self._wait.until_solved(is_unready, cancel, timeout_s=timeout_s):
                    self._deps.node.emit(
                        reason="MonitorNotReady",
                        message=f"{key}: no pod is ready after {timeout_s:g} s",
                        is_warning=True,
                    )
        except errors.Superseded as end:
            _log.info("monitors_not_waited_for", why=end.why)
        except errors.ClusterError as error:
            _log.warning("monitors_not_waited_for", error=error.message)
        # Feature discovery with a deploy label was restarted already.
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
        journal: run_journal.RunJournal,
        cancel: ports.Cancellation,
    ) -> bool:
        """Wait for a DRA driver: without one, affected pods with ResourceClaims cannot end.

        If a claim's devices are unknown, wait for the driver's slices too. A closed node is
        reopened first. Returns whether it waited.

        Raises:
            NotReadyError: PLUGIN_NOT_READY; no pod was evicted.
            Superseded: Another layout is requested, or the agent stops.
        """
        claiming = [pod for pod in affected if pod.may_claim]
        if not claiming or not self.advertising.expects_driver(journal, pods):
            return False
        needs_slices = not all(pod.claimed_ids for pod in claiming)
        driver = self.advertising.driver

        def is_lacking(pods: _Pods) -> bool:
            return not dra_driver.has_ready(pods) or (needs_slices and driver.is_stale(gpus))

        if not is_lacking(pods):
            return False
        if journal.entries.is_closed and not dra_driver.has_ready(pods):
            # Evicted pods may come back, so an earlier attempt's drain starts over.
            journal.note(draining=False)
            changed = journal.entries.snapshot
            self.resume_plugin(self.find_plugin(journal, gpus, changed), journal)
        journal.enter(model.Phase.RESOLVE, "waiting for the DRA driver, which ends pods' claims")
        timeout_s = self._limits.plugin_timeout_s
        # Slices that do not match in time are no failure: a claim may then use any GPU.
        is_late = self._wait.until_solved(is_lacking, cancel, timeout_s=timeout_s)
        if is_late and not dra_driver.has_ready(self._deps.workloads.list()):
            raise errors.NotReadyError(
                f"no DRA driver pod is ready after {timeout_s:g} s, and without it pods with "
                "ResourceClaims cannot end: " + messages.listed([pod.key for pod in claiming]),
                reason=errors.Reason.PLUGIN_NOT_READY,
            )
        return True

    def find_plugin(
        self,
        journal: run_journal.RunJournal,
        gpus: Sequence[model.Gpu],
        changed: Iterable[model.GpuSnapshot],
    ) -> pausing.Paused:
        """Return the advertisers as if they had been paused for a change of some GPUs.

        An up-to-date DRA driver is kept: restarting it would change nothing.
        """
        pods = self._deps.workloads.list()
        kept_uids = self.advertising.driver.current(gpus, pods)
        return pausing.Paused(
            kinds=self.advertising.find(pods, gpus, journal),
            old_uids=advertisers.uids(pods) - kept_uids,
            kept_uids=kept_uids,
            changed=frozenset(gpu.uuid for gpu in changed),
        )


@contextlib.contextmanager
def _warn_on_error() -> Iterator[None]:
    try:
        yield
    except errors.ClusterError as error:
        _log.warning("pod_not_restarted", error=error.message)
