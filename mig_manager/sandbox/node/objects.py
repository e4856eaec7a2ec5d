"""Kubernetes objects as plain JSON: read their fields, and make pods, DaemonSets and statuses."""

import collections
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from mig_manager.core.node import well_known
from mig_manager.sandbox.apiserver import store

JsonObject = dict[str, Any]

UNSCHEDULABLE_TAINT = "node.kubernetes.io/unschedulable"
STOP_SECONDS = "sandbox.mig-manager.io/stop-seconds"
"""Annotation of a pod: how long its containers need to stop, in seconds."""
RUN_SECONDS = "sandbox.mig-manager.io/run-seconds"
"""Annotation of a pod: how long its containers run until they succeed, in seconds."""
MONITORS = "sandbox.mig-manager.io/monitors-gpus"
"""Annotation of a pod: with ``true``, its process watches every GPU, as DCGM does."""


class DeployStyle(enum.Enum):
    """How the device plugin was deployed, which decides how it can be paused."""

    GPU_OPERATOR = "gpu-operator"
    """A DaemonSet that selects the label ``nvidia.com/gpu.deploy.device-plugin=true``."""
    PLAIN = "plain"
    """NVIDIA's static manifest: no selector, and only the toleration of ``nvidia.com/gpu``."""


PLUGIN_NAME = "nvidia-device-plugin-daemonset"
_PLUGIN_CONTAINERS = {
    DeployStyle.GPU_OPERATOR: "nvidia-device-plugin",
    DeployStyle.PLAIN: "nvidia-device-plugin-ctr",
}
"""Names by the GPU operator, and by the static manifest and the Helm chart."""


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
    """Return ``metadata.labels``; empty if missing."""
    return obj["metadata"].get("labels") or {}


def annotations(obj: Mapping[str, Any]) -> Mapping[str, str]:
    """Return ``metadata.annotations``; empty if missing."""
    return obj["metadata"].get("annotations") or {}


def version(obj: Mapping[str, Any]) -> int:
    """Return ``metadata.resourceVersion`` as a number.

    Kubernetes promises comparable versions since 1.35 and has always had them; the embedded API
    server counts.
    """
    return int(obj["metadata"].get("resourceVersion") or 0)


def is_terminating(obj: Mapping[str, Any]) -> bool:
    """Return whether deletion was requested."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def controller(obj: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the owner reference of the controlling owner; None for a bare object."""
    references = obj["metadata"].get("ownerReferences") or ()
    return next((ref for ref in references if ref.get("controller")), None)


# -- pods -------------------------------------------------------------------------------------


def node_name(pod: Mapping[str, Any]) -> str:
    """Return the node of a pod; empty before it is bound."""
    return str(pod["spec"].get("nodeName") or "")


def phase(pod: Mapping[str, Any]) -> str:
    """Return a pod's phase; a pod without status is Pending."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def is_finished(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod's containers have ended for good."""
    return phase(pod) in ("Succeeded", "Failed")


def true_conditions(obj: Mapping[str, Any]) -> dict[str, str]:
    """Return the messages of a pod's or node's conditions that hold, by type."""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return {c["type"]: c.get("message", "") for c in conditions if c["status"] == "True"}


def is_ready(obj: Mapping[str, Any]) -> bool:
    """Return whether the Ready condition of a pod or node holds."""
    return "Ready" in true_conditions(obj)


