"""NVIDIA's mig-manager v0.13.1 on a node, and the device plugin as the GPU operator deploys it.

The DaemonSet is that of the operator with a driver container: NVIDIA's manager then runs
``nvidia-mig-parted`` in its own container and leaves services of the host alone.
"""

from typing import Any

from tests import programs, waiting
from tests.realnode import images, manifests, rig

Object = dict[str, Any]

NAMESPACE = "gpu-operator"
NAME = "nvidia-mig-manager"
USER = f"system:serviceaccount:{NAMESPACE}:{NAME}"
PLUGIN = "nvidia-device-plugin-daemonset"
DEPLOY = "nvidia.com/gpu.deploy."
OPERANDS = ("device-plugin", "gpu-feature-discovery", "dcgm", "dcgm-exporter", "nvsm")
"""Those that NVIDIA's manager pauses."""
_LAYOUTS = "mig-parted-config"
_PROGRAMS = ("nvidia-mig-manager", "nvidia-mig-parted")
_START = """
import ctypes, os
MS_BIND, MS_REC = 4096, 16384
os.mkdir('/run/proc')
for line in (b'/proc', b'/run/proc', None, MS_BIND | MS_REC), (b'tmpfs', b'/proc', b'tmpfs', 0):
    assert ctypes.CDLL(None).mount(*line, None) == 0
for name in set(os.listdir('/run/proc')) - {'modules'}:
    os.symlink('/run/proc/' + name, '/proc/' + name)
with open('/proc/modules', 'w') as modules:
    modules.write('nvidia 56717312 1 - Live 0x0000000000000000')
os.execvp('nvidia-mig-manager', ['nvidia-mig-manager'])
"""
"""Starts it where ``/proc/modules`` has the driver's module, as on a machine with a GPU."""


def install_plugin(cluster: rig.Cluster) -> None:
    """Replace the device plugin by one that the operator's deploy label starts and stops."""
    cluster.kubectl("delete", "daemonset", "-n", "kube-system", PLUGIN, "--ignore-not-found")
    cluster.kubectl("label", "--overwrite", "node", rig.NODE, f"{DEPLOY}device-plugin=true")
    plugin = manifests.plugin()
    plugin["metadata"]["namespace"] = NAMESPACE
    spec, template = plugin["spec"], plugin["spec"]["template"]
    spec["selector"]["matchLabels"] = template["metadata"]["labels"] = {"app": PLUGIN}
    template["spec"]["nodeSelector"] = {f"{DEPLOY}device-plugin": "true"}
    # As values.yaml of our overlay for the operator has it.
    template["spec"]["tolerations"] += [
        {"key": "mig-manager.io/reconfiguring", "operator": "Exists", "effect": "NoSchedule"}
    ]
    cluster.apply(_namespace(NAMESPACE), plugin)
    waiting.until(lambda: plugin_runs(cluster), "the operator's device plugin")


def plugin_runs(cluster: rig.Cluster) -> bool:
    """Check whether the operator's device plugin runs, and none of its pods is ending."""
    pods = cluster.pods(NAMESPACE, app=PLUGIN)
    return bool(pods) and all(
        pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        for pod in pods
    )


def install(cluster: rig.Cluster, layouts: str) -> None:
    """Install NVIDIA's manager and wait until it runs.

    Args:
        cluster: Where.
        layouts: Its config document.
    """
    programs.needed("dbus-daemon")
    archive = cluster.images.nvidia_manager(rig.built(*_PROGRAMS))
    cluster.node.import_image(archive)
    cluster.node.start_bus()
    cluster.kubectl("label", "--overwrite", "node", rig.NODE, f"{DEPLOY}mig-manager=true")
    cluster.apply(_namespace(NAMESPACE), config_map(layouts, NAMESPACE), *_rights(), _daemon_set())
    cluster.kubectl("rollout", "status", "-n", NAMESPACE, f"ds/{NAME}", "--timeout=120s")


