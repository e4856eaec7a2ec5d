"""NVIDIA's GPU operator deploys the agent in the place of its own MIG manager."""

from collections.abc import Iterator

import pytest

from tests import waiting
from tests.realnode import gpu_operator, images, judging, rig

pytestmark = pytest.mark.realnode

MANAGER = gpu_operator.MANAGER


@pytest.fixture
def shape() -> rig.Shape:
    return rig.Shape(overlay=None)


@pytest.fixture
def operator(cluster: rig.Cluster) -> Iterator[gpu_operator.Operator]:
    """The operator with our image; afterwards the node is as it wants it."""
    found = gpu_operator.Operator(cluster)
    if not cluster.kubectl("get", "namespace", "--ignore-not-found", gpu_operator.NAMESPACE):
        found.install()
        found.use_ours()
        # The operator requests this layout for a node without the label.
        cluster.outcome("all-disabled")
    yield found
    judging.assert_released(cluster)
    waiting.until(found.is_ready, "a ClusterPolicy that is ready", within_s=90)


def test_a_layout_becomes_schedulable_through_the_operators_own_daemon_set(
    cluster: rig.Cluster, operator: gpu_operator.Operator
) -> None:
    agent = operator.awaited(MANAGER, images.AGENT)
    requests = cluster.listen()

    cluster.request("all-1g.5gb")

    assert cluster.outcome("all-1g.5gb")["state"] == "success"
    assert cluster.driver.profiles() == [["1g.5gb"] * 7] * 2
    assert cluster.allocatable() == {"mig-1g.5gb": 14}
    assert requests.evicted() == []
    assert operator.awaited(MANAGER, images.AGENT)["uid"] == agent["uid"]
