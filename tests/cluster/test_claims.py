"""Pods with plain limits on a node of the DRA driver, from the scheduler to the partitioner.

Real are kube-apiserver and kube-scheduler, which makes the ResourceClaims (KEP-5004), our agent
and our partitioner; DRA driver and kubelet are played.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mig_manager.catalogue import hardware
from mig_manager.core.node.devices import claims, device_classes
from mig_manager.core.objects import well_known
from mig_manager.sandbox.driver import state_file
from mig_manager.sandbox.node import cluster_view, device_plugin, manifests, objects
from tests.rigs import waiting
from tests.rigs.cluster import api_servers, audit, dra_driver
from tests.rigs.stage import sandbox_nodes

pytestmark = pytest.mark.cluster

NODE = "node-a"
PRODUCT = "A100-SXM4-40GB"
LAYOUTS = """
version: v1
mig-configs:
  seven: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}]
  one-small: [{devices: all, mig-enabled: true, mig-devices: {3g.20gb: 1, 1g.5gb: 1}}]
"""
_TIMES = ("--quiet-s", "0.3", "--longest-wait-s", "1", "--cooldown-s", "0.5")


class ClaimsScene:
    """A node with seven small devices, which the scheduler allocates by claims."""

    def __init__(self, real: api_servers.EnvtestCluster, nodes: sandbox_nodes.Nodes) -> None:
        self.real = real
        self.nodes = nodes
        (machine,) = nodes.machines
        self._state = state_file.SharedState(machine.state_file)
        self._driver = dra_driver.FakeDraDriver(nodes.cluster, real.kube, self._devices, node=NODE)

    def _devices(self) -> list[dict[str, Any]]:
        return [
            dra_driver.device(f"mig-{uuid[-12:].lower()}", uuid, profile)
            for gpu in device_plugin.enumerate_gpus(self._state)
            for uuid, profile in gpu.mig_devices.items()
        ]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait, and play the DRA driver meanwhile."""
        waiting.until(lambda: self._driver.publish_new_pods() and holds(), what, within_s=120)

    def create_pod(self, name: str, profile: str) -> None:
        self.nodes.cluster.create(
            cluster_view.WatchedKind.POD, manifests.gpu_pod(name, f"nvidia.com/mig-{profile}")
        )

    def running(self) -> dict[str, str]:
        """Return the devices of the running pods with claims, by name of the pod."""
        devices = {}
        for pod in self.nodes.cluster.list(cluster_view.WatchedKind.POD):
            claim = (pod["status"].get("extendedResourceClaimStatus") or {}).get(
                "resourceClaimName"
            )
            if claim and objects.phase(pod) == "Running" and not objects.is_terminating(pod):
                claim_object = self.real.kube.get(f"{dra_driver.CLAIMS}/{claim}")
                (result,) = claim_object["status"]["allocation"]["devices"]["results"]
                devices[objects.name(pod)] = str(result["device"])
        return devices

    def release_claims(self) -> None:
        """Delete the claims of pods that are gone, as Kubernetes' controllers would."""
        there = {
            objects.uid(pod)
            for pod in self.real.kube.get("/api/v1/namespaces/default/pods")["items"]
        }
        for claim in self.real.kube.get(dra_driver.CLAIMS)["items"]:
            (owner,) = claim["metadata"]["ownerReferences"]
            if owner["uid"] not in there:
                path = f"{dra_driver.CLAIMS}/{objects.name(claim)}"
                self.real.kube.patch(path, {"metadata": {"finalizers": None}})
                with contextlib.suppress(Exception):
                    self.real.kube.delete(path)

    def apply(self, layout: str) -> None:
        """Request a layout, and return when it is active."""

        def has_finished() -> bool:
            status = self.nodes.status()
            return status.get("config") == layout and "finishedAt" in status

        self.nodes.set_labels({NODE: {well_known.CONFIG_LABEL: layout}})
        self.until(has_finished, f"an end for {layout}")
        assert self.nodes.status()["reason"] == "Applied", self.nodes.status()


@pytest.fixture
def scene(real_cluster: api_servers.EnvtestCluster) -> Iterator[ClaimsScene]:
    shape = sandbox_nodes.NodeShape(
        names=(NODE,), spec=f"1x{PRODUCT}", layouts=LAYOUTS, agent_options=("--custom-layouts",)
    )
    kube = real_cluster.kube
    with contextlib.ExitStack() as exits:
        for path in (dra_driver.CLAIMS, dra_driver.SLICES, dra_driver.CLASSES):
            exits.callback(kube.delete, path)
        nodes = exits.enter_context(sandbox_nodes.running(real_cluster, shape))
        # Before the device plugin has listed a MIG device: kubelet would keep the resource as 0,
        # and the scheduler would ask no driver before 1.36.
        nodes.set_labels(
            {NODE: {well_known.PLUGIN_DEPLOY_LABEL: "false", claims.DEPLOY_LABEL: "true"}}
        )
        nodes.cluster.create(cluster_view.WatchedKind.DAEMON_SET, dra_driver.DAEMON_SET)
        for row in hardware.template(hardware.find(PRODUCT)).profiles or ():
            if made := device_classes.of_profile(row.profile):
                kube.post(dra_driver.CLASSES, device_classes.manifest(row.profile, made))
        made_scene = ClaimsScene(real_cluster, nodes)
        made_scene.apply("seven")
        yield made_scene


def test_pods_with_plain_limits_get_devices_by_claims_and_keep_them(scene: ClaimsScene) -> None:
    requests = audit.Log(scene.real.server.audit_log)
    for name in ("one", "two"):
        scene.create_pod(name, "1g.5gb")
    scene.until(lambda: scene.running().keys() == {"one", "two"}, "the pods")
    before = scene.running()
    assert len(set(before.values())) == 2

    # A layout that keeps one of the two instances in use.
    scene.apply("one-small")
    (remaining,) = scene.running().items()
    assert remaining in before.items()
    assert len(requests.evicted_pods()) == 1

    scene.release_claims()
    with sandbox_nodes.installed_partitioner(scene.real):
        scene.nodes.opt_in()
        partitioner = scene.nodes.partitioner("--mode", "act", *_TIMES)
        try:
            scene.create_pod("large", "2g.10gb")
            scene.until(lambda: "large" in scene.running(), "room for the large pod")
        finally:
            partitioner.end()
    assert remaining in scene.running().items()
    assert len(requests.evicted_pods()) == 1