def remove(cluster: rig.Cluster) -> None:
    """Remove NVIDIA's manager and wait until it has ended."""
    cluster.kubectl("delete", "daemonset", "-n", NAMESPACE, NAME, "--timeout=60s")
    waiting.until(lambda: not cluster.pods(NAMESPACE, app=NAME), "no manager of NVIDIA's")


def log(cluster: rig.Cluster) -> str:
    """Return what NVIDIA's manager has printed."""
    return cluster.kubectl("logs", "-n", NAMESPACE, f"ds/{NAME}", "--tail=-1")


def config_map(layouts: str, namespace: str) -> Object:
    """Return a ConfigMap with layouts, for either manager."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": _LAYOUTS, "namespace": namespace},
        "data": {"config.yaml": layouts},
    }


def serving(layouts: str, cluster: rig.Cluster) -> Object:
    """Create layouts for our agent; return the patch by which it serves them."""
    cluster.apply(_namespace("mig-manager"), config_map(layouts, "mig-manager"))
    volume = {"name": "config", "configMap": {"name": _LAYOUTS}}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "mig-manager", "namespace": "mig-manager"},
        "spec": {"template": {"spec": {"volumes": [volume]}}},
    }


def _namespace(name: str) -> Object:
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": labels},
    }


def _rights() -> list[Object]:
    """Return the operator's ServiceAccount and roles of NVIDIA's manager."""
    own, pods = {"name": NAME, "namespace": NAMESPACE}, {"apiGroups": [""], "resources": ["pods"]}
    nodes = {"apiGroups": [""], "resources": ["nodes"]}
    group = "rbac.authorization.k8s.io"
    written = ["get", "list", "watch", "update", "patch"]
    subjects = [{"kind": "ServiceAccount", **own}]
    roles = {
        "Role": [pods | {"verbs": ["get", "list", "watch", "delete"]}],
        "ClusterRole": [nodes | {"verbs": written}, pods | {"verbs": ["list"]}],
    }
    found: list[Object] = [{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": own}]
    for kind, rules in roles.items():
        shared = {"apiVersion": f"{group}/v1", "metadata": own}
        reference = {"apiGroup": group, "kind": kind, "name": NAME}
        found += [
            shared | {"kind": kind, "rules": rules},
            shared | {"kind": f"{kind}Binding", "roleRef": reference, "subjects": subjects},
        ]
    return found


def _daemon_set() -> Object:
    node_name = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    folders = {"host-root": ("/", "/host"), "host-sys": ("/sys", "/sys")}
    container = {
        "name": NAME,
        "image": images.NVIDIA_MANAGER,
        "command": ["python3", "-c", _START],
        "env": [
            {"name": "NODE_NAME", "valueFrom": node_name},
            {"name": "CONFIG_FILE", "value": "/mig-parted-config/config.yaml"},
            {"name": "DEFAULT_GPU_CLIENTS_NAMESPACE", "value": NAMESPACE},
            {"name": "WITH_SHUTDOWN_HOST_GPU_CLIENTS", "value": "false"},
        ],
        "securityContext": {"privileged": True},
        "volumeMounts": [
            {"name": "mig-parted-config", "mountPath": "/mig-parted-config"},
            *({"name": name, "mountPath": inside} for name, (_, inside) in folders.items()),
        ],
    }
    pod = {
        "nodeSelector": {f"{DEPLOY}mig-manager": "true"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "system-node-critical",
        "serviceAccountName": NAME,
        "hostPID": True,
        "hostIPC": True,
        "containers": [container],
        "volumes": [
            {"name": "mig-parted-config", "configMap": {"name": _LAYOUTS}},
            *({"name": name, "hostPath": {"path": path}} for name, (path, _) in folders.items()),
        ],
    }
    found = manifests.daemon_set(NAME, NAMESPACE, NAME, pod)
    spec = found["spec"]
    spec["selector"]["matchLabels"] = spec["template"]["metadata"]["labels"] = {"app": NAME}
    return found
