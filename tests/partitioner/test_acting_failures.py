"""Refused requests, lost watches, clocks that jump, and storms of pods."""

import dataclasses
import json
import re

import pytest
import structlog.testing

from mig_manager import reasons
from mig_manager.core import steps
from mig_manager.core.partitioning.decision import decisions
from mig_manager.partitioner import announcer
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.partitioner.partitioner_rig import SOON_S, TERM_S, PartitionerRig


def test_a_node_that_changed_since_the_decision_is_decided_on_again(rig: PartitionerRig) -> None:
    rig.add_node()
    rig.add_pods("p1")
    replica = rig.replica()
    fault = apiserver.Fault(verb="patch", resource="nodes", status=409)
    rig.server.inject(fault)

    rig.pass_time(SOON_S, replica)
    assert rig.requested_layout() is None
    rig.touch("n1")
    rig.pass_time(SOON_S, replica)

    assert rig.requested_layout()
    assert rig.metric(replica, "changes_total", result="conflict") == 1
    assert len(rig.events()) == 1


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(apiserver.Fault(status=500), id="500"),
        pytest.param(apiserver.Fault(status=500, is_carried_out=True), id="500 when done"),
        pytest.param(apiserver.Fault(status=503, times=4), id="503 four times"),
        pytest.param(apiserver.Fault(status=429, retry_after_s=20), id="429"),
        pytest.param(apiserver.Fault(reset=True, is_carried_out=True), id="reset when done"),
        pytest.param(apiserver.Fault(garbles=True, is_carried_out=True), id="garbage when done"),
    ],
)
def test_a_failed_patch_is_retried_once(rig: PartitionerRig, fault: apiserver.Fault) -> None:
    rig.add_nodes("n1", "n2")
    rig.add_pods("p1")
    replica = rig.replica(max_unavailable="2")
    rig.server.inject(dataclasses.replace(fault, verb="patch", resource="nodes"))

    with structlog.testing.capture_logs():
        rig.pass_time(TERM_S, replica)
    rig.answer(rig.requested_node())
    rig.pass_time(TERM_S, replica)

    assert len({json.dumps(body) for body in replica.kube.patches}) == 1
    assert len(rig.events("RepartitioningRequested")) <= 1


def test_a_throttled_request_waits_as_long_as_the_api_asks(rig: PartitionerRig) -> None:
    rig.add_node()
    rig.add_pods("p1")
    replica = rig.replica()
    rig.server.inject(apiserver.Fault(verb="patch", status=429, retry_after_s=40))

    with structlog.testing.capture_logs():
        rig.pass_time(SOON_S + 35, replica)
        assert len(replica.kube.patches) == 1
        rig.pass_time(TERM_S, replica)

    assert len(replica.kube.patches) == 2


def test_a_failed_request_is_replaced_once_its_pods_are_gone(rig: PartitionerRig) -> None:
    rig.add_node()
    rig.add_pods("p1")
    replica = rig.stepping_replica()
    rig.answer("n1", reason=reasons.Reason.INTERNAL)
    failed = rig.requested_layout()

    rig.end("p1", "Succeeded")
    rig.pass_time(SOON_S, replica)
    assert rig.requested_layout() == failed  # The node rests after its failure.
    rig.pass_time(5 * TERM_S, replica)

    assert rig.requested_layout() != failed


def test_requests_to_a_failing_api_become_rarer(rig: PartitionerRig) -> None:
    rig.add_node()
    rig.add_pods("p1")
    replica = rig.replica()
    rig.server.inject(apiserver.Fault(verb="patch", status=500, times=None))

    with structlog.testing.capture_logs():
        rig.pass_time(5 * TERM_S, replica)

    assert 6 <= len(replica.kube.patches) <= 12


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(apiserver.Fault(status=403), id="forbidden"),
        pytest.param(apiserver.Fault(reverts=True), id="reverted by a webhook"),
    ],
)
def test_unchangeable_node_is_left_alone_and_others_are_served(
    rig: PartitionerRig, fault: apiserver.Fault
) -> None:
    rig.add_nodes("n1", "n2")
    rig.add_pods("p1")
    replica = rig.replica()
    rig.server.inject(dataclasses.replace(fault, verb="patch", path="/nodes/n1", times=None))

    with structlog.testing.capture_logs():
        rig.pass_time(TERM_S, replica)

    assert rig.requested_layout("n2")
    assert len(replica.kube.patches) <= 2


@pytest.mark.parametrize("small", ["a", "z"], ids=["the first in order", "the last in order"])
def test_a_node_that_fails_for_a_pod_serves_a_smaller_one(rig: PartitionerRig, small: str) -> None:
    rig.add_node()
    rig.add_pods("large", profile="3g.20gb")
    replica = rig.replica()
    layouts: list[str] = []
    same_age = {"metadata": {"creationTimestamp": "2026-03-01T00:00:00Z"}}

    with structlog.testing.capture_logs():
        while rig.clock.now_s < 1200:
            rig.pass_time(5, replica)
            rig.clock.now_s += 0.1  # so that no decision is exactly at the end of a pause
            requested = rig.requested_layout()
            if requested is None or requested in layouts:
                continue
            layouts.append(requested)
            if "3g.20gb" not in requested:
                break
            rig.answer("n1", reason=reasons.Reason.IN_USE)
            if len(layouts) == 2:
                rig.add_pods(small)
                for pod in ("large", small):
                    rig.server.merge(kinds.PODS, pod, same_age, namespace="default")

    assert '"mig-devices": {"1g.5gb": 1}' in layouts[-1]


