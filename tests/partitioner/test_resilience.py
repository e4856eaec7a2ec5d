"""What must neither stop the partitioner nor its service to a pod, and what it says about it."""

import json
import math
import threading

import pytest
import structlog.testing

from mig_manager import reasons
from mig_manager.core.layout import custom_layouts
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import well_known
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.partitioner import partitioner_rig
from tests.partitioner.partitioner_rig import SOON_S, TERM_S, PartitionerRig
from tests.rigs import api_objects, waiting


def test_malformed_pod_or_node_is_left_out(rig: PartitionerRig) -> None:
    rig.add_nodes("n1", "n2")
    rig.add_pods("p1", "strange")

    def break_pod(pod: api_objects.Object) -> None:
        (container,) = pod["spec"]["containers"]
        container["resources"]["limits"]["cpu"] = "many"

    rig.server.modify(kinds.PODS, "strange", break_pod, namespace="default")
    with structlog.testing.capture_logs() as logs:
        replica = rig.replica()
        waiting.until(lambda: replica.service.cluster.is_current, "the watches")
        rig.server.merge(kinds.NODES, "n2", {"status": {"allocatable": {"cpu": "many"}}})
        waiting.until(lambda: len(replica.service.cluster.nodes()) == 1, "n2 to be left out")
        for _ in range(round(SOON_S)):
            rig.clock.now_s += 1
            replica.service.loop.step()

    assert rig.requested_layout("n1")
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
        replica = rig.replica()
        waiting.until(lambda: rig.server.log.count("list", resource) > 2, "some lists")
        replica.service.signal.wait(0)

        def wait_for_watches() -> None:
            while not replica.service.cluster.is_current:
                replica.service.signal.wait(threading.TIMEOUT_MAX)

        waiter = threading.Thread(target=wait_for_watches, daemon=True)
        waiter.start()
        rig.server.clear_faults()

        waiting.until(lambda: not waiter.is_alive(), "a wake-up with current watches")


def test_a_replica_whose_watch_is_refused_is_not_ready_though_it_can_list(
    rig: PartitionerRig,
) -> None:
    rig.add_node()
    refusal = apiserver.Fault(verb="watch", resource="pods", status=403, times=None)
    rig.server.inject(refusal)

    with structlog.testing.capture_logs():
        replica = rig.replica()
        waiting.until(lambda: rig.server.log.count("list", "pods") > 2, "some lists")
        assert replica.service.cluster.last_contact_s == math.inf
        rig.server.clear_faults()
        rig.sync(replica)

    assert replica.service.cluster.last_contact_s < math.inf


def test_why_an_opted_in_node_cannot_be_used_is_logged_once(rig: PartitionerRig) -> None:
    rig.add_nodes("n1", "n2")
    rig.add_node("n3", labels={well_known.PARTITIONING_LABEL: "no"})
    unpublished = {"annotations": {well_known.CAPACITY_ANNOTATION: None}}
    for name in ("n1", "n3"):
        rig.server.merge(kinds.NODES, name, {"metadata": unpublished})
    rig.add_pods("p1", "p2")
    replica = rig.replica()

    with structlog.testing.capture_logs() as logs:
        rig.pass_time(TERM_S, replica)

    (line,) = (each for each in logs if each["event"] == "node_unusable")
    assert (line["node"], line["why"]) == (
        "n1",
        "its agent has not published which instances are in use",
    )


def test_budget_counts_a_node_although_our_clock_is_a_day_ahead(rig: PartitionerRig) -> None:
    rig.add_nodes("n1", "n2")
    rig.add_pods("p1", "p2", profile="3g.20gb")
    rig.add_pods("p3", profile="4g.20gb")
    asked_at = rig.clock.now_iso()
    rig.clock.jump_s = 86400.0
    replica = rig.stepping_replica()

    stamp_request(rig, rig.requested_node(), at=asked_at)
    rig.pass_time(TERM_S, replica)
    assert len(replica.kube.patches) == 1
    rig.pass_time(5 * TERM_S, replica)

    assert len(replica.kube.patches) == 2