def is_plugin(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod runs NVIDIA's device plugin.

    Its labels alone do not distinguish it from GPU feature discovery.
    """
    return any(c["name"] in _PLUGIN_CONTAINERS.values() for c in pod["spec"]["containers"])


def restart_count(pod: Mapping[str, Any]) -> int | None:
    """Return how often a pod's containers were restarted; None: they never ran."""
    containers = (pod.get("status") or {}).get("containerStatuses") or ()
    return max((int(c["restartCount"]) for c in containers), default=None)


def gpu_counts(container: Mapping[str, Any]) -> dict[str, int]:
    """Return a container's ``nvidia.com/*`` limits; Kubernetes forbids other requests for them."""
    resources = container.get("resources") or {}
    limits = resources.get("limits") or resources.get("requests") or {}
    return {
        key: int(value)
        for key, value in limits.items()
        if key.startswith(well_known.RESOURCE_PREFIX) and int(value) > 0
    }


def claimed_resources(pod: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return the limits that a ResourceClaim provides: names of container and resource."""
    claim = (pod.get("status") or {}).get("extendedResourceClaimStatus") or {}
    return frozenset(
        (str(each["containerName"]), str(each["resourceName"]))
        for each in claim.get("requestMappings") or ()
    )


def gpu_requests(pod: Mapping[str, Any]) -> collections.Counter[str]:
    """Return the sum of the GPU limits of a pod's containers."""
    counters = map(collections.Counter, map(gpu_counts, pod["spec"]["containers"]))
    return sum(counters, start=collections.Counter[str]())


def tolerates(tolerations: Iterable[Mapping[str, Any]], taint: Mapping[str, Any]) -> bool:
    """Return whether a toleration matches a taint."""
    for each in tolerations:
        key, is_exists = each.get("key"), each.get("operator") == "Exists"
        is_same = key == taint["key"] and (each.get("value") or "") == (taint.get("value") or "")
        if each.get("effect") and each["effect"] != taint.get("effect"):
            continue
        if is_same or (is_exists and (not key or key == taint["key"])):
            return True
    return False


def gpu_pod(
    name: str, resource: str, *, labels: Mapping[str, str] | None = None, grace_s: int = 30
) -> JsonObject:
    """Return the manifest of a pod that requests one device of a resource."""
    container = {
        "name": "cuda",
        "image": "nvcr.io/nvidia/cuda",
        "resources": {"limits": {resource: "1"}, "requests": {resource: "1"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": dict(labels or {})},
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": grace_s,
            "schedulerName": "default-scheduler",
        },
    }


def running(pod: Mapping[str, Any], *, restarts: int) -> JsonObject:
    """Return the status of a pod whose containers run."""
    return _status(
        pod, phase="Running", state={"running": {"startedAt": store.timestamp()}}, n=restarts
    )


def succeeded(pod: Mapping[str, Any]) -> JsonObject:
    """Return the status of a pod whose containers have succeeded."""
    ended = {"exitCode": 0, "reason": "Completed", "finishedAt": store.timestamp()}
    return _status(pod, phase="Succeeded", state={"terminated": ended}, n=0)


def waiting(pod: Mapping[str, Any], *, reason: str, message: str, restarts: int) -> JsonObject:
    """Return the status of a pod whose containers wait for a restart."""
    # The pod of a container that has run stays in phase Running.
    phase = "Running" if restarts else "Pending"
    state = {"waiting": {"reason": reason, "message": message}}
    return _status(pod, phase=phase, state=state, n=restarts)


def _status(pod: Mapping[str, Any], *, phase: str, state: Mapping[str, Any], n: int) -> JsonObject:
    is_ready = "running" in state
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Initialized", "status": "True"},
        {"type": "ContainersReady", "status": str(is_ready)},
        {"type": "Ready", "status": str(is_ready), "lastTransitionTime": store.timestamp()},
    ]
    common = {"ready": is_ready, "started": is_ready, "restartCount": n, "state": state}
    containers = [{"name": each["name"], **common} for each in pod["spec"]["containers"]]
    return {
        "phase": phase,
        "startTime": (pod.get("status") or {}).get("startTime") or store.timestamp(),
        "conditions": conditions,
        "containerStatuses": containers,
    }


# -- nodes ------------------------------------------------------------------------------------


def matches(selector: Mapping[str, str] | None, node: Mapping[str, Any]) -> bool:
    """Return whether a node has every label of a ``nodeSelector``."""
    return (selector or {}).items() <= labels(node).items()


def taints(node: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return a node's taints; a cordon counts as its well-known taint.

    The node lifecycle controller adds that taint in a real cluster; it is not simulated here.
    """
    spec = node.get("spec") or {}
    listed = tuple(spec.get("taints") or ())
    if spec.get("unschedulable") and not any(t["key"] == UNSCHEDULABLE_TAINT for t in listed):
        return (*listed, {"key": UNSCHEDULABLE_TAINT, "effect": "NoSchedule"})
    return listed


def devices(node: Mapping[str, Any], field: str = "allocatable") -> dict[str, int]:
    """Return the number of devices in a node's status, by GPU resource.

    In the field ``capacity`` unhealthy ones count too.
    """
    counts = (node.get("status") or {}).get(field) or {}
    return {
        key: int(value)
        for key, value in counts.items()
        if key.startswith(well_known.RESOURCE_PREFIX)
    }


def node_status(capacity: Mapping[str, int], allocatable: Mapping[str, int]) -> JsonObject:
    """Return a ready node's status; ``allocatable`` counts only healthy devices."""
    base = {"cpu": "64", "memory": "512Gi", "pods": "110"}
    message = "kubelet is posting ready status"
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": message}
    return {
        "capacity": {**base, **{r: str(n) for r, n in capacity.items()}},
        "allocatable": {**base, **{r: str(n) for r, n in allocatable.items()}},
        "conditions": [ready],
        "nodeInfo": {"operatingSystem": "linux", "kubeletVersion": "v1.34.0"},
    }


def plugin_daemon_set(style: DeployStyle) -> JsonObject:
    """Return the DaemonSet of NVIDIA's device plugin."""
    is_gated = style is DeployStyle.GPU_OPERATOR
    labels = {"app": PLUGIN_NAME} if is_gated else {"name": "nvidia-device-plugin-ds"}
    volume = {"name": "device-plugins", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}
    container = {"name": _PLUGIN_CONTAINERS[style], "image": "nvcr.io/nvidia/k8s-device-plugin"}
    spec: JsonObject = {
        "containers": [container],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "system-node-critical",
        "volumes": [volume],
    }
    if is_gated:
        spec["nodeSelector"] = {well_known.PLUGIN_DEPLOY_LABEL: "true"}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {
            "name": PLUGIN_NAME,
            "namespace": "gpu-operator" if is_gated else "kube-system",
            "labels": labels,
        },
        "spec": {
            "selector": {"matchLabels": labels},
            "updateStrategy": {"type": "RollingUpdate"},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
