"""Three nodes: a rollout, and the slots that limit how many of them change at once."""

import json
import subprocess
import sys

import pytest

from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.realnode import contract_keys, manifests, node_state, real_cluster, watching
from tests.rigs import waiting

pytestmark = pytest.mark.realnode

NODES = ("node-a", "node-b", "node-c")
SLOTS = 2


@pytest.fixture
def shape() -> real_cluster.ClusterShape:
    budget = manifests.settings(MIG_MANAGER_MAX_CONCURRENT_NODES=str(SLOTS))
    return real_cluster.ClusterShape(
        nodes=NODES, gpus="1xA100-SXM4-40GB", overlay="budget", patches=(budget,)
    )


def profiles(cluster: real_cluster.RealCluster) -> dict[str, list[str]]:
    return {name: each.driver.profiles()[0] for name, each in cluster.machines.items()}


def roll_out(
    cluster: real_cluster.RealCluster, layout: str, *options: str
) -> tuple[int, dict[str, str]]:
    """Roll a layout out to all nodes; return the exit status and what it says of each node."""
    command = [sys.executable, "-m", "mig_manager", "rollout", layout, "--output-format=json"]
    where = ["--selector=nvidia.com/gpu.present=true", *options]
    kubeconfig = f"--kubeconfig={cluster.plane.kubeconfig('admin')}"
    done = subprocess.run(
        [*command, *where, kubeconfig], capture_output=True, text=True, check=False, timeout=180
    )
    nodes = json.loads(done.stdout)["nodes"]
    return done.returncode, {each["name"]: each["state"] for each in nodes}


def have_published(cluster: real_cluster.RealCluster) -> bool:
    """Check whether every agent has published its GPUs; a rollout skips nodes without an agent."""
    nodes = [cluster.get("node", name) for name in NODES]
    return all("mig-manager.io/gpus" in node["metadata"]["annotations"] for node in nodes)


def is_changing(node: watching.Version) -> bool:
    return bool(node.layout) and node.state not in {"success", "failed"}


def test_rollout_changes_one_node_at_a_time_and_resumes_after_a_failure(
    cluster: real_cluster.RealCluster,
) -> None:
    refuses = nvml_faults.Fault(
        function="nvmlDeviceCreateGpuInstance*", code=states.Code.NO_PERMISSION
    )
    cluster.machines["node-b"].driver.gpus.add_fault(refuses)
    before = profiles(cluster)
    waiting.until(lambda: have_published(cluster), "what GPUs the nodes have")

    with watching.nodes(cluster) as watch:
        status, nodes = roll_out(cluster, "all-1g.5gb", "--pause-on-failure")

        assert (status, nodes) == (
            1,
            dict(zip(NODES, ("success", "failed", "to-do"), strict=True)),
        )
        assert cluster.status("node-b")["reason"] == "NoPermission"
        assert profiles(cluster) == before | {"node-a": ["1g.5gb"] * 7}
        assert contract_keys.CONFIG_LABEL not in cluster.labels("node-c")

        # The agent does not retry a failure of this kind by itself.
        cluster.withdraw("node-b")
        assert roll_out(cluster, "all-1g.5gb") == (0, dict.fromkeys(NODES, "success"))

        assert watch.most_at_once(is_changing) == 1
        assert watch.most_at_once(lambda node: node.is_tainted) == 1
    assert profiles(cluster) == dict.fromkeys(NODES, ["1g.5gb"] * 7)
    for name in NODES:
        node_state.assert_at_rest(cluster, name)


def test_agents_change_no_more_nodes_at_once_than_there_are_slots(
    cluster: real_cluster.RealCluster,
) -> None:
    with watching.nodes(cluster) as watch:
        cluster.kubectl(
            "label", "nodes", "--all", "--overwrite", "nvidia.com/mig.config=all-2g.10gb"
        )
        waiting.until(
            lambda: (
                [cluster.status(name).get("reason") for name in NODES].count("SlotsTaken") == 1
            ),
            "a node that waits for a slot",
        )
        for name in NODES:
            assert cluster.outcome("all-2g.10gb", name)["state"] == "success"

        # A node that waits shows that all slots are taken; the taints need not overlap.
        assert 1 <= watch.most_at_once(lambda node: node.is_tainted) <= SLOTS
    assert profiles(cluster) == dict.fromkeys(NODES, ["2g.10gb"] * 3)
    for name in NODES:
        node_state.assert_at_rest(cluster, name)
    leases = cluster.get("leases", "-n", "mig-manager")["items"]
    assert [lease["spec"].get("holderIdentity", "") for lease in leases] == [""] * SLOTS
