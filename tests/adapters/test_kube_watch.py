"""What everybody has who follows a collection: the watches of node, pods and fleet."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog.testing

from mig_manager.adapters.kubernetes import api, fleet, pods, responses, watch
from mig_manager.core.fleet import nodes as fleet_nodes
from mig_manager.core.node import cluster
from mig_manager.sandbox.apiserver import resources
from testkit import apiserver
from tests import waiting
from tests.sandbox import apirig

_SOON_S = 20.0


class FaultyApi(api.KubeApi):
    """Has a bug: some watches end in an unexpected error. Keeps the time-outs asked for."""

    faults: int
    timeouts_s: list[float]

    def watch(self, *args: Any, **options: Any) -> responses.WatchStream:
        self.timeouts_s.append(options["idle_timeout_s"])
        if self.faults:
            self.faults -= 1
            raise LookupError("a bug")
        return super().watch(*args, **options)


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    with apiserver.serve() as running:
        running.store.create(apirig.a_node("n1"))
        yield running


@pytest.fixture
def kube(server: apiserver.ApiServer) -> Iterator[FaultyApi]:
    client = FaultyApi.at(server.url, sleep=lambda _seconds: None)
    client.faults, client.timeouts_s = 0, []
    yield client
    client.close()


@contextlib.contextmanager
def node_followed(kube: api.KubeApi, heard: Callable[[], None]) -> Iterator[None]:
    stop = threading.Event()
    follower = watch.NodeWatch(kube, name="n1", on_node=lambda _: heard(), stop=stop)
    thread = threading.Thread(target=follower.run)
    thread.start()
    yield
    stop.set()
    thread.join(_SOON_S)


@contextlib.contextmanager
def pods_followed(kube: api.KubeApi, heard: Callable[[], None]) -> Iterator[None]:
    pod_watch = pods.PodWatch(kube, node_name="n1", on_change=heard)
    pod_watch.expect_change()
    yield
    pod_watch.dismiss()


@contextlib.contextmanager
def fleet_followed(kube: api.KubeApi, heard: Callable[[], None]) -> Iterator[None]:
    class Heard(fleet.Fleet):
        def changed(self, kind: str, item: Any) -> None:
            super().changed(kind, item)
            heard()

    nodes = Heard(kube, selector="")
    nodes.start()
    yield
    nodes.close()


FOLLOWERS = [node_followed, pods_followed, fleet_followed]
Follower = Callable[[api.KubeApi, Callable[[], None]], contextlib.AbstractContextManager[None]]


def touch(server: apiserver.ApiServer, value: str) -> None:
    """Change the node, and a pod on it."""

    def label(thing: dict[str, Any]) -> None:
        thing["metadata"]["labels"] = {"touched": value}

    server.modify(resources.NODES, "n1", label)
    metadata = {"name": value, "namespace": "default"}
    spec = {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}]}
    server.store.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


@pytest.mark.parametrize("follow", FOLLOWERS)
def test_an_unexpected_error_does_not_end_a_watch(
    server: apiserver.ApiServer, kube: FaultyApi, follow: Follower
) -> None:
    heard: queue.Queue[None] = queue.Queue()
    kube.faults = 2

    with (
        structlog.testing.capture_logs() as logs,
        follow(kube, lambda: heard.put(None)),
    ):
        waiting.until(lambda: server.watch_count == 1)
        while not heard.empty():
            heard.get()
        touch(server, "once")
        heard.get(timeout=_SOON_S)

    assert kube.faults == 0
    logged = [entry["event"] for entry in logs if entry["log_level"] == "error"]
    assert len(logged) == 2
    assert logged[0].endswith(("_watch_error", "pod_watch_error"))


@pytest.mark.parametrize("follow", FOLLOWERS)
def test_a_dead_connection_is_detected_before_the_second_bookmark_is_due(
    server: apiserver.ApiServer, kube: FaultyApi, follow: Follower
) -> None:
    with follow(kube, lambda: None):
        waiting.until(lambda: server.watch_count == 1)

    # The API server sends one each minute.
    assert set(kube.timeouts_s) != set()
    assert all(0 < timeout_s < 120 for timeout_s in kube.timeouts_s)


def test_a_fleet_reports_trouble_after_an_unexpected_error(
    server: apiserver.ApiServer, kube: FaultyApi
) -> None:
    times = watch.Times(first_wait_s=0.01, longest_wait_s=0.02)
    nodes = fleet.Fleet(kube, selector="", times=times)
    kube.faults = 1000
    nodes.start()
    with contextlib.closing(nodes), structlog.testing.capture_logs():
        waiting.until(lambda: nodes.trouble == "internal error: LookupError: a bug")
        server.modify(
            resources.NODES,
            "n1",
            lambda thing: thing["metadata"].update(labels={cluster.CONFIG_LABEL: "new"}),
        )
        kube.faults = 0

        def layouts() -> list[str | None]:
            return [node.requested for node in nodes.nodes()]

        waiting.until(lambda: layouts() == ["new"] and not nodes.trouble)
        assert isinstance(nodes.nodes()[0], fleet_nodes.Node)
