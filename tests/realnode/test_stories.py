"""The shipped manifests and image on a real kubelet, containerd and NVIDIA device plugin."""

import pytest

from tests.realnode import rig

pytestmark = pytest.mark.realnode


def test_a_first_layout_becomes_schedulable_and_every_device_of_it_can_be_used(
    spoiled: rig.Cluster,
) -> None:
    cluster = spoiled
    cluster.request("all-1g.5gb")

    assert cluster.outcome("all-1g.5gb")["state"] == "success"
    assert cluster.driver.profiles() == [["1g.5gb"] * 7] * 2
    assert cluster.allocatable() == {"mig-1g.5gb": 14}
    cluster.deploy("all", "mig-1g.5gb", 14)
    assert len(set().union(*cluster.node.assigned().values())) == 14


def test_no_pod_is_given_a_device_of_the_layout_before(cluster: rig.Cluster) -> None:
    cluster.ensure_layout("all-1g.5gb")
    cluster.deploy("many", "mig-1g.5gb", 14)

    cluster.request("all-7g.40gb")

    assert cluster.outcome("all-7g.40gb")["state"] == "success"
    assert cluster.refused() == []
