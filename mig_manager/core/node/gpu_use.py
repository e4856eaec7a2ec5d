"""Find which GPU instances of a node are in use, from its pods, kubelet and GPU processes.

What may be in use counts as in use: kubelet does not show the devices of a pod that starts, or of
a running init container, and such a pod may have any.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from mig_manager.core import model, steps
from mig_manager.core.node import claims, clients, cluster
from mig_manager.core.planner import placement

Processes = Mapping[str, Sequence[steps.GpuProcess]]
"""The processes that use GPUs, by UUID; a GPU that does not answer is missing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """What is in use on the GPUs of a node."""

    in_use: Mapping[str, frozenset[model.Placement]]
    """Placements of GPU instances by UUID of the GPU, as in ``records.capacity``; a GPU whose use
    is not known is missing."""
    is_stable: bool
    """False: the use may end, or become known, without an event of a pod."""


def find(
    gpus: Iterable[model.Gpu],
    pods: Sequence[cluster.Pod],
    assigned: Sequence[cluster.PodDevices] | None,
    processes: Processes | None = None,
    *,
    daemons: Sequence[clients.ExtraClient] = (),
) -> GpuUse | None:
    """Find what is in use; None if that is not known.

    Args:
        gpus: The node's GPUs.
        pods: All pods of the node.
        assigned: Kubelet's allocations; None if kubelet does not answer: then only a node without
            a pod that may use a GPU is known.
        processes: None: not looked for.
        daemons: GPU clients that the agent pauses for a change; they do not count.
    """
    # An id that no device has: only a pod that may have any device uses it.
    any_device = clients.affected_pods(pods, assigned, {""}, daemons=daemons)
    if assigned is None and any_device:
        return None
    finished = {pod.key for pod in pods if pod.is_finished}
    listed = [one for one in assigned or () if one.key not in finished]
    known = {pod.key for pod in pods}
    # Kubelet has not ended them yet, or the API does not show them yet.
    unknown = frozenset[str]().union(*(one.device_ids for one in listed if one.key not in known))
    paused = paused_homes(pods, daemons)
    in_use: dict[str, frozenset[model.Placement]] = {}
    is_stable = not any_device
    for gpu in gpus:
        if processes is not None and gpu.uuid not in processes:
            is_stable = False
            continue
        users = [each for each in (processes or {}).get(gpu.uuid, ()) if each.home not in paused]
        used = set()
        for place, ids, is_used in _instances(gpu, users):
            if clients.affected_pods(pods, listed, ids, daemons=daemons):
                used.add(place)
            elif is_used or not unknown.isdisjoint(ids):
                used.add(place)
                is_stable = False
        in_use[gpu.uuid] = frozenset(used)
    return GpuUse(in_use=in_use, is_stable=is_stable)


def paused_homes(
    pods: Iterable[cluster.Pod], daemons: Sequence[clients.ExtraClient]
) -> frozenset[str]:
    """Return the homes, as ``steps.GpuProcess`` has them, of pods that may be GPU clients."""

    def is_client(pod: cluster.Pod) -> bool:
        has_deploy_label = any(
            key.startswith(cluster.DEPLOY_LABEL_PREFIX) for key in pod.node_selector
        )
        return (
            clients.is_device_plugin(pod)
            or claims.is_driver(pod)
            or bool(clients.members((pod,), daemons))
            or (pod.owner_kind == "DaemonSet" and has_deploy_label)
        )

    return frozenset(f"pod {pod.uid}" for pod in pods if is_client(pod))


def relevant(pods: Iterable[cluster.Pod]) -> frozenset[tuple[object, ...]]:
    """Return what of the pods' states the use depends on, to compare it with a later one."""
    return frozenset(
        (pod.uid, pod.is_finished, pod.may_run_gpu_init)
        for pod in pods
        if pod.gpu_resources or pod.may_claim
    )


def _instances(
    gpu: model.Gpu, users: Sequence[steps.GpuProcess]
) -> Iterable[tuple[model.Placement, Collection[str], bool]]:
    """Yield the placement of each instance, its device ids, and whether a process uses it.

    Without MIG the GPU is one span, which is no instance.
    """
    if gpu.current_mode is model.MigMode.ENABLED:
        by_process = {one for user in users for one in user.gpu_instances}
        for gi in gpu.gpu_instances:
            # With ``mig.strategy=none`` pods have GPUs whole, whatever their instances are.
            ids = {gpu.uuid, *(ci.uuid for ci in gi.compute_instances if ci.uuid)}
            yield gi.placement, ids, gi.instance_id in by_process
        return
    slices = placement.Capacity(gpu.profiles or ()).memory_slices
    is_used = any(not steps.is_releasing_daemon(user) for user in users)
    yield model.Placement(0, max(1, slices)), {gpu.uuid}, is_used
