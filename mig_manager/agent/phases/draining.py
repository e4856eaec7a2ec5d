"""Taint the node, evict the pods that a change affects, and pause the GPU clients.

A change that may evict no pod, such as a custom layout on a node with on-demand partitioning,
waits for no pod. It fails once a device to be destroyed is in use. Use is checked five times:
before the node is touched, after the taint, after the device plugin is paused, right before the
change, and in its session.
"""

import dataclasses

from mig_manager import errors
from mig_manager.agent import attempts, run_journal
from mig_manager.agent.phases import preparing, slots
from mig_manager.agent.pods import advertising, drain, orders, pausing, survey
from mig_manager.core import messages, model
from mig_manager.core.node import gpu_use, node_object, well_known


def taint(attempt: attempts.Attempt, change: preparing.PlannedChange) -> None:
    """Taint the node, record the layout labelled as applied, and name the affected pods.

    Raises:
        ClusterError: The API refused or does not answer.
        NotReadyError: SLOTS_TAKEN: another node may take the slot soon.
    """
    slots.require(attempt)
    affected = change.affected_pods
    message = f"applying {attempt.status.title}"
    if affected:
        act = "evict" if isinstance(change.order.rights, orders.Evict) else "wait for"
        count = messages.count(len(affected), "pod")
        message = f"{count} to {act}: {change.usage.describe_users(affected)}"

    def decide(view: node_object.NodeView) -> run_journal.PhaseStart:
        # An interrupted run has removed the label, and its journal names the layout.
        applied = view.labels.get(well_known.APPLIED_LABEL) or attempt.journal.entries.applied
        return run_journal.PhaseStart(
            message=message,
            entries=dataclasses.replace(attempt.journal.entries, hold_taint=True, applied=applied),
        )

    attempt.journal.enter_decided(model.Phase.DRAIN if affected else model.Phase.TAINT, decide)
    if affected:
        text = f"{attempt.status.title}: {message}"
        attempt.deps.node.emit(reason="Draining", message=text, is_warning=False)


def pause_clients(
    attempt: attempts.Attempt,
    change: preparing.PlannedChange,
    pod_drain: drain.Drain,
    usage: gpu_use.Usage,
) -> advertising.Paused:
    """Pause the GPU clients, so that no pod gets a device any more.

    ``usage`` is as of the end of the drain.

    Raises:
        ClusterError: The API refused or does not answer.
        DrainError: Pods that got a device meanwhile did not end before the deadline.
        NotReadyError: IN_USE: paused pods did not stop before the deadline.
        MigManagerError: IN_USE: pods use devices to be destroyed, and none may be evicted.
        Superseded: Another layout is requested, or the agent stops.
    """
    attempt.journal.note_record(attempt.journal.record.with_awaited(change.awaited))
    usage = usage.with_pods(pausing.await_admission(attempt, usage.pods))
    now = pausing.pause_clients(attempt, change.plan, usage)
    # Without a plugin no pod gets a device any more: drain pods that meanwhile got one.
    drained = pod_drain.run(now)
    paused = pausing.pause_driver(attempt, change.plan, usage)
    if advertising.DRIVER in paused.programs:
        # The driver allocates devices until it is paused, and then pods with a device cannot end.
        pod_drain.require_done(drained)
    attempt.cancel.check()
    return paused


def drain_whole_node(
    attempt: attempts.Attempt, change: preparing.PlannedChange, paused: advertising.Paused
) -> None:
    """Evict every pod with a GPU before a reboot, regardless of the drain policy.

    Raises:
        ClusterError: The API refused or does not answer.
        DrainError: The deadline passed.
        MigManagerError: REBOOT_REQUIRED: pods cannot end. IN_USE: pods may not be evicted.
    """
    if attempt.request.is_on_demand:
        raise errors.MigManagerError(
            "a custom layout does not reboot an on-demand node",
            reason=errors.Reason.REBOOT_REQUIRED,
        )
    order = orders.Order(affected=None, rights=change.order.rights)
    clients = change.usage.extra_clients
    usage = survey.wait_for_usage(
        attempt.deps, change.gpus, None, attempt.cancel, extra_clients=clients
    )
    claiming = [pod.key for pod in usage.users(None) if pod.may_claim]
    if claiming and advertising.DRIVER in paused.programs:
        raise errors.MigManagerError(
            "while the DRA driver is paused, these pods with ResourceClaims cannot end: "
            f"{messages.list_names(claiming)}; drain the node and reboot it",
            reason=errors.Reason.REBOOT_REQUIRED,
        )
    drain.Drain.begin(attempt, order).run(usage)
