"""What the partitioner writes, and when: one patch for one decision, by one replica."""

import json
import threading

import pytest
import structlog.testing

from mig_manager.adapters import host
from mig_manager.core.fleet import decisions
from mig_manager.core.layout import config, layouts
from mig_manager.core.node import well_known
from mig_manager.partitioner import announcer, main
from mig_manager.sandbox.apiserver import resources as kinds
from testkit import apiserver
from tests import waiting
from tests.node import scenes
from tests.partitioner import rig as rigs
from tests.partitioner.rig import SOON_S, TERM_S, Rig


def test_pending_pod_gets_room_by_one_patch(rig: Rig) -> None:
    rig.add_node()
    own = rig.replica()
    rig.pass_time(SOON_S, own)
    assert own.kube.patches == []
    version = rig.node()["metadata"]["resourceVersion"]

    rig.add_pods("p1", "p2")
    rig.pass_time(SOON_S, own)

    (body,) = own.kube.patches
    text = body["metadata"]["annotations"].pop(well_known.LAYOUT_ANNOTATION)
    assert body == {
        "metadata": {
            "resourceVersion": version,
            "labels": {well_known.CONFIG_LABEL: well_known.CUSTOM_LAYOUT},
            "annotations": {},
        }
    }
    (layout,) = config.parse(text, source="annotation").layouts.values()
    (wanted,) = layouts.select(layout, rig.gpus["n1"]).values()
    assert sum(wanted.counts.values()) >= 2
    (event,) = rig.events()
    assert event["reason"] == "RepartitioningRequested"
    assert event["involvedObject"]["name"] == "n1"
    assert "default/p1, default/p2" in event["message"]
    assert "1x 7g.40gb" in event["message"]


def test_a_node_under_change_and_one_that_has_room_are_asked_nothing_more(rig: Rig) -> None:
    rig.add_node()
    rig.add_pods("p1")
    own = rig.replica()
    rig.pass_time(TERM_S, own)
    assert len(own.kube.patches) == 1

    rig.answer("n1")
    rig.pass_time(TERM_S, own)
    rig.bind("p1", "n1")
    rig.pass_time(TERM_S, own)

    assert len(own.kube.patches) == 1
    assert rig.metric(own, "changes_total", result="requested") == 1
    assert rig.metric(own, "wait_seconds_count") == 1
    assert rig.metric(own, "answers_total", result="applied") == 1


def test_pod_that_ends_no_longer_counts_and_is_not_watched(rig: Rig) -> None:
    rig.add_node()
    rig.add_pods("p1", "p2")
    own = rig.replica()
    for pod in ("p1", "p2"):
        rig.bind(pod, "n1")
    rig.pass_time(SOON_S, own)
    requests = own.service.cluster.requests
    assert dict(requests.of("n1"))["pods"] == 2

    rig.end("p1", "Succeeded")
    rig.end("p2", "Failed")
    rig.pass_time(SOON_S, own)

    assert requests.of("n1") == ()
    kept = {pod.name for pod in own.service.cluster._pods.items()}
    assert kept == set()
    watches = rig.server.log.requests(verb="watch", resource="pods")
    assert {each.query["fieldSelector"] for each in watches} == {
        "status.phase!=Succeeded,status.phase!=Failed"
    }


def test_demand_that_keeps_changing_is_decided_on_after_the_longest_wait(rig: Rig) -> None:
    rig.add_node()
    own = rig.replica(longest_wait_s="5")
    rig.pass_time(SOON_S, own)
    asked_after = None

    for second in range(10):
        rig.add_pods(f"p{second}")
        rig.pass_time(1, own)
        if own.kube.patches and asked_after is None:
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
    rig: Rig, labels: dict[str, str], options: dict[str, str]
) -> None:
    rig.add_node(labels=labels)
    rig.add_pods("p1")
    own = rig.replica(**options)

    rig.pass_time(TERM_S, own)

    assert own.kube.patches == []


def test_a_pod_that_opts_out_gets_neither_room_nor_an_event(rig: Rig) -> None:
    rig.add_node()
    rig.add_pods("p1", **{well_known.PARTITIONING_LABEL: "off"})
    rig.add_pods("p2", profile="9g.99gb", **{well_known.PARTITIONING_LABEL: "off"})
    own = rig.replica()

    rig.pass_time(TERM_S, own)

    assert own.kube.patches == []
    assert rig.events() == []