@pytest.mark.parametrize(
    ("failing", "within_s"),
    [(["7g.40gb", "4g.20gb"], 300), (["7g.40gb", "4g.20gb", "3g.20gb", "2g.10gb"], 1800)],
    ids=["two", "four"],
)
def test_a_node_that_fails_some_layouts_serves_the_pod_of_another(
    rig: PartitionerRig, failing: list[str], within_s: float
) -> None:
    rig.add_node(layout="1g.10gb")
    for number, profile in enumerate([*failing, "1g.5gb"]):
        rig.add_pods(f"p{number}", profile=profile)
    replica = rig.replica()
    layouts: list[str] = []
    devices = ""

    with structlog.testing.capture_logs():
        while rig.clock.now_s < within_s and devices != "1g.10gb 1g.5gb":
            rig.pass_time(5, replica)
            rig.clock.now_s += 0.1  # so that no decision is exactly at the end of a pause
            requested = rig.requested_layout()
            if requested and requested not in layouts[-1:]:
                layouts.append(requested)
                devices = " ".join(re.findall(r"\dg[.0-9a-z]+", requested))
                rig.answer("n1", reason=reasons.Reason.IN_USE)

    assert devices == "1g.10gb 1g.5gb"


def test_refused_events_stop_nothing_and_are_not_repeated(rig: PartitionerRig) -> None:
    rig.add_node()
    rig.add_pods("p1")
    rig.add_pods("big", profile="9g.99gb")
    replica = rig.replica()
    rig.server.inject(apiserver.Fault(verb="create", resource="events", status=403, times=None))

    with structlog.testing.capture_logs():
        rig.pass_time(TERM_S, replica)

    assert rig.requested_layout()
    assert rig.server.log.count("create", "events") == 2


@pytest.mark.parametrize(
    "how", [apiserver.Break.EXPIRE, apiserver.Break.RESET, apiserver.Break.CLOSE]
)
def test_a_lost_watch_is_opened_again_and_nothing_is_decided_meanwhile(
    rig: PartitionerRig, how: apiserver.Break
) -> None:
    rig.add_node()
    replica = rig.stepping_replica()

    with structlog.testing.capture_logs():
        rig.server.break_watches(how)
        rig.add_pods("p1")
        rig.pass_time(SOON_S + 5, replica)

    assert len(replica.kube.patches) == 1


@pytest.mark.parametrize("jump_s", [86400.0, -86400.0])
def test_a_wall_clock_that_jumps_changes_nothing(rig: PartitionerRig, jump_s: float) -> None:
    rig.add_node()
    replica = rig.stepping_replica()

    rig.clock.jump_s = jump_s
    rig.add_pods("p1")
    rig.pass_time(SOON_S, replica)
    assert len(replica.kube.patches) == 1
    rig.clock.jump_s = 0
    rig.answer("n1")
    rig.pass_time(TERM_S, replica)

    assert replica.leads
    assert len(replica.kube.patches) == 1


@pytest.mark.slow
def test_a_storm_of_pods_causes_few_requests_and_few_events(rig: PartitionerRig) -> None:
    rig.add_node("n1")
    replica = rig.stepping_replica()
    rig.server.log.clear()

    rig.add_pods(*(f"p{number}" for number in range(250)))
    rig.add_pods(*(f"big{number}" for number in range(250)), profile="9g.99gb")
    rig.pass_time(60, replica)

    assert len(rig.patches()) == 1
    assert len(rig.events("RepartitioningRequested")) == 1
    # Twenty at once, and ten a minute.
    assert 20 <= len(rig.events("NoRoomPossible")) <= 31
    withheld = rig.metric(replica, "withheld_events")
    assert withheld == 250 - len(rig.events("NoRoomPossible"))
    # Beside those: the Lease, each ten seconds.
    assert len(rig.server.log.requests()) <= 1 + 1 + 31 + 7


def test_events_about_requests_are_within_the_allowance(rig: PartitionerRig) -> None:
    replica = rig.stepping_replica()
    another = announcer.Announcer(replica.service.cluster, replica.service.leader, rig.clock)
    for number in range(40):
        another.announce_request(
            decisions.NodeChange(
                node=f"n{number}",
                version="7",
                layout="",
                content_hash="",
                pods=(),
                desired={},
                plan=steps.Plan(gpus=()),
                why="room for 1 pod",
            )
        )

    assert len(rig.events("RepartitioningRequested")) == 20


def test_a_reason_that_returns_gets_another_event(rig: PartitionerRig) -> None:
    rig.add_pods("big", profile="9g.99gb")
    replica = rig.replica()
    rig.pass_time(20, replica)
    rig.clock.now_s += 600
    rig.add_node("n1")
    rig.pass_time(20, replica)
    rig.clock.now_s += 600
    rig.server.delete(kinds.NODES, "n1")
    rig.pass_time(20, replica)

    messages = [each["message"] for each in rig.events("NoRoomPossible")]
    assert sorted(map(messages.count, set(messages))) == [1, 2]


def test_pods_that_can_never_fit_get_one_event_each(rig: PartitionerRig) -> None:
    rig.add_node("n1")
    rig.add_pods("big1", "big2", profile="9g.99gb")
    replica = rig.replica()

    for number in range(5):
        rig.add_pods(f"other{number}", profile="8g.88gb")
        rig.pass_time(20, replica)
        rig.server.delete(kinds.PODS, f"other{number}", "default")

    names = [each["involvedObject"]["name"] for each in rig.events("NoRoomPossible")]
    assert sorted(names) == ["big1", "big2", *(f"other{number}" for number in range(5))]
