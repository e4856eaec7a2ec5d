"""The shipped scheduler profile on the real kube-scheduler, with the rights of its account."""

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from mig_manager.sandbox.node import manifests, objects
from tests.rigs import api_objects, waiting
from tests.rigs.cluster import account_rights, api_servers, deploy_files
from tests.rigs.cluster.apirig import PODS

pytestmark = pytest.mark.cluster

CONFIG = deploy_files.DEPLOY / "scheduler" / "config.yaml"
ACCOUNT = account_rights.Account(namespace="mig-manager", name="mig-scheduler")
REPLICA_SETS = "/apis/apps/v1/namespaces/default/replicasets"
NODES = ("node-a", "node-b", "node-c")
RESOURCE = "nvidia.com/mig-1g.5gb"
COUNT = 6


@pytest.fixture(scope="module")
def real(
    real_cluster: api_servers.EnvtestCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[api_servers.EnvtestCluster]:
    """Three nodes with seven devices each, the stock scheduler, and the shipped one."""
    folder = tmp_path_factory.mktemp("scheduler")
    kube = real_cluster.kube
    made = [
        each
        for each in deploy_files.manifest_objects("scheduler/scheduler.yaml")
        if not is_pod(each)
    ]
    for obj in made:
        kube.post(deploy_files.collection(obj), obj)
    for name in NODES:
        labels = {"kubernetes.io/hostname": name}
        path = f"/api/v1/nodes/{name}"
        kube.post("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        resources = {"cpu": "4", "memory": "8Gi", "pods": "110", RESOURCE: "7"}
        kube.patch(f"{path}/status", {"status": {"capacity": resources, "allocatable": resources}})
        # A new node has the taint of one that is not ready.
        kube.patch(path, {"spec": {"taints": None}})
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    file = real_cluster.kubeconfig(folder / "kubeconfig", ACCOUNT)
    config["clientConnection"] = {"kubeconfig": str(file)}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with contextlib.ExitStack() as exits:
        exits.callback(real_cluster.clear)
        for obj in reversed(made):
            path = f"{deploy_files.collection(obj)}/{objects.name(obj)}"
            exits.callback(kube.delete, path)
        exits.enter_context(real_cluster.server.scheduling())
        exits.enter_context(real_cluster.server.scheduling(folder / "config.yaml"))
        yield real_cluster


def is_pod(obj: api_objects.Object) -> bool:
    return "spec" in obj


def replica_set(real: api_servers.EnvtestCluster, name: str) -> dict[str, Any]:
    """Create the owner of pods, and return its reference."""
    template = manifests.gpu_pod(name, RESOURCE, labels={"app": name})
    spec = {
        "replicas": COUNT,
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": template["spec"]},
    }
    made = real.kube.post(REPLICA_SETS, {"metadata": {"name": name}, "spec": spec})
    kind = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "controller": True}
    return {**kind, "name": name, "uid": objects.uid(made)}


@pytest.mark.parametrize("has_owner", [False, True])
@pytest.mark.parametrize(
    ("scheduler", "has_affinity", "expected"),
    [
        ("default-scheduler", False, 3),
        ("default-scheduler", True, 1),
        ("mig-packing", False, 1),
    ],
)
def test_small_pods_fill_one_node_with_the_profile_or_an_affinity(
    real: api_servers.EnvtestCluster,
    scheduler: str,
    expected: int,
    *,
    has_affinity: bool,
    has_owner: bool,
) -> None:
    name = f"{scheduler}-{has_affinity}-{has_owner}".lower()
    with contextlib.ExitStack() as exits:
        exits.callback(real.kube.delete, PODS, {"gracePeriodSeconds": 0})
        exits.callback(real.kube.delete, REPLICA_SETS)
        owners = [replica_set(real, name)] if has_owner else []
        for number in range(COUNT):
            pod = manifests.gpu_pod(f"{name}-{number}", RESOURCE, labels={"app": name})
            pod["metadata"]["ownerReferences"] = owners
            pod["spec"]["schedulerName"] = scheduler
            pod["spec"]["affinity"] = affinity(name) if has_affinity else {}
            real.kube.post(PODS, pod)

        waiting.until(lambda: len(nodes_of_pods(real)) == COUNT, "a node for every pod")
        spread = collections.Counter(nodes_of_pods(real))
        assert len(spread) == expected, spread


def affinity(app: str) -> dict[str, Any]:
    """Return a preference for nodes with pods of the same app."""
    term = {
        "labelSelector": {"matchLabels": {"app": app}},
        "topologyKey": "kubernetes.io/hostname",
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def nodes_of_pods(real: api_servers.EnvtestCluster) -> list[str]:
    pods = real.kube.get(PODS)["items"]
    return [name for each in pods if (name := objects.node_name(each))]
