"""Plan a change, and refuse an impossible one before the node is touched."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import structlog

from mig_manager import errors
from mig_manager.agent import attempts, outcomes
from mig_manager.agent.phases import host, recovery, targets
from mig_manager.agent.pods import advertising, orders, pausing, resuming, survey
from mig_manager.core import messages, model, steps, timing
from mig_manager.core.node import (
    clients,
    gpu_use,
    pod_object,
    policies,
    resources,
    strategies,
)
from mig_manager.core.planner import planner
from mig_manager.core.records import gpu_repair

_ON_DEMAND = (
    "an on-demand layout evicts no pod, but these pods use devices to be removed, or may get "
    "them: {}"
)

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChange:
    """A planned change of the GPUs."""

    target: targets.Target
    desired: Mapping[str, model.DesiredGpu]  # the target's GPUs by UUID
    gpus: model.ObservedGpus
    plan: steps.Plan
    order: orders.Order  # the drain for the plan
    usage: gpu_use.Usage  # who uses the devices; without pods before it is asked
    restoring: model.Snapshots = ()
    """The instances of GPUs outside the target from before an interrupted change."""
    awaited: frozenset[str] = frozenset()
    """Deploy labels of the advertisers that ran here without one, maybe before the taint."""
    busy: frozenset[str] = frozenset()
    """The devices in use, which any plan of this change destroys last."""
    ending: frozenset[str] = frozenset()
    """The used devices that only terminating pods have: they are destroyed before the others."""
    services: tuple[str, ...] = ()  # the host's services that the owner lists

    def replan(self, gpus: model.ObservedGpus) -> steps.Plan:
        """Plan the target again, for the same use of devices.

        A GPU lost during the change is verified only if the layout names it.

        Raises:
            LayoutError: The target is impossible on these GPUs.
        """
        plan = self.target.plan(gpus, busy=self.busy, ending=self.ending)
        return planner.combine(plan, planner.restore(gpus, self.restoring))

    @property
    def affected_pods(self) -> pod_object.Pods:
        """The pods with devices that the change removes; the policy says what becomes of them."""
        return self.usage.users(self.order.affected)


def plan_change(
    attempt: attempts.Attempt, target: targets.Target, gpus: model.ObservedGpus
) -> PlannedChange:
    """Plan the layout or the repair for the observed GPUs.

    Raises:
        ConfigError: A file of the owner cannot be read or is invalid.
        HardwareError: GPU_NEEDS_RESET: a GPU must be repaired first.
        LayoutError: The layout is impossible on these GPUs.
        MissingGpusError: The driver no longer lists a GPU of the verified layout.
    """
    usage = gpu_use.Usage(pods=(), assigned=None, extra_clients=attempt.deps.extra_clients())
    services = attempt.deps.service_names()
    attempt.hooks.load()
    missing = attempt.journal.record.absent_gpus(gpus, attempt.deps.boot_id)
    if missing and not attempt.request.repairs:
        message = outcomes.missing_message(attempt.status.title, missing)
        raise errors.MissingGpusError(message, missing)
    recovery.restore_persistence(attempt, gpus)
    desired = target.select(gpus)
    others = tuple(gpu for gpu in attempt.journal.entries.gpus.snapshot if gpu.uuid not in desired)
    restoring = others if others and recovery.is_possible(attempt, gpus, others) else ()
    plan = planner.combine(target.plan(gpus), planner.restore(gpus, restoring))
    _require_repaired(attempt, gpus, plan)
    return PlannedChange(
        target=target,
        desired=desired,
        gpus=gpus,
        plan=plan,
        order=_order(attempt, gpus, plan, _rights(attempt, plan)),
        usage=usage,
        restoring=restoring,
        services=services,
    )


def require_possible(attempt: attempts.Attempt, planned: PlannedChange) -> PlannedChange:
    """Return the change with the use of devices, or fail if the node rules it out.

    Raises:
        ClusterError: The API refused or does not answer, or kubelet does not.
        GpuInUseError: A process uses a GPU.
        HostError: The init system does not answer, and services must stop.
        HardwareError: The driver does not list the processes.
        LayoutError: STRATEGY_MISMATCH: device plugin or DRA driver would not start.
        MigManagerError: DRIFTED: pods would be evicted, but no change was requested; IN_USE: the
            same on demand; FOREIGN_MANAGER.
        NotReadyError: PLUGIN_NOT_READY, or IN_USE: a paused daemon has not stopped.
        Superseded: Another layout is requested, or the agent stops.
    """
    change = _survey(attempt, planned)
    if resuming.await_driver(attempt, change.affected_pods, change.usage.pods, change.gpus):
        change = _survey(attempt, change)
    return _require_unhindered(attempt, change)


def follow_pods(
    attempt: attempts.Attempt, change: PlannedChange, pods: pod_object.Pods
) -> PlannedChange:
    """Plan again if pods with GPUs were bound or have ended since the survey.

    Hooks may take long, and a pod may have got a device to be destroyed while another is free.
    ``pods`` are the node's, as just listed.

    Raises:
        MigManagerError: As ``require_possible``.
    """
    if not change.order.affected or _gpu_pods(pods) == _gpu_pods(change.usage.pods):
        return dataclasses.replace(change, usage=change.usage.with_pods(pods))
    return plan_again(attempt, change, pods)


def plan_again(
    attempt: attempts.Attempt, change: PlannedChange, pods: pod_object.Pods
) -> PlannedChange:
    """Plan for the use of devices now; keep the plan if kubelet does not answer.

    Raises:
        MigManagerError: As ``require_possible``.
    """
    try:
        surveyed = _survey(attempt, change)
    except errors.KubeletError as error:
        # The drain has more time for kubelet.
        _log.warning("pod_resources_unavailable", error=error.message)
        return dataclasses.replace(change, usage=change.usage.with_pods(pods))
    return _require_unhindered(attempt, surveyed)


def _gpu_pods(pods: Iterable[pod_object.Pod]) -> frozenset[tuple[str, bool]]:
    """Return the UIDs of the pods that use GPUs, and whether the pods are terminating."""
    return frozenset(
        (pod.uid, pod.is_terminating)
        for pod in pods
        if not pod.is_finished
        and (pod.may_claim or any(map(resources.is_device_or_shared, pod.gpu_resources)))
    )


def _require_unhindered(attempt: attempts.Attempt, change: PlannedChange) -> PlannedChange:
    """Return the change, or fail if pods, processes or services of the node rule it out."""
    try:
        _require_idle(attempt, change, timing.Wait(clock=attempt.deps.clock))
    except errors.GpuInUseError:
        change = _avoid_processes(attempt, change)
        _require_idle(attempt, change, idle_wait(attempt))
    # Ask before pods are evicted: a silent init system could not stop services later.
    host.running_services(attempt, change.services, change.plan)
    change.order.require_allowed(change.usage.describe_users(change.affected_pods))
    return change


def _require_idle(attempt: attempts.Attempt, change: PlannedChange, wait: timing.Wait) -> None:
    survey.require_idle(
        attempt.deps,
        change.plan,
        change.order,
        change.usage,
        services=change.services,
        wait=wait,
    )


def _avoid_processes(attempt: attempts.Attempt, change: PlannedChange) -> PlannedChange:
    """Plan again so that instances that processes use stay, unless that affects other pods."""
    processes = attempt.deps.processes() if attempt.deps.processes else None
    other = _plan(
        attempt, change, used_ids=frozenset(steps.ids_in_use(change.gpus, processes or {}))
    )
    before, after = ({pod.key for pod in each.affected_pods} for each in (change, other))
    return other if after <= before else change


def _require_repaired(
    attempt: attempts.Attempt, gpus: model.ObservedGpus, plan: steps.Plan
) -> None:
    """Refuse a layout on a GPU that the agent is to reset first: no new work runs before that."""
    if attempt.request.repairs or not attempt.may_repair:
        return
    changed = {each.gpu_uuid for each in plan.gpus}
    faulty = [str(gpu) for gpu in gpus if gpu.uuid in changed and gpu_repair.is_possible(gpu)]
    if faulty:
        raise errors.HardwareError(
            f"no layout is applied before the repair of {messages.list_names(faulty)}",
            reason=errors.Reason.GPU_NEEDS_RESET,
        )


def _rights(attempt: attempts.Attempt, plan: steps.Plan) -> orders.DrainRights:
    """Return whether the change may evict."""
    if not attempt.may_evict:
        title = attempt.status.title
        if plan.gpu_uuids == attempt.journal.record.returned_gpus(plan.gpu_uuids):
            # The layout has not drifted there.
            gpus = messages.list_names([*map(str, plan.gpus)])
            message = functools.partial(outcomes.owed_message, title, gpus)
            return orders.Refuse(errors.Reason.IN_USE, message)
        message = functools.partial(outcomes.drift_message, title)
        return orders.Refuse(errors.Reason.DRIFTED, message)
    if attempt.request.is_on_demand:
        return orders.Refuse(errors.Reason.IN_USE, _ON_DEMAND.format)
    failed = attempt.journal.record.failed_changes
    if failed and not failed.may_evict(attempt.status.config_hash, attempt.deps.boot_id):
        message = functools.partial(
            outcomes.failed_changes_message, attempt.status.title, failed.count, failed.problem
        )
        return orders.Refuse(failed.reason, message)
    if attempt.limits.policy.drain is policies.DrainPolicy.NONE:
        return orders.WaitOnly("--drain-policy none evicts no pod")
    return orders.Evict()


def _order(
    attempt: attempts.Attempt,
    gpus: model.ObservedGpus,
    plan: steps.Plan,
    rights: orders.DrainRights,
) -> orders.Order:
    """Return the drain for a plan."""
    may_evict = isinstance(rights, orders.Evict)
    is_whole_node = may_evict and attempt.limits.policy.drain is policies.DrainPolicy.NODE
    return orders.Order(
        affected=None if is_whole_node else clients.affected_ids(plan, gpus),
        rights=rights,
        # A wait for the DRA driver makes an earlier attempt's drain start over.
        has_begun=attempt.journal.entries.draining,
    )


def _survey(attempt: attempts.Attempt, change: PlannedChange) -> PlannedChange:
    """Survey the use of devices, and plan again so that busy devices are destroyed last."""
    attempt.deps.standby.prepare()
    if attempt.deps.pod_watch is not None:
        attempt.deps.pod_watch.expect_change()
    first = change.order
    change = _plan_for_usage(attempt, change)
    # Another plan may affect other pods, for which the survey did not wait.
    is_other = change.order.affected != first.affected
    if is_other and change.usage.undecided_users(change.order.affected):
        change = _plan_for_usage(attempt, change)
    usage = change.usage
    if not attempt.limits.allows_foreign_managers:
        others = survey.foreign_managers(attempt.deps, usage.pods)
        if others:
            raise errors.MigManagerError(
                f"another program manages MIG on this node: {', '.join(others)}",
                reason=errors.Reason.FOREIGN_MANAGER,
            )
    pausing.require_none_stuck(attempt, usage.pods)
    desired = strategies.gpu_layouts(change.gpus, change.desired)
    advertising.require_served(attempt, desired, usage.pods)
    awaited = change.awaited | advertising.labels_to_await(usage.pods)
    return dataclasses.replace(change, awaited=awaited)


def _plan_for_usage(attempt: attempts.Attempt, change: PlannedChange) -> PlannedChange:
    usage = survey.wait_for_usage(
        attempt.deps,
        change.gpus,
        change.order.affected,
        attempt.cancel,
        extra_clients=change.usage.extra_clients,
    )
    return _plan(attempt, dataclasses.replace(change, usage=usage))


def _plan(
    attempt: attempts.Attempt, change: PlannedChange, *, used_ids: frozenset[str] = frozenset()
) -> PlannedChange:
    """Plan for the use of devices; ``used_ids`` are in use without a pod."""
    ending = change.usage.ending_ids(attempt.deps.clock.unix_s(), attempt.limits.drain_timeout_s)
    # Undoing an interrupted change evicts no pod that got a device since.
    undo = planner.restore(change.gpus, change.restoring)
    is_used = bool(change.usage.users(clients.affected_ids(undo, change.gpus)))
    change = dataclasses.replace(
        change,
        restoring=() if is_used else change.restoring,
        busy=change.usage.device_ids | used_ids,
        ending=ending - used_ids,
    )
    plan = change.replan(change.gpus)
    order = _order(attempt, change.gpus, plan, change.order.rights)
    return dataclasses.replace(change, plan=plan, order=order)


def idle_wait(attempt: attempts.Attempt) -> timing.Wait:
    """Return the wait for processes that use devices to be destroyed."""
    return dataclasses.replace(
        attempt.wait(0.0 if attempt.request.is_on_demand else attempt.limits.in_use_timeout_s),
        on_wait=lambda error: _log.info("gpus_in_use", error=error.message),
    )
