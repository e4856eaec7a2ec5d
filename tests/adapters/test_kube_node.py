"""KubeNode against the embedded API server."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, node
from mig_manager.core.node import cluster
from mig_manager.sandbox.apiserver import resources
from testkit import apiserver

_HOLD = {"key": cluster.HOLD_TAINT, "effect": "NoSchedule"}
_OTHER = {"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}


class FixedClock:
    now_s = 0.0

    def now_iso(self, *, after_s: float = 0.0) -> str:
        return "2026-01-02T03:04:05Z"

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        raise AssertionError(seconds)


def make_node(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": "n1",
            "labels": {cluster.CONFIG_LABEL: "all-1g.10gb"},
            "annotations": {"a": "b"},
        },
        "spec": spec,
        "status": {
            "allocatable": {"cpu": "63500m", "nvidia.com/gpu": "0", "nvidia.com/mig-1g.10gb": "7"}
        },
    }


class Rig:
    """An API server, a client of it, and its node n1."""

    def __init__(self, server: apiserver.ApiServer, kube: api.KubeApi) -> None:
        self.server = server
        self.kube = kube
        self.own = node.KubeNode(kube, name="n1", clock=FixedClock())

    def stored(self) -> dict[str, Any]:
        return self.server.get(resources.NODES, "n1")

    def taints(self) -> list[dict[str, Any]]:
        return list(self.stored()["spec"].get("taints") or ())


@pytest.fixture
def rig() -> Iterator[Rig]:
    with apiserver.serve() as server:
        server.store.create(make_node(taints=[_OTHER]))
        kube = api.KubeApi.at(server.url, sleep=lambda _seconds: None)
        yield Rig(server, kube)
        kube.close()


def test_a_read_returns_the_node_view(rig: Rig) -> None:
    seen = rig.own.read()
    assert seen == cluster.NodeView(
        name="n1",
        uid=rig.stored()["metadata"]["uid"],
        labels={cluster.CONFIG_LABEL: "all-1g.10gb"},
        annotations={"a": "b"},
        is_unschedulable=False,
        taint_keys=frozenset({"dedicated"}),
        allocatable={"nvidia.com/gpu": 0, "nvidia.com/mig-1g.10gb": 7},
    )


def test_a_missing_node_is_404(rig: Rig) -> None:
    with pytest.raises(errors.ClusterError) as caught:
        node.KubeNode(rig.kube, name="n2", clock=FixedClock()).read()
    assert caught.value.status == 404


@pytest.mark.parametrize(
    "thing",
    [
        {},
        {"metadata": []},
        {"metadata": {"name": "n1", "labels": 3}},
        {"metadata": {"name": "n1"}, "spec": {"taints": [{}]}},
        {"metadata": {"name": "n1"}, "status": {"allocatable": {"nvidia.com/gpu": "many"}}},
    ],
)
def test_a_malformed_node_is_a_cluster_error(thing: dict[str, Any]) -> None:
    with pytest.raises(errors.ClusterError, match="makes no sense"):
        cluster.parse_node(thing)


def taint(*, is_tainted: bool) -> Callable[[cluster.NodeView], cluster.NodePatch]:
    return lambda _view: cluster.NodePatch(hold_taint=is_tainted)


def test_a_patch_writes_everything_in_one_request_and_keeps_what_it_does_not_name(
    rig: Rig,
) -> None:
    seen = rig.own.patch(
        cluster.NodePatch(
            labels={cluster.STATE_LABEL: "pending", cluster.CONFIG_LABEL: None, "none": None},
            annotations={cluster.STATUS_ANNOTATION: "{}"},
        )
    )
    assert seen.labels == {cluster.STATE_LABEL: "pending"}
    assert seen.annotations == {"a": "b", cluster.STATUS_ANNOTATION: "{}"}
    assert rig.stored()["spec"] == {"taints": [_OTHER]}
    assert len(rig.server.log.requests()) == 1


def test_without_permission_it_is_forbidden(rig: Rig) -> None:
    rig.server.inject(apiserver.Fault(method="PATCH", status=403))
    with pytest.raises(errors.ClusterError) as caught:
        rig.own.patch(cluster.NodePatch(labels={"x": "y"}))
    assert caught.value.reason is errors.Reason.FORBIDDEN


def test_an_update_sends_one_request_for_a_node_that_was_read(rig: Rig) -> None:
    rig.own.read()
    seen = rig.own.update(
        lambda view: cluster.NodePatch(
            labels={cluster.STATE_LABEL: view.labels[cluster.CONFIG_LABEL]},
            annotations={"a": None},
            hold_taint=True,
        )
    )
    assert seen.labels[cluster.STATE_LABEL] == "all-1g.10gb"
    assert seen.annotations == {}
    assert cluster.HOLD_TAINT in seen.taint_keys
    assert (rig.server.log.count("get", "nodes"), rig.server.log.count("patch", "nodes")) == (1, 1)


def test_lifts_a_cordon_and_adds_and_removes_our_taint_and_no_other(rig: Rig) -> None:
    rig.server.modify(
        resources.NODES, "n1", lambda thing: thing["spec"].update(unschedulable=True)
    )
    assert rig.own.read().is_unschedulable
    seen = rig.own.update(lambda _view: cluster.NodePatch(unschedulable=False))
    assert not seen.is_unschedulable
    seen = rig.own.update(lambda _view: cluster.NodePatch(hold_taint=True, labels={"x": "y"}))
    assert seen.taint_keys == {"dedicated", cluster.HOLD_TAINT}
    assert rig.taints() == [_OTHER, _HOLD]
    seen = rig.own.update(taint(is_tainted=False))
    assert seen.taint_keys == {"dedicated"}
    assert seen.labels["x"] == "y"
    assert rig.taints() == [_OTHER]


@pytest.mark.parametrize("is_tainted", [True, False])
def test_a_correct_taint_is_not_written(rig: Rig, *, is_tainted: bool) -> None:
    rig.own.update(taint(is_tainted=is_tainted))
    version = rig.stored()["metadata"]["resourceVersion"]
    rig.own.update(taint(is_tainted=is_tainted))
    assert rig.stored()["metadata"]["resourceVersion"] == version


def test_a_concurrently_added_taint_is_kept(rig: Rig) -> None:
    rival = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    interfering = Interfering(rig.server, lambda thing: thing["spec"]["taints"].append(rival))
    own_with_rival = node.KubeNode(interfering, name="n1", clock=FixedClock())
    seen = own_with_rival.update(taint(is_tainted=True))
    assert seen.taint_keys == {"dedicated", cluster.HOLD_TAINT, str(rival["key"])}
    assert interfering.conflicts == 1


def test_a_concurrent_write_leads_to_a_new_decision(rig: Rig) -> None:
    rig.server.modify(
        resources.NODES, "n1", lambda thing: thing["metadata"]["labels"].update(x="true")
    )
    interfering = Interfering(
        rig.server, lambda thing: thing["metadata"]["labels"].update(x="false")
    )
    own_with_rival = node.KubeNode(interfering, name="n1", clock=FixedClock())
    own_with_rival.read()
    decided: list[str] = []

    def pause(view: cluster.NodeView) -> cluster.NodePatch:
        decided.append(view.labels["x"])
        return cluster.NodePatch(
            labels={"x": "paused"} if view.labels["x"] == "true" else {},
            annotations={"was": view.labels["x"]},
        )

    seen = own_with_rival.update(pause)

    assert decided == ["true", "false"]
    assert (seen.labels["x"], seen.annotations["was"]) == ("false", "false")


def test_a_node_that_always_conflicts_is_an_error_in_the_end(rig: Rig) -> None:
    rig.server.inject(apiserver.Fault(method="PATCH", status=409, times=None))
    with pytest.raises(errors.ClusterError, match="changes faster") as caught:
        rig.own.update(taint(is_tainted=True))
    assert caught.value.reason is errors.Reason.API_UNAVAILABLE
    assert caught.value.may_be_done
    assert rig.server.log.count("patch", "nodes") < 20


def test_a_patch_whose_response_was_lost_is_applied_once(rig: Rig) -> None:
    rig.server.inject(apiserver.Fault(method="PATCH", reset=True, is_carried_out=True))
    decided: list[str | None] = []

    def switch(view: cluster.NodeView) -> cluster.NodePatch:
        decided.append(view.labels.get("x"))
        return cluster.NodePatch(labels={"x": "y"}, hold_taint=True)

    seen = rig.own.update(switch)

    assert decided == [None]
    assert seen.labels["x"] == "y"
    assert rig.taints() == [_OTHER, _HOLD]


class Interfering(api.KubeApi):
    """Another writer changes the node between our first read and our first patch."""

    def __init__(
        self, server: apiserver.ApiServer, write: Callable[[dict[str, Any]], None]
    ) -> None:
        plain = api.KubeApi.at(server.url)
        super().__init__(plain._configuration)
        self._server = server
        self._write: Callable[[dict[str, Any]], None] | None = write
        self.conflicts = 0

    def patch(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self._write is not None:
            write, self._write = self._write, None
            self._server.modify(resources.NODES, "n1", write)
        try:
            return super().patch(*args, **kwargs)
        except errors.ClusterError as err:
            self.conflicts += err.status == 409
            raise


def test_announce_does_not_block_and_later_writes_come_after_it(rig: Rig) -> None:
    rig.server.inject(apiserver.Fault(method="PATCH", hang_s=1.0, times=1))

    rig.own.announce(cluster.NodePatch(labels={"phase": "first"}))

    assert "phase" not in rig.kube.get("/api/v1/nodes/n1")["metadata"].get("labels", {})
    assert rig.own.patch(cluster.NodePatch(labels={"phase": "second"})).labels["phase"] == "second"
    assert rig.server.log.count("patch", "nodes") == 2


def test_a_failed_announcement_does_not_fail_later_writes(rig: Rig) -> None:
    rig.server.inject(apiserver.Fault(method="PATCH", status=403, times=1))

    rig.own.announce(cluster.NodePatch(labels={"phase": "first"}))

    assert "phase" not in rig.own.read().labels


def test_kubectl_describe_node_shows_the_event(rig: Rig) -> None:
    rig.own.emit(reason="Draining", message="evicting ns/a", is_warning=False)
    assert rig.own.flush_events(10)
    # The query of kubectl's describe: by name, kind and the node's NAME in place of its uid.
    selector = (
        "involvedObject.name=n1,involvedObject.kind=Node,involvedObject.uid=n1,"
        "involvedObject.namespace="
    )
    found = rig.kube.get("/api/v1/events", {"fieldSelector": selector})
    (event,) = found["items"]
    assert event["metadata"]["namespace"] == "default"
    assert (event["reason"], event["message"]) == ("Draining", "evicting ns/a")
    assert (event["type"], event["count"]) == ("Normal", 1)
    assert event["source"]["component"] == event["reportingComponent"] == "mig-manager"
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2026-01-02T03:04:05Z"


def test_events_of_one_second_are_listed_in_their_order_with_long_messages_cut(rig: Rig) -> None:
    messages = [*map(str, range(12)), "x" * 5000]
    for message in messages:
        rig.own.emit(reason="Failed", message=message, is_warning=True)
    assert rig.own.flush_events(10)
    events = rig.kube.get("/api/v1/events")["items"]
    assert {event["type"] for event in events} == {"Warning"}
    assert [event["message"] for event in events[:-1]] == messages[:-1]
    assert len(events[-1]["message"].encode()) == 1024


def test_without_permission_events_are_paused_for_ten_minutes(rig: Rig) -> None:
    clock = FixedClock()
    own = node.KubeNode(rig.kube, name="n1", clock=clock)
    rig.server.inject(apiserver.Fault(path="/events", status=403))

    for at_s in (0, 1, 590, 601):
        clock.now_s = at_s
        own.emit(reason=f"At{at_s}", message="x", is_warning=True)
        assert own.flush_events(10)

    (event,) = rig.kube.get("/api/v1/events")["items"]
    assert event["reason"] == "At601"
    assert rig.server.log.count("create", "events") == 2


def test_emit_does_not_block_while_the_api_is_silent(rig: Rig) -> None:
    rig.server.inject(apiserver.Fault(path="/events", hang_s=3.0, times=1))

    for number in range(200):
        rig.own.emit(reason="Draining", message=str(number), is_warning=False)

    assert not rig.own.flush_events(0)
    assert rig.own.flush_events(30)
    found = rig.kube.get("/api/v1/events")["items"]
    found.sort(key=lambda each: int(each["metadata"]["resourceVersion"]))
    published = [int(each["message"]) for each in found]
    assert published[:64] == list(range(64))
    assert len(published) < 200


@pytest.mark.parametrize("fault", [apiserver.Fault(reset=True), apiserver.Fault(status=503)])
def test_a_failed_event_is_not_raised_and_the_next_one_is_published(
    rig: Rig, fault: apiserver.Fault
) -> None:
    rig.server.inject(fault)
    rig.own.emit(reason="Failed", message="lost", is_warning=True)
    rig.own.emit(reason="Failed", message="found", is_warning=True)
    assert rig.own.flush_events(10)
    (event,) = rig.kube.get("/api/v1/events")["items"]
    assert event["message"] == "found"


@pytest.mark.parametrize(
    ("texts", "value"),
    [
        (("0",), 0),
        (("7", 7), 7),
        (("1k", "1e3", "1E3"), 1000),
        (("2Ki",), 2048),
        (("1500m",), 2),
        (("0.5",), 1),
        (("3E",), 3 * 10**18),
    ],
)
def test_a_quantity_is_a_whole_number_rounded_up(texts: tuple[str | int], value: int) -> None:
    assert {cluster.quantity(text) for text in texts} == {value}


@pytest.mark.parametrize(
    "text",
    ["", "many", "1 k", "1kk", "1e", "1.2.3", "-", ".", "1e999999999", "1e9999999999999999999"],
)
def test_an_invalid_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        cluster.quantity(text)
