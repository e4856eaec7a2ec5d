"""What must neither stop the partitioner nor its service to a pod, and what it says about it."""

import json
import math
import time

import pytest
import structlog.testing

from mig_manager import errors
from mig_manager.core.layout import custom_layouts
from mig_manager.core.node import well_known
from mig_manager.sandbox.apiserver import resources as kinds
from testkit import apiserver
from tests import api_objects, waiting
from tests.partitioner import rigs
from tests.partitioner.rigs import SOON_S, TERM_S, PartitionerRig

_WOKEN_WITHIN_S = 30.0


def test_malformed_pod_or_node_is_left_out(rig: PartitionerRig) -> None:
    rig.add_node("n1")
    rig.add_node("n2")
    rig.add_pods("p1", "strange")

    def break_pod(pod: api_objects.Object) -> None:
        (container,) = pod["spec"]["containers"]
        container["resources"]["limits"]["cpu"] = "many"

    rig.server.modify(kinds.PODS, "strange", break_pod, namespace="default")
    with structlog.testing.capture_logs() as logs:
        own = rig.replica()
        waiting.until(lambda: own.service.cluster.is_current, "the watches")
        rig.server.merge(kinds.NODES, "n2", {"status": {"allocatable": {"cpu": "many"}}})
        waiting.until(lambda: len(own.service.cluster.nodes()) == 1, "n2 to be left out")
        for _ in range(round(SOON_S)):
            rig.clock.now_s += 1
            own.service.loop.step()

    assert rig.requested("n1")
    left_out = [each["name"] for each in logs if each["event"] == "object_left_out"]
    assert left_out == ["default/strange", "n2"]


@pytest.mark.parametrize("resource", ["nodes", "pods", "deviceclasses"])
def test_a_replica_is_woken_once_its_watches_are_current(
    rig: PartitionerRig, resource: str
) -> None:
    rig.add_node()
    refusal = apiserver.Fault(verb="watch", resource=resource, status=500, times=None)
    rig.server.inject(refusal)
    with structlog.testing.capture_logs():
        own = rig.replica()
        waiting.until(lambda: rig.server.log.count("list", resource) > 2, "some lists")
        own.service.signal.wait(0)
        began_s = time.monotonic()

        rig.server.clear_faults()
        while not own.service.cluster.is_current:
            own.service.signal.wait(_WOKEN_WITHIN_S)

    assert time.monotonic() - began_s < _WOKEN_WITHIN_S


def test_a_replica_whose_watch_is_refused_is_not_ready_though_it_can_list(
    rig: PartitionerRig,
) -> None:
    rig.add_node()
    refusal = apiserver.Fault(verb="watch", resource="pods", status=403, times=None)
    rig.server.inject(refusal)

    with structlog.testing.capture_logs():
        own = rig.replica()
        waiting.until(lambda: rig.server.log.count("list", "pods") > 2, "some lists")
        assert own.service.cluster.last_contact_s == math.inf
        rig.server.clear_faults()
        rig.sync(own)

    assert own.service.cluster.last_contact_s < math.inf


def test_why_an_opted_in_node_cannot_be_used_is_logged_once(rig: PartitionerRig) -> None:
    rig.add_node("n1")
    rig.add_node("n2")
    rig.add_node("n3", labels={well_known.PARTITIONING_LABEL: "no"})
    unpublished = {"annotations": {well_known.CAPACITY_ANNOTATION: None}}
    for name in ("n1", "n3"):
        rig.server.merge(kinds.NODES, name, {"metadata": unpublished})
    rig.add_pods("p1", "p2")
    own = rig.replica()

    with structlog.testing.capture_logs() as logs:
        rig.pass_time(TERM_S, own)

    (line,) = (each for each in logs if each["event"] == "node_unusable")
    assert (line["node"], line["why"]) == (
        "n1",
        "its agent has not published which instances are in use",
    )


def test_budget_counts_a_node_although_our_clock_is_a_day_ahead(rig: PartitionerRig) -> None:
    rig.add_node("n1")
    rig.add_node("n2")
    rig.add_pods("p1", "p2", profile="3g.20gb")
    rig.add_pods("p3", profile="4g.20gb")
    asked_at = rig.clock.now_iso()
    rig.clock.jump_s = 86400.0
    own = rig.replica()
    rig.pass_time(SOON_S, own)
    (asked,) = (name for name in ("n1", "n2") if rig.requested(name))

    stamp_request(rig, asked, at=asked_at)
    rig.pass_time(TERM_S, own)
    assert len(own.kube.patches) == 1
    rig.pass_time(5 * TERM_S, own)

    assert len(own.kube.patches) == 2


