"""Three nodes, and the slots that limit how many of them change at once."""

import pytest

from tests import waiting
from tests.realnode import judging, manifests, rig, watching

pytestmark = pytest.mark.realnode

NODES = ("node-a", "node-b", "node-c")
SLOTS = 2


@pytest.fixture
def shape() -> rig.Shape:
    budget = manifests.settings(MIG_MANAGER_MAX_CONCURRENT_NODES=str(SLOTS))
    return rig.Shape(nodes=NODES, gpus="1xA100-SXM4-40GB", overlay="budget", patches=(budget,))


def profiles(cluster: rig.Cluster) -> dict[str, list[str]]:
    return {name: each.driver.profiles()[0] for name, each in cluster.machines.items()}


def test_agents_change_no_more_nodes_at_once_than_there_are_slots_when_all_are_labelled_together(
    cluster: rig.Cluster,
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

        assert watch.most_at_once(lambda node: node.is_tainted) == SLOTS
    assert profiles(cluster) == dict.fromkeys(NODES, ["2g.10gb"] * 3)
    for name in NODES:
        judging.assert_at_rest(cluster, name)
    leases = cluster.get("leases", "-n", "mig-manager")["items"]
    assert [lease["spec"].get("holderIdentity", "") for lease in leases] == [""] * SLOTS
