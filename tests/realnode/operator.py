"""Operands as NVIDIA's GPU operator deploys them, and its MIG manager's account."""

from tests.realnode import contract_keys, manifests
from tests.rigs.api_objects import Object
from tests.rigs.cluster import account_rights, operator_pod

NAMESPACE = operator_pod.NAMESPACE
MANAGER, PLUGIN = "nvidia-mig-manager", "nvidia-device-plugin-daemonset"
DEPLOY = "nvidia.com/gpu.deploy."


def account() -> list[Object]:
    """Return the account of the MIG manager, with the rights that the operator gives it."""
    rights = account_rights.STOCK_OPERATOR
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
            for key in ("nvidia.com/gpu", contract_keys.RECONFIGURING_TAINT)
        ],
    }
    return manifests.daemon_set(name, NAMESPACE, {"app": name}, spec | placed)
