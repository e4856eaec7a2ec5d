"""Resume the node's GPU clients after a change: first the advertisers, then the monitors."""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts, run_recorder
from mig_manager.agent.pods import dra_driver, node_advertisers, paused_clients, schedulability
from mig_manager.core import messages, model
from mig_manager.core.node.daemons import client_table, clients
from mig_manager.core.objects import node_object, pod_object, well_known
from mig_manager.core.records import node_entries, run_status

_log = structlog.get_logger()


def resume_advertisers(
    attempt: attempts.Attempt,
    paused: paused_clients.PausedClients,
    *,
    plugin_config: str | None = None,
) -> schedulability.ExpectedAdvertisers:
    """Resume device plugin and DRA driver with new pods, and with the layout's plugin config.

    Returns:
        The advertisers to wait for, also those that served the node only since the change began.
        All their pods that may have missed a part of the change must be replaced.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    # A pod that tolerates every taint came back during the change, and is stale too.
    pods = attempt.deps.workloads.list()
    stale = (
        *filter(node_advertisers.is_advertiser, pods),
        *client_table.members(pods, paused.extra_clients),
    )
    early = tuple(pod for pod in stale if pod.uid not in paused.kept_uids)
    replaced = tuple(pod for pod in early if not pod.is_terminating)
    awaited = node_advertisers.labels_to_await(replaced)
    attempt.recorder.set_record(attempt.record.with_awaited(awaited))
    expected = schedulability.ExpectedAdvertisers(
        advertisers=paused.advertisers | node_advertisers.of_pods(replaced),
        old_uids=paused.old_uids | {pod.uid for pod in early},
        changed=paused.changed,
    )
    kept = {node_advertisers.DRIVER} if paused.kept_uids else set()
    to_restart = [each for each in node_advertisers.ALL if each in expected.advertisers - kept]
    journal = attempt.journal
    for each in to_restart:
        each.hide_devices(attempt.deps)
    deploy_labels = node_advertisers.DEPLOY_LABELS
    is_paused = not journal.node.paused_labels.keys().isdisjoint(deploy_labels)
    if is_paused or journal.node.has_reconfiguring_taint or plugin_config:
        names = " and ".join(f"the {each.name}" for each in to_restart)
        what = f"restarting {names or 'the device plugin'}"
        _resume(attempt.recorder, deploy_labels, what=what, plugin_config=plugin_config)
    node_advertisers.delete(attempt.deps.workloads, replaced)
    return expected


def resume_monitors(attempt: attempts.Attempt, paused: paused_clients.PausedClients) -> None:
    """Restore the other deploy labels one by one, and have the operator validate again.

    The layout is already active and verified, so a monitor that does not become ready is only a
    warning. A newer request or an API failure ends the wait; the end of the run restores the
    remaining labels.
    """
    timeout_s = attempt.settings.monitor_timeout_s
    labels = attempt.journal.node.paused_labels
    waited_for = [key for key in labels if key in paused.labels_with_pods]
    others = labels.keys() - waited_for
    try:
        for key in waited_for:

            def is_unready(pods: pod_object.Pods, key: str = key) -> bool:
                placed = clients.gated_by(pods, (key,))
                is_ready = placed and all(p.is_ready and not p.is_terminating for p in placed)
                # Another value is the decision of another program or a person, also meanwhile.
                return not is_ready and attempt.node_labels.get(key) == "true"

            _resume(attempt.recorder, {key, *others})
            others = set()
            if attempt.until_solved(is_unready, timeout_s)[0]:
                attempt.deps.node.emit(
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
        for pod in attempt.deps.workloads.present():
            if clients.is_validator(pod) or (is_old and clients.is_feature_discovery(pod)):
                with _warn_on_error():
                    node_advertisers.delete(attempt.deps.workloads, [pod])


def _resume(
    recorder: run_recorder.RunRecorder,
    keys: Collection[str],
    *,
    what: str = "",
    plugin_config: str | None = None,
) -> None:
    """Restore some paused labels before the run ends, and remove our taint.

    Args:
        recorder: Of the run.
        keys: The labels; a label that another program wrote since the pause is kept.
        what: The message; if empty, it names the labels.
        plugin_config: The device plugin's config to set in the same patch; None: keep it.
    """
    before = recorder.journal

    def decide(view: node_object.NodeView) -> run_recorder.PhaseStart:
        own_entries = node_entries.without_foreign_labels(before.node, view)
        old, changed = view.labels.get(well_known.PLUGIN_CONFIG_LABEL), before.node.plugin_config
        if plugin_config is not None and plugin_config != old:
            # An interrupted run may have changed it before, with other settings.
            first = own_entries.plugin_config.before if own_entries.plugin_config else old
            changed = node_entries.PluginConfig(before=first, now=plugin_config)
        resumed = (key for key in own_entries.paused_labels if key in keys)
        names = ", ".join(key.removeprefix(well_known.DEPLOY_LABEL_PREFIX) for key in resumed)
        node = dataclasses.replace(
            before.node,
            paused_labels={k: v for k, v in before.node.paused_labels.items() if k not in keys},
            has_reconfiguring_taint=False,
            plugin_config=changed,
        )
        return run_recorder.PhaseStart(
            message=what or f"resuming {names or 'nothing'}",
            journal=dataclasses.replace(before, node=node),
        )

    recorder.enter_for_view(run_status.Phase.RESUME, decide)


def await_driver(
    attempt: attempts.Attempt,
    affected: pod_object.Pods,
    pods: pod_object.Pods,
    gpus: model.ObservedGpus,
) -> bool:
    """Wait for a DRA driver: without one, affected pods with ResourceClaims cannot end.

    If a claim's devices are unknown, wait for the driver's slices too. Our taint is removed
    first. Returns whether it waited.

    Raises:
        ClusterError: The API refused or does not answer.
        NotReadyError: PLUGIN_NOT_READY; no pod was evicted.
        Superseded: Another layout is requested, or the agent stops.
    """
    claiming = [pod for pod in affected if pod.may_claim]
    if not (claiming and node_advertisers.DRIVER.is_expected(attempt, pods)):
        return False
    needs_slices = not all(pod.claimed_ids for pod in claiming)

    def is_lacking(pods: pod_object.Pods) -> bool:
        is_ready = dra_driver.has_ready(pods)
        return not is_ready or (
            needs_slices and node_advertisers.DRIVER.is_stale(attempt.deps, gpus)
        )

    if not is_lacking(pods):
        return False
    if attempt.journal.node.is_tainted_or_paused and not dra_driver.has_ready(pods):
        # Evicted pods may come back, so an earlier attempt's drain starts over.
        attempt.recorder.set_journal(is_draining=False)
        resume_advertisers(
            attempt,
            paused_clients.remove_phantoms_as_if_paused(
                attempt, gpus, attempt.journal.gpus.snapshots
            ),
        )
    attempt.recorder.enter(
        run_status.Phase.RESOLVE, "waiting for the DRA driver, which ends pods' claims"
    )
    timeout_s = attempt.settings.plugin_timeout_s
    # Slices that do not match in time are no failure: a claim may then use any GPU.
    is_late, pods = attempt.until_solved(is_lacking, timeout_s)
    if is_late and not dra_driver.has_ready(pods):
        raise errors.NotReadyError(
            f"no DRA driver pod is ready after {timeout_s:g} s, and without it pods with "
            "ResourceClaims cannot end: " + messages.list_names([pod.key for pod in claiming]),
            reason=reasons.Reason.PLUGIN_NOT_READY,
            remedy=dra_driver.remedy_if_kept_away(attempt.node_labels),
        )
    return True


@contextlib.contextmanager
def _warn_on_error() -> Iterator[None]:
    try:
        yield
    except errors.ClusterError as error:
        _log.warning("pod_not_restarted", error=error.message)