def test_a_clock_set_before_the_term_prolongs_no_cooldown(rig: PartitionerRig) -> None:
    rig.clock.jump_s = -86400.0
    replica = rig.replica(cooldown_s="600")
    rig.clock.jump_s = 0.0
    rig.add_node()
    rig.add_pods("p1")

    rig.pass_time(SOON_S, replica)

    assert len(replica.kube.patches) == 1


def test_the_budget_counts_a_run_although_the_agents_clock_is_behind(rig: PartitionerRig) -> None:
    rig.add_nodes("n1", "n2", "n3")
    rig.agents_ahead_s = -7200.0
    rig.add_pods("p1", "p2", "p3", profile="4g.20gb")
    replica = rig.stepping_replica()
    rig.begin(rig.requested_node())

    rig.pass_time(2 * TERM_S, replica)

    assert len(replica.kube.patches) == 1


def lose_watch(rig: PartitionerRig, replica: partitioner_rig.Replica, *, seconds: int) -> None:
    """Have the watch of nodes refused for a while."""
    with structlog.testing.capture_logs():
        refusal = apiserver.Fault(verb="watch", resource="nodes", status=500, times=None)
        rig.server.inject(refusal)
        rig.server.break_watches(apiserver.Break.RESET)
        waiting.until(lambda: not replica.service.cluster.is_current, "the watch to be lost")
        for _ in range(4):
            rig.clock.now_s += seconds / 4
            replica.service.loop.step()
        rig.server.clear_faults()


def ask_one_of_two(rig: PartitionerRig) -> partitioner_rig.Replica:
    """Return the partitioner that has asked one of two nodes, whose agent stays silent."""
    rig.add_nodes("n1", "n2")
    rig.add_pods("p1", "p2", profile="4g.20gb")
    replica = rig.stepping_replica(max_unavailable="1")
    stamp_request(rig, rig.requested_node(), at=rig.clock.now_iso())
    return replica


def test_the_budget_counts_a_silent_node_after_a_lost_watch(rig: PartitionerRig) -> None:
    replica = ask_one_of_two(rig)
    rig.pass_time(TERM_S, replica)

    lose_watch(rig, replica, seconds=400)
    rig.pass_time(TERM_S, replica)

    assert len(replica.kube.patches) == 1


def test_lost_watches_do_not_keep_a_silent_node_in_the_budget(
    rig: PartitionerRig,
) -> None:
    replica = ask_one_of_two(rig)

    for _ in range(2):
        assert len(replica.kube.patches) == 1
        rig.pass_time(170, replica)
        lose_watch(rig, replica, seconds=4)
    rig.pass_time(TERM_S, replica)

    assert len(replica.kube.patches) == 2


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_lost_watches_neither_shorten_nor_prolong_the_pause_after_in_use(
    rig: PartitionerRig, ahead_s: float
) -> None:
    rig.add_node()
    rig.agents_ahead_s = ahead_s
    rig.add_pods("p1")
    replica = rig.stepping_replica()
    rig.answer("n1", reason=reasons.Reason.IN_USE)

    rig.pass_time(20, replica)
    lose_watch(rig, replica, seconds=4)
    rig.pass_time(150, replica)
    assert len(replica.kube.patches) == 1
    lose_watch(rig, replica, seconds=4)
    rig.pass_time(150, replica)

    assert len(replica.kube.patches) == 2


def test_a_node_rests_as_long_as_its_change_took(rig: PartitionerRig) -> None:
    rig.add_node()
    rig.agents_ahead_s = 3600.0
    rig.add_pods("p1", profile="4g.20gb")
    replica = rig.stepping_replica()
    rig.begin("n1")
    rig.pass_time(TERM_S, replica)
    rig.answer("n1", took_s=20)
    rig.bind("p1", "n1")
    rig.add_pods("p2")

    with structlog.testing.capture_logs() as logs:
        rig.pass_time(19, replica)
        assert len(replica.kube.patches) == 1
        assert rig.metric(replica, "resting_nodes") == 1
        rig.pass_time(7, replica)

    assert len(replica.kube.patches) == 2
    assert [each["is_own"] for each in logs if each["event"] == "node_resting"] == [True]


