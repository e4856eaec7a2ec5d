"""NVIDIA's DRA driver with static MIG, played: the ResourceSlices that it publishes."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from mig_manager.adapters.kubernetes import api, responses
from mig_manager.core import model
from mig_manager.core.node.devices import claims
from mig_manager.core.objects import well_known
from mig_manager.sandbox import stages
from mig_manager.sandbox.node import cluster_view, objects
from tests.rigs import api_objects

NAME = well_known.GPU_CLAIM_DRIVER
GROUP = "/apis/resource.k8s.io/v1"
SLICES, CLAIMS = f"{GROUP}/resourceslices", f"{GROUP}/namespaces/default/resourceclaims"
CLASSES = f"{GROUP}/deviceclasses"
DAEMON_SET = {
    "apiVersion": "apps/v1",
    "kind": "DaemonSet",
    "metadata": {"name": "nvidia-dra-driver-kubelet-plugin", "namespace": "gpu-operator"},
    "spec": {
        "selector": {"matchLabels": {"app": "nvidia-dra-driver-kubelet-plugin"}},
        "template": {
            "metadata": {"labels": {"app": "nvidia-dra-driver-kubelet-plugin"}},
            "spec": {
                "containers": [
                    {
                        "name": "gpus",
                        "image": "dra-driver-nvidia-gpu:v0.5.0",
                        "env": [{"name": "FEATURE_GATES", "value": "DynamicMIG=false"}],
                    }
                ],
                "nodeSelector": {claims.DEPLOY_LABEL: "true"},
                "volumes": [
                    {
                        "name": "plugins-registry",
                        "hostPath": {"path": "/var/lib/kubelet/plugins_registry"},
                    }
                ],
            },
        },
    },
}
"""What the GPU operator's GPUCluster deploys, in short."""


class FakeDraDriver:
    """A node's driver: each new pod of it publishes the devices that it finds, once."""

    def __init__(
        self,
        cluster: cluster_view.ClusterView,
        kube: api.KubeApi,
        observe: Callable[[], Iterable[dict[str, Any]]],
        *,
        node: str = stages.NODE_NAME,
    ) -> None:
        self.starts: list[str] = []
        self._cluster = cluster
        self._kube = kube
        self._observe = observe
        self._node = node
        self._publishers: set[str] = set()

    def publish_new_pods(self) -> bool:
        """Publish if a new pod is ready; return whether one has."""
        for pod in self._cluster.list(cluster_view.WatchedKind.POD):
            is_driver = any(each["name"] == "gpus" for each in pod["spec"]["containers"])
            uid = objects.uid(pod)
            if not is_driver or objects.node_name(pod) != self._node:
                continue
            if uid not in self.starts:
                self.starts.append(uid)
            if objects.is_ready(pod) and uid not in self._publishers:
                self._publish(len(self.starts))
                self._publishers.add(uid)
        return bool(self._publishers)

    def _publish(self, generation: int) -> None:
        listed = api_objects.a_resource_slice(
            *self._observe(), node=self._node, generation=generation
        )
        with contextlib.suppress(responses.ApiError):
            self._kube.delete(f"{SLICES}/{objects.name(listed)}")
        self._kube.post(SLICES, listed)


def devices(gpus: Iterable[model.Gpu]) -> list[dict[str, Any]]:
    """Return the devices of the GPUs, named by GPU and first slice."""
    return [
        device(f"gpu-{gpu.index}-mig-{instance.placement.start}", ci.uuid or "", ci.profile)
        for gpu in gpus
        for instance in gpu.gpu_instances
        for ci in instance.compute_instances
    ]


def device(name: str, uuid: str, profile: model.Profile) -> dict[str, Any]:
    return api_objects.a_device(name, uuid=uuid, type="mig", profile=str(profile))