def test_devices_are_ready_for_a_pod_like_those_that_came_before(rig: Rig) -> None:
    rig.add_node(layout="1g.5gb")
    rig.add_pods("p0", profile="7g.40gb")
    rig.bind("p0", "n1")
    own = rig.replica(prepare_for_s="60")
    rig.pass_time(TERM_S, own)
    rig.end("p0", "Succeeded")
    rig.pass_time(TERM_S, own)
    assert own.kube.patches == []  # The pods of the first list have not just arrived.

    rig.add_pods("p1", profile="7g.40gb", **{well_known.PARTITIONING_LABEL: "off"})
    rig.bind("p1", "n1")
    rig.pass_time(SOON_S, own)
    rig.end("p1", "Succeeded")
    rig.pass_time(TERM_S, own)

    assert len(own.kube.patches) == 1
    rig.answer("n1")
    rig.pass_time(TERM_S, own)
    assert rigs.counts(rig.gpus["n1"])["nvidia.com/mig-7g.40gb"] == 1
    assert len(own.kube.patches) == 1


def test_idle_node_returns_to_the_base_layout(rig: Rig) -> None:
    rig.add_node(layout="1g.5gb")
    own = rig.replica(base_layout="all-7g.40gb", merge_back_after_s="300")

    rig.pass_time(290, own)
    assert own.kube.patches == []
    rig.pass_time(30, own)
    assert len(own.kube.patches) == 1
    rig.answer("n1")
    rig.pass_time(400, own)

    assert rigs.counts(rig.gpus["n1"]) == {"nvidia.com/mig-7g.40gb": 1}
    assert len(own.kube.patches) == 1


@pytest.mark.parametrize("layout", ["no-such-layout", "all-9g.99gb"])
def test_a_base_layout_that_a_node_cannot_have_leaves_its_instances(rig: Rig, layout: str) -> None:
    rig.add_node(layout="1g.5gb")
    own = rig.replica(base_layout=layout, merge_back_after_s="60")

    rig.pass_time(200, own)

    assert own.kube.patches == []


# -- recommend -----------------------------------------------------------------------------------


def test_recommend_changes_nothing_and_needs_no_patch_right() -> None:
    def authorize(access: apiserver.Access) -> bool:
        return access.token != "a" or access.verb != "patch"  # noqa: S105 - a name

    server = apiserver.ApiServer(authorizer=authorize, bookmark_period_s=0.05)
    with rigs.serving(server) as rig:
        rig.add_node()
        rig.add_pods("p1")
        rig.add_pods("big", profile="9g.99gb")
        before = rig.node()
        own = rig.replica(mode="recommend")

        rig.pass_time(3 * TERM_S, own)

        assert rig.patches() == []
        assert rig.node() == before
        events = {each["involvedObject"]["name"]: each["reason"] for each in rig.events()}
        assert events == {
            "mig-manager-partitioner": "RepartitioningRecommended",
            "big": "NoRoomPossible",
        }
        assert len(rig.events()) == 2
        assert rig.metric(own, "changes_total", result="recommended") == 1
        assert rig.metric(own, "pending_pods", reason="change") == 1
        assert rig.metric(own, "pending_pods", reason="no-room-possible") == 1


def test_recommendations_are_summed_up_every_hour(rig: Rig) -> None:
    rig.add_node("n1")
    rig.add_node("n2")
    rig.add_pods("p1", "p2")
    own = rig.replica(mode="recommend", max_unavailable="2")
    rig.pass_time(SOON_S, own)
    (first,) = rig.events("RepartitioningRecommended")
    assert first["involvedObject"]["kind"] == "Lease"
    assert first["metadata"]["namespace"] == "mig-manager"
    assert "a change would make room for 2 pods; node n" in first["message"]
    assert "for default/p1, default/p2" in first["message"]

    rig.add_pods("p3", profile="3g.20gb")
    rig.pass_time(1800, own)
    rig.bind("p1", "n1")
    rig.pass_time(1790, own)
    assert len(rig.events("RepartitioningRecommended")) == 1
    rig.pass_time(20, own)

    messages = {each["message"] for each in rig.events("RepartitioningRecommended")}
    (second,) = messages - {first["message"]}
    assert second.startswith("in 60 min, ")
    assert "new change" in second
    assert "3 pods waited 2.5 h in all without them" in second
    assert rig.metric(own, "recommended_pods_total") == 3
    waited_s = rig.metric(own, "unserved_seconds_total")
    assert waited_s == pytest.approx(2.5 * 3600, rel=0.01)
    for name in ("p2", "p3"):
        rig.bind(name, "n1")
    rig.pass_time(3700, own)
    assert len(rig.events("RepartitioningRecommended")) == 3
    rig.pass_time(3700, own)
    assert len(rig.events("RepartitioningRecommended")) == 3


# -- replicas ------------------------------------------------------------------------------------


def test_second_replica_takes_over_without_a_repeated_request(rig: Rig) -> None:
    rig.add_node("n1")
    rig.add_node("n2")
    rig.add_pods("p1")
    rig.add_pods("big", profile="9g.99gb")
    first, second = rig.replica("a"), rig.replica("b")
    rig.pass_time(SOON_S, first, second)
    assert (len(first.kube.patches), len(second.kube.patches)) == (1, 0)
    events = rig.events()
    assert (rig.metric(first, "leader"), rig.metric(second, "leader")) == (1, 0)

    first.service.leader.release()
    rig.kill(first)
    rig.pass_time(TERM_S, second)

    assert second.leads
    assert second.kube.patches == []
    assert rig.events() == events


def test_new_leader_awaits_the_change_of_the_former_one(rig: Rig) -> None:
    rig.add_node("n1")
    rig.add_node("n2")
    rig.add_pods("p1")
    first, second = (rig.replica(name, max_unavailable="2") for name in "ab")
    rig.pass_time(SOON_S, first, second)
    first.service.leader.release()
    rig.kill(first)

    rig.pass_time(TERM_S, second)
    assert second.leads
    assert second.kube.patches == []
    (asked,) = (name for name in ("n1", "n2") if rig.requested(name))
    rig.answer(asked)
    rig.bind("p1", asked)
    rig.add_pods("p2", profile="7g.40gb")
    rig.pass_time(TERM_S, second)

    assert second.kube.patches == []
    rig.add_pods("p3", profile="3g.20gb")
    rig.pass_time(TERM_S, second)
    assert len(second.kube.patches) == 1


@pytest.mark.parametrize("is_sent", [False, True], ids=["before it is sent", "after"])
def test_whatever_request_a_leader_is_killed_at_nothing_is_asked_twice(*, is_sent: bool) -> None:
    kill_at = 0
    has_survived = False
    while not has_survived:
        kill_at += 1
        with rigs.serving() as rig, structlog.testing.capture_logs():
            rig.add_node("n1")
            rig.add_node("n2")
            rig.add_pods("p1", "p2", "p3")
            rig.add_pods("big", profile="9g.99gb")
            first, second = (rig.replica(name, max_unavailable="2") for name in "ab")
            first.kube.kill_at, first.kube.is_sent = kill_at, is_sent
            try:
                rig.pass_time(SOON_S, first, second)
                has_survived = True
            except scenes.Killed:
                pass
            rig.kill(first)

            rig.pass_time(TERM_S + SOON_S, second)
            rig.answer("n1" if rig.requested("n1") else "n2")
            rig.pass_time(TERM_S, second)

            assert second.leads
            assert len(rig.patches()) == 1, kill_at
            assert len(rig.events("NoRoomPossible")) == 1, kill_at
            assert len(rig.events("RepartitioningRequested")) <= 1, kill_at
    assert kill_at >= 5


def test_the_end_of_a_process_releases_the_lease_at_once(rig: Rig) -> None:
    replica = rig.replica("a")
    service = main.Service(
        replica.service._settings, replica.kube, identity="a", clock=host.SystemClock()
    )
    thread = threading.Thread(target=service.serve, daemon=True)
    thread.start()
    waiting.until(lambda: service.leader.may_write, "leadership")

    service.stop()
    thread.join(60)

    lease = rig.server.get(kinds.LEASES, "mig-manager-partitioner", "mig-manager")
    assert not thread.is_alive()
    assert lease["spec"]["holderIdentity"] == ""


# -- a storm -------------------------------------------------------------------------------------


def test_a_storm_of_pods_costs_few_requests_and_few_events(rig: Rig) -> None:
    rig.add_node("n1")
    own = rig.replica()
    rig.pass_time(SOON_S, own)
    rig.server.log.clear()

    rig.add_pods(*(f"p{number}" for number in range(250)))
    rig.add_pods(*(f"big{number}" for number in range(250)), profile="9g.99gb")
    rig.pass_time(60, own)

    assert len(rig.patches()) == 1
    assert len(rig.events("RepartitioningRequested")) == 1
    # Twenty at once, and ten a minute.
    assert 20 <= len(rig.events("NoRoomPossible")) <= 31
    withheld = rig.metric(own, "withheld_events")
    assert withheld == 250 - len(rig.events("NoRoomPossible"))
    # Beside those: the Lease, each ten seconds.
    assert len(rig.server.log.requests()) <= 1 + 1 + 31 + 7


def test_events_about_requests_are_within_the_allowance(rig: Rig) -> None:
    own = rig.replica()
    rig.pass_time(SOON_S, own)
    ours = announcer.Announcer(own.service.cluster, own.service.leader, rig.clock)
    for number in range(40):
        ours.announce_request(
            decisions.Change(
                node=f"n{number}",
                version="7",
                layout="",
                content_hash="",
                pods=(),
                created={},
                destroyed={},
                why="room for 1 pod",
            )
        )

    assert len(rig.events("RepartitioningRequested")) == 20


def test_pods_that_can_never_fit_get_one_event_each(rig: Rig) -> None:
    rig.add_node("n1")
    rig.add_pods("big1", "big2", profile="9g.99gb")
    own = rig.replica()

    for number in range(5):
        rig.add_pods(f"other{number}", profile="8g.88gb")
        rig.pass_time(20, own)
        rig.server.delete(kinds.PODS, f"other{number}", "default")

    names = [each["involvedObject"]["name"] for each in rig.events("NoRoomPossible")]
    assert sorted(names) == ["big1", "big2", *(f"other{number}" for number in range(5))]


# -- failures ------------------------------------------------------------------------------------


def test_a_node_that_changed_since_it_was_seen_is_decided_on_again(rig: Rig) -> None:
    rig.add_node()
    rig.add_pods("p1")
    own = rig.replica()
    fault = apiserver.Fault(verb="patch", resource="nodes", status=409)
    rig.server.inject(fault)

    rig.pass_time(SOON_S, own)
    assert rig.requested() is None
    rig.touch("n1")
    rig.pass_time(SOON_S, own)

    assert rig.requested()
    assert rig.metric(own, "changes_total", result="conflict") == 1
    assert len(rig.events()) == 1


@pytest.mark.parametrize(
    "fault",
    [
        apiserver.Fault(status=500),
        apiserver.Fault(status=500, is_carried_out=True),
        apiserver.Fault(status=503, times=4),
        apiserver.Fault(status=429, retry_after_s=20),
        apiserver.Fault(reset=True, is_carried_out=True),
        apiserver.Fault(garbles=True, is_carried_out=True),
    ],
    ids=str,
)
def test_a_failed_patch_is_made_up_for_once(rig: Rig, fault: apiserver.Fault) -> None:
    rig.add_node("n1")
    rig.add_node("n2")
    rig.add_pods("p1")
    own = rig.replica(max_unavailable="2")
    values = {name: getattr(fault, name) for name in fault.__dataclass_fields__}
    rig.server.inject(apiserver.Fault(**values | {"verb": "patch", "resource": "nodes"}))

    with structlog.testing.capture_logs():
        rig.pass_time(TERM_S, own)
    (asked,) = (name for name in ("n1", "n2") if rig.requested(name))
    rig.answer(asked)
    rig.pass_time(TERM_S, own)

    assert len({json.dumps(body) for body in own.kube.patches}) == 1
    assert len(rig.events("RepartitioningRequested")) <= 1


def test_forbidden_node_is_left_alone_and_others_are_served(rig: Rig) -> None:
    rig.add_node("n1")
    rig.add_node("n2")
    rig.add_pods("p1")
    own = rig.replica()
    refusal = apiserver.Fault(verb="patch", path="/nodes/n1", status=403, times=None)
    rig.server.inject(refusal)

    with structlog.testing.capture_logs():
        rig.pass_time(TERM_S, own)

    assert rig.requested("n2")
    assert len(own.kube.patches) <= 2


def test_refused_events_stop_nothing_and_are_not_repeated(rig: Rig) -> None:
    rig.add_node()
    rig.add_pods("p1")
    rig.add_pods("big", profile="9g.99gb")
    own = rig.replica()
    rig.server.inject(apiserver.Fault(verb="create", resource="events", status=403, times=None))

    with structlog.testing.capture_logs():
        rig.pass_time(TERM_S, own)

    assert rig.requested()
    assert rig.server.log.count("create", "events") == 2


@pytest.mark.parametrize(
    "how", [apiserver.Break.EXPIRE, apiserver.Break.RESET, apiserver.Break.CLOSE]
)
def test_a_lost_watch_is_opened_again_and_nothing_is_decided_meanwhile(
    rig: Rig, how: apiserver.Break
) -> None:
    rig.add_node()
    own = rig.replica()
    rig.pass_time(SOON_S, own)

    with structlog.testing.capture_logs():
        rig.server.break_watches(how)
        rig.add_pods("p1")
        rig.pass_time(SOON_S + 5, own)

    assert len(own.kube.patches) == 1


@pytest.mark.parametrize("jump_s", [86400.0, -86400.0])
def test_a_wall_clock_that_jumps_changes_nothing(rig: Rig, jump_s: float) -> None:
    rig.add_node()
    own = rig.replica()
    rig.pass_time(SOON_S, own)

    rig.clock.jump_s = jump_s
    rig.add_pods("p1")
    rig.pass_time(SOON_S, own)
    assert len(own.kube.patches) == 1
    rig.clock.jump_s = 0
    rig.answer("n1")
    rig.pass_time(TERM_S, own)

    assert own.leads
    assert len(own.kube.patches) == 1
