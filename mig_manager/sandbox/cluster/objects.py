"""Read Kubernetes objects as the API gives them: plain JSON, questions without side effects."""

from collections.abc import Iterable, Mapping
from typing import Any

from mig_manager.core.node import cluster

JsonObject = dict[str, Any]


def name(obj: Mapping[str, Any]) -> str:
    """Return ``metadata.name``."""
    return str(obj["metadata"]["name"])


def namespace(obj: Mapping[str, Any]) -> str:
    """Return ``metadata.namespace``; empty for cluster-scoped objects."""
    return str(obj["metadata"].get("namespace") or "")


def uid(obj: Mapping[str, Any]) -> str:
    """Return ``metadata.uid``."""
    return str(obj["metadata"]["uid"])


def labels(obj: Mapping[str, Any]) -> Mapping[str, str]:
    """Return ``metadata.labels``, empty when absent."""
    return obj["metadata"].get("labels") or {}


def annotations(obj: Mapping[str, Any]) -> Mapping[str, str]:
    """Return ``metadata.annotations``, empty when absent."""
    return obj["metadata"].get("annotations") or {}


def version(obj: Mapping[str, Any]) -> int:
    """Return ``metadata.resourceVersion`` as a number.

    Kubernetes promises comparable versions since 1.35 and has had them since ever; the embedded
    API server counts.
    """
    return int(obj["metadata"].get("resourceVersion") or 0)


def is_terminating(obj: Mapping[str, Any]) -> bool:
    """Tell whether deletion has been asked for."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def controller(obj: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the owner reference of the controlling owner; None for a bare object."""
    references = obj["metadata"].get("ownerReferences") or ()
    return next((ref for ref in references if ref.get("controller")), None)


def node_name(pod: Mapping[str, Any]) -> str:
    """Return the node that a pod is bound to; empty while it is not."""
    return str(pod["spec"].get("nodeName") or "")


def phase(pod: Mapping[str, Any]) -> str:
    """Return a pod's phase; a pod without status is Pending."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def is_finished(pod: Mapping[str, Any]) -> bool:
    """Tell whether a pod's containers have ended for good."""
    return phase(pod) in ("Succeeded", "Failed")


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Tell whether a pod's Ready condition holds."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def restart_count(pod: Mapping[str, Any]) -> int | None:
    """Return how often a pod's containers have been started again; None: they never ran."""
    containers = (pod.get("status") or {}).get("containerStatuses") or ()
    return max((int(c["restartCount"]) for c in containers), default=None)


def container_names(pod: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a pod's app containers."""
    return tuple(str(c["name"]) for c in pod["spec"]["containers"])


def gpu_counts(container: Mapping[str, Any]) -> dict[str, int]:
    """Return a container's ``nvidia.com/*`` limits; Kubernetes forbids other requests for them."""
    resources = container.get("resources") or {}
    limits = resources.get("limits") or resources.get("requests") or {}
    return {
        key: int(value)
        for key, value in limits.items()
        if key.startswith(cluster.RESOURCE_PREFIX) and int(value) > 0
    }


def is_sidecar(init_container: Mapping[str, Any]) -> bool:
    """Tell whether an init container keeps running beside the app containers."""
    return init_container.get("restartPolicy") == "Always"


def gpu_requests(pod: Mapping[str, Any]) -> dict[str, int]:
    """Return what a pod needs at once: the app containers' sum or the hungriest init container."""
    total: dict[str, int] = {}
    peak: dict[str, int] = {}
    initial = pod["spec"].get("initContainers") or ()
    lasting = [*pod["spec"]["containers"], *(c for c in initial if is_sidecar(c))]
    for container in lasting:
        for resource, count in gpu_counts(container).items():
            total[resource] = total.get(resource, 0) + count
    for container in initial:
        for resource, count in gpu_counts(container).items():
            peak[resource] = max(peak.get(resource, 0), count)
    return {r: max(total.get(r, 0), peak.get(r, 0)) for r in {*total, *peak}}


def matches(selector: Mapping[str, str] | None, node: Mapping[str, Any]) -> bool:
    """Tell whether a node has every label of a ``nodeSelector``."""
    have = labels(node)
    return all(have.get(key) == value for key, value in (selector or {}).items())


def taints(node: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return a node's taints; a cordon counts as its well-known taint.

    The node lifecycle controller adds that taint in a real cluster; nobody plays it here.
    """
    spec = node.get("spec") or {}
    listed = tuple(spec.get("taints") or ())
    if spec.get("unschedulable") and not any(t["key"] == UNSCHEDULABLE_TAINT for t in listed):
        return (*listed, {"key": UNSCHEDULABLE_TAINT, "effect": "NoSchedule"})
    return listed


UNSCHEDULABLE_TAINT = "node.kubernetes.io/unschedulable"


def tolerates(tolerations: Iterable[Mapping[str, Any]], taint: Mapping[str, Any]) -> bool:
    """Tell whether one of a pod's tolerations matches a taint."""
    return any(_matches_taint(toleration, taint) for toleration in tolerations)


def _matches_taint(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    is_exists = toleration.get("operator") == "Exists"
    if not toleration.get("key"):
        return is_exists
    if toleration["key"] != taint["key"]:
        return False
    return is_exists or (toleration.get("value") or "") == (taint.get("value") or "")
