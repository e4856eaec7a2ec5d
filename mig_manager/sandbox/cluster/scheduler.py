"""A tiny scheduler: the first node that is willing and has the devices gets the pod."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mig_manager.sandbox.cluster import manifests, objects, view


def refusal(
    pod: Mapping[str, Any], node: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]
) -> str | None:
    """Say why a node cannot take a pod; None: it can.

    Args:
        pod: The pod without a node.
        node: The node.
        pods: All pods of the cluster; those on the node use its devices.
    """
    tolerations = pod["spec"].get("tolerations") or ()
    for taint in objects.taints(node):
        is_hard = taint.get("effect") in ("NoSchedule", "NoExecute")
        if is_hard and not objects.tolerates(tolerations, taint):
            return f"untolerated taint {taint['key']}"
    if not objects.matches(pod["spec"].get("nodeSelector"), node):
        return "node selector does not match"
    free = free_devices(node, pods)
    for resource, count in objects.gpu_requests(pod).items():
        if count > free.get(resource, 0):
            return f"insufficient {resource}"
    return None


def free_devices(node: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return a node's allocatable devices less what its unfinished pods ask for."""
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    free = {key: int(value) for key, value in allocatable.items() if key.startswith("nvidia.com/")}
    for pod in pods:
        if objects.node_name(pod) == objects.name(node) and not objects.is_finished(pod):
            for resource, count in objects.gpu_requests(pod).items():
                free[resource] = free.get(resource, 0) - count
    return free


class Scheduler:
    """Binds pods to nodes, oldest first.

    Args:
        cluster: Where nodes and pods are.
    """

    def __init__(self, cluster: view.ClusterView) -> None:
        self._cluster = cluster

    def sync(self) -> None:
        """Bind every pod that fits somewhere; say in its status why another does not.

        Raises:
            ClusterError: The API refused or does not answer; what was done stays done.
        """
        waiting = [pod for pod in self._cluster.list(view.Kind.POD) if _is_ours(pod)]
        nodes = self._cluster.list(view.Kind.NODE)
        for pod in sorted(waiting, key=objects.version):
            self._place(pod, nodes)

    def _place(self, pod: objects.JsonObject, nodes: Sequence[objects.JsonObject]) -> None:
        # Read for every pod: the one before may just have taken the last device.
        pods = self._cluster.list(view.Kind.POD)
        reasons: dict[str, int] = {}
        for node in nodes:
            reason = refusal(pod, node, pods)
            if reason is None:
                self._cluster.bind(pod, objects.name(node))
                return
            reasons[reason] = reasons.get(reason, 0) + 1
        counted = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        status = manifests.unschedulable(f"0/{len(nodes)} nodes are available: {counted}.")
        if (pod.get("status") or {}).get("conditions") != status["conditions"]:
            self._cluster.patch_status(view.Kind.POD, pod, status)


def _is_ours(pod: Mapping[str, Any]) -> bool:
    return (
        not objects.node_name(pod)
        and not objects.is_terminating(pod)
        and not objects.is_finished(pod)
        and (pod["spec"].get("schedulerName") or "default-scheduler") == "default-scheduler"
    )
