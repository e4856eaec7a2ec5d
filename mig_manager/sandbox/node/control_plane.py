"""The part of the node lifecycle controller that a new node waits for.

A real API server taints every new node as not ready; the taint goes when kubelet says Ready.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mig_manager.sandbox.node import cluster_view, objects

NOT_READY_TAINT = "node.kubernetes.io/not-ready"


class NodeLifecycle:
    """Removes the taint of new nodes from those that are ready."""

    def __init__(self, cluster: cluster_view.ClusterView) -> None:
        self._cluster = cluster

    def sync(self) -> None:
        """Do so for every node, once."""
        for node in self._cluster.list(cluster_view.Kind.NODE):
            taints = (node.get("spec") or {}).get("taints") or ()
            others = [taint for taint in taints if taint["key"] != NOT_READY_TAINT]
            if len(others) < len(taints) and objects.is_ready(node):
                # The version guards what others write into the same list meanwhile.
                version = {"resourceVersion": str(objects.version(node))}
                change = {"metadata": version, "spec": {"taints": others}}
                self._cluster.patch(cluster_view.Kind.NODE, node, change)


def refusal(
    pod: Mapping[str, Any], node: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]
) -> str | None:
    """Return why a node cannot take a pod, or None; ``pods`` are those of the whole cluster."""
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
    """Binds pods to nodes, oldest first."""

    def __init__(self, cluster: cluster_view.ClusterView) -> None:
        self._cluster = cluster

    def sync(self) -> None:
        """Bind every pod that fits somewhere; say in its status why another does not."""
        waiting = [pod for pod in self._cluster.list(cluster_view.Kind.POD) if _is_ours(pod)]
        nodes = self._cluster.list(cluster_view.Kind.NODE)
        for pod in sorted(waiting, key=objects.version):
            self._place(pod, nodes)

    def _place(self, pod: objects.JsonObject, nodes: Sequence[objects.JsonObject]) -> None:
        # Read for every pod: the one before may just have taken the last device.
        pods = self._cluster.list(cluster_view.Kind.POD)
        reasons: dict[str, int] = {}
        for node in nodes:
            reason = refusal(pod, node, pods)
            if reason is None:
                self._cluster.bind(pod, objects.name(node))
                return
            reasons[reason] = reasons.get(reason, 0) + 1
        counted = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        status = objects.unschedulable(f"0/{len(nodes)} nodes are available: {counted}.")
        if (pod.get("status") or {}).get("conditions") != status["conditions"]:
            self._cluster.patch_status(cluster_view.Kind.POD, pod, status)


def _is_ours(pod: Mapping[str, Any]) -> bool:
    return (
        not objects.node_name(pod)
        and not objects.is_terminating(pod)
        and not objects.is_finished(pod)
        and (pod["spec"].get("schedulerName") or "default-scheduler") == "default-scheduler"
    )


_STANDARD_TOLERATIONS: tuple[Mapping[str, str], ...] = (
    {"key": objects.UNSCHEDULABLE_TAINT, "operator": "Exists", "effect": "NoSchedule"},
    {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"},
    {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"},
)
"""What the controller adds to every daemon, as far as such taints occur here."""


def should_start(daemon_set: Mapping[str, Any], node: Mapping[str, Any]) -> bool:
    """Return whether a node without a pod of the DaemonSet shall get one."""
    return _selects(daemon_set, node) and _tolerates(
        daemon_set, node, effects=("NoSchedule", "NoExecute")
    )


def should_continue(daemon_set: Mapping[str, Any], node: Mapping[str, Any]) -> bool:
    """Return whether a running pod of the DaemonSet may stay on a node."""
    return _selects(daemon_set, node) and _tolerates(daemon_set, node, effects=("NoExecute",))


def owned(
    daemon_set: Mapping[str, Any], pods: Iterable[objects.JsonObject]
) -> tuple[objects.JsonObject, ...]:
    """Return the pods that a DaemonSet controls."""
    uid = objects.uid(daemon_set)
    return tuple(pod for pod in pods if (objects.controller(pod) or {}).get("uid") == uid)


def pod_for(daemon_set: objects.JsonObject, node: Mapping[str, Any]) -> objects.JsonObject:
    """Return the manifest of a DaemonSet's pod, bound to its node."""
    template = daemon_set["spec"]["template"]
    spec = {
        **template["spec"],
        "nodeName": objects.name(node),
        "tolerations": _tolerations(daemon_set),
    }
    metadata = {
        "name": f"{objects.name(daemon_set)}-{uuid.uuid4().hex[:5]}",
        "namespace": objects.namespace(daemon_set),
        "labels": dict(objects.labels(template)),
        "annotations": dict(objects.annotations(template)),
        "ownerReferences": [objects.owner_reference(daemon_set)],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def status(
    daemon_set: Mapping[str, Any],
    nodes: Sequence[Mapping[str, Any]],
    pods: Sequence[Mapping[str, Any]],
) -> objects.JsonObject:
    """Return the status of a DaemonSet that owns ``pods``."""
    desired = {objects.name(node) for node in nodes if should_start(daemon_set, node)}
    alive = [pod for pod in pods if not objects.is_terminating(pod)]
    right = [pod for pod in alive if objects.node_name(pod) in desired]
    ready = sum(objects.is_ready(pod) for pod in right)
    return {
        "desiredNumberScheduled": len(desired),
        "currentNumberScheduled": len(right),
        "updatedNumberScheduled": len(right),
        "numberMisscheduled": len(alive) - len(right),
        "numberReady": ready,
        "numberAvailable": ready,
        "numberUnavailable": len(desired) - ready,
        "observedGeneration": daemon_set["metadata"].get("generation") or 1,
    }


class DaemonSetController:
    """Keeps the pods of every DaemonSet, and deletes those whose DaemonSet has gone."""

    def __init__(self, cluster: cluster_view.ClusterView) -> None:
        self._cluster = cluster

    def sync(self) -> None:
        """Bring the pods of all DaemonSets in line, once."""
        daemon_sets = self._cluster.list(cluster_view.Kind.DAEMON_SET)
        pods = self._cluster.list(cluster_view.Kind.POD)
        nodes = self._cluster.list(cluster_view.Kind.NODE)
        self._collect_orphans(daemon_sets, pods)
        for daemon_set in daemon_sets:
            mine = owned(daemon_set, pods)
            by_node: dict[str, list[objects.JsonObject]] = {}
            for pod in mine:
                by_node.setdefault(objects.node_name(pod), []).append(pod)
            for node in nodes:
                self._sync_node(daemon_set, node, by_node.get(objects.name(node), []))
            self._publish(daemon_set, nodes, mine)

    def _collect_orphans(
        self, daemon_sets: Iterable[objects.JsonObject], pods: Iterable[objects.JsonObject]
    ) -> None:
        alive = {objects.uid(daemon_set) for daemon_set in daemon_sets}
        for pod in pods:
            owner = objects.controller(pod)
            if owner and owner["kind"] == "DaemonSet" and owner["uid"] not in alive:
                self._delete(pod)

    def _sync_node(
        self,
        daemon_set: objects.JsonObject,
        node: objects.JsonObject,
        on_node: Sequence[objects.JsonObject],
    ) -> None:
        may_stay = should_continue(daemon_set, node)
        for pod in on_node:
            if not may_stay or objects.is_finished(pod):
                self._delete(pod)
        # A terminating pod still counts: two daemons never share a node.
        if not on_node and should_start(daemon_set, node):
            self._cluster.create(cluster_view.Kind.POD, pod_for(daemon_set, node))

    def _delete(self, pod: objects.JsonObject) -> None:
        if not objects.is_terminating(pod):
            self._cluster.delete(cluster_view.Kind.POD, pod)

    def _publish(
        self,
        daemon_set: objects.JsonObject,
        nodes: Sequence[objects.JsonObject],
        pods: Sequence[objects.JsonObject],
    ) -> None:
        new = status(daemon_set, nodes, pods)
        have = daemon_set.get("status") or {}
        if any(have.get(key) != value for key, value in new.items()):
            self._cluster.patch_status(cluster_view.Kind.DAEMON_SET, daemon_set, new)


def _selects(daemon_set: Mapping[str, Any], node: Mapping[str, Any]) -> bool:
    return objects.matches(daemon_set["spec"]["template"]["spec"].get("nodeSelector"), node)


def _tolerations(daemon_set: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    own = daemon_set["spec"]["template"]["spec"].get("tolerations") or ()
    return [*own, *_STANDARD_TOLERATIONS]


def _tolerates(
    daemon_set: Mapping[str, Any], node: Mapping[str, Any], *, effects: Sequence[str]
) -> bool:
    tolerations = _tolerations(daemon_set)
    return all(
        objects.tolerates(tolerations, taint)
        for taint in objects.taints(node)
        if taint.get("effect") in effects
    )
