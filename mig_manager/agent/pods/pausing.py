"""Pause the node's GPU clients before a change.

GPU clients are the device plugin, the DRA driver, the operator's other operands, and clients that
the owner lists. A deploy label pauses its client; clients without one are deleted while the node
has our taint. The DRA driver is paused last and resumed first: a pod with a ResourceClaim starts
and ends only while the driver runs (gpu-operator, ``controllers/nodelabeling_controller.go``).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from mig_manager import errors, reasons
from mig_manager.agent import attempts, node_context, run_recorder
from mig_manager.agent.pods import device_listing, dra_driver, node_advertisers, paused_clients
from mig_manager.core import messages, ports, steps
from mig_manager.core.node.daemons import client_table, clients
from mig_manager.core.node.devices import claims, resources
from mig_manager.core.objects import node_object, pod_object, well_known
from mig_manager.core.records import run_status


def await_admission(attempt: attempts.Attempt, pods: pod_object.Pods) -> pod_object.Pods:
    """Wait until kubelet has admitted the pods that were bound before the taint; return the pods.

    Without the device plugin kubelet refuses them, and they fail: ``UnexpectedAdmissionError``.
    """

    def find_waiting(pods: pod_object.Pods) -> list[pod_object.Pod]:
        return [
            pod
            for pod in pods
            if not (pod.is_admitted or pod.is_finished or pod.is_terminating)
            and any(map(resources.is_device_or_shared, pod.gpu_resources))
        ]

    if find_waiting(pods):
        _, pods = attempt.until_solved(find_waiting, device_listing.ADMITTED_WITHIN_S)
    return pods


def pause_clients(
    attempt: attempts.Attempt,
    plan: steps.Plan,
    pods: pod_object.Pods,
    extra_clients: Sequence[client_table.ExtraClient],
) -> pod_object.Pods:
    """Pause the clients that must not see the change, and wait until they have stopped.

    The DRA driver still runs, so pods with claims can end.

    Args:
        attempt: The attempt.
        plan: The change of the GPUs.
        pods: The node's, as last listed.
        extra_clients: The GPU clients that the owner lists.

    Returns:
        The node's pods now.

    Raises:
        ClusterError: The API refused or does not answer.
        NotReadyError: IN_USE: paused pods did not stop before the deadline.
        Superseded: Another layout is requested, or the agent stops.
    """
    record_awaited(attempt.recorder, pods)
    choose = functools.partial(_choose, plan, pods, extra_clients, is_driver=False)
    return _pause(attempt, choose) or pods


def pause_driver(
    attempt: attempts.Attempt,
    plan: steps.Plan,
    pods: pod_object.Pods,
    extra_clients: tuple[client_table.ExtraClient, ...],
) -> paused_clients.PausedClients:
    """Pause the DRA driver as ``pause_clients`` pauses the others; return all that are paused.

    From now on the scheduler can allocate no device, not even to pods that tolerate the taint.
    """
    _pause(attempt, functools.partial(_choose, plan, pods, extra_clients, is_driver=True))
    advertisers = node_advertisers.find_awaited(attempt)
    if node_advertisers.DRIVER in advertisers:
        # Kubelet deletes the slices 30 s after the driver has stopped.
        node_advertisers.DRIVER.hide_devices(attempt.deps)
    return paused_clients.PausedClients(
        advertisers=advertisers,
        old_uids=node_advertisers.uids(pods),
        changed=frozenset(one.gpu_uuid for one in plan.gpus if one.steps),
        labels_with_pods=frozenset(
            key for key in attempt.journal.node.paused_labels if clients.gated_by(pods, (key,))
        ),
        extra_clients=extra_clients,
    )


def record_awaited(recorder: run_recorder.RunRecorder, pods: Iterable[pod_object.Pod]) -> None:
    """Record which advertisers must serve the node again although no deploy label shows it."""
    awaited = node_advertisers.labels_to_await(pods)
    recorder.set_record(recorder.record.with_awaited(awaited))


def record_present(attempt: attempts.Attempt) -> None:
    """Record that advertisers with a pod need not serve the node again, unless they were paused.

    Once the taint is removed, nothing keeps their next pods away but their owner.
    """
    journal = attempt.journal
    if journal.is_draining:
        return
    with contextlib.suppress(errors.ClusterError):
        pods = (pod for pod in attempt.deps.workloads.present() if not pod.is_terminating)
        labels = {each.deploy_label for each in node_advertisers.of_pods(pods)}
        present = labels - journal.node.advertisers
        attempt.recorder.set_record(attempt.record.without_awaited(present))


def require_none_stuck(context: node_context.NodeContext, pods: Iterable[pod_object.Pod]) -> None:
    """Fail while a pod is still terminating that did not stop by the deadline of an earlier pause.

    Another attempt would evict pods, and fail in the same place. A pod whose deletion began too
    late, such as while the DaemonSet controller was away, does not count.

    Raises:
        NotReadyError: IN_USE; nothing was touched.
    """
    stuck = context.memory.stuck_uids
    terminating = (pod for pod in pods if pod.is_terminating and not pod.is_finished)
    remaining = [pod for pod in terminating if pod.uid in stuck]
    if remaining:
        what = "paused daemons have not stopped since the last try"
        raise _stuck_error(context.deps.node, what, remaining)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Pause:
    """Which GPU clients to pause, and how."""

    labels: Mapping[str, str]
    label_managed: pod_object.Pods  # the labels stop them
    to_delete: pod_object.Pods  # no label stops them


def _choose(
    plan: steps.Plan,
    pods: pod_object.Pods,
    extra_clients: Sequence[client_table.ExtraClient],
    view: node_object.NodeView,
    *,
    is_driver: bool,
) -> _Pause:
    """Choose the pods and labels that a plan pauses: the DRA driver's, or all others."""
    pods = tuple(pod for pod in pods if not pod.is_finished)
    listed = client_table.members(pods, extra_clients)
    labels = clients.labels_to_pause(view.labels, plan, extra_clients)
    label_managed = clients.gated_by(pods, labels)
    every = (*filter(node_advertisers.is_advertiser, pods), *listed)
    to_delete = {pod.uid: pod for pod in every if pod not in label_managed}

    def is_chosen(pod: pod_object.Pod) -> bool:
        return claims.is_driver(pod) is is_driver

    return _Pause(
        labels={k: v for k, v in labels.items() if (k == claims.DEPLOY_LABEL) is is_driver},
        label_managed=tuple(filter(is_chosen, label_managed)),
        to_delete=tuple(filter(is_chosen, to_delete.values())),
    )


