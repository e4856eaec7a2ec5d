"""Find the GPU instances in use, which the agent publishes for the partitioner."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from mig_manager.core import gpu_processes, model
from mig_manager.core.node import gpu_use
from mig_manager.core.objects import pod_object
from mig_manager.core.planner import placement


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InstanceUse:
    """The GPU instances of a node that are in use."""

    in_use: Mapping[str, frozenset[model.Placement]]
    """Placements of GPU instances by UUID of the GPU, as in ``records.capacity``; without GPUs
    whose use is unknown."""
    is_stable: bool  # False: the use may end, or become known, without a pod event


def find(gpus: Iterable[model.Gpu], usage: gpu_use.Usage) -> InstanceUse | None:
    """Find the instances in use; None if that depends on kubelet, whose answer is incomplete.

    Args:
        gpus: The node's GPUs.
        usage: Of these GPUs.
    """
    # No device has this id, so only pods that may have any device match.
    any_device = usage.users({""})
    if usage.why_incomplete and any_device:
        return None
    paused = usage.client_owners
    in_use: dict[str, frozenset[model.Placement]] = {}
    is_stable = not any_device
    for gpu in gpus:
        if usage.processes is not None and gpu.uuid not in usage.processes:
            is_stable = False
            continue
        listed = (usage.processes or {}).get(gpu.uuid, ())
        running = [each for each in listed if each.owner not in paused]
        used = set()
        for place, ids, has_process in _instances(gpu, running):
            users = usage.users(ids)
            if users or has_process:
                used.add(place)
                # Kubelet has not ended an unlisted pod yet, or the API does not show it yet.
                is_stable &= any(not pod.is_unlisted for pod in users)
        in_use[gpu.uuid] = frozenset(used)
    return InstanceUse(in_use=in_use, is_stable=is_stable)


def relevant(pod: pod_object.Pod | None) -> tuple[object, ...]:
    """Return the part of a pod's state that decides the use, to detect a change."""
    if pod is None or not (pod.gpu_resources or pod.may_claim):
        return ()
    return pod.uid, pod.is_finished, pod.has_gpu_init, pod.has_claim_init


def _instances(
    gpu: model.Gpu, users: Sequence[gpu_processes.GpuProcess]
) -> Iterable[tuple[model.Placement, Collection[str], bool]]:
    """Yield the placement of each instance, its device ids, and whether a process uses it.

    Without MIG, the GPU is one span.
    """
    if gpu.current_mode is model.MigMode.ENABLED:
        by_process = {one for user in users for one in user.gpu_instances}
        for gi in gpu.gpu_instances:
            # With ``mig.strategy=none`` pods get whole GPUs, regardless of instances.
            ids = {gpu.uuid, *(ci.uuid for ci in gi.compute_instances if ci.uuid)}
            yield gi.placement, ids, gi.instance_id in by_process
        return
    slices = placement.Capacity(gpu.profiles or ()).memory_slices
    is_used = any(not gpu_processes.is_releasing_daemon(user) for user in users)
    yield model.Placement(0, max(1, slices)), {gpu.uuid}, is_used