def test_refused_layout_is_requested_again_after_minutes(rig: PartitionerRig) -> None:
    rig.add_node()
    rig.agents_ahead_s = 3600.0
    rig.add_pods("p1")
    replica = rig.stepping_replica()
    rig.answer("n1", reason=reasons.Reason.IN_USE)
    refused = rig.requested_layout()

    rig.pass_time(290, replica)
    assert len(replica.kube.patches) == 1
    assert rig.metric(replica, "answers_total", result="failed") == 1
    rig.pass_time(30, replica)

    assert len(replica.kube.patches) == 2
    assert rig.requested_layout() != refused
    rig.answer("n1")
    rig.pass_time(TERM_S, replica)
    assert resources.counts(rig.gpus["n1"])["nvidia.com/mig-1g.5gb"]
    assert len(replica.kube.patches) == 2


def test_a_persons_failed_request_does_not_cause_a_decision(rig: PartitionerRig) -> None:
    rig.add_node(labels={well_known.CONFIG_LABEL: well_known.CUSTOM_LAYOUT})
    rules = "[{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}]"
    layout = f"{{version: v1, mig-configs: {{mine: {rules}}}}}"
    requested = {"annotations": {well_known.LAYOUT_ANNOTATION: layout}}
    rig.server.merge(kinds.NODES, "n1", {"metadata": requested})
    rig.answer("n1", reason=reasons.Reason.INTERNAL)
    replica = rig.stepping_replica()
    decided = rig.metric(replica, "decisions_total")
    rig.pass_time(TERM_S, replica)

    assert rig.metric(replica, "decisions_total") == decided


def test_layout_that_an_agent_fails_unread_is_not_repeated(rig: PartitionerRig) -> None:
    rig.add_node()
    rig.add_pods("p1")
    replica = rig.stepping_replica()
    rig.answer("n1", reason=reasons.Reason.INVALID_CONFIG)
    status = json.loads(rig.node()["metadata"]["annotations"][well_known.STATUS_ANNOTATION])
    unread = {well_known.STATUS_ANNOTATION: json.dumps(status | {"configHash": ""})}
    rig.server.merge(kinds.NODES, "n1", {"metadata": {"annotations": unread}})
    rig.pass_time(5 * TERM_S, replica)

    assert len(replica.kube.patches) == 1
    assert rig.metric(replica, "answers_total", result="failed") == 1


def test_a_lease_whose_namespace_is_missing_is_logged(rig: PartitionerRig) -> None:
    path = "/namespaces/mig-manager/leases"
    rig.server.inject(apiserver.Fault(path=path, status=404, times=None))
    replica = rig.replica()

    with structlog.testing.capture_logs() as logs:
        rig.pass_time(SOON_S, replica)

    assert not replica.leads
    assert {each["event"] for each in logs} == {"lease_not_renewed"}


def test_a_recommendation_for_a_node_that_is_registered_again_counts_again(
    rig: PartitionerRig,
) -> None:
    replica = rig.replica(mode="recommend")
    rig.add_pods("p1")
    for _ in range(2):
        rig.add_node("n1")
        rig.pass_time(10, replica)
        rig.server.delete(kinds.NODES, "n1")
        rig.pass_time(10, replica)

    assert rig.metric(replica, "changes_total", result="recommended") == 2


@pytest.mark.slow
def test_requests_stop_after_failures_and_resume_after_a_trial(rig: PartitionerRig) -> None:
    rig.add_nodes("n0", "n1", "n2", "n3")
    rig.add_pods("p1", profile="3g.20gb")
    replica = rig.replica(max_unavailable="1", max_failures="2", cooldown_s="1")

    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            rig.pass_time(20, replica)
            (target,) = (name for name in rig.gpus if is_unanswered(rig, name))
            rig.answer(target, reason=reasons.Reason.INTERNAL)
            rig.add_pods(f"next-{target}", profile="3g.20gb")
        rig.pass_time(20, replica)
        stopped_after = len(replica.kube.patches)
        assert rig.metric(replica, "stopped") == 1
        rig.pass_time(500, replica)
        assert len(replica.kube.patches) == stopped_after == 2

        rig.pass_time(120, replica)
        assert len(replica.kube.patches) == 3
        (target,) = (name for name in rig.gpus if is_unanswered(rig, name))
        rig.answer(target)
        rig.pass_time(20, replica)

    assert rig.metric(replica, "stopped") == 0
    events = [each["reason"] for each in rig.events() if each["reason"].startswith("Partitioning")]
    assert events == ["PartitioningStopped", "PartitioningResumed"]
    assert [each["event"] for each in logs if each["event"].startswith("requests_")] == [
        "requests_stopped",
        "requests_resumed",
    ]