def _pause(
    attempt: attempts.Attempt, choose: Callable[[node_object.NodeView], _Pause]
) -> pod_object.Pods:
    """Pause the clients chosen for the node's current state, and wait until they have stopped.

    Returns:
        The node's pods now; none if no pod had to stop.
    """
    before = attempt.journal
    pause = choose(attempt.deps.node.latest())

    def decide(view: node_object.NodeView) -> run_recorder.PhaseStart:
        pause = choose(view)
        names = [key.removeprefix(well_known.DEPLOY_LABEL_PREFIX) for key in pause.labels]
        names += [pod.key for pod in pause.to_delete]
        stopped = node_advertisers.of_pods((*pause.label_managed, *pause.to_delete))
        served = frozenset(
            each.deploy_label
            for each in node_advertisers.ALL
            if each in stopped or each.deploy_label in pause.labels
        )
        node = dataclasses.replace(
            before.node,
            paused_labels={**pause.labels, **before.node.paused_labels},
            advertisers=before.node.advertisers | served,
        )
        return run_recorder.PhaseStart(
            message="pausing " + ", ".join(names or ["nothing"]),
            journal=dataclasses.replace(before, node=node),
        )

    if pause.labels or pause.to_delete:
        pause = choose(attempt.recorder.enter_for_view(run_status.Phase.PAUSE, decide))
    for pod in pause.to_delete:
        attempt.deps.workloads.delete(pod)
    uids = {pod.uid for pod in (*pause.label_managed, *pause.to_delete)}
    if not uids:
        return ()
    timeout_s = attempt.settings.plugin_timeout_s
    stuck, latest = attempt.until_solved(
        lambda pods: [pod for pod in pods if pod.uid in uids and not pod.is_finished], timeout_s
    )
    if stuck:
        attempt.memory.add_stuck(stuck)
        what = f"paused daemons did not stop within {timeout_s:g} s"
        raise _stuck_error(attempt.deps.node, what, stuck)
    return latest


def _stuck_error(
    node: ports.Node, what: str, pods: Sequence[pod_object.Pod]
) -> errors.NotReadyError:
    # The claim of a monitor may have no device of its own.
    has_claim = any(pod.may_claim or pod.claimed_ids is not None for pod in pods)
    return errors.NotReadyError(
        f"{what}: {messages.list_names([pod.key for pod in pods])}",
        reason=reasons.Reason.IN_USE,
        remedy=dra_driver.remedy_if_kept_away(node.latest().labels) if has_claim else "",
    )
