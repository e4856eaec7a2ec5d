"""Static MIG under NVIDIA's DRA driver: the agent on both servers, with real ResourceSlices.

The test plays the driver: it publishes the simulated GPUs whenever a new driver pod is ready.
"""

import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mig_manager.adapters.kubernetes import api
from mig_manager.core.node.devices import claims
from mig_manager.core.objects import well_known
from mig_manager.sandbox.node import cluster_view, manifests, objects
from tests.rigs import api_objects, waiting
from tests.rigs.cluster import account_rights, api_servers, dra_driver
from tests.rigs.node import gpu_values
from tests.rigs.stage import agent_stage, clusters

CLAIMS, SLICES = dra_driver.CLAIMS, dra_driver.SLICES
RESOURCE = "nvidia.com/mig-1g.5gb"


def allocate(stage: agent_stage.AgentStage, name: str, device: str) -> None:
    """Create a claim with a device, which a scheduler would have allocated."""
    request = {"name": "r", "exactly": {"deviceClassName": "mig.nvidia.com"}}
    spec = {"devices": {"requests": [request]}}
    stage.api.post(CLAIMS, {"metadata": {"name": name}, "spec": spec})
    result = {"request": "r", "driver": dra_driver.NAME, "pool": clusters.NODE, "device": device}
    allocation = {"allocation": {"devices": {"results": [result]}}}
    stage.api.patch(f"{CLAIMS}/{name}/status", {"status": allocation})


def run_with_claim(stage: agent_stage.AgentStage, name: str, device: str) -> None:
    """Run a pod that names its claim."""
    allocate(stage, name, device)
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
    stage.cluster.create(cluster_view.WatchedKind.POD, pod)


def run_with_limit(stage: agent_stage.AgentStage, name: str, device: str) -> None:
    """Run a pod with a plain limit, whose claim the scheduler would have made (KEP-5004)."""
    allocate(stage, name, device)
    pod = manifests.gpu_pod(name, RESOURCE)
    pod["spec"]["schedulerName"] = "played"
    stage.cluster.create(cluster_view.WatchedKind.POD, pod)
    (container,) = pod["spec"]["containers"]
    mapping = {"containerName": container["name"], "requestName": "r", "resourceName": RESOURCE}
    status = {"resourceClaimName": name, "requestMappings": [mapping]}
    path = f"/api/v1/namespaces/default/pods/{name}"
    stage.api.patch(f"{path}/status", {"status": {"extendedResourceClaimStatus": status}})
    target = {"apiVersion": "v1", "kind": "Node", "name": clusters.NODE}
    stage.api.post(f"{path}/binding", {"metadata": {"name": name}, "target": target})


def driver_of(stage: agent_stage.AgentStage) -> dra_driver.FakeDraDriver:
    def observe() -> list[dict[str, Any]]:
        return dra_driver.devices(stage.gpus.observe())

    return dra_driver.FakeDraDriver(stage.cluster, stage.api, observe)


def delete_all(kube: api.KubeApi, path: str) -> None:
    for each in kube.get(path)["items"]:
        kube.delete(f"{path}/{objects.name(each)}")


@contextlib.contextmanager
def dra_stage(
    where: api_servers.Cluster, folder: pathlib.Path
) -> Iterator[agent_stage.AgentStage]:
    """A node that the DRA driver serves alone, with seven instances."""
    with clusters.stage(where, folder) as stage, contextlib.ExitStack() as exits:
        exits.callback(delete_all, stage.api, CLAIMS)
        exits.callback(delete_all, stage.api, SLICES)
        stage.apply_layout("all-1g.5gb")
        labels = {well_known.PLUGIN_DEPLOY_LABEL: "false", claims.DEPLOY_LABEL: "true"}
        stage.cluster.patch(
            cluster_view.WatchedKind.NODE, stage.node(), {"metadata": {"labels": labels}}
        )
        stage.cluster.create(cluster_view.WatchedKind.DAEMON_SET, dra_driver.DAEMON_SET)
        stage.wait(lambda: not stage.allocatable(), "the end of the device plugin")
        yield stage


@pytest.mark.parametrize("run", [run_with_claim, run_with_limit])
def test_one_of_two_pods_with_claims_leaves_and_the_slices_are_verified(
    where_in_depth: api_servers.Cluster,
    tmp_path: pathlib.Path,
    run: Callable[[agent_stage.AgentStage, str, str], None],
) -> None:
    with dra_stage(where_in_depth, tmp_path) as stage:
        driver = driver_of(stage)
        stage.wait(driver.publish_new_pods, "the DRA driver")
        for name, start in (("low", 0), ("high", 6)):
            run(stage, name, f"gpu-0-mig-{start}")
        names = {"low", "high"}
        stage.wait(lambda: names <= stage.workloads().keys(), "the pods")

        def has_ended() -> bool:
            driver.publish_new_pods()
            status = stage.status()
            return status["config"] == "all-balanced" and "finishedAt" in status

        stage.label("all-balanced")
        stage.wait(has_ended, "an end for all-balanced", timeout_s=120.0)

        assert stage.status()["reason"] == "Applied", stage.status()
        assert len(stage.workloads().keys() & names) == 1
        assert len(driver.starts) == 2
        uuids = gpu_values.device_uuids(stage.gpus.observe())
        (published,) = stage.api.get(SLICES)["items"]
        assert set(claims.parse_slice(published).uuids.values()) == uuids
        assert len(uuids) == 4
        stage.assert_restored()
        assert clusters.event_reasons(stage) >= {"Draining", "Applied"}


@pytest.mark.cluster
def test_policy_lets_an_agent_withdraw_only_its_nodes_slices(
    real_cluster: api_servers.EnvtestCluster, tmp_path: pathlib.Path
) -> None:
    foreign = [("other", dra_driver.NAME), (clusters.NODE, "nic.example.com")]
    with (
        real_cluster.admit(tmp_path, account_rights.SHIPPED) as credentials,
        contextlib.closing(api.KubeApi.connect(kubeconfig=str(credentials.agent))) as agent,
        contextlib.ExitStack() as exits,
    ):
        exits.callback(delete_all, real_cluster.kube, SLICES)
        for node, driver in (*foreign, (clusters.NODE, dra_driver.NAME)):
            published = api_objects.a_resource_slice(node=node, driver=driver)
            real_cluster.kube.post(SLICES, published)

        def refusal(node: str, driver: str) -> str:
            path = f"{SLICES}/{node}-{driver}-x"
            return clusters.refusal(lambda: agent.delete(path, {"dryRun": ["All"]}))

        for each in foreign:
            # The policy becomes active a moment after its creation.
            waiting.until(functools.partial(refusal, *each), "the policy")  # type: ignore[arg-type]
            assert "may not delete ResourceSlices of others" in refusal(*each)
        assert refusal(clusters.NODE, dra_driver.NAME) == ""
