"""Find the users of devices that a plan changes, before the node is touched."""

import dataclasses
import functools
from collections.abc import Callable, Collection

import structlog

from mig_manager import errors
from mig_manager.agent import attempts
from mig_manager.agent.pods import device_listing, dra_driver
from mig_manager.core import messages, model, ports, steps, timing
from mig_manager.core.node import gpu_use
from mig_manager.core.node.daemons import client_table, mig_managers
from mig_manager.core.node.devices import device_ids
from mig_manager.core.objects import pod_object

_log = structlog.get_logger()

_ExtraClients = tuple[client_table.ExtraClient, ...]

_KUBELET_STARTS_WITHIN_S = 20.0
"""How long a restarting kubelet may take to answer and to list its pods: it first waits some
seconds for the API server's list."""


def wait_for_usage(
    attempt: attempts.Attempt,
    gpus: model.ObservedGpus,
    affected: Collection[str] | None,
    *,
    extra_clients: _ExtraClients,
) -> gpu_use.Usage:
    """Return the usage of devices; wait until kubelet lists the devices of starting pods.

    Once it is known that such a pod uses no ``affected`` device, the wait ends.

    Raises:
        ClusterError: The API refused or does not answer.
        KubeletError: Kubelet does not answer or lists no device, and undecided pods remain.
        HardwareError: The driver does not list the processes of pods whose devices no GPU has.
        Superseded: Another layout is requested, or the agent stops.
    """
    deps = attempt.deps
    wait = timing.Wait(
        clock=deps.clock,
        timeout_s=_KUBELET_STARTS_WITHIN_S,
        sleep=attempt.cancel.wait,
        backoff=timing.Backoff(first_s=1.0),
    )

    # A pod without a process may have a device whose UUID NVML does not report.
    have_uuids = all(device.uuid for gpu in gpus for device in gpu.devices)
    listing = device_listing.ListingWait(deps.clock)
    tries = wait.tries()
    while True:
        is_last = next(tries)
        usage = _list_usage(
            deps,
            functools.partial(dra_driver.list_with_unbound, attempt),
            gpus,
            lambda usage: usage.has_unknown_ids and have_uuids,
            extra_clients,
        )
        undecided = usage.undecided_users(affected)
        if is_last or not undecided:
            break
        if not (usage.why_incomplete or listing.is_any_new(undecided)):
            break
    if undecided and usage.why_incomplete:
        names = messages.list_names([pod.key for pod in undecided])
        raise errors.KubeletError(
            f"{usage.why_incomplete}; no pod is evicted, because these may use other devices than "
            f"those to be removed: {names}"
        )
    return usage


def name_users(attempt: attempts.Attempt, plan: steps.Plan, gpus: model.ObservedGpus) -> str:
    """Name the pods that use, or may use, devices that a plan destroys, if none may be evicted.

    Raises as ``wait_for_usage``.
    """
    affected = plan.affected_ids(gpus)
    clients_of_owner = read_extra_clients(attempt.deps)
    usage = wait_for_usage(attempt, gpus, affected, extra_clients=clients_of_owner)
    return usage.describe_users(usage.users(affected))


def require_unallocated(
    deps: ports.Dependencies, affected: Collection[str], gpus: model.ObservedGpus
) -> None:
    """Fail if a pod got one of the devices since the node was drained or found unused.

    The agent pauses no plugin that it does not know, such as a service of the host. If kubelet
    does not answer, its earlier answer counts.

    Raises:
        ClusterError: The API refused or does not answer.
        GpuInUseError: Names the pods.
    """
    try:
        assigned = deps.allocations.assigned_devices()
    except errors.KubeletError as error:
        _log.warning("pod_resources_unavailable", error=error.message)
        return
    if all(one.device_ids.isdisjoint(affected) for one in assigned):
        return
    extra = read_extra_clients(deps)
    usage = _list_usage(deps, deps.workloads.list, gpus, lambda _usage: False, extra)
    users = [pod.key for pod in usage.users(affected) if not usage.why_uncertain(pod)]
    if users:
        names = messages.list_names(users)
        raise errors.GpuInUseError(f"pods got devices to be removed meanwhile: {names}")


def read_extra_clients(deps: ports.Dependencies) -> _ExtraClients:
    """Return the owner's GPU clients; none if the list is invalid, so that a rollback can run."""
    try:
        return deps.extra_clients()
    except errors.ConfigError as error:
        _log.warning("extra_clients_not_read", error=error.message)
        return ()


def foreign_managers(
    deps: ports.Dependencies, pods: Collection[pod_object.Pod]
) -> tuple[str, ...]:
    """Return the other programs that manage MIG on this node, by their pods."""
    # Only these need the Node's annotations.
    has_mode = any(map(mig_managers.is_vgpu_plugin, pods))
    annotations = deps.node.latest().annotations if has_mode else {}
    return mig_managers.others(pods, deps.own_pod_uid, annotations)


def report_usage(
    deps: ports.Dependencies,
    gpus: model.ObservedGpus,
    *,
    has_processes: bool,
    extra_clients: _ExtraClients,
) -> gpu_use.Usage:
    """Return the usage to publish, of the pods as last watched; and of all processes on request.

    Raises:
        ClusterError: The API refused or does not answer.
        HardwareError: The driver does not list the processes.
    """
    return _list_usage(
        deps, deps.workloads.present, gpus, lambda _usage: has_processes, extra_clients
    )


def _list_usage(
    deps: ports.Dependencies,
    list_pods: Callable[[], pod_object.Pods],
    gpus: model.ObservedGpus,
    needs_processes: Callable[[gpu_use.Usage], bool],
    extra_clients: _ExtraClients,
) -> gpu_use.Usage:
    """List the node's pods and the devices that kubelet assigned to them."""
    assigned, no_answer = None, ""
    try:
        assigned = deps.allocations.assigned_devices()
    except errors.KubeletError as error:
        _log.info("pod_resources_unavailable", error=error.message)
        no_answer = error.message
    usage = gpu_use.Usage(
        pods=list_pods(),
        assigned=assigned,
        no_answer=no_answer,
        known_ids=device_ids.of_gpus(gpus),
        resource_names=gpu_use.resource_names(gpus),
        extra_clients=extra_clients,
    )
    if needs_processes(usage):
        return dataclasses.replace(usage, processes=deps.processes())
    return usage