def test_the_budget_counts_a_run_although_the_agents_clock_is_behind(rig: PartitionerRig) -> None:
    for name in ("n1", "n2", "n3"):
        rig.add_node(name)
    rig.agents_ahead_s = -7200.0
    rig.add_pods("p1", "p2", "p3", profile="4g.20gb")
    own = rig.replica()
    rig.pass_time(SOON_S, own)
    (asked,) = (name for name in ("n1", "n2", "n3") if rig.requested(name))
    rig.begin(asked)

    rig.pass_time(2 * TERM_S, own)

    assert len(own.kube.patches) == 1


def lose_watch(rig: PartitionerRig, own: rigs.Replica, *, seconds: int) -> None:
    """Have the watch of nodes refused for a while."""
    with structlog.testing.capture_logs():
        refusal = apiserver.Fault(verb="watch", resource="nodes", status=500, times=None)
        rig.server.inject(refusal)
        rig.server.break_watches(apiserver.Break.RESET)
        waiting.until(lambda: not own.service.cluster.is_current, "the watch to be lost")
        for _ in range(4):
            rig.clock.now_s += seconds / 4
            own.service.loop.step()
        rig.server.clear_faults()


def ask_one_of_two(rig: PartitionerRig) -> rigs.Replica:
    """Return the partitioner that has asked one of two nodes, whose agent stays silent."""
    for name in ("n1", "n2"):
        rig.add_node(name)
    rig.add_pods("p1", "p2", profile="4g.20gb")
    own = rig.replica(max_unavailable="1")
    rig.pass_time(SOON_S, own)
    (asked,) = (name for name in ("n1", "n2") if rig.requested(name))
    stamp_request(rig, asked, at=rig.clock.now_iso())
    return own


def test_the_budget_counts_a_silent_node_after_a_lost_watch(rig: PartitionerRig) -> None:
    own = ask_one_of_two(rig)
    rig.pass_time(TERM_S, own)

    lose_watch(rig, own, seconds=400)
    rig.pass_time(TERM_S, own)

    assert len(own.kube.patches) == 1


def test_lost_watches_do_not_keep_a_silent_node_in_the_budget(
    rig: PartitionerRig,
) -> None:
    own = ask_one_of_two(rig)

    for _ in range(2):
        assert len(own.kube.patches) == 1
        rig.pass_time(170, own)
        lose_watch(rig, own, seconds=4)
    rig.pass_time(TERM_S, own)

    assert len(own.kube.patches) == 2


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_lost_watches_neither_shorten_nor_prolong_the_pause_after_in_use(
    rig: PartitionerRig, ahead_s: float
) -> None:
    rig.add_node()
    rig.agents_ahead_s = ahead_s
    rig.add_pods("p1")
    own = rig.replica()
    rig.pass_time(SOON_S, own)
    rig.answer("n1", reason=errors.Reason.IN_USE)

    rig.pass_time(20, own)
    lose_watch(rig, own, seconds=4)
    rig.pass_time(150, own)
    assert len(own.kube.patches) == 1
    lose_watch(rig, own, seconds=4)
    rig.pass_time(150, own)

    assert len(own.kube.patches) == 2


def test_a_node_rests_as_long_as_its_change_took(rig: PartitionerRig) -> None:
    rig.add_node()
    rig.agents_ahead_s = 3600.0
    rig.add_pods("p1", profile="4g.20gb")
    own = rig.replica()
    rig.pass_time(SOON_S, own)
    rig.begin("n1")
    rig.pass_time(TERM_S, own)
    rig.answer("n1", took_s=20)
    rig.bind("p1", "n1")
    rig.add_pods("p2")

    with structlog.testing.capture_logs() as logs:
        rig.pass_time(19, own)
        assert len(own.kube.patches) == 1
        assert rig.metric(own, "resting_nodes") == 1
        rig.pass_time(7, own)

    assert len(own.kube.patches) == 2
    assert [each["is_own"] for each in logs if each["event"] == "node_resting"] == [True]


