"""Plan a change for the use of the devices, or refuse it, before the node is touched.

The first plan ignores the pods. Who uses the devices is read, and the change planned again:

- once in every run, with a second pass if the new plan affects other devices, whose users kubelet
  has not reported yet
- after a wait for the DRA driver, because pods may have ended
- after hooks, during the drain and after the pause, if pods with GPUs were bound or have ended

The drain follows the latest plan: every ``PreparedChange`` has the drain scope of its own plan.
"""

import collections
import dataclasses

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts
from mig_manager.agent.phases import host, planning
from mig_manager.agent.pods import advertising, device_usage, dra_driver, pausing, resuming
from mig_manager.core import gpu_processes, timing
from mig_manager.core.node import clients, gpu_use, pod_object, strategies
from mig_manager.core.planner import planner

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChange(planning.PlannedChange):
    """A change that is planned for the use of the devices."""

    usage: gpu_use.Usage  # who uses the devices

    @property
    def affected_pods(self) -> pod_object.Pods:
        """The pods with devices that the change removes; the policy says what becomes of them."""
        return self.usage.users(self.scope.affected)


def require_possible(attempt: attempts.Attempt, planned: planning.PlannedChange) -> PreparedChange:
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
    change = _plan_and_check(attempt, planned)
    inputs = change.inputs
    # Not again later: once the plugin is paused, only an outdated label may show its strategy.
    desired = strategies.gpu_layouts(inputs.gpus, inputs.desired)
    advertising.require_served(attempt, desired, change.usage.pods)
    if resuming.await_driver(attempt, change.affected_pods, change.usage.pods, inputs.gpus):
        change = _plan_and_check(attempt, change)
    return _require_unhindered(attempt, change)


def follow_pods(
    attempt: attempts.Attempt, change: PreparedChange, pods: pod_object.Pods
) -> PreparedChange:
    """Plan again if another plan may spare pods that now use devices to be destroyed.

    Hooks may take long, and a pod may have got such a device while another is free. ``pods`` are
    the node's, as just listed.

    Raises:
        MigManagerError: As ``require_possible``.
    """
    usage = change.usage.with_pods(pods)
    if change.scope.is_outdated(change.usage, usage):
        return plan_again(attempt, change)
    return dataclasses.replace(change, usage=usage)


def plan_again(attempt: attempts.Attempt, change: PreparedChange) -> PreparedChange:
    """Plan for the use of devices now; keep the plan if kubelet does not answer.

    Raises:
        MigManagerError: As ``require_possible``, but for STRATEGY_MISMATCH.
    """
    try:
        latest = _plan_and_check(attempt, change)
    except errors.KubeletError as error:
        # The drain has more time for kubelet.
        _log.warning("pod_resources_unavailable", error=error.message)
        usage = change.usage.with_pods(dra_driver.list_with_unbound(attempt))
        return dataclasses.replace(change, usage=usage)
    return _require_unhindered(attempt, latest)


def _require_unhindered(attempt: attempts.Attempt, change: PreparedChange) -> PreparedChange:
    """Return the change, or fail if pods, processes or services of the node rule it out."""
    try:
        _require_idle(attempt, change, timing.Wait(clock=attempt.deps.clock))
    except errors.GpuInUseError:
        change = _avoid_processes(attempt, change)
        _require_idle(attempt, change, idle_wait(attempt))
    # Ask before pods are evicted: a silent init system could not stop services later.
    host.running_services(attempt, change.inputs.services, change.plan)
    change.scope.require_allowed(change.usage.describe_users(change.affected_pods))
    return change


def _require_idle(attempt: attempts.Attempt, change: PreparedChange, wait: timing.Wait) -> None:
    device_usage.require_idle(
        attempt.deps,
        change.plan,
        change.scope,
        change.usage,
        services=change.inputs.services,
        wait=wait,
    )


def _avoid_processes(attempt: attempts.Attempt, change: PreparedChange) -> PreparedChange:
    """Plan again so that instances that processes use stay, unless that affects other pods."""
    used_ids = frozenset(gpu_processes.ids_in_use(change.inputs.gpus, attempt.deps.processes()))
    other = _plan(attempt, change, change.usage, used_ids=used_ids)
    before, after = ({pod.key for pod in each.affected_pods} for each in (change, other))
    return other if after <= before else change


def _plan_and_check(attempt: attempts.Attempt, last: planning.PlannedChange) -> PreparedChange:
    """Plan so that busy devices are destroyed last; refuse what the node rules out.

    ``last`` is the change with its last plan, whose affected pods must be known.
    """
    attempt.deps.standby.prepare()
    attempt.deps.pod_watch.expect_change()
    change = _plan_for_usage(attempt, last)
    # Another plan may affect other pods, whose devices were not waited for.
    is_other = change.scope.affected != last.scope.affected
    if is_other and change.usage.undecided_users(change.scope.affected):
        change = _plan_for_usage(attempt, change)
    pods = change.usage.pods
    if not attempt.limits.allows_foreign_managers:
        others = device_usage.foreign_managers(attempt.deps, pods)
        if others:
            raise errors.MigManagerError(
                f"another program manages MIG on this node: {', '.join(others)}",
                reason=reasons.Reason.FOREIGN_MANAGER,
            )
    pausing.require_none_stuck(attempt, pods)
    return change


def _plan_for_usage(attempt: attempts.Attempt, last: planning.PlannedChange) -> PreparedChange:
    inputs = last.inputs
    usage = device_usage.wait_for_usage(
        attempt, inputs.gpus, last.scope.affected, extra_clients=inputs.extra_clients
    )
    return _plan(attempt, last, usage)


def _plan(
    attempt: attempts.Attempt,
    last: planning.PlannedChange,
    usage: gpu_use.Usage,
    *,
    used_ids: frozenset[str] = frozenset(),
) -> PreparedChange:
    """Plan for the use of devices; ``used_ids`` are in use without a pod."""
    by_pods = usage.use_by_device(attempt.deps.clock.unix_s(), attempt.limits.drain_timeout_s)
    # Undoing an interrupted change evicts no pod that got a device since.
    inputs = last.inputs
    undo = planner.restore(inputs.gpus, inputs.restoring)
    is_used = bool(usage.users(clients.affected_ids(undo, inputs.gpus)))
    basis = dataclasses.replace(
        last.basis,
        restoring=() if is_used else inputs.restoring,
        use=by_pods | collections.Counter(dict.fromkeys(used_ids, gpu_use.IN_USE)),
    )
    plan = basis.plan(inputs.gpus)
    scope = planning.scope_for(attempt, inputs.gpus, plan, last.scope.rights)
    return PreparedChange(inputs=inputs, basis=basis, plan=plan, scope=scope, usage=usage)


def idle_wait(attempt: attempts.Attempt) -> timing.Wait:
    """Return the wait for processes that use devices to be destroyed."""
    return dataclasses.replace(
        attempt.wait(0.0 if attempt.never_evicts else attempt.limits.in_use_timeout_s),
        on_wait=lambda error: _log.info("gpus_in_use", error=error.message),
    )
