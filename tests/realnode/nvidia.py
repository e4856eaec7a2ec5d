"""NVIDIA's daemons beyond the plain device plugin, as their Helm chart deploys them."""

from tests.realnode import images, manifests, node
from tests.rigs.api_objects import Object
from tests.rigs.cluster import account_rights

DISCOVERY = "gpu-feature-discovery"
DISCOVERY_LABEL = "nvidia.com/gpu.deploy.gpu-feature-discovery"
_FEATURES = "/var/lib/gpu-feature-discovery"
_CONFIGS, _CONFIG = "/available-configs", "/config"
_CONFIG_LABEL = "nvidia.com/device-plugin.config"


def plugin_with_configs(resource: str, *, replicas: int) -> list[Object]:
    """Return the plugin with a config manager, and the configs ``whole`` and ``shared``.

    Args:
        resource: What ``shared`` offers several times, such as ``mig-1g.5gb``.
        replicas: How many times.
    """
    shared = f"""
version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/{resource}
      replicas: {replicas}
"""
    configs = manifests.config_map(
        "device-plugin-configs", "kube-system", {"whole": "version: v1\n", "shared": shared}
    )
    plugin = manifests.plugin(CONFIG_FILE=f"{_CONFIG}/config.yaml")
    pod = plugin["spec"]["template"]["spec"]
    pod["serviceAccountName"] = "nvidia-device-plugin"
    pod["shareProcessNamespace"] = True
    pod["initContainers"] = [_config_manager("init", is_once=True)]
    pod["volumes"] += [
        {"name": "available-configs", "configMap": {"name": "device-plugin-configs"}},
        {"name": "config", "emptyDir": {}},
    ]
    pod["containers"][0]["volumeMounts"] += _config_mounts()
    pod["containers"].append(_config_manager("sidecar", is_once=False))
    reads_nodes = account_rights.to("nodes", "get", "list", "watch")
    account = manifests.account("nvidia-device-plugin", "kube-system", reads_nodes)
    return [*account, configs, plugin]


def feature_discovery() -> Object:
    """Return GPU feature discovery, which lists the devices only when it starts.

    The GPU operator's label deploys it.
    """
    variables = {
        "MIG_STRATEGY": "mixed",
        "NVIDIA_MIG_MONITOR_DEVICES": "all",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "GFD_USE_NODE_FEATURE_API": "false",
        "GFD_SLEEP_INTERVAL": "infinite",
        "GFD_OUTPUT_FILE": "/features/gfd",
    }
    container = {
        "name": DISCOVERY,
        "image": images.PLUGIN,
        "command": ["gpu-feature-discovery"],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "volumeMounts": [{"name": "features", "mountPath": "/features"}],
    }
    pod = {
        "nodeSelector": {DISCOVERY_LABEL: "true"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "containers": [container],
        "volumes": [
            {"name": "features", "hostPath": {"path": _FEATURES, "type": "DirectoryOrCreate"}}
        ],
    }
    return manifests.daemon_set(DISCOVERY, "kube-system", {"name": DISCOVERY}, pod)


def features(of: node.RealNode) -> dict[str, str]:
    """Return the labels that GPU feature discovery has written, without ``nvidia.com/``."""
    lines = (of.folder / _FEATURES.removeprefix("/") / "gfd").read_text().splitlines()
    pairs = (line.removeprefix("nvidia.com/").partition("=") for line in lines)
    return {key: value for key, _, value in pairs}


def _config_manager(suffix: str, *, is_once: bool) -> Object:
    variables = {
        "ONESHOT": str(is_once).lower(),
        "NODE_LABEL": _CONFIG_LABEL,
        "CONFIG_FILE_SRCDIR": _CONFIGS,
        "CONFIG_FILE_DST": f"{_CONFIG}/config.yaml",
        "DEFAULT_CONFIG": "whole",
        "SEND_SIGNAL": str(not is_once).lower(),
        "SIGNAL": "1",
        "PROCESS_TO_SIGNAL": "/usr/bin/nvidia-device-plugin",
    }
    environ: list[Object] = [{"name": name, "value": value} for name, value in variables.items()]
    name = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    return {
        "name": f"nvidia-device-plugin-{suffix}",
        "image": images.PLUGIN,
        "command": ["config-manager"],
        "env": [*environ, {"name": "NODE_NAME", "valueFrom": name}],
        "securityContext": {"privileged": True},
        "volumeMounts": _config_mounts(),
    }


def _config_mounts() -> list[Object]:
    return [
        {"name": "available-configs", "mountPath": _CONFIGS},
        {"name": "config", "mountPath": _CONFIG},
    ]
