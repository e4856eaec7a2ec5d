"""Kubernetes objects as the API gives them, plain JSON: questions about them, and their makers."""

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mig_manager.core.node import cluster
from mig_manager.sandbox.node import node_options

JsonObject = dict[str, Any]

UNSCHEDULABLE_TAINT = "node.kubernetes.io/unschedulable"
STOP_SECONDS = "sandbox.mig-manager.io/stop-seconds"
"""Annotation of a pod: how long its containers need to stop, in seconds."""
MONITORS = "sandbox.mig-manager.io/monitors-gpus"
"""Annotation of a pod: with ``true`` its process watches every GPU, as DCGM's does."""
PLUGIN_NAME = "nvidia-device-plugin-daemonset"
_PLUGIN_CONTAINERS = {
    node_options.DeployStyle.GPU_OPERATOR: "nvidia-device-plugin",
    node_options.DeployStyle.PLAIN: "nvidia-device-plugin-ctr",
}
"""What the plugin's container is called by the GPU operator, and by the static manifest and the
Helm chart."""


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
    """Return whether deletion has been asked for."""
    return bool(obj["metadata"].get("deletionTimestamp"))


def controller(obj: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the owner reference of the controlling owner; None for a bare object."""
    references = obj["metadata"].get("ownerReferences") or ()
    return next((ref for ref in references if ref.get("controller")), None)


def owner_reference(owner: Mapping[str, Any]) -> JsonObject:
    """Return the reference that makes an object the controlling owner of another."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": name(owner),
        "uid": uid(owner),
        "controller": True,
        "blockOwnerDeletion": True,
    }


def now_iso() -> str:
    """Return the wall-clock time as Kubernetes writes it."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# -- pods -------------------------------------------------------------------------------------


def node_name(pod: Mapping[str, Any]) -> str:
    """Return the node that a pod is bound to; empty while it is not."""
    return str(pod["spec"].get("nodeName") or "")


def phase(pod: Mapping[str, Any]) -> str:
    """Return a pod's phase; a pod without status is Pending."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def is_finished(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod's containers have ended for good."""
    return phase(pod) in ("Succeeded", "Failed")


def is_ready(obj: Mapping[str, Any]) -> bool:
    """Return whether the Ready condition of a pod or node holds."""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def is_plugin(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod runs NVIDIA's device plugin.

    Its labels alone do not distinguish it from GPU feature discovery.
    """
    return any(c["name"] in _PLUGIN_CONTAINERS.values() for c in pod["spec"]["containers"])


def restart_count(pod: Mapping[str, Any]) -> int | None:
    """Return how often a pod's containers have been started again; None: they never ran."""
    containers = (pod.get("status") or {}).get("containerStatuses") or ()
    return max((int(c["restartCount"]) for c in containers), default=None)


def is_sidecar(init_container: Mapping[str, Any]) -> bool:
    """Return whether an init container keeps running beside the app containers."""
    return init_container.get("restartPolicy") == "Always"


def gpu_counts(container: Mapping[str, Any]) -> dict[str, int]:
    """Return a container's ``nvidia.com/*`` limits; Kubernetes forbids other requests for them."""
    resources = container.get("resources") or {}
    limits = resources.get("limits") or resources.get("requests") or {}
    return {
        key: int(value)
        for key, value in limits.items()
        if key.startswith(cluster.RESOURCE_PREFIX) and int(value) > 0
    }


def gpu_requests(pod: Mapping[str, Any]) -> dict[str, int]:
    """Return what a pod needs at once: the app containers' sum or the hungriest init container."""
    total: dict[str, int] = {}
    peak: dict[str, int] = {}
    initial = pod["spec"].get("initContainers") or ()
    for container in [*pod["spec"]["containers"], *(c for c in initial if is_sidecar(c))]:
        for resource, count in gpu_counts(container).items():
            total[resource] = total.get(resource, 0) + count
    for container in initial:
        for resource, count in gpu_counts(container).items():
            peak[resource] = max(peak.get(resource, 0), count)
    return {r: max(total.get(r, 0), peak.get(r, 0)) for r in {*total, *peak}}


def tolerates(tolerations: Iterable[Mapping[str, Any]], taint: Mapping[str, Any]) -> bool:
    """Return whether one of a pod's tolerations matches a taint."""
    for each in tolerations:
        key, is_exists = each.get("key"), each.get("operator") == "Exists"
        is_same = key == taint["key"] and (each.get("value") or "") == (taint.get("value") or "")
        if each.get("effect") and each["effect"] != taint.get("effect"):
            continue
        if is_same or (is_exists and (not key or key == taint["key"])):
            return True
    return False


