"""Make the pods, DaemonSets and statuses of a simulated node, as plain JSON."""

from collections.abc import Mapping
from typing import Any

from mig_manager.core.objects import well_known
from mig_manager.sandbox.apiserver import store
from mig_manager.sandbox.node import objects


def gpu_pod(
    name: str, resource: str, *, labels: Mapping[str, str] | None = None
) -> objects.JsonObject:
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
        "spec": {"containers": [container]},
    }


def running(pod: Mapping[str, Any], *, restarts: int) -> objects.JsonObject:
    """Return the status of a pod whose containers run."""
    return _status(
        pod, phase="Running", state={"running": {"startedAt": store.timestamp()}}, n=restarts
    )


def success(pod: Mapping[str, Any]) -> objects.JsonObject:
    """Return the status of a pod whose containers have succeeded."""
    termination = {"exitCode": 0, "reason": "Completed", "finishedAt": store.timestamp()}
    return _status(pod, phase="Succeeded", state={"terminated": termination}, n=0)


def waiting(
    pod: Mapping[str, Any], *, reason: str, message: str, restarts: int
) -> objects.JsonObject:
    """Return the status of a pod whose containers wait for a restart."""
    # The pod of a container that has run stays in phase Running.
    phase = "Running" if restarts else "Pending"
    state = {"waiting": {"reason": reason, "message": message}}
    return _status(pod, phase=phase, state=state, n=restarts)


def _status(
    pod: Mapping[str, Any], *, phase: str, state: Mapping[str, Any], n: int
) -> objects.JsonObject:
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


def node_status(capacity: Mapping[str, int], allocatable: Mapping[str, int]) -> objects.JsonObject:
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


def plugin_daemon_set(style: objects.DeployStyle) -> objects.JsonObject:
    """Return the DaemonSet of NVIDIA's device plugin."""
    is_gated = style is objects.DeployStyle.GPU_OPERATOR
    labels = {"app": objects.PLUGIN_NAME} if is_gated else {"name": "nvidia-device-plugin-ds"}
    volume = {"name": "device-plugins", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}
    container = {
        "name": objects.PLUGIN_CONTAINERS[style],
        "image": "nvcr.io/nvidia/k8s-device-plugin",
    }
    spec: objects.JsonObject = {
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
            "name": objects.PLUGIN_NAME,
            "namespace": "gpu-operator" if is_gated else "kube-system",
            "labels": labels,
        },
        "spec": {
            "selector": {"matchLabels": labels},
            "updateStrategy": {"type": "RollingUpdate"},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }
