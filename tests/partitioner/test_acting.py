"""What the partitioner writes, and when: one patch for one decision, by one replica."""

import pathlib

import pytest

from mig_manager import errors
from mig_manager.core.layout import layout_parser, selection
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import well_known
from mig_manager.core.partitioning import demand
from mig_manager.sandbox.apiserver import kinds
from tests.partitioner.partitioner_rig import SOON_S, TERM_S, PartitionerRig
from tests.rigs import layout_table


def test_pending_pod_gets_room_by_one_patch(rig: PartitionerRig) -> None:
    rig.add_node()
    replica = rig.stepping_replica()
    assert replica.kube.patches == []
    version = rig.node()["metadata"]["resourceVersion"]

    rig.add_pods("p1", "p2")
    rig.pass_time(SOON_S, replica)

    (body,) = replica.kube.patches
    text = body["metadata"]["annotations"].pop(well_known.LAYOUT_ANNOTATION)
    assert body == {
        "metadata": {
            "resourceVersion": version,
            "labels": {well_known.CONFIG_LABEL: well_known.CUSTOM_LAYOUT},
            "annotations": {},
        }
    }
    (layout,) = layout_parser.parse(text, source="annotation").layouts.values()
    (desired,) = selection.select(layout, rig.gpus["n1"]).values()
    assert sum(desired.counts.values()) >= 2
    (event,) = rig.events()
    assert event["reason"] == "RepartitioningRequested"
    assert event["involvedObject"]["name"] == "n1"
    assert "default/p1, default/p2" in event["message"]
    assert "1x 7g.40gb" in event["message"]


def test_a_node_under_change_or_with_room_gets_no_further_request(
    rig: PartitionerRig,
) -> None:
    rig.add_node()
    rig.add_pods("p1")
    replica = rig.replica()
    rig.pass_time(TERM_S, replica)
    assert len(replica.kube.patches) == 1

    rig.answer("n1")
    rig.pass_time(TERM_S, replica)
    rig.bind("p1", "n1")
    rig.pass_time(TERM_S, replica)

    assert len(replica.kube.patches) == 1
    assert rig.metric(replica, "changes_total", result="requested") == 1
    assert rig.metric(replica, "wait_seconds_count") == 1
    assert rig.metric(replica, "wait_seconds_sum") > TERM_S
    assert rig.metric(replica, "answers_total", result="applied") == 1


def test_wait_of_a_pod_that_is_bound_during_a_decision_is_measured(
    rig: PartitionerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.add_node()
    rig.add_pods("p1")
    replica = rig.replica()
    rig.pass_time(TERM_S, replica)
    rig.answer("n1")
    rig.sync(replica)
    pods = replica.service.cluster.pods

    def bind_after_reading() -> tuple[demand.PendingPod | demand.PodOfNode, ...]:
        monkeypatch.undo()
        listed = pods.items()
        rig.bind("p1", "n1")
        rig.sync(replica)
        return listed

    monkeypatch.setattr(pods, "items", bind_after_reading)
    rig.clock.now_s += TERM_S
    replica.service.loop.step()
    rig.pass_time(TERM_S, replica)

    assert rig.metric(replica, "wait_seconds_count") == 1


def test_pod_that_ends_no_longer_counts_and_is_not_watched(rig: PartitionerRig) -> None:
    rig.add_node()
    rig.add_pods("p1", "p2")
    replica = rig.replica()
    for pod in ("p1", "p2"):
        rig.bind(pod, "n1")
    rig.pass_time(SOON_S, replica)
    requests = replica.service.cluster.requests
    assert dict(requests.of("n1"))["pods"] == 2

    rig.end("p1", "Succeeded")
    rig.end("p2", "Failed")
    rig.pass_time(SOON_S, replica)

    assert requests.of("n1") == ()
    assert not [*replica.service.cluster.pods.items()]
    watches = rig.server.log.requests(verb="watch", resource="pods")
    assert {each.query["fieldSelector"] for each in watches} == {
        "status.phase!=Succeeded,status.phase!=Failed"
    }


def test_demand_that_keeps_changing_is_decided_on_after_the_longest_wait(
    rig: PartitionerRig,
) -> None:
    rig.add_node()
    replica = rig.stepping_replica(longest_wait_s="5")
    asked_after = None

    for second in range(10):
        rig.add_pods(f"p{second}")
        rig.pass_time(1, replica)
        if replica.kube.patches and asked_after is None:
            asked_after = second

    assert asked_after in (4, 5)


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        ({well_known.PARTITIONING_LABEL: "no"}, {}),
        ({"pool": "b"}, {"node_selector": "pool in (a)"}),
    ],
    ids=["not opted in", "not selected"],
)
def test_a_node_that_is_not_the_partitioners_is_never_changed(
    rig: PartitionerRig, labels: dict[str, str], options: dict[str, str]
) -> None:
    rig.add_node(labels=labels)
    rig.add_pods("p1")
    replica = rig.replica(**options)

    rig.pass_time(TERM_S, replica)

    assert replica.kube.patches == []


def test_a_pod_that_opts_out_gets_neither_room_nor_an_event(rig: PartitionerRig) -> None:
    rig.add_node()
    rig.add_pods("p1", **{well_known.PARTITIONING_LABEL: "off"})
    rig.add_pods("p2", profile="9g.99gb", **{well_known.PARTITIONING_LABEL: "off"})
    replica = rig.replica()

    rig.pass_time(TERM_S, replica)

    assert replica.kube.patches == []
    assert rig.events() == []


@pytest.mark.slow
def test_devices_are_ready_for_a_pod_like_those_that_came_before(rig: PartitionerRig) -> None:
    rig.add_node(layout="1g.5gb")
    rig.add_pods("p0", profile="7g.40gb")
    rig.bind("p0", "n1")
    replica = rig.replica(prepare_for_s="35")
    rig.pass_time(TERM_S, replica)
    rig.end("p0", "Succeeded")
    rig.pass_time(TERM_S, replica)
    assert replica.kube.patches == []  # The pods of the first list have not just arrived.

    rig.add_pods("p1", profile="7g.40gb")
    rig.bind("p1", "n1")
    rig.pass_time(SOON_S, replica)
    rig.end("p1", "Succeeded")
    rig.pass_time(TERM_S, replica)

    assert len(replica.kube.patches) == 1
    rig.answer("n1")
    rig.pass_time(TERM_S, replica)
    assert resources.counts(rig.gpus["n1"])["nvidia.com/mig-7g.40gb"] == 1
    assert len(replica.kube.patches) == 1
    rig.pass_time(1300, replica)
    decided = rig.metric(replica, "decisions_total")
    rig.pass_time(600, replica)
    assert rig.metric(replica, "decisions_total") == decided  # No pod is likely any more.


@pytest.mark.parametrize(
    ("created", "ahead_s"),
    [("2026-02-28T12:00:00Z", 0.0), ("2026-03-01T00:00:00Z", 7200.0)],
    ids=["gated until now", "our clock is ahead"],
)
def test_no_gpu_is_on_hold_for_a_pod_that_has_just_begun_to_wait(
    rig: PartitionerRig, created: str, ahead_s: float
) -> None:
    rig.clock.jump_s = ahead_s
    rig.add_node(layout="1g.5gb")
    rig.add_pods("user")
    rig.bind("user", "n1")
    (gpu,) = rig.gpus["n1"]
    rig.in_use["n1"] = {gpu.uuid: frozenset(gi.placement for gi in gpu.gpu_instances)}
    rig.publish("n1")
    replica = rig.stepping_replica()
    rig.add_pods("large", profile="7g.40gb")
    age = {"metadata": {"creationTimestamp": created}}
    rig.server.merge(kinds.PODS, "large", age, namespace="default")
    rig.add_pods("small", profile="2g.10gb")
    rig.pass_time(SOON_S, replica)

    assert rig.requested_layout()


def test_idle_node_returns_to_the_base_layout(rig: PartitionerRig) -> None:
    rig.add_node(layout="1g.5gb")
    replica = rig.replica(base_layout="all-7g.40gb", merge_back_after_s="300")

    rig.pass_time(290, replica)
    assert replica.kube.patches == []
    rig.pass_time(30, replica)
    assert len(replica.kube.patches) == 1
    rig.answer("n1")
    rig.pass_time(400, replica)

    assert resources.counts(rig.gpus["n1"]) == {"nvidia.com/mig-7g.40gb": 1}
    assert len(replica.kube.patches) == 1


@pytest.mark.parametrize("layout", ["no-such-layout", "all-9g.99gb"])
def test_a_base_layout_that_a_node_cannot_have_leaves_its_instances(
    rig: PartitionerRig, layout: str
) -> None:
    rig.add_node(layout="1g.5gb")
    replica = rig.replica(base_layout=layout, merge_back_after_s="60")

    rig.pass_time(200, replica)

    assert replica.kube.patches == []


def test_a_base_layout_that_its_file_lacks_is_named_at_the_start(
    rig: PartitionerRig, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "layouts.yaml"
    file.write_text(layout_table.document(["all-1g.5gb"]))

    with pytest.raises(errors.LayoutError, match="unknown layout 'all-7g"):
        rig.replica(config_file=str(file), base_layout="all-7g.40gb", merge_back_after_s="60")
