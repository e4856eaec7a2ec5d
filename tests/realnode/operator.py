"""A node of NVIDIA's GPU operator, with our image where its own MIG manager would be."""

from tests.cluster import clusters
from tests.realnode import images, manifests

NAMESPACE = clusters.OPERATOR_NAMESPACE
MANAGER, PLUGIN, DCGM = "nvidia-mig-manager", "nvidia-device-plugin-daemonset", "nvidia-dcgm"
DEPLOY = "nvidia.com/gpu.deploy."
DEPLOY_LABELS = {f"{DEPLOY}{name}": "true" for name in ("mig-manager", "device-plugin", "dcgm")}
_NO_CLIENTS = "version: v1\nsystemd-services: []\n"
_HOST = {"/host": "/", "/driver-root": "/run/nvidia/driver", "/sys": "/sys"}

Object = manifests.Object


def objects() -> list[Object]:
    """Return the operator's namespace, its rights for the MIG manager, and three operands."""
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        *account(),
        manifests.config_map("gpu-clients", NAMESPACE, {"clients.yaml": _NO_CLIENTS}),
        operand(MANAGER, "mig-manager", _manager()),
        operand(PLUGIN, "device-plugin", plugin()),
        operand(DCGM, "dcgm", {"containers": [{"name": DCGM, "image": images.PAUSE}]}),
    ]


def _manager() -> Object:
    environ = {
        "CONFIG_FILE": "/mig-parted-config/config.yaml",
        "GPU_CLIENTS_FILE": "/gpu-clients/clients.yaml",
        "DEFAULT_GPU_CLIENTS_NAMESPACE": NAMESPACE,
        "DRIVER_ROOT_CTR_PATH": "/host",
        "WITH_REBOOT": "false",
        # What values.yaml adds.
        "MIG_MANAGER_LOCK_FILE": "/host/run/mig-manager/lock",
        "MIG_MANAGER_VERIFIED_LAYOUT_FILE": "/host/var/lib/mig-manager/verified-layout.json",
    }
    fields = {"NODE_NAME": "spec.nodeName", "POD_NAMESPACE": "metadata.namespace"}
    volumes: list[Object] = [
        {"name": f"host-{number}", "hostPath": {"path": path, "type": "DirectoryOrCreate"}}
        for number, path in enumerate(_HOST.values())
    ]
    mounts: list[Object] = [
        {"name": f"host-{number}", "mountPath": path, "mountPropagation": "HostToContainer"}
        for number, path in enumerate(_HOST)
    ]
    for folder, config in {
        "/mig-parted-config": "mig-manager-config",
        "/gpu-clients": "gpu-clients",
    }.items():
        volumes.append({"name": config, "configMap": {"name": config}})
        mounts.append({"name": config, "mountPath": folder})
    container = {
        "name": MANAGER,
        "image": images.AGENT,
        "command": ["sh", "-c", "exec nvidia-mig-manager"],
        "env": [
            *({"name": name, "value": value} for name, value in environ.items()),
            *(
                {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                for name, path in fields.items()
            ),
        ],
        "securityContext": {"privileged": True},
        "volumeMounts": mounts,
    }
    own = {"hostPID": True, "hostIPC": True, "serviceAccountName": MANAGER}
    return own | {"containers": [container], "volumes": volumes}


def account() -> list[Object]:
    """Return the account of the MIG manager, with the rights that the operator gives it."""
    rights = clusters.STOCK_OPERATOR
    return manifests.account(MANAGER, NAMESPACE, rights.everywhere, rights.within)


def plugin() -> Object:
    """Return the pod of the device plugin."""
    spec: Object = manifests.plugin()["spec"]["template"]["spec"]
    spec["containers"][0]["name"] = "nvidia-device-plugin"
    return spec


def operand(name: str, deploy: str, spec: Object) -> Object:
    """Return a DaemonSet on the nodes where its deploy label is true."""
    placed = {
        "nodeSelector": {f"{DEPLOY}{deploy}": "true"},
        "tolerations": [
            {"key": key, "operator": "Exists", "effect": "NoSchedule"}
            for key in ("nvidia.com/gpu", "mig-manager.io/reconfiguring")
        ],
    }
    return manifests.daemon_set(name, NAMESPACE, {"app": name}, spec | placed)
