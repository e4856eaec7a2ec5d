"""A monitor of GPUs, as the GPU operator deploys it."""

from mig_manager.core.objects import well_known
from mig_manager.sandbox.node import objects

NAME = "nvidia-dcgm-exporter"


def daemon_set() -> objects.JsonObject:
    """Return a DaemonSet whose pods watch every GPU of the nodes with its deploy label."""
    labels = {"app": NAME}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": NAME, "namespace": "gpu-operator", "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels, "annotations": {objects.MONITORS: "true"}},
                "spec": {
                    "containers": [{"name": NAME, "image": f"nvcr.io/nvidia/{NAME}"}],
                    "nodeSelector": {f"{well_known.DEPLOY_LABEL_PREFIX}dcgm-exporter": "true"},
                },
            },
        },
    }
