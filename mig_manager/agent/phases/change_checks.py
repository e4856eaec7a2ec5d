"""Plan a change for the use of the devices, or refuse it, before the node is touched.

The first plan ignores the pods. Who uses the devices is read, and the change planned again:

- once in every run, with a second pass if the new plan affects other devices, whose users kubelet
  has not reported yet
- after a wait for the DRA driver, because pods may have ended
- after hooks, during the drain and after the pause, if pods with GPUs were bound or have ended

The drain follows the latest plan: every ``PlannedChange`` has the drain scope of its own plan.
"""

import dataclasses

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts
from mig_manager.agent.phases import planning, services_and_hooks
from mig_manager.agent.pods import device_usage, dra_driver, pausing, resuming, schedulability
from mig_manager.core import gpu_processes, steps, timing
from mig_manager.core.node.devices import strategies
from mig_manager.core.objects import pod_object

_log = structlog.get_logger()


def require_possible(
    attempt: attempts.Attempt, inputs: planning.ChangeInputs
) -> planning.PlannedChange:
    """Return the change planned for the use of devices, or fail if the node rules it out.

    Raises:
        ClusterError: The API refused or does not answer.
        GpuInUseError: A process uses a GPU.
        HostError: The init system does not answer, and services must stop.
        HardwareError: The driver does not list the processes.
        KubeletError: As ``device_usage.wait_for_usage``.
        LayoutError: STRATEGY_MISMATCH: device plugin or DRA driver would not start.
        MigManagerError: DRIFTED: pods would be evicted, but no change was requested; IN_USE: the
            same on demand; FOREIGN_MANAGER.
        NotReadyError: PLUGIN_NOT_READY, or IN_USE: a paused daemon has not stopped.
        Superseded: Another layout is requested, or the agent stops.
    """
    change = _plan_and_check(attempt, inputs, inputs.plan)
    # Not again later: once the plugin is paused, only an outdated label may show its strategy.
    desired = strategies.gpu_layouts(inputs.gpus, inputs.desired)
    schedulability.require_served(attempt, desired, change.usage.pods)
    if resuming.await_driver(attempt, change.affected_pods, change.usage.pods, inputs.gpus):
        change = _plan_and_check(attempt, inputs, change.plan)
    return _require_unhindered(attempt, change)


def replan_if_outdated(
    attempt: attempts.Attempt, change: planning.PlannedChange, pods: pod_object.Pods
) -> planning.PlannedChange:
    """Plan again if another plan may spare pods that now use devices to be destroyed.

    Hooks may take long, and a pod may have got such a device while another is free. ``pods`` are
    the node's, as just listed.

    Raises:
        MigManagerError: As ``require_possible``.
    """
    usage = change.usage.with_pods(pods)
    if change.scope.is_outdated(change.usage, usage):
        return replan(attempt, change)
    return dataclasses.replace(change, usage=usage)


def replan(attempt: attempts.Attempt, change: planning.PlannedChange) -> planning.PlannedChange:
    """Plan for the use of devices now; keep the plan if kubelet does not answer.

    Raises:
        MigManagerError: As ``require_possible``, but for STRATEGY_MISMATCH.
    """
    try:
        latest = _plan_and_check(attempt, change.inputs, change.plan)
    except errors.KubeletError as error:
        # The drain has more time for kubelet.
        _log.warning("pod_resources_unavailable", error=error.message)
        usage = change.usage.with_pods(dra_driver.list_with_unbound(attempt))
        return dataclasses.replace(change, usage=usage)
    return _require_unhindered(attempt, latest)


def _require_unhindered(
    attempt: attempts.Attempt, change: planning.PlannedChange
) -> planning.PlannedChange:
    """Return the change, or fail if pods, processes or services of the node rule it out."""
    try:
        _require_idle(attempt, change, timing.Wait(clock=attempt.deps.clock))
    except errors.GpuInUseError:
        change = _avoid_processes(attempt, change)
        _require_idle(attempt, change, idle_wait(attempt))
    # Ask before pods are evicted: a silent init system could not stop services later.
    services_and_hooks.running_services(attempt, change.inputs.services, change.plan)
    change.scope.require_allowed(change.usage.describe_users(change.affected_pods))
    return change


def _require_idle(
    attempt: attempts.Attempt, change: planning.PlannedChange, wait: timing.Wait
) -> None:
    """Wait for processes that block the plan, unless the drain or a pause ends them."""

    def check() -> None:
        usage = dataclasses.replace(change.usage, processes=attempt.deps.processes())
        blocking = usage.blocking(
            change.plan, leaving=change.affected_pods, services=change.inputs.services
        )
        if blocking:
            raise errors.GpuInUseError("; ".join(blocking))

    wait.retry(check, may_pass=lambda error: isinstance(error, errors.GpuInUseError))


def _avoid_processes(
    attempt: attempts.Attempt, change: planning.PlannedChange
) -> planning.PlannedChange:
    """Plan again so that instances that processes use stay, unless that affects other pods."""
    used_ids = frozenset(gpu_processes.ids_in_use(change.inputs.gpus, attempt.deps.processes()))
    other = planning.plan_change(attempt, change.inputs, change.usage, used_ids=used_ids)
    before, after = ({pod.key for pod in each.affected_pods} for each in (change, other))
    return other if after <= before else change


def _plan_and_check(
    attempt: attempts.Attempt, inputs: planning.ChangeInputs, last: steps.Plan
) -> planning.PlannedChange:
    """Plan so that busy devices are destroyed last; refuse what the node rules out.

    ``last`` is the last plan, whose affected pods must be known.
    """
    attempt.deps.pod_watch.expect_change()
    change = _plan_for_usage(attempt, inputs, last)
    # Another plan may affect other pods, whose devices were not waited for.
    is_other = change.scope.affected != inputs.scope(last).affected
    if is_other and change.usage.undecided_users(change.scope.affected):
        change = _plan_for_usage(attempt, inputs, change.plan)
    pods = change.usage.pods
    if not attempt.settings.allows_foreign_managers:
        others = device_usage.foreign_managers(attempt.deps, pods)
        if others:
            raise errors.MigManagerError(
                f"another program manages MIG on this node: {', '.join(others)}",
                reason=reasons.Reason.FOREIGN_MANAGER,
            )
    pausing.require_none_stuck(attempt, pods)
    return change


def _plan_for_usage(
    attempt: attempts.Attempt, inputs: planning.ChangeInputs, last: steps.Plan
) -> planning.PlannedChange:
    usage = device_usage.wait_for_usage(
        attempt, inputs.gpus, inputs.scope(last).affected, extra_clients=inputs.extra_clients
    )
    return planning.plan_change(attempt, inputs, usage)


def idle_wait(attempt: attempts.Attempt) -> timing.Wait:
    """Return the wait for processes that use devices to be destroyed."""
    return dataclasses.replace(
        attempt.new_wait(0.0 if attempt.rights.is_passive else attempt.settings.in_use_timeout_s),
        on_wait=lambda error: _log.info("gpus_in_use", error=error.message),
    )
