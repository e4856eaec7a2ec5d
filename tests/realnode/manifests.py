"""What is applied to the cluster beside our own manifests: NVIDIA's plugin, and workloads."""

from collections.abc import Mapping
from typing import Any

from tests.realnode import images
from tests.rigs.api_objects import Object
from tests.rigs.cluster import account_rights, deploy_files

PLUGIN = "nvidia-device-plugin-daemonset"
PLUGIN_FOLDER = "/var/lib/kubelet/device-plugins"


def plugin(*, tolerates_all: bool = False, **variables: str) -> Object:
    """Return NVIDIA's device plugin as its own static manifest has it.

    Args:
        tolerates_all: Whether it returns at once to a node with any taint.
        variables: Of its environment, such as ``MIG_STRATEGY``; by default ``mixed``.
    """
    environ = {
        "FAIL_ON_INIT_ERROR": "false",
        "MIG_STRATEGY": "mixed",
        "NVIDIA_MIG_MONITOR_DEVICES": "all",
        "NVIDIA_VISIBLE_DEVICES": "all",
    } | variables
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    container = {
        "name": "nvidia-device-plugin-ctr",
        "image": images.PLUGIN,
        "env": [{"name": name, "value": value} for name, value in environ.items()],
        "securityContext": {"privileged": True},
        "volumeMounts": [{"name": "device-plugin", "mountPath": PLUGIN_FOLDER}],
    }
    pod = {
        "tolerations": [{"operator": "Exists"} if tolerates_all else toleration],
        "priorityClassName": "system-node-critical",
        "containers": [container],
        "volumes": [{"name": "device-plugin", "hostPath": {"path": PLUGIN_FOLDER}}],
    }
    return daemon_set(PLUGIN, "kube-system", {"name": "nvidia-device-plugin-ds"}, pod)


def daemon_set(name: str, namespace: str, labels: Mapping[str, str], pod: Object) -> Object:
    """Return a DaemonSet whose pods have these labels."""
    metadata = {"name": name, "namespace": namespace}
    head = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata}
    return head | {"spec": _pods(labels, pod)}


def _pods(labels: Mapping[str, str], pod: Object) -> Object:
    """Return the part of a workload's spec that selects and describes its pods."""
    template = {"metadata": {"labels": labels}, "spec": pod}
    return {"selector": {"matchLabels": labels}, "template": template}


def workload(name: str, resource: str, replicas: int = 1, **spec: Any) -> Object:
    """Return a Deployment each of whose pods computes on one device.

    Args:
        name: Its name, and the value of its pods' label ``app``.
        resource: Of NVIDIA's, such as ``mig-1g.5gb``.
        replicas: Number of pods.
        spec: Fields of the pods' ``spec``.
    """
    container = {
        "name": "main",
        "image": images.PAUSE,
        "resources": {"limits": {f"nvidia.com/{resource}": 1}},
    }
    pod = {"terminationGracePeriodSeconds": 5, "containers": [container]} | spec
    metadata = {"name": name, "namespace": "default"}
    head = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata}
    return head | {"spec": {"replicas": replicas, **_pods({"app": name}, pod)}}


def budget(name: str) -> Object:
    """Return a PodDisruptionBudget that lets no pod of a workload go."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {"app": name}}},
    }


def layouts(text: str, name: str = "mig-manager-config", namespace: str = "mig-manager") -> Object:
    """Return a ConfigMap of layouts, which is also a patch of the shipped one.

    Args:
        text: Layouts to add to the shipped ones, as lines of its ``mig-configs``.
        name: The ConfigMap's.
        namespace: The ConfigMap's.
    """
    shipped = (deploy_files.ROOT / "profiles/mig-parted.yaml").read_text()
    return config_map(name, namespace, {"config.yaml": shipped + text})


def config_map(name: str, namespace: str, data: Mapping[str, str]) -> Object:
    """Return a ConfigMap."""
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def account(
    name: str,
    namespace: str,
    everywhere: frozenset[account_rights.Right],
    within: frozenset[account_rights.Right] = frozenset(),
) -> list[Object]:
    """Return an account with rights to the whole cluster, and beyond that to its namespace."""
    metadata = {"name": name, "namespace": namespace}
    group = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", **metadata}
    objects: list[Object] = [{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}]
    for kind, rights in {
        "ClusterRole": everywhere,
        **({"Role": within} if within else {}),
    }.items():
        rules = [
            {"apiGroups": [api], "resources": [resource], "verbs": [verb]}
            for api, resource, verb in sorted(rights)
        ]
        role = {"apiGroup": group, "kind": kind, "name": name}
        head: Object = {"apiVersion": f"{group}/v1", "metadata": metadata}
        objects += [
            head | {"kind": kind, "rules": rules},
            head | {"kind": f"{kind}Binding", "roleRef": role, "subjects": [subject]},
        ]
    return objects


def settings(**variables: str) -> Object:
    """Return a patch of the agent's environment."""
    environ = [{"name": name, "value": value} for name, value in variables.items()]
    return agent({"containers": [{"name": "mig-manager", "env": environ}]})


def agent(pod: Object) -> Object:
    """Return a patch of the agent's pods."""
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "mig-manager", "namespace": "mig-manager"},
        "spec": {"template": {"spec": pod}},
    }
