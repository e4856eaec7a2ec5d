"""Read Kubernetes objects as the API gives them: plain JSON, questions without side effects."""

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mig_manager.core.node import cluster
from mig_manager.sandbox.node import node_options

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
    """Return whether deletion has been asked for."""
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
    """Return whether a pod's containers have ended for good."""
    return phase(pod) in ("Succeeded", "Failed")


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod's Ready condition holds."""
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
    """Return whether an init container keeps running beside the app containers."""
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
    """Return whether a node has every label of a ``nodeSelector``."""
    have = labels(node)
    return all(have.get(key) == value for key, value in (selector or {}).items())


def taints(node: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return a node's taints; a cordon counts as its well-known taint.

    The node lifecycle controller adds that taint in a real cluster; it is not simulated here.
    """
    spec = node.get("spec") or {}
    listed = tuple(spec.get("taints") or ())
    if spec.get("unschedulable") and not any(t["key"] == UNSCHEDULABLE_TAINT for t in listed):
        return (*listed, {"key": UNSCHEDULABLE_TAINT, "effect": "NoSchedule"})
    return listed


UNSCHEDULABLE_TAINT = "node.kubernetes.io/unschedulable"


def tolerates(tolerations: Iterable[Mapping[str, Any]], taint: Mapping[str, Any]) -> bool:
    """Return whether one of a pod's tolerations matches a taint."""
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


STOP_SECONDS = "sandbox.mig-manager.io/stop-seconds"
"""Annotation of a pod: how long its containers need to stop, in seconds."""
MONITORS = "sandbox.mig-manager.io/monitors-gpus"
"""Annotation of a pod: with ``true`` its process watches every GPU, as DCGM's does."""
PLUGIN_NAME = "nvidia-device-plugin-daemonset"
_PLUGIN_CONTAINERS = {
    node_options.DeployStyle.GPU_OPERATOR: "nvidia-device-plugin",
    node_options.DeployStyle.PLAIN: "nvidia-device-plugin-ctr",
}
PLUGIN_CONTAINERS = frozenset(_PLUGIN_CONTAINERS.values())
"""What the plugin's container is called by the GPU operator, and by the static manifest and the
Helm chart; labels alone do not distinguish it from GPU feature discovery."""


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
    """Return the manifest of a pod that wants one device.

    Args:
        name: Name of the pod.
        resource: The extended resource, such as ``nvidia.com/mig-1g.5gb``.
        namespace: Namespace of the pod.
        owner: The controlling owner as an object; None for a bare pod.
        labels: Labels of the pod.
        grace_s: ``terminationGracePeriodSeconds``.
        stop_s: How long its container really needs to stop; None: as the node's options say.
    """
    metadata: JsonObject = {
        "name": name,
        "namespace": namespace,
        "labels": dict(labels or {}),
    }
    if owner is not None:
        metadata["ownerReferences"] = [owner_reference(owner)]
    if stop_s is not None:
        metadata["annotations"] = {STOP_SECONDS: str(stop_s)}
    container = {
        "name": "cuda",
        "image": "nvcr.io/nvidia/cuda",
        "resources": {"limits": {resource: "1"}, "requests": {resource: "1"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": grace_s,
            "schedulerName": "default-scheduler",
        },
    }


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


def plugin_daemon_set(style: node_options.DeployStyle) -> JsonObject:
    """Return NVIDIA's device-plugin DaemonSet as that way of deploying it has it."""
    is_gated = style is node_options.DeployStyle.GPU_OPERATOR
    namespace = "gpu-operator" if is_gated else "kube-system"
    labels = {"app": PLUGIN_NAME} if is_gated else {"name": "nvidia-device-plugin-ds"}
    spec: JsonObject = {
        "containers": [
            {"name": _PLUGIN_CONTAINERS[style], "image": "nvcr.io/nvidia/k8s-device-plugin"}
        ],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "system-node-critical",
        "volumes": [
            {"name": "device-plugins", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}
        ],
    }
    if is_gated:
        spec["nodeSelector"] = {cluster.PLUGIN_DEPLOY_LABEL: "true"}
    return _daemon_set(
        name=PLUGIN_NAME, namespace=namespace, labels=labels, annotations={}, spec=spec
    )


def monitor_daemon_set(
    name: str = "nvidia-dcgm-exporter", *, component: str = "dcgm-exporter"
) -> JsonObject:
    """Return a DaemonSet of the GPU operator whose pods watch every GPU.

    Args:
        name: Of the DaemonSet; also the value of its pods' label ``app``.
        component: What follows ``nvidia.com/gpu.deploy.`` in the label that lets it in.
    """
    labels = {"app": name}
    spec = {
        "containers": [{"name": name, "image": f"nvcr.io/nvidia/{name}"}],
        "nodeSelector": {f"{cluster.DEPLOY_LABEL_PREFIX}{component}": "true"},
    }
    return _daemon_set(
        name=name,
        namespace="gpu-operator",
        labels=labels,
        annotations={MONITORS: "true"},
        spec=spec,
    )


def _daemon_set(
    *,
    name: str,
    namespace: str,
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    spec: Mapping[str, Any],
) -> JsonObject:
    metadata = {"labels": dict(labels), "annotations": dict(annotations)}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": namespace, "labels": dict(labels)},
        "spec": {
            "selector": {"matchLabels": dict(labels)},
            "updateStrategy": {"type": "RollingUpdate"},
            "template": {"metadata": metadata, "spec": dict(spec)},
        },
    }


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


def node(opts: node_options.NodeOptions, labels: Mapping[str, str]) -> JsonObject:
    """Return the Node object as kubelet registers it."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": opts.name, "labels": dict(labels)},
        "spec": {},
    }


def node_status(capacity: Mapping[str, int], allocatable: Mapping[str, int]) -> JsonObject:
    """Return a ready node's status; ``allocatable`` counts only healthy devices."""
    base = {"cpu": "64", "memory": "512Gi", "pods": "110"}
    return {
        "capacity": {**base, **{r: str(n) for r, n in capacity.items()}},
        "allocatable": {**base, **{r: str(n) for r, n in allocatable.items()}},
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
        ],
        "nodeInfo": {"operatingSystem": "linux", "kubeletVersion": "v1.34.0"},
    }