def test_a_success_between_two_refusals_in_use_keeps_a_node_in_service(
    rig: PartitionerRig,
) -> None:
    rig.add_node("n1")
    replica = rig.replica()
    answers = (reasons.Reason.IN_USE, reasons.Reason.APPLIED, reasons.Reason.IN_USE)
    for number, reason in enumerate(answers):
        rig.add_pods(f"p{number}")
        rig.pass_time(TERM_S, replica)
        assert is_unanswered(rig, "n1")
        rig.answer("n1", reason=reason)
    rig.add_pods("last")

    rig.pass_time(10, replica)

    assert is_unanswered(rig, "n1")


@pytest.mark.parametrize(
    ("reason", "times"),
    [
        (reasons.Reason.GPU_NEEDS_RESET, 1),
        (reasons.Reason.IN_USE, 2),
    ],
)
def test_node_that_failed_a_layout_gets_no_other_for_minutes(
    rig: PartitionerRig, reason: reasons.Reason, times: int
) -> None:
    rig.add_node("n1")
    rig.add_pods("p1", profile="4g.20gb")
    replica = rig.stepping_replica(max_unavailable="2")
    rig.answer("n1", reason=reason)
    for number in range(1, times):
        rig.add_pods(*(f"more-{number}-{each}" for each in range(3)), profile="2g.10gb")
        rig.pass_time(10, replica)
        assert is_unanswered(rig, "n1")
        rig.answer("n1", reason=reason)
    failed = rig.requested_layout("n1")
    rig.add_node("n2")
    rig.add_pods("p2", "p3", "p4", profile="3g.20gb")

    rig.pass_time(TERM_S, replica)
    assert rig.requested_layout("n1") == failed
    assert rig.requested_layout("n2")
    rig.pass_time(300, replica)

    assert rig.requested_layout("n1") != failed


@pytest.mark.slow
def test_a_silent_agent_does_not_keep_requests_stopped(rig: PartitionerRig) -> None:
    rig.add_nodes("n0", "n1", "n2", "n3")
    rig.add_pods("p1", "p2", "p3", profile="4g.20gb")
    replica = rig.replica(max_unavailable="2", max_failures="1", cooldown_s="1")
    rig.pass_time(20, replica)
    failed, silent = (name for name in rig.gpus if is_unanswered(rig, name))
    stamp_request(rig, silent, at=rig.clock.now_iso())
    rig.answer(failed, reason=reasons.Reason.INTERNAL)
    rig.pass_time(20, replica)
    assert rig.metric(replica, "stopped") == 1
    rig.pass_time(620, replica)

    assert is_unanswered(rig, silent)
    assert len(replica.kube.patches) == 3


@pytest.mark.parametrize(
    "labels", [{well_known.PARTITIONING_LABEL: "off"}, {well_known.CONFIG_LABEL: "all-7g.40gb"}]
)
def test_an_answer_to_another_request_is_not_counted(
    rig: PartitionerRig, labels: dict[str, str]
) -> None:
    rig.add_node()
    rig.add_pods("p1")
    replica = rig.replica()
    before = rig.node()["metadata"]["annotations"][well_known.STATUS_ANNOTATION]
    rig.pass_time(SOON_S, replica)
    metadata = {"labels": labels, "annotations": {well_known.STATUS_ANNOTATION: before}}
    rig.server.merge(kinds.NODES, "n1", {"metadata": metadata})
    rig.pass_time(SOON_S, replica)

    assert rig.metric(replica, "answers_total", result="applied") == 0


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
    requested = custom_layouts.CustomRequest(node_name=name, text=text)
    return bool(text) and status.get("annotationHash") != requested.annotation_hash
