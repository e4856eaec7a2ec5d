"""Static MIG under NVIDIA's DRA driver: the agent on both servers, with real ResourceSlices.

The test plays the driver: it publishes the simulated GPUs whenever a new driver pod is ready.
"""

import contextlib
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from mig_manager.adapters.kubernetes import api, responses
from mig_manager.core import model
from mig_manager.core.node import claims, schedulable, well_known
from mig_manager.sandbox.node import cluster_view, objects
from tests import waiting
from tests.cluster import clusters
from tests.stage import agent_stage

DRIVER = well_known.GPU_CLAIM_DRIVER
GROUP = "/apis/resource.k8s.io/v1"
SLICES, CLAIMS = f"{GROUP}/resourceslices", f"{GROUP}/namespaces/default/resourceclaims"
SLICE = f"{clusters.NODE}-{DRIVER}"
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


class Driver:
    """NVIDIA's DRA driver: each new pod of it publishes the GPUs that it finds, once."""

    def __init__(self, stage: agent_stage.Stage) -> None:
        self.starts: list[str] = []
        self._stage = stage
        self._published: set[str] = set()

    def play(self) -> bool:
        """Publish if a new pod is ready; return whether one has."""
        for pod in self._stage.cluster.list(cluster_view.Kind.POD):
            is_driver = any(each["name"] == "gpus" for each in pod["spec"]["containers"])
            uid = objects.uid(pod)
            if not is_driver:
                continue
            if uid not in self.starts:
                self.starts.append(uid)
            if objects.is_ready(pod) and uid not in self._published:
                self._publish(len(self.starts))
                self._published.add(uid)
        return bool(self._published)

    def _publish(self, generation: int) -> None:
        with contextlib.suppress(responses.ApiError):
            self._stage.api.delete(f"{SLICES}/{SLICE}")
        gpus = self._stage.gpus.observe()
        self._stage.api.post(SLICES, a_slice(clusters.NODE, *devices(gpus), generation=generation))


def devices(gpus: model.ObservedGpus) -> list[dict[str, Any]]:
    """Return the devices of the GPUs with the names that the driver gives them."""
    return [
        {
            "name": f"gpu-{gpu.index}-mig-{instance.placement.start}",
            "attributes": {"uuid": {"string": ci.uuid}, "type": {"string": "mig"}},
        }
        for gpu in gpus
        for instance in gpu.gpu_instances
        for ci in instance.compute_instances
    ]


def a_slice(
    node: str, *of_node: dict[str, Any], driver: str = DRIVER, generation: int = 1
) -> dict[str, Any]:
    pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": node, "pool": pool, "devices": list(of_node)}
    return {"metadata": {"name": f"{node}-{driver}"}, "spec": spec}


def run_with_claim(stage: agent_stage.Stage, name: str, device: str) -> None:
    """Run a pod with a device by a claim, which a scheduler would have allocated."""
    request = {"name": "r", "exactly": {"deviceClassName": "mig.nvidia.com"}}
    spec = {"devices": {"requests": [request]}}
    stage.api.post(CLAIMS, {"metadata": {"name": name}, "spec": spec})
    result = {"request": "r", "driver": DRIVER, "pool": clusters.NODE, "device": device}
    allocation = {"allocation": {"devices": {"results": [result]}}}
    stage.api.patch(f"{CLAIMS}/{name}/status", {"status": allocation})
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "nodeName": clusters.NODE,
            "containers": [{"name": "main", "image": "app:1"}],
            "resourceClaims": [{"name": "c", "resourceClaimName": name}],
        },
    }
    stage.cluster.create(cluster_view.Kind.POD, pod)


def delete_all(kube: api.KubeApi, path: str) -> None:
    for each in kube.get(path)["items"]:
        kube.delete(f"{path}/{objects.name(each)}")


@contextlib.contextmanager
def dra_stage(where: clusters.Cluster, folder: pathlib.Path) -> Iterator[agent_stage.Stage]:
    """A node that the DRA driver serves alone, with seven instances."""
    with clusters.stage(where, folder) as stage, contextlib.ExitStack() as exits:
        exits.callback(delete_all, stage.api, CLAIMS)
        exits.callback(delete_all, stage.api, SLICES)
        stage.assert_ends("all-1g.5gb")
        labels = {well_known.PLUGIN_DEPLOY_LABEL: "false", claims.DEPLOY_LABEL: "true"}
        stage.cluster.patch(cluster_view.Kind.NODE, stage.node(), {"metadata": {"labels": labels}})
        stage.cluster.create(cluster_view.Kind.DAEMON_SET, DAEMON_SET)
        stage.wait(lambda: not stage.allocatable(), "the end of the device plugin")
        yield stage


def test_one_of_two_pods_with_claims_leaves_and_the_slices_are_verified(
    where: clusters.Cluster, tmp_path: pathlib.Path
) -> None:
    with dra_stage(where, tmp_path) as stage:
        driver = Driver(stage)
        stage.wait(driver.play, "the DRA driver")
        for name, start in (("low", 0), ("high", 6)):
            run_with_claim(stage, name, f"gpu-0-mig-{start}")
        names = {"low", "high"}
        stage.wait(lambda: names <= stage.workloads().keys(), "the pods")

        def has_ended() -> bool:
            driver.play()
            status = stage.status()
            return status["config"] == "all-balanced" and "finishedAt" in status

        stage.label("all-balanced")
        stage.wait(has_ended, "an end for all-balanced", timeout_s=120.0)

        assert stage.status()["reason"] == "Applied", stage.status()
        assert len(stage.workloads().keys() & names) == 1
        assert len(driver.starts) == 2
        uuids, _ = schedulable.expected_devices(stage.gpus.observe())
        (published,) = stage.api.get(SLICES)["items"]
        assert set(claims.parse_slice(published).uuids.values()) == uuids
        assert len(uuids) == 4
        stage.assert_nothing_taken()
        assert clusters.event_reasons(stage) >= {"Draining", "Applied"}


@pytest.mark.cluster
def test_policy_lets_an_agent_withdraw_only_its_nodes_slices(
    real_cluster: clusters.Real, tmp_path: pathlib.Path
) -> None:
    foreign = [("other", DRIVER), (clusters.NODE, "nic.example.com")]
    with (
        real_cluster.admit(tmp_path, clusters.SHIPPED) as credentials,
        contextlib.closing(api.KubeApi.connect(kubeconfig=str(credentials.agent))) as agent,
        contextlib.ExitStack() as exits,
    ):
        exits.callback(delete_all, real_cluster.kube, SLICES)
        for node, driver in (*foreign, (clusters.NODE, DRIVER)):
            real_cluster.kube.post(SLICES, a_slice(node, driver=driver))

        def refusal(node: str, driver: str) -> str:
            path = f"{SLICES}/{node}-{driver}"
            return clusters.refusal(lambda: agent.delete(path, {"dryRun": ["All"]}))

        for each in foreign:
            # The policy becomes active a moment after its creation.
            waiting.until(functools.partial(refusal, *each), "the policy")  # type: ignore[arg-type]
            assert "may not delete ResourceSlices of others" in refusal(*each)
        assert refusal(clusters.NODE, DRIVER) == ""
