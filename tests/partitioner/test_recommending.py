"""The partitioner that recommends: it changes nothing."""

import pytest

from testkit import apiserver
from tests.partitioner import partitioner_rig
from tests.partitioner.partitioner_rig import SOON_S, TERM_S, PartitionerRig

RECOMMENDED = "RepartitioningRecommended"


def test_recommend_changes_nothing_and_needs_no_patch_right() -> None:
    def authorize(access: apiserver.Access) -> bool:
        return access.token != "a" or access.verb != "patch"  # noqa: S105 - a name

    server = apiserver.ApiServer(authorizer=authorize, bookmark_period_s=0.05)
    with partitioner_rig.serving(server) as rig:
        rig.add_node()
        rig.add_pods("p1")
        rig.add_pods("big", profile="9g.99gb")
        before = rig.node()
        replica = rig.replica(mode="recommend")

        rig.pass_time(3 * TERM_S, replica)

        assert rig.patches() == []
        assert rig.node() == before
        events = {each["involvedObject"]["name"]: each["reason"] for each in rig.events()}
        assert events == {
            "mig-manager-partitioner": RECOMMENDED,
            "big": "NoRoomPossible",
        }
        assert len(rig.events()) == 2
        assert rig.metric(replica, "changes_total", result="recommended") == 1
        assert rig.metric(replica, "pending_pods", reason="change") == 1
        assert rig.metric(replica, "pending_pods", reason="no-room-possible") == 1


def test_a_recommendation_names_the_pods_that_a_change_would_serve(rig: PartitionerRig) -> None:
    rig.add_nodes("n1", "n2")
    rig.add_pods("p1", "p2")

    rig.pass_time(SOON_S, rig.replica(mode="recommend", max_unavailable="2"))

    (event,) = rig.events(RECOMMENDED)
    assert event["involvedObject"]["kind"] == "Lease"
    assert event["metadata"]["namespace"] == "mig-manager"
    assert "a change would make room for 2 pods; node n" in event["message"]
    assert "for default/p1, default/p2" in event["message"]


@pytest.mark.slow
def test_recommendations_are_summed_up_every_hour(rig: PartitionerRig) -> None:
    rig.add_nodes("n1", "n2")
    rig.add_pods("p1", "p2")
    replica = rig.stepping_replica(mode="recommend", max_unavailable="2")
    (first,) = rig.events(RECOMMENDED)

    rig.add_pods("p3", profile="3g.20gb")
    rig.pass_time(1800, replica)
    rig.bind("p1", "n1")
    rig.pass_time(1790, replica)
    assert len(rig.events(RECOMMENDED)) == 1
    rig.pass_time(20, replica)

    messages = {each["message"] for each in rig.events(RECOMMENDED)}
    (second,) = messages - {first["message"]}
    assert second.startswith("in 60 min, ")
    assert "new change" in second
    assert "3 pods waited 2.5 h in all without them" in second
    assert rig.metric(replica, "recommended_pods_total") == 3
    waited_s = rig.metric(replica, "unserved_seconds_total")
    assert waited_s == pytest.approx(2.5 * 3600, rel=0.01)


@pytest.mark.slow
def test_recommendations_are_summed_up_once_more_after_the_last_pod(rig: PartitionerRig) -> None:
    rig.add_node("n1")
    rig.add_pods("p1")
    replica = rig.stepping_replica(mode="recommend")
    assert len(rig.events(RECOMMENDED)) == 1

    rig.bind("p1", "n1")

    for _ in range(2):
        rig.pass_time(3700, replica)
        assert len(rig.events(RECOMMENDED)) == 2


def test_nothing_is_recommended_for_pods_that_are_only_likely(rig: PartitionerRig) -> None:
    rig.add_node(layout="1g.5gb")
    replica = rig.replica(mode="recommend", prepare_for_s="35")
    rig.pass_time(TERM_S, replica)

    rig.add_pods("p1", profile="7g.40gb")
    rig.bind("p1", "n1")
    rig.pass_time(SOON_S, replica)
    rig.end("p1", "Succeeded")
    rig.pass_time(TERM_S, replica)

    assert rig.metric(replica, "changes_total", result="recommended") == 0
