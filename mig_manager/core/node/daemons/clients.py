"""GPU clients: the daemons to pause for a plan, and how to recognise them."""

from collections.abc import Collection, Iterable, Mapping

from mig_manager.core import steps
from mig_manager.core.node.daemons import client_table
from mig_manager.core.objects import pod_object, well_known

DISCOVERY_DEPLOY_LABEL = well_known.DEPLOY_LABEL_PREFIX + "gpu-feature-discovery"

_PLUGIN_CONTAINERS = frozenset({"nvidia-device-plugin", "nvidia-device-plugin-ctr"})

_GFD_CONTAINERS = frozenset({"gpu-feature-discovery", "gpu-feature-discovery-ctr"})
_VALIDATORS = frozenset(
    {f"nvidia-{name}-validator" for name in ("operator", "cuda", "device-plugin")}
)
"""Pods that validated the former layout; the operator restarts them."""
_OF_OPERATOR = ("DaemonSet", "ClusterPolicy")
"""Kinds that own the validators (gpu-operator, ``cmd/nvidia-validator/main.go``)."""

_ENUMERATE_AT_START = (
    *("device-plugin", "dra-driver", "gpu-feature-discovery"),
    *("dcgm", "dcgm-exporter", "dcgm-dra", "dcgm-exporter-dra"),
)
"""Operands of the GPU operator that list the instances only when they start."""

_MONITORS = frozenset(
    well_known.DEPLOY_LABEL_PREFIX + operand
    for operand in ("dcgm-dra", "dcgm-exporter-dra", "dra-validator")
)
"""Deploy labels of operands that have every GPU by a ResourceClaim with admin access."""

_HOLD_DEVICES = ("nvsm", "client")  # operands to pause only if the plan destroys an instance

PAUSED_LABELS = frozenset(
    well_known.DEPLOY_LABEL_PREFIX + operand for operand in _ENUMERATE_AT_START + _HOLD_DEVICES
)
"""Deploy labels that a change may pause; a DaemonSet may select its nodes by another one."""


def is_device_plugin(pod: pod_object.Pod) -> bool:
    """Return whether a pod is NVIDIA's device plugin, however it was deployed.

    The GPU operator sets label ``app``, the static manifest label ``name``. The Helm chart's label
    ``app.kubernetes.io/name`` is also on its GFD and MPS daemons, so the container name decides.

    Any user can choose these names, and the plugin's pods get deleted. So the pod must also belong
    to a DaemonSet and mount the directory where plugins register with kubelet, which requires
    access to the host's files.
    """
    has_known_name = (
        pod.labels.get("app") == "nvidia-device-plugin-daemonset"
        or pod.labels.get("name") == "nvidia-device-plugin-ds"
        or not _PLUGIN_CONTAINERS.isdisjoint(pod.container_names)
    )
    return has_known_name and pod.owner_kind == "DaemonSet" and pod.mounts_plugin_sockets


def is_plugin_or_monitor(pod: pod_object.Pod) -> bool:
    """Return whether a pod is the device plugin, or a monitor with a claim for every GPU.

    The agent pauses or ignores them, and never evicts one.
    """
    return is_device_plugin(pod) or bool(gated_by((pod,), _MONITORS))


def is_feature_discovery(pod: pod_object.Pod) -> bool:
    """Return whether a pod is NVIDIA's GPU feature discovery, which labels the node.

    Any user can choose this name, as with the device plugin.
    """
    has_known_name = not _GFD_CONTAINERS.isdisjoint(pod.container_names)
    return has_known_name and pod.owner_kind == "DaemonSet"


def is_validator(pod: pod_object.Pod) -> bool:
    """Return whether a pod is one of the GPU operator's validators.

    Any user can choose this label, as with the device plugin.
    """
    return pod.labels.get("app") in _VALIDATORS and pod.owner_kind in _OF_OPERATOR


def labels_to_pause(
    labels: Mapping[str, str],
    plan: steps.Plan,
    extra_clients: Iterable[client_table.ExtraClient] = (),
) -> dict[str, str]:
    """Return the deploy labels to set to ``paused-for-mig-change``, with their original values.

    Only labels with value ``true``: absent labels, ``false`` and other values (a pause by another
    component) stay. A label with the paused value, from a manager that did not resume it, counts
    as ``true``, or its daemon would never run again.

    In the order of the resume. A monitor that starts at the same time as the device plugin can
    hang the driver. One that starts before its data source fails.
    """
    operands = _ENUMERATE_AT_START + (_HOLD_DEVICES if plan.destroys_instances else ())
    keys = [well_known.DEPLOY_LABEL_PREFIX + operand for operand in operands]
    keys += [client.deploy_label for client in extra_clients if client.deploy_label]
    return {key: "true" for key in keys if labels.get(key) in ("true", well_known.PAUSED_VALUE)}


def gated_by(pods: Iterable[pod_object.Pod], keys: Collection[str]) -> pod_object.Pods:
    """Return the pods of DaemonSets that select nodes by one of these labels.

    Only the DaemonSet controller deletes a pod when its node no longer matches.
    """
    return tuple(
        pod
        for pod in pods
        if pod.owner_kind == "DaemonSet" and not pod.node_selector.keys().isdisjoint(keys)
    )