def admission_failure(message: str) -> JsonObject:
    """Return the status of a pod that kubelet refused; it is final."""
    return {
        "phase": "Failed",
        "reason": "UnexpectedAdmissionError",
        "message": f"Pod was rejected: {message}",
        "startTime": now_iso(),
    }


def running(pod: Mapping[str, Any], *, restarts: int) -> JsonObject:
    """Return the status of a pod whose containers run."""
    return _status(pod, phase="Running", state={"running": {"startedAt": now_iso()}}, n=restarts)


def waiting(pod: Mapping[str, Any], *, reason: str, message: str, restarts: int) -> JsonObject:
    """Return the status of a pod whose containers wait to be started again."""
    # A container that has run before leaves its pod in phase Running while it waits.
    phase = "Running" if restarts else "Pending"
    state = {"waiting": {"reason": reason, "message": message}}
    return _status(pod, phase=phase, state=state, n=restarts)


def unschedulable(message: str) -> JsonObject:
    """Return the status of a pod for which the scheduler found no node."""
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }
    return {"phase": "Pending", "conditions": [condition]}


def _status(pod: Mapping[str, Any], *, phase: str, state: Mapping[str, Any], n: int) -> JsonObject:
    is_ready = "running" in state
    truth = str(is_ready)
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Initialized", "status": "True"},
        {"type": "ContainersReady", "status": truth},
        {"type": "Ready", "status": truth, "lastTransitionTime": now_iso()},
    ]
    containers = [
        {"name": name, "ready": is_ready, "started": is_ready, "restartCount": n, "state": state}
        for name in container_names(pod)
    ]
    return {"phase": phase, "conditions": conditions, "containerStatuses": containers}


def now_iso() -> str:
    """Return the wall-clock time as Kubernetes writes it."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
