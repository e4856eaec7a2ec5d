"""Taint the node, evict the pods that a change affects, and pause the GPU clients.

A change that may evict no pod, such as a custom layout on a node with on-demand partitioning,
waits for no pod. It fails once a device to be destroyed is in use. Use is checked five times:
before the node is touched, after the taint, after the device plugin is paused, right before the
change, and in its session.
"""

import dataclasses

from mig_manager import errors, reasons
from mig_manager.agent import attempts, run_recorder
from mig_manager.agent.phases import change_checks, planning, slots
from mig_manager.agent.pods import (
    device_usage,
    dra_driver,
    drain,
    node_advertisers,
    paused_clients,
    pausing,
)
from mig_manager.core import messages, pod_rights
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import run_status

_MAX_NEW_PLANS = 5  # a drain must end even if pods come and go all the time


def taint(attempt: attempts.Attempt, change: planning.PlannedChange) -> None:
    """Taint the node, record the layout labelled as applied, and name the affected pods.

    Raises:
        ClusterError: The API refused or does not answer.
        NotReadyError: SLOTS_TAKEN: another node may take the slot soon.
    """
    slots.require(attempt)
    # The taint may keep the next pod of an advertiser away.
    pausing.record_awaited(attempt.recorder, change.usage.pods)
    _publish(attempt, change)


def drain_pods(
    attempt: attempts.Attempt, change: planning.PlannedChange
) -> tuple[planning.PlannedChange, drain.Drain]:
    """Evict the pods that use devices to be destroyed, and wait until they are gone.

    Returns:
        The change as planned last, with the usage at the end of the drain, and the drain.

    Raises:
        ClusterError: The API refused or does not answer.
        MigManagerError: As ``change_checks.require_possible`` and ``drain.Drain.run``.
        Superseded: Another layout is requested, or the agent stops.
    """
    pods = dra_driver.list_pods(attempt.deps.workloads, change.usage.pods)
    latest = change_checks.replan_if_outdated(attempt, change, pods)
    pod_drain = drain.Drain.start_or_continue(attempt, latest.scope, latest.usage)
    _publish_others(attempt, change, latest)
    deadline: drain.Deadline | None = None
    new_plans = 0
    while True:
        can_replan = new_plans < _MAX_NEW_PLANS
        pod_drain = pod_drain.for_plan(latest.scope, latest.usage, can_replan=can_replan)
        state = pod_drain.run(deadline)
        if not state.needs_plan:
            return dataclasses.replace(latest, usage=state.usage), pod_drain
        change, latest = latest, change_checks.replan(attempt, latest)
        _publish_others(attempt, change, latest)
        deadline, new_plans = state.deadline, new_plans + 1


def pause_clients(
    attempt: attempts.Attempt, change: planning.PlannedChange, pod_drain: drain.Drain
) -> tuple[planning.PlannedChange, paused_clients.PausedClients]:
    """Pause the GPU clients, so that no pod gets a device any more.

    Raises:
        ClusterError: The API refused or does not answer.
        DrainError: Pods that got a device meanwhile did not end before the deadline.
        NotReadyError: IN_USE: paused pods did not stop before the deadline.
        MigManagerError: As ``change_checks.require_possible``, if pods got a device meanwhile.
        Superseded: Another layout is requested, or the agent stops.
    """
    pods = pausing.await_admission(attempt, change.usage.pods)
    clients = change.usage.extra_clients
    now = pausing.pause_clients(attempt, change.plan, pods, clients)
    # Without a plugin no pod gets a device any more: spare or drain pods that meanwhile got one.
    change = change_checks.replan_if_outdated(attempt, change, now)
    last_drain = pod_drain.for_plan(change.scope, change.usage)
    change = dataclasses.replace(change, usage=last_drain.run().usage)
    paused = pausing.pause_driver(attempt, change.plan, pods, clients)
    if node_advertisers.DRIVER in paused.advertisers:
        # The driver allocates devices until it is paused, and then pods with a device cannot end.
        last_drain.for_plan(change.scope, change.usage).require_done()
    attempt.cancel.check()
    return change, paused


def drain_whole_node(
    attempt: attempts.Attempt, change: planning.PlannedChange, paused: paused_clients.PausedClients
) -> None:
    """Evict every pod with a GPU before a reboot, regardless of the drain policy.

    Raises:
        ClusterError: The API refused or does not answer.
        DrainError: The deadline passed.
        MigManagerError: REBOOT_REQUIRED: pods cannot end. IN_USE: pods may not be evicted.
    """
    if attempt.rights.is_passive:
        raise errors.MigManagerError(
            "a custom layout does not reboot an on-demand node",
            reason=reasons.Reason.REBOOT_REQUIRED,
        )
    scope = dataclasses.replace(change.scope, affected=None)
    clients = change.usage.extra_clients
    usage = device_usage.wait_for_usage(attempt, change.inputs.gpus, None, extra_clients=clients)
    claiming = [pod.key for pod in usage.users(None) if pod.may_claim]
    if claiming and node_advertisers.DRIVER in paused.advertisers:
        raise errors.MigManagerError(
            "while the DRA driver is paused, these pods with ResourceClaims cannot end: "
            f"{messages.list_names(claiming)}; drain the node and reboot it",
            reason=reasons.Reason.REBOOT_REQUIRED,
        )
    drain.Drain.start_or_continue(attempt, scope, usage).run()


def _publish_others(
    attempt: attempts.Attempt, before: planning.PlannedChange, now: planning.PlannedChange
) -> None:
    """Publish the affected pods again, if a new plan affects others."""
    old, new = ({pod.uid for pod in change.affected_pods} for change in (before, now))
    if new != old:
        _publish(attempt, now)


def _publish(attempt: attempts.Attempt, change: planning.PlannedChange) -> None:
    """Publish taint and affected pods."""
    affected = change.affected_pods
    message = f"applying {attempt.status.title}"
    if affected:
        act = "evict" if isinstance(change.scope.rights, pod_rights.Evict) else "wait for"
        count = messages.count(len(affected), "pod")
        message = f"{count} to {act}: {change.usage.describe_users(affected)}"

    def decide(view: node_object.NodeView) -> run_recorder.PhaseStart:
        # An interrupted run has removed the label, and its journal names the layout.
        before = attempt.journal
        applied_before = view.labels.get(well_known.APPLIED_LABEL) or before.applied_before
        node = dataclasses.replace(before.node, has_reconfiguring_taint=True)
        return run_recorder.PhaseStart(
            message=message,
            journal=dataclasses.replace(before, applied_before=applied_before, node=node),
        )

    attempt.recorder.enter_for_view(
        run_status.Phase.DRAIN if affected else run_status.Phase.TAINT, decide
    )
    if affected:
        text = f"{attempt.status.title}: {message}"
        attempt.deps.node.emit(reason="Draining", message=text, is_warning=False)
