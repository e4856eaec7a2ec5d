"""Read the fields of Kubernetes objects, which are plain JSON."""

import collections
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from mig_manager.core.objects import well_known

JsonObject = dict[str, Any]

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
PLUGIN_CONTAINERS = {
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
    return any(c["name"] in PLUGIN_CONTAINERS.values() for c in pod["spec"]["containers"])


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
        key = each.get("key")
        is_exists = each.get("operator") == "Exists"
        is_same = key == taint["key"] and (each.get("value") or "") == (taint.get("value") or "")
        if each.get("effect") and each["effect"] != taint.get("effect"):
            continue
        if is_same or (is_exists and (not key or key == taint["key"])):
            return True
    return False


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
    if spec.get("unschedulable") and not any(t["key"] == well_known.CORDON_TAINT for t in listed):
        return (*listed, {"key": well_known.CORDON_TAINT, "effect": "NoSchedule"})
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
