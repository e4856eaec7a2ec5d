"""The controllers that a simulated node needs; a call syncs once."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mig_manager.core.objects import well_known
from mig_manager.sandbox.node import cluster_view, objects

Kind = cluster_view.WatchedKind

_STANDARD_TOLERATIONS: tuple[Mapping[str, str], ...] = (
    {"key": well_known.CORDON_TAINT, "operator": "Exists", "effect": "NoSchedule"},
    {"key": well_known.NOT_READY_TAINT, "operator": "Exists", "effect": "NoExecute"},
    {"key": well_known.UNREACHABLE_TAINT, "operator": "Exists", "effect": "NoExecute"},
)
"""Tolerations by the DaemonSet controller, for the taints that occur here."""


def sync_nodes(cluster: cluster_view.ClusterView) -> None:
    """Remove the not-ready taint from ready nodes.

    A real API server taints every new node as not ready; the node lifecycle controller removes
    the taint when kubelet reports Ready.
    """
    for node in cluster.list(Kind.NODE):
        taints = (node.get("spec") or {}).get("taints") or ()
        others = [taint for taint in taints if taint["key"] != well_known.NOT_READY_TAINT]
        if len(others) < len(taints) and objects.is_ready(node):
            # The version protects concurrent writes to the same list.
            version = {"resourceVersion": str(objects.version(node))}
            cluster.patch(Kind.NODE, node, {"metadata": version, "spec": {"taints": others}})


# -- scheduler --------------------------------------------------------------------------------


def sync_scheduler(cluster: cluster_view.ClusterView) -> None:
    """Bind every pod that fits a node, oldest first; publish why the others do not fit."""
    waiting = [
        pod
        for pod in cluster.list(Kind.POD)
        if not objects.node_name(pod)
        and not objects.is_terminating(pod)
        and not objects.is_finished(pod)
        and (pod["spec"].get("schedulerName") or "default-scheduler") == "default-scheduler"
    ]
    nodes = cluster.list(Kind.NODE)
    for pod in sorted(waiting, key=objects.version):
        # Read for every pod: the previous one may have got the last device.
        pods = cluster.list(Kind.POD)
        reasons = [refusal(pod, node, pods) for node in nodes]
        if None in reasons:
            cluster.bind(pod, objects.name(nodes[reasons.index(None)]))
            continue
        counted = ", ".join(f"{reasons.count(r)} {r}" for r in sorted({str(r) for r in reasons}))
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": f"0/{len(nodes)} nodes are available: {counted}.",
        }
        if (pod.get("status") or {}).get("conditions") != [condition]:
            pending = {"phase": "Pending", "conditions": [condition]}
            cluster.patch_status(Kind.POD, pod, pending)


def refusal(
    pod: Mapping[str, Any], node: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]
) -> str | None:
    """Return why a pod does not fit a node, or None; ``pods`` are all pods of the cluster."""
    tolerations = pod["spec"].get("tolerations") or ()
    for taint in objects.taints(node):
        is_hard = taint.get("effect") in ("NoSchedule", "NoExecute")
        if is_hard and not objects.tolerates(tolerations, taint):
            return f"untolerated taint {taint['key']}"
    if not objects.matches(pod["spec"].get("nodeSelector"), node):
        return "node selector does not match"
    free = objects.devices(node)
    for other in pods:
        if objects.node_name(other) == objects.name(node) and not objects.is_finished(other):
            for resource, count in objects.gpu_requests(other).items():
                free[resource] = free.get(resource, 0) - count
    for resource, count in objects.gpu_requests(pod).items():
        if count > free.get(resource, 0):
            return f"insufficient {resource}"
    return None


# -- DaemonSets -------------------------------------------------------------------------------


def sync_daemon_sets(cluster: cluster_view.ClusterView) -> None:
    """Create and delete the pods of every DaemonSet; a deleted DaemonSet loses its pods."""
    daemon_sets = cluster.list(Kind.DAEMON_SET)
    pods = cluster.list(Kind.POD)
    nodes = cluster.list(Kind.NODE)
    alive = {objects.uid(daemon_set) for daemon_set in daemon_sets}
    for pod in pods:
        owner = objects.controller(pod)
        if owner and owner["kind"] == "DaemonSet" and owner["uid"] not in alive:
            _delete(cluster, pod)
    for daemon_set in daemon_sets:
        daemons = pods_of_daemon_set(daemon_set, pods)
        for node in nodes:
            on_node = [pod for pod in daemons if objects.node_name(pod) == objects.name(node)]
            may_stay = takes(daemon_set, node, is_running=True)
            for pod in on_node:
                if not may_stay or objects.is_finished(pod):
                    _delete(cluster, pod)
            # A terminating pod still counts: two daemons never share a node.
            if not on_node and takes(daemon_set, node):
                cluster.create(Kind.POD, pod_for(daemon_set, node))
        after = status(daemon_set, nodes, daemons)
        before = daemon_set.get("status") or {}
        # Real API servers omit zeros.
        if any(before.get(key, 0) != count for key, count in after.items()):
            cluster.patch_status(Kind.DAEMON_SET, daemon_set, after)


def _delete(cluster: cluster_view.ClusterView, pod: objects.JsonObject) -> None:
    if not objects.is_terminating(pod):
        cluster.delete(Kind.POD, pod)


def takes(
    daemon_set: Mapping[str, Any], node: Mapping[str, Any], *, is_running: bool = False
) -> bool:
    """Return whether a node gets a pod of the DaemonSet, or keeps a running one."""
    effects = ("NoExecute",) if is_running else ("NoSchedule", "NoExecute")
    tolerations = _tolerations(daemon_set)
    selector = daemon_set["spec"]["template"]["spec"].get("nodeSelector")
    return objects.matches(selector, node) and all(
        objects.tolerates(tolerations, taint)
        for taint in objects.taints(node)
        if taint.get("effect") in effects
    )


def _tolerations(daemon_set: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    declared = daemon_set["spec"]["template"]["spec"].get("tolerations") or ()
    return [*declared, *_STANDARD_TOLERATIONS]


def pods_of_daemon_set(
    daemon_set: Mapping[str, Any], pods: Iterable[objects.JsonObject]
) -> tuple[objects.JsonObject, ...]:
    """Return the pods that a DaemonSet controls."""
    uid = objects.uid(daemon_set)
    return tuple(pod for pod in pods if (objects.controller(pod) or {}).get("uid") == uid)


def pod_for(daemon_set: objects.JsonObject, node: Mapping[str, Any]) -> objects.JsonObject:
    """Return the manifest of a DaemonSet's pod, bound to its node."""
    template = daemon_set["spec"]["template"]
    metadata = {
        "name": f"{objects.name(daemon_set)}-{uuid.uuid4().hex[:5]}",
        "namespace": objects.namespace(daemon_set),
        "labels": dict(objects.labels(template)),
        "annotations": dict(objects.annotations(template)),
        "ownerReferences": [
            {
                "apiVersion": daemon_set["apiVersion"],
                "kind": daemon_set["kind"],
                "name": objects.name(daemon_set),
                "uid": objects.uid(daemon_set),
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
    bound = {"nodeName": objects.name(node), "tolerations": _tolerations(daemon_set)}
    spec = template["spec"] | bound
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def status(
    daemon_set: Mapping[str, Any],
    nodes: Sequence[Mapping[str, Any]],
    pods: Sequence[Mapping[str, Any]],
) -> objects.JsonObject:
    """Return the status of a DaemonSet that owns ``pods``."""
    desired = {objects.name(node) for node in nodes if takes(daemon_set, node)}
    alive = [pod for pod in pods if not objects.is_terminating(pod)]
    scheduled = [pod for pod in alive if objects.node_name(pod) in desired]
    ready = sum(map(objects.is_ready, scheduled))
    return {
        "desiredNumberScheduled": len(desired),
        "currentNumberScheduled": len(scheduled),
        "updatedNumberScheduled": len(scheduled),
        "numberMisscheduled": len(alive) - len(scheduled),
        "numberReady": ready,
        "numberAvailable": ready,
        "numberUnavailable": len(desired) - ready,
        "observedGeneration": daemon_set["metadata"].get("generation") or 1,
    }
