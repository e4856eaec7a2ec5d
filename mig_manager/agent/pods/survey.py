"""Find the users of devices that a plan changes, before the node is touched."""

import dataclasses
from collections.abc import Callable, Collection, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent.pods import drain
from mig_manager.core import messages, model, ports, steps, timing
from mig_manager.core.node import client_table, clients, gpu_use, pod_object

_log = structlog.get_logger()

_KUBELET_STARTS_WITHIN_S = 20.0
"""How long a restarting kubelet may take to answer and to list its pods: it first waits some
seconds for the API server's list."""


def wait_for_usage(
    deps: ports.Dependencies,
    gpus: model.ObservedGpus,
    order: drain.Order,
    cancel: ports.Cancellation,
) -> gpu_use.Usage:
    """Return the usage of devices; wait until kubelet lists the devices of starting pods.

    Raises:
        ClusterError: The API refused or does not answer; POD_RESOURCES_UNAVAILABLE: kubelet does
            not answer or lists no device, and the order may affect pods that use others.
        HardwareError: The driver does not list the processes of pods whose devices no GPU has.
        Superseded: Another layout is requested, or the agent stops.
    """
    wait = timing.Wait(
        clock=deps.clock,
        timeout_s=_KUBELET_STARTS_WITHIN_S,
        sleep=cancel.wait,
        backoff=timing.Backoff(first_s=1.0),
    )
    listed_s = deps.clock.monotonic() + drain.LISTED_WITHIN_S
    attempts = wait.attempts()
    while True:
        is_last = next(attempts)
        usage = usage_now(deps.workloads.list, deps.allocations, gpus, deps.processes)
        undecided = order.undecided_pods(usage)
        is_over = is_last if usage.why_incomplete else deps.clock.monotonic() >= listed_s
        if is_over or not undecided:
            break
    if undecided and usage.why_incomplete:
        names = messages.listed([pod.key for pod in undecided])
        raise errors.ClusterError(
            f"{usage.why_incomplete}; no pod is evicted, because these may use other devices than "
            f"those to be removed: {names}",
            reason=errors.Reason.POD_RESOURCES_UNAVAILABLE,
        )
    return usage


def require_idle(
    deps: ports.Dependencies,
    plan: steps.Plan,
    order: drain.Order,
    usage: gpu_use.Usage,
    *,
    services: Collection[str],
    wait: timing.Wait,
) -> None:
    """Wait for processes that block a plan, except those that the drain or a pause ends.

    Raises:
        HardwareError: The driver does not list the processes.
        GpuInUseError: Some processes remain.
        Superseded: Another layout is requested, or the agent stops.
    """
    if deps.processes is None:
        return
    ask = deps.processes

    def check() -> None:
        blocking = dataclasses.replace(usage, processes=ask()).blocking(
            plan,
            leaving=order.affected_pods(usage),
            services=services,
            daemons=order.extra_clients,
        )
        if blocking:
            raise errors.GpuInUseError("; ".join(blocking))

    wait.retry(check, may_pass=lambda error: isinstance(error, errors.GpuInUseError))
    # The query has used the worker that was started ahead.
    deps.standby.expect_change()


def name_users(deps: ports.Dependencies, plan: steps.Plan, gpus: Sequence[model.Gpu]) -> str:
    """Name the pods that use, or may use, devices that a plan destroys, if none may be evicted.

    Raises:
        ClusterError: The API refused or does not answer.
        HardwareError: The driver does not list the processes of pods whose devices no GPU has.
    """
    usage = usage_now(deps.workloads.list, deps.allocations, gpus, deps.processes)
    affected = clients.affected_ids(plan, gpus)
    return usage.named(usage.users(affected, daemons=extra_clients(deps)))


def extra_clients(deps: ports.Dependencies) -> tuple[client_table.ExtraClient, ...]:
    """Return the owner's GPU clients; none if the list is invalid, so that a rollback can run."""
    try:
        return deps.extra_clients()
    except errors.ConfigError as error:
        _log.warning("extra_clients_not_read", error=error.message)
        return ()


def usage_now(
    list_pods: Callable[[], tuple[pod_object.Pod, ...]],
    allocations: ports.DeviceAllocations,
    gpus: Sequence[model.Gpu] | None = None,
    processes: Callable[[], gpu_use.Processes] | None = None,
) -> gpu_use.Usage:
    """List the node's pods and the devices that kubelet assigned to them.

    ``processes`` is called if pods have devices that none of ``gpus`` has.

    Raises:
        ClusterError: The API refused or does not answer. A silent kubelet is no error.
        HardwareError: From ``processes``.
    """
    assigned, no_answer = None, ""
    try:
        assigned = allocations.assigned()
    except errors.ClusterError as error:
        _log.info("pod_resources_unavailable", error=error.message)
        no_answer = error.message
    usage = gpu_use.Usage(
        pods=list_pods(),
        assigned=assigned,
        no_answer=no_answer,
        known_ids=None if gpus is None else gpu_use.device_ids(gpus),
        resource_names=gpu_use.resource_names(gpus or ()),
    )
    if usage.has_unknown_ids and processes is not None:
        return dataclasses.replace(usage, processes=processes())
    return usage