def gpu_pod(  # noqa: PLR0913 - each is a plain fact of the pod
    name: str,
    resource: str,
    *,
    namespace: str = "default",
    owner: Mapping[str, Any] | None = None,
    labels: Mapping[str, str] | None = None,
    grace_s: int = 30,
    stop_s: float | None = None,
) -> JsonObject:
    """Return the manifest of a pod that wants one device of a resource.

    Its container really needs ``stop_s`` to stop; None: as the node's options say.
    """
    metadata: JsonObject = {"name": name, "namespace": namespace, "labels": dict(labels or {})}
    if owner is not None:
        metadata["ownerReferences"] = [owner_reference(owner)]
    if stop_s is not None:
        metadata["annotations"] = {STOP_SECONDS: str(stop_s)}
    container = {
        "name": "cuda",
        "image": "nvcr.io/nvidia/cuda",
        "resources": {"limits": {resource: "1"}, "requests": {resource: "1"}},
    }
    spec = {
        "containers": [container],
        "terminationGracePeriodSeconds": grace_s,
        "schedulerName": "default-scheduler",
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def running(pod: Mapping[str, Any], *, restarts: int) -> JsonObject:
    """Return the status of a pod whose containers run."""
    return _status(pod, phase="Running", state={"running": {"startedAt": now_iso()}}, n=restarts)


def waiting(pod: Mapping[str, Any], *, reason: str, message: str, restarts: int) -> JsonObject:
    """Return the status of a pod whose containers wait to be started again."""
    # A container that has run before leaves its pod in phase Running while it waits.
    phase = "Running" if restarts else "Pending"
    state = {"waiting": {"reason": reason, "message": message}}
    return _status(pod, phase=phase, state=state, n=restarts)


def _status(pod: Mapping[str, Any], *, phase: str, state: Mapping[str, Any], n: int) -> JsonObject:
    is_ready = "running" in state
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Initialized", "status": "True"},
        {"type": "ContainersReady", "status": str(is_ready)},
        {"type": "Ready", "status": str(is_ready), "lastTransitionTime": now_iso()},
    ]
    common = {"ready": is_ready, "started": is_ready, "restartCount": n, "state": state}
    containers = [{"name": each["name"], **common} for each in pod["spec"]["containers"]]
    return {"phase": phase, "conditions": conditions, "containerStatuses": containers}


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


def allocatable_devices(node: Mapping[str, Any]) -> dict[str, int]:
    """Return how many healthy devices of each GPU resource a node's status shows."""
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    return {
        key: int(value)
        for key, value in allocatable.items()
        if key.startswith(cluster.RESOURCE_PREFIX)
    }


def node(opts: node_options.NodeOptions, labels: Mapping[str, str]) -> JsonObject:
    """Return the Node object as kubelet registers it."""
    metadata = {"name": opts.name, "labels": dict(labels)}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}}


def node_labels(
    gpus: Sequence[node_options.SeenGpu], opts: node_options.NodeOptions
) -> dict[str, str]:
    """Return the labels that kubelet and GPU feature discovery put on a node, and the extra ones.

    Feature discovery follows a change of layout up to a minute late; the labels that depend on
    the layout are left out.
    """
    labels = {"kubernetes.io/hostname": opts.name, "kubernetes.io/os": "linux"}
    if gpus:
        labels |= {
            "nvidia.com/gpu.present": "true",
            "nvidia.com/gpu.count": str(len(gpus)),
            "nvidia.com/gpu.product": gpus[0].name.replace(" ", "-"),
            "nvidia.com/gpu.memory": str(gpus[0].memory_mib),
            "nvidia.com/mig.capable": str(any(g.is_mig_capable for g in gpus)).lower(),
            "nvidia.com/mig.strategy": opts.strategy.value,
        }
        if opts.deploy_style is node_options.DeployStyle.GPU_OPERATOR:
            labels[cluster.PLUGIN_DEPLOY_LABEL] = "true"
    return {**labels, **opts.labels}


def node_status(capacity: Mapping[str, int], allocatable: Mapping[str, int]) -> JsonObject:
    """Return a ready node's status; ``allocatable`` counts only healthy devices."""
    base = {"cpu": "64", "memory": "512Gi", "pods": "110"}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    return {
        "capacity": {**base, **{r: str(n) for r, n in capacity.items()}},
        "allocatable": {**base, **{r: str(n) for r, n in allocatable.items()}},
        "conditions": [ready],
        "nodeInfo": {"operatingSystem": "linux", "kubeletVersion": "v1.34.0"},
    }


def plugin_daemon_set(style: node_options.DeployStyle) -> JsonObject:
    """Return NVIDIA's device-plugin DaemonSet as that way of deploying it has it."""
    is_gated = style is node_options.DeployStyle.GPU_OPERATOR
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
        spec["nodeSelector"] = {cluster.PLUGIN_DEPLOY_LABEL: "true"}
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
