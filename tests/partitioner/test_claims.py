"""The partitioner beside NVIDIA's DRA driver, and in clusters that know no claims."""

from collections.abc import Callable

import pytest

from mig_manager.core.node.devices import device_classes
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.partitioner.partitioner_rig import SOON_S, TERM_S, PartitionerRig
from tests.rigs import api_objects, waiting
from tests.rigs.cluster import dra_driver


def is_usable(rig: PartitionerRig) -> bool:
    cluster = rig.replicas[0].service.cluster
    return cluster.is_current and all(not node.unusable for node in cluster.nodes())


@pytest.mark.parametrize("last", ["class", "slice"])
def test_node_of_the_dra_driver_gets_devices_for_plain_limits(
    rig: PartitionerRig, last: str
) -> None:
    rig.by_claims.add("n1")
    rig.add_node()
    publish: dict[str, Callable[[], None]] = {
        "class": lambda: rig.add_classes("3g.20gb"),
        "slice": lambda: rig.publish_devices("n1"),
    }
    publish_last = publish.pop(last)
    (publish_first,) = publish.values()
    publish_first()
    replica = rig.replica()
    rig.add_pods("p1", profile="3g.20gb")
    rig.pass_time(SOON_S, replica)
    assert replica.kube.patches == []

    publish_last()
    waiting.until(lambda: is_usable(rig), "the devices of the node")
    rig.pass_time(SOON_S, replica)
    assert len(replica.kube.patches) == 1
    assert "3g.20gb" in (rig.requested_layout() or "")

    rig.answer("n1")
    rig.pass_time(TERM_S, replica)
    assert not is_usable(rig)
    rig.publish_devices("n1")
    waiting.until(lambda: is_usable(rig), "the devices of the node")
    rig.pass_time(TERM_S, replica)
    assert len(replica.kube.patches) == 1


def test_device_of_a_claim_is_never_destroyed(rig: PartitionerRig) -> None:
    rig.by_claims.add("n1")
    rig.add_node()
    rig.publish_devices("n1")
    rig.add_classes("3g.20gb")
    result = {"request": "r", "driver": dra_driver.NAME, "pool": "n1", "device": "gpu-0-mig-0"}
    rig.server.create(api_objects.a_claim(result, name="of-a-pod"))
    replica = rig.replica()
    waiting.until(lambda: is_usable(rig), "the devices of the node")
    rig.add_pods("p1", profile="3g.20gb")

    rig.pass_time(TERM_S, replica)
    assert replica.kube.patches == []
    rig.server.delete(kinds.CLAIMS, "of-a-pod", "default")
    rig.pass_time(TERM_S, replica)
    assert len(replica.kube.patches) == 1


def test_nodes_wait_if_their_claims_cannot_be_read(rig: PartitionerRig) -> None:
    rig.server.inject(apiserver.Fault(path="/resourceclaims", status=403, times=10**6))
    rig.by_claims.add("n1")
    rig.add_node()
    rig.publish_devices("n1")
    rig.add_classes("3g.20gb")
    replica = rig.replica()
    rig.add_pods("p1", profile="3g.20gb")

    def why() -> list[str]:
        return [node.unusable for node in replica.service.cluster.nodes()]

    expected = ["the partitioner cannot list ResourceClaims"]
    waiting.until(lambda: why() == expected, "the refusal")
    rig.pass_time(SOON_S, replica)

    assert replica.kube.patches == []


@pytest.mark.parametrize("status", [403, 404])
def test_cluster_that_serves_or_grants_no_classes_is_served_as_before(
    rig: PartitionerRig, status: int
) -> None:
    rig.server.inject(apiserver.Fault(path=device_classes.PATH, status=status, times=10**6))
    rig.add_node()
    replica = rig.replica()
    rig.add_pods("p1")

    rig.pass_time(SOON_S, replica)

    assert len(replica.kube.patches) == 1
    assert replica.service.cluster.last_contact_s < TERM_S
    assert rig.server.log.count("list", "resourceslices") == 0
    assert rig.server.log.count("list", "resourceclaims") == 0
