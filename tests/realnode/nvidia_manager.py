"""NVIDIA's mig-manager v0.13.1 on a node, and the device plugin as the GPU operator deploys it.

The DaemonSet is that of the operator with a driver container: NVIDIA's manager then runs
``nvidia-mig-parted`` in its own container and leaves services of the host alone.
"""

from tests.realnode import images, operator, real_cluster
from tests.rigs import programs, waiting
from tests.rigs.api_objects import Object

NAME, NAMESPACE, PLUGIN = operator.MANAGER, operator.NAMESPACE, operator.PLUGIN
_CONFIG_MAP = "mig-parted-config"
LAYOUTS = """
version: v1
mig-configs:
  all-1g.5gb:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}
  all-2g.10gb:
  - {devices: all, mig-enabled: true, mig-devices: {2g.10gb: 3}}
  eight-slices:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 8}}
"""
"""Its layout file."""
PROGRAMS = ("nvidia-mig-manager", "nvidia-mig-parted")
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


def prepare() -> None:
    """Build NVIDIA's programs; before a cluster starts, because then there is no network."""
    real_cluster.built(*PROGRAMS)


def install_plugin(cluster: real_cluster.RealCluster) -> None:
    """Replace the device plugin by one that the operator's deploy label starts and stops."""
    cluster.kubectl("delete", "daemonset", "-n", "kube-system", PLUGIN, "--ignore-not-found")
    label = f"{operator.DEPLOY}device-plugin=true"
    cluster.kubectl("label", "--overwrite", "node", real_cluster.NODE, label)
    plugin = operator.operand(PLUGIN, "device-plugin", operator.plugin())
    cluster.apply(_namespace(), plugin)
    waiting.until(lambda: plugin_runs(cluster), "the operator's device plugin")


def plugin_runs(cluster: real_cluster.RealCluster) -> bool:
    """Check whether the operator's device plugin runs, and none of its pods is ending."""
    pods = cluster.pods(NAMESPACE, app=PLUGIN)
    return bool(pods) and all(map(real_cluster.is_running, pods))


def install(cluster: real_cluster.RealCluster) -> None:
    """Install NVIDIA's manager and wait until it runs."""
    programs.path_or_skip("dbus-daemon")
    archive = cluster.images.nvidia_manager(real_cluster.built(*PROGRAMS))
    cluster.node.import_image(archive)
    cluster.node.start_bus()
    cluster.kubectl(
        "label", "--overwrite", "node", real_cluster.NODE, f"{operator.DEPLOY}mig-manager=true"
    )
    cluster.apply(_namespace(), _config_map(), *operator.account(), _daemon_set())
    cluster.wait_for_daemons(NAMESPACE, NAME)


def remove(cluster: real_cluster.RealCluster) -> None:
    """Remove NVIDIA's manager and wait until it has ended."""
    cluster.kubectl("delete", "daemonset", "-n", NAMESPACE, NAME, "--timeout=60s")
    waiting.until(lambda: not cluster.pods(NAMESPACE, app=NAME), "no manager of NVIDIA's")


def log(cluster: real_cluster.RealCluster) -> str:
    """Return what NVIDIA's manager has printed."""
    return cluster.kubectl("logs", "-n", NAMESPACE, f"ds/{NAME}", "--tail=-1")


def _config_map() -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": _CONFIG_MAP, "namespace": NAMESPACE},
        "data": {"config.yaml": LAYOUTS},
    }


def _namespace() -> Object:
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": labels},
    }


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
        "priorityClassName": "system-node-critical",
        "serviceAccountName": NAME,
        "hostPID": True,
        "hostIPC": True,
        "containers": [container],
        "volumes": [
            {"name": "mig-parted-config", "configMap": {"name": _CONFIG_MAP}},
            *({"name": name, "hostPath": {"path": path}} for name, (path, _) in folders.items()),
        ],
    }
    return operator.operand(NAME, "mig-manager", pod)