def test_refused_layout_is_requested_again_after_minutes(rig: PartitionerRig) -> None:
    rig.add_node()
    rig.agents_ahead_s = 3600.0
    rig.add_pods("p1")
    own = rig.replica()
    rig.pass_time(SOON_S, own)
    rig.answer("n1", reason=errors.Reason.IN_USE)
    refused = rig.requested()

    rig.pass_time(290, own)
    assert len(own.kube.patches) == 1
    assert rig.metric(own, "answers_total", result="failed") == 1
    rig.pass_time(20, own)

    assert len(own.kube.patches) == 2
    assert rig.requested() != refused
    rig.answer("n1")
    rig.pass_time(TERM_S, own)
    assert rigs.counts(rig.gpus["n1"])["nvidia.com/mig-1g.5gb"]
    assert len(own.kube.patches) == 2


def test_failed_request_of_a_person_is_no_reason_to_decide_again(rig: PartitionerRig) -> None:
    rig.add_node(labels={well_known.CONFIG_LABEL: well_known.CUSTOM_LAYOUT})
    rules = "[{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}]"
    layout = f"{{version: v1, mig-configs: {{mine: {rules}}}}}"
    requested = {"annotations": {well_known.LAYOUT_ANNOTATION: layout}}
    rig.server.merge(kinds.NODES, "n1", {"metadata": requested})
    rig.answer("n1", reason=errors.Reason.INTERNAL)
    own = rig.replica()
    rig.pass_time(SOON_S, own)
    decided = rig.metric(own, "decisions_total")
    rig.pass_time(TERM_S, own)

    assert rig.metric(own, "decisions_total") == decided


def test_layout_that_an_agent_fails_unread_is_not_repeated(rig: PartitionerRig) -> None:
    rig.add_node()
    rig.add_pods("p1")
    own = rig.replica()
    rig.pass_time(SOON_S, own)
    rig.answer("n1", reason=errors.Reason.INVALID_CONFIG)
    status = json.loads(rig.node()["metadata"]["annotations"][well_known.STATUS_ANNOTATION])
    unread = {well_known.STATUS_ANNOTATION: json.dumps(status | {"configHash": ""})}
    rig.server.merge(kinds.NODES, "n1", {"metadata": {"annotations": unread}})
    rig.pass_time(5 * TERM_S, own)

    assert len(own.kube.patches) == 1
    assert rig.metric(own, "answers_total", result="failed") == 1


def test_a_lease_whose_namespace_is_missing_is_logged(rig: PartitionerRig) -> None:
    path = "/namespaces/mig-manager/leases"
    rig.server.inject(apiserver.Fault(path=path, status=404, times=None))
    own = rig.replica()

    with structlog.testing.capture_logs() as logs:
        rig.pass_time(SOON_S, own)

    assert not own.leads
    assert {each["event"] for each in logs} == {"lease_not_renewed"}


def test_a_recommendation_for_a_node_that_is_registered_again_counts_again(
    rig: PartitionerRig,
) -> None:
    own = rig.replica(mode="recommend")
    rig.add_pods("p1")
    for _ in range(2):
        rig.add_node("n1")
        rig.pass_time(10, own)
        rig.server.delete(kinds.NODES, "n1")
        rig.pass_time(10, own)

    assert rig.metric(own, "changes_total", result="recommended") == 2


@pytest.mark.slow
def test_requests_stop_after_failures_and_resume_after_a_trial(rig: PartitionerRig) -> None:
    for number in range(4):
        rig.add_node(f"n{number}")
    rig.add_pods("p1", profile="3g.20gb")
    own = rig.replica(max_unavailable="1", max_failures="2", cooldown_s="1")

    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            rig.pass_time(20, own)
            (asked,) = (name for name in rig.gpus if is_unanswered(rig, name))
            rig.answer(asked, reason=errors.Reason.INTERNAL)
            rig.add_pods(f"next-{asked}", profile="3g.20gb")
        rig.pass_time(20, own)
        stopped_after = len(own.kube.patches)
        assert rig.metric(own, "stopped") == 1
        rig.pass_time(500, own)
        assert len(own.kube.patches) == stopped_after == 2

        rig.pass_time(120, own)
        assert len(own.kube.patches) == 3
        (asked,) = (name for name in rig.gpus if is_unanswered(rig, name))
        rig.answer(asked)
        rig.pass_time(20, own)

    assert rig.metric(own, "stopped") == 0
    events = [each["reason"] for each in rig.events() if each["reason"].startswith("Partitioning")]
    assert events == ["PartitioningStopped", "PartitioningResumed"]
    assert [each["event"] for each in logs if each["event"].startswith("requests_")] == [
        "requests_stopped",
        "requests_resumed",
    ]


