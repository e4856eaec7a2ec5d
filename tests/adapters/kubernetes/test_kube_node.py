"""KubeNode against the embedded API server."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog.testing

from mig_manager import errors, reasons
from mig_manager.adapters.kubernetes import api, kube_node
from mig_manager.core.objects import node_object, well_known
from mig_manager.core.records import readiness
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.rigs import api_objects
from tests.rigs.node import fakes

OTHER = {
    "key": "dedicated",
    "value": "gpu",
    "effect": "NoExecute",
    "timeAdded": "2026-01-02T03:04:05Z",
}
RIVAL = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
NODE = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {
        "name": "n1",
        "labels": {well_known.CONFIG_LABEL: "all-1g.10gb"},
        "annotations": {"a": "b"},
    },
    "spec": {"taints": [OTHER], "unschedulable": True},
    "status": {
        "allocatable": {"cpu": "63500m", "nvidia.com/gpu": "0", "nvidia.com/mig-1g.10gb": "7"}
    },
}


class ContendedApi(api.KubeApi):
    """Another writer may change the node before our next patch, and any post may have to wait."""

    before_patch: Callable[[], object] | None = None
    before_post: Callable[[], object] | None = None

    def patch(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        write, self.before_patch = self.before_patch, None
        if write is not None:
            write()
        return super().patch(*args, **kwargs)

    def post(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.before_post is not None:
            self.before_post()
        return super().post(*args, **kwargs)


@dataclasses.dataclass
class KubeNodeRig:
    """An API server, a client of it, and its node n1."""

    server: apiserver.ApiServer
    kube: ContendedApi

    def __post_init__(self) -> None:
        self.clock = fakes.FakeClock()
        self.node_port = kube_node.KubeNode(self.kube, name="n1", clock=self.clock)

    def stored_node(self) -> dict[str, Any]:
        return self.server.get(kinds.NODES, "n1")

    def change(self, write: Callable[[dict[str, Any]], object]) -> None:
        """Change the node as another writer."""
        self.server.modify(kinds.NODES, "n1", write)

    def with_conditions(self, *conditions: dict[str, Any]) -> None:
        self.change(lambda thing: thing["status"].update(conditions=list(conditions)))

    def patches(self) -> int:
        return self.server.log.count("patch", "nodes")

    def emit(self, *messages: str) -> None:
        for message in messages:
            self.node_port.emit(reason="Failed", message=message, is_warning=True)

    def events(self) -> list[dict[str, Any]]:
        """Return the Events in the order of their creation, when all are published."""
        assert self.node_port.flush_events(30)
        events: list[dict[str, Any]] = self.kube.get("/api/v1/events")["items"]
        return sorted(events, key=lambda event: int(event["metadata"]["resourceVersion"]))


@pytest.fixture
def rig(server: apiserver.ApiServer) -> Iterator[KubeNodeRig]:
    server.create(NODE)
    kube = ContendedApi.at(server.url, sleep=lambda _seconds: None)
    yield KubeNodeRig(server, kube)
    kube.close()


def test_a_read_returns_the_node_view(rig: KubeNodeRig) -> None:
    assert rig.node_port.read() == node_object.NodeView(
        name="n1",
        uid=rig.stored_node()["metadata"]["uid"],
        labels={well_known.CONFIG_LABEL: "all-1g.10gb"},
        annotations={"a": "b"},
        is_unschedulable=True,
        taint_keys=frozenset({"dedicated"}),
        closing_taints=frozenset({"dedicated"}),
        allocatable={"nvidia.com/gpu": 0, "nvidia.com/mig-1g.10gb": 7},
    )


def test_a_watch_that_lags_behind_our_write_is_ignored(rig: KubeNodeRig) -> None:
    outdated = rig.stored_node()
    node_port = kube_node.KubeNode(rig.kube, name="n1", clock=rig.clock, watched=lambda: outdated)
    node_port.patch(node_object.NodePatch(annotations={"a": "c"}))

    assert node_port.latest(is_at_rest=True).annotations["a"] == "c"
    assert rig.server.log.count("get", "nodes") == 0


def test_a_watch_older_than_our_write_for_long_leads_to_a_read(rig: KubeNodeRig) -> None:
    """After a restore of etcd versions are smaller, until the cluster has reached ours again."""
    restored = rig.stored_node()
    node_port = kube_node.KubeNode(rig.kube, name="n1", clock=rig.clock, watched=lambda: restored)
    node_port.patch(node_object.NodePatch(annotations={"a": "c"}))
    rig.change(lambda thing: thing["metadata"]["annotations"].update(a="b"))
    rig.clock.wait(3600)

    assert node_port.latest(is_at_rest=True).annotations["a"] == "b"


def test_patch_writes_all_in_one_request_and_keeps_the_rest(rig: KubeNodeRig) -> None:
    node_view = rig.node_port.patch(
        node_object.NodePatch(
            labels={
                well_known.STATE_LABEL: "pending",
                well_known.CONFIG_LABEL: None,
                "none": None,
            },
            annotations={well_known.STATUS_ANNOTATION: "{}"},
        )
    )
    assert node_view.labels == {well_known.STATE_LABEL: "pending"}
    assert node_view.annotations == {"a": "b", well_known.STATUS_ANNOTATION: "{}"}
    assert rig.stored_node()["spec"] == NODE["spec"]
    assert len(rig.server.log.requests()) == 1


def test_update_of_a_known_node_sends_one_request_with_differences(rig: KubeNodeRig) -> None:
    rig.node_port.read()
    node_view = rig.node_port.update(
        lambda view: node_object.NodePatch(
            labels={well_known.STATE_LABEL: view.labels[well_known.CONFIG_LABEL]},
            annotations={"a": None},
            reconfiguring_taint=True,
        )
    )
    assert node_view.labels[well_known.STATE_LABEL] == "all-1g.10gb"
    assert node_view.annotations == {}
    assert node_view.is_unschedulable
    assert node_view.taint_keys == {"dedicated", well_known.RECONFIGURING_TAINT}
    assert len(rig.server.log.requests()) == 2

    for is_tainted, taints in ((True, [OTHER, api_objects.RECONFIGURING_TAINT]), (False, [OTHER])):
        rig.node_port.update(lambda _view: node_object.NodePatch(reconfiguring_taint=is_tainted))  # noqa: B023
        stored = rig.stored_node()
        assert stored["spec"]["taints"] == taints
        rig.node_port.update(lambda _view: node_object.NodePatch(reconfiguring_taint=is_tainted))  # noqa: B023
        assert rig.stored_node() == stored


def test_an_update_outlasts_a_storm_of_other_writes(rig: KubeNodeRig) -> None:
    writes = itertools.count()

    def storm() -> None:
        written = {"labels": {"storm": str(next(writes))}}
        rig.change(lambda thing: thing["metadata"].update(written))
        if rig.clock.now_s < 3:
            rig.kube.before_patch = storm

    rig.kube.before_patch = storm

    rig.node_port.update(lambda _view: node_object.NodePatch(reconfiguring_taint=True))

    assert rig.stored_node()["spec"]["taints"] == [OTHER, api_objects.RECONFIGURING_TAINT]
    assert rig.patches() < 20


def test_a_node_that_always_conflicts_is_an_error_in_the_end(rig: KubeNodeRig) -> None:
    rig.server.inject(apiserver.Fault(method="PATCH", status=409, times=None))
    with pytest.raises(errors.ClusterError, match="changes faster") as caught:
        rig.node_port.update(lambda _view: node_object.NodePatch(reconfiguring_taint=True))
    assert caught.value.reason is reasons.Reason.API_UNAVAILABLE
    assert caught.value.may_be_done
    assert rig.patches() < 40
    assert rig.clock.now_s < 15


def test_a_patch_whose_response_was_lost_is_applied_once(rig: KubeNodeRig) -> None:
    rig.server.inject(apiserver.Fault(method="PATCH", reset=True, is_carried_out=True))
    decided: list[str | None] = []

    def switch(view: node_object.NodeView) -> node_object.NodePatch:
        decided.append(view.labels.get("x"))
        return node_object.NodePatch(labels={"x": "y"}, reconfiguring_taint=True)

    assert rig.node_port.update(switch).labels["x"] == "y"
    assert decided == [None]
    assert rig.stored_node()["spec"]["taints"] == [OTHER, api_objects.RECONFIGURING_TAINT]


def test_hidden_devices_are_not_allocatable_and_the_status_stays(rig: KubeNodeRig) -> None:
    shared = "nvidia.com/gpu.shared"
    rig.change(lambda thing: thing["status"]["allocatable"].update({shared: "4"}))

    for _ in range(2):
        rig.node_port.hide_devices()

    none = dict.fromkeys((shared, "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"), "0")
    assert rig.stored_node()["status"] == {"allocatable": {"cpu": "63500m"} | none}
    assert rig.server.log.count("patch", "nodes/status") == 1


def test_devices_are_reported_by_one_request_where_that_is_forbidden(rig: KubeNodeRig) -> None:
    rig.server.inject(apiserver.Fault(method="PATCH", path="/status", status=403, times=None))
    for _ in range(3):
        rig.node_port.report_devices({"nvidia.com/gpu": 8})
    assert rig.server.log.count("patch", "nodes/status") == 1


READY = readiness.Condition(is_true=True, reason="LayoutVerified", message="yes")
NOT_READY = readiness.Condition(is_true=False, reason="InUse", message="no")
KUBELETS = {"type": "Ready", "status": "True", "reason": "KubeletReady"}


def has_condition(rig: KubeNodeRig, condition: readiness.Condition, since: str = "") -> bool:
    facts = {"reason": condition.reason, "message": condition.message}
    now = rig.clock.now_iso()
    times = {"lastHeartbeatTime": now, "lastTransitionTime": since or now}
    own_condition = {"type": "MigReady", "status": str(condition.is_true), **facts, **times}
    conditions = rig.stored_node()["status"]["conditions"]
    return bool(conditions == [KUBELETS, own_condition])


def test_condition_is_written_beside_others_and_only_on_a_change(rig: KubeNodeRig) -> None:
    rig.with_conditions(KUBELETS)

    for condition in (READY, READY, NOT_READY, NOT_READY):
        rig.node_port.set_condition(condition)
        assert has_condition(rig, condition)

    assert rig.server.log.count("patch", "nodes/status") == 2


def test_another_agent_of_the_node_keeps_the_time_of_the_last_transition(rig: KubeNodeRig) -> None:
    old = {"type": "MigReady", "status": "False", "lastTransitionTime": "2025-01-01T00:00:00Z"}
    rig.with_conditions(KUBELETS, old)

    rig.node_port.set_condition(NOT_READY)

    assert has_condition(rig, NOT_READY, "2025-01-01T00:00:00Z")


def test_condition_without_the_right_is_skipped_and_logged_once(rig: KubeNodeRig) -> None:
    rig.server.inject(apiserver.Fault(method="PATCH", path="/status", status=403, times=None))
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            rig.node_port.set_condition(READY)
            rig.node_port.retry_condition()
        rig.clock.now_s += 601
        rig.node_port.set_condition(READY)

    assert [entry["event"] for entry in logs] == ["status_forbidden"]
    assert rig.server.log.count("patch", "nodes/status") == 2
    assert rig.node_port.patch(node_object.NodePatch(labels={"x": "y"})).labels["x"] == "y"


def test_the_newest_condition_is_written_once_a_refusal_has_passed(rig: KubeNodeRig) -> None:
    rig.with_conditions(KUBELETS)
    assert not rig.node_port.has_unwritten_condition
    rig.server.inject(apiserver.Fault(method="PATCH", path="/status", status=403, times=None))
    rig.node_port.set_condition(NOT_READY)
    rig.server.clear_faults()
    rig.node_port.set_condition(READY)
    rig.node_port.retry_condition()
    assert rig.node_port.has_unwritten_condition
    assert rig.stored_node()["status"]["conditions"] == [KUBELETS]

    rig.clock.now_s += 601
    rig.node_port.retry_condition()

    assert has_condition(rig, READY)
    assert not rig.node_port.has_unwritten_condition


@pytest.mark.parametrize("status", [401, 500])
def test_unwritten_condition_is_written_later_unless_outdated(
    rig: KubeNodeRig, status: int
) -> None:
    rig.node_port.retry_condition()
    assert rig.patches() == rig.server.log.count("patch", "nodes/status") == 0
    for condition in (NOT_READY, READY):
        rig.server.inject(apiserver.Fault(method="PATCH", path="/status", status=status))
        rig.node_port.set_condition(condition)
    rig.with_conditions(KUBELETS)

    rig.node_port.retry_condition()
    rig.node_port.retry_condition()

    assert has_condition(rig, READY)
    assert rig.server.log.count("patch", "nodes/status") == 3


NEEDED = readiness.Condition(
    type="GpuRecoveryNeeded", is_true=True, reason="GpuReset", message="GPU 0 needs a reset"
)


def test_both_conditions_are_written_once_a_refusal_has_passed(rig: KubeNodeRig) -> None:
    rig.with_conditions(KUBELETS)
    rig.server.inject(apiserver.Fault(method="PATCH", path="/status", status=500, times=None))
    rig.node_port.set_condition(READY)
    rig.node_port.set_condition(NEEDED)
    rig.server.clear_faults()

    rig.node_port.retry_condition()

    types = [each["type"] for each in rig.stored_node()["status"]["conditions"]]
    assert types == ["Ready", "MigReady", "GpuRecoveryNeeded"]
    assert not rig.node_port.has_unwritten_condition


def test_startup_taints_go_in_the_patch_of_the_rest_whatever_their_effect(
    rig: KubeNodeRig,
) -> None:
    twice = [{"key": "a.b/c", "effect": effect} for effect in ("NoSchedule", "NoExecute")]
    rig.change(
        lambda thing: thing["spec"].update(taints=[*twice, OTHER, api_objects.RECONFIGURING_TAINT])
    )

    rig.node_port.update(
        lambda _view: node_object.NodePatch(
            labels={"x": "y"},
            reconfiguring_taint=False,
            removed_taints=frozenset({"a.b/c", "not/there"}),
        )
    )

    assert rig.stored_node()["spec"]["taints"] == [OTHER]
    assert rig.patches() == 1


def test_a_startup_taint_goes_although_another_writer_was_first(rig: KubeNodeRig) -> None:
    rig.node_port.read()
    rig.kube.before_patch = lambda: rig.change(lambda thing: thing["spec"]["taints"].append(RIVAL))

    rig.node_port.update(
        lambda _view: node_object.NodePatch(removed_taints=frozenset({OTHER["key"]}))
    )

    assert rig.stored_node()["spec"]["taints"] == [RIVAL]


def test_announce_does_not_block_and_later_writes_come_after_it(rig: KubeNodeRig) -> None:
    first, second = threading.Event(), threading.Event()

    def wait_for_first() -> None:
        rig.kube.before_patch = lambda: second.wait(30)
        first.wait(30)

    rig.kube.before_patch = wait_for_first
    rig.node_port.announce(node_object.NodePatch(labels={"phase": "first"}))

    assert "phase" not in rig.stored_node()["metadata"]["labels"]
    first.set()
    rig.node_port.announce(node_object.NodePatch(labels={"phase": "second"}))
    assert rig.stored_node()["metadata"]["labels"]["phase"] == "first"
    second.set()
    third = rig.node_port.patch(node_object.NodePatch(labels={"third": "yes"}))
    assert (third.labels["phase"], rig.patches()) == ("second", 3)


NEXT: dict[str, Callable[[kube_node.KubeNode], object]] = {
    "read": lambda node: node.read(),
    "latest": lambda node: node.latest(),
    "update": lambda node: node.update(lambda _view: node_object.NodePatch(labels={"x": "y"})),
    "hide_devices": lambda node: node.hide_devices(),
    "report_devices": lambda node: node.report_devices({"nvidia.com/gpu": 8}),
    "remove_resources": lambda node: node.remove_resources(["nvidia.com/gpu"]),
    "set_condition": lambda node: node.set_condition(READY),
}


@pytest.mark.parametrize("call", NEXT.values(), ids=NEXT)
def test_every_call_waits_for_the_announcement(
    rig: KubeNodeRig, call: Callable[[kube_node.KubeNode], object]
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        has_begun.set()
        may_end.wait(30)

    rig.kube.before_patch = wait
    rig.node_port.announce(node_object.NodePatch(labels={"phase": "first"}))
    assert has_begun.wait(30)
    threading.Timer(0.1, may_end.set).start()

    call(rig.node_port)

    assert may_end.is_set()
    assert rig.node_port.read().labels["phase"] == "first"


def test_a_failed_announcement_does_not_fail_later_writes(rig: KubeNodeRig) -> None:
    rig.server.inject(apiserver.Fault(method="PATCH", status=403))

    rig.node_port.announce(node_object.NodePatch(labels={"phase": "first"}))

    assert "phase" not in rig.node_port.read().labels


def test_events_of_one_second_keep_their_order_and_are_cut(rig: KubeNodeRig) -> None:
    messages = [*map(str, range(12)), "x" * 5000]
    rig.emit(*messages)
    events = sorted(rig.events(), key=lambda event: str(event["metadata"]["name"]))
    assert [event["message"] for event in events[:-1]] == messages[:-1]
    assert len(events[-1]["message"].encode()) == 1024


def test_without_permission_events_are_paused_for_ten_minutes(rig: KubeNodeRig) -> None:
    rig.server.inject(apiserver.Fault(path="/events", status=403))

    for at_s in (0, 1, 590, 601):
        rig.clock.now_s = at_s
        rig.emit(f"at {at_s}")
        assert rig.node_port.flush_events(30)

    assert [event["message"] for event in rig.events()] == ["at 601"]
    assert rig.server.log.count("create", "events") == 2


def test_emit_does_not_block_while_the_api_is_silent(rig: KubeNodeRig) -> None:
    has_answer = threading.Event()
    rig.kube.before_post = lambda: has_answer.wait(30)

    rig.emit(*map(str, range(200)))

    assert not rig.node_port.flush_events(0)
    has_answer.set()
    published = [int(event["message"]) for event in rig.events()]
    assert published[:64] == list(range(64))
    assert len(published) < 200


@pytest.mark.parametrize("fault", [apiserver.Fault(reset=True), apiserver.Fault(status=503)])
def test_a_failed_event_is_not_raised_and_the_next_one_is_published(
    rig: KubeNodeRig, fault: apiserver.Fault
) -> None:
    rig.server.inject(fault)
    rig.emit("lost", "found")
    assert [event["message"] for event in rig.events()] == ["found"]