@pytest.mark.parametrize(
    ("reason", "times"),
    [
        (errors.Reason.GPU_NEEDS_RESET, 1),
        pytest.param(errors.Reason.IN_USE, 2, marks=pytest.mark.slow),
    ],
)
def test_node_that_failed_a_layout_gets_no_other_for_minutes(
    rig: PartitionerRig, reason: errors.Reason, times: int
) -> None:
    rig.add_node("n1")
    rig.add_pods("p1", profile="4g.20gb")
    own = rig.replica(max_unavailable="2")
    rig.pass_time(SOON_S, own)
    rig.answer("n1", reason=reason)
    for number in range(1, times):
        rig.add_pods(*(f"more-{number}-{each}" for each in range(3)), profile="2g.10gb")
        rig.pass_time(10, own)
        assert is_unanswered(rig, "n1")
        rig.answer("n1", reason=reason)
    failed = rig.requested("n1")
    rig.add_node("n2")
    rig.add_pods("p2", "p3", "p4", profile="3g.20gb")

    rig.pass_time(TERM_S, own)
    assert rig.requested("n1") == failed
    assert rig.requested("n2")
    rig.pass_time(300, own)

    assert rig.requested("n1") != failed


@pytest.mark.slow
def test_a_silent_agent_does_not_keep_requests_stopped(rig: PartitionerRig) -> None:
    for number in range(4):
        rig.add_node(f"n{number}")
    rig.add_pods("p1", "p2", "p3", profile="4g.20gb")
    own = rig.replica(max_unavailable="2", max_failures="1", cooldown_s="1")
    rig.pass_time(20, own)
    failed, silent = (name for name in rig.gpus if is_unanswered(rig, name))
    stamp_request(rig, silent, at=rig.clock.now_iso())
    rig.answer(failed, reason=errors.Reason.INTERNAL)
    rig.pass_time(20, own)
    assert rig.metric(own, "stopped") == 1
    rig.pass_time(620, own)

    assert is_unanswered(rig, silent)
    assert len(own.kube.patches) == 3


@pytest.mark.parametrize(
    "labels", [{well_known.PARTITIONING_LABEL: "off"}, {well_known.CONFIG_LABEL: "all-7g.40gb"}]
)
def test_an_answer_to_another_request_is_not_counted(
    rig: PartitionerRig, labels: dict[str, str]
) -> None:
    rig.add_node()
    rig.add_pods("p1")
    own = rig.replica()
    before = rig.node()["metadata"]["annotations"][well_known.STATUS_ANNOTATION]
    rig.pass_time(SOON_S, own)
    metadata = {"labels": labels, "annotations": {well_known.STATUS_ANNOTATION: before}}
    rig.server.merge(kinds.NODES, "n1", {"metadata": metadata})
    rig.pass_time(SOON_S, own)

    assert rig.metric(own, "answers_total", result="applied") == 0


def stamp_request(rig: PartitionerRig, name: str, *, at: str) -> None:
    """Record who wrote a node's request and when, as the API server does."""
    labels: api_objects.Object = {"f:metadata": {"f:labels": {f"f:{well_known.CONFIG_LABEL}": {}}}}
    entry = {"manager": "x", "operation": "Update", "time": at, "fieldsV1": labels}
    rig.server.merge(kinds.NODES, name, {"metadata": {"managedFields": [entry]}})


def is_unanswered(rig: PartitionerRig, name: str) -> bool:
    """Whether a node's agent has not reported on its last request."""
    annotations = rig.node(name)["metadata"]["annotations"]
    text = annotations.get(well_known.LAYOUT_ANNOTATION)
    status = json.loads(annotations[well_known.STATUS_ANNOTATION])
    requested = custom_layouts.Custom(node_name=name, text=text)
    return bool(text) and status.get("annotationHash") != requested.annotation_hash
