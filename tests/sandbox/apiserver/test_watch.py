"""Watches of the embedded Kubernetes API."""

import contextlib
import gc
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib import parse

import pytest

from mig_manager.sandbox.apiserver import kinds
from mig_manager.sandbox.apiserver import server as sandbox_server
from testkit import apiserver
from tests.rigs import api_objects, waiting
from tests.rigs.cluster import apirig

DEADLINE_S = 60


class WatchClient:
    def __init__(self, server: apiserver.ApiServer, query: str, path: str, accept: str) -> None:
        address = parse.urlsplit(server.url)
        self._connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=DEADLINE_S
        )
        headers = {"Accept": accept}
        self._connection.request("GET", f"{path}?watch=true&{query}", headers=headers)
        self.response = self._connection.getresponse()

    def next(self) -> tuple[str, Any]:
        """Return type and object of the next event, or an empty type at the end."""
        line = self.response.readline()
        if not line:
            return "", None
        event = json.loads(line)
        return event["type"], event["object"]

    def names(self, count: int) -> list[str]:
        """Return the next events as ``TYPE name``."""
        events = [self.next() for _ in range(count)]
        return [f"{kind} {thing['metadata']['name']}" for kind, thing in events]

    def close(self) -> None:
        self.response.close()
        self._connection.close()


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    with apiserver.serve(apiserver.ApiServer(history_limit=40)) as running:
        yield running


Begin = Callable[..., WatchClient]


@pytest.fixture
def watch(server: apiserver.ApiServer) -> Iterator[Begin]:
    with contextlib.ExitStack() as stack:

        def begin(query: str = "", path: str = apirig.NODES, accept: str = "*/*") -> WatchClient:
            events = WatchClient(server, query, path, accept)
            return stack.enter_context(contextlib.closing(events))

        yield begin


def label(server: apiserver.ApiServer, name: str, **labels: str) -> None:
    server.merge(kinds.NODES, name, {"metadata": {"labels": labels}})


def test_a_watch_without_a_version_begins_with_the_present_objects(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    server.create(api_objects.a_node("n1"))
    unset, zero, table = watch(), watch("resourceVersion=0"), watch(accept=apirig.TABLE)

    server.create(api_objects.a_node("n2"))
    label(server, "n1", a="b")
    server.delete(kinds.NODES, "n2")

    expected = ["ADDED n1", "ADDED n2", "MODIFIED n1", "DELETED n2"]
    assert unset.names(4) == expected
    assert zero.names(4) == expected
    kind, shown = table.next()
    assert (kind, shown["kind"], shown["rows"][0]["cells"][0]) == ("ADDED", "Table", "n1")


def test_an_object_that_enters_or_leaves_a_selection_is_added_or_deleted(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    server.create(api_objects.a_node("n1"))
    events = watch("labelSelector=mode%3Don")

    label(server, "n1", mode="on")
    label(server, "n1", other="x")
    label(server, "n1", mode="off")
    label(server, "n1", other="y")
    label(server, "n1", mode="on")

    added, modified, deleted, again = (events.next() for _ in range(4))
    event_kinds = [kind for kind, _ in (added, modified, deleted, again)]
    assert event_kinds == ["ADDED", "MODIFIED", "DELETED", "ADDED"]
    assert deleted[1]["metadata"]["labels"]["mode"] == "on"
    version = int(deleted[1]["metadata"]["resourceVersion"])
    assert version == int(modified[1]["metadata"]["resourceVersion"]) + 1


def test_a_watch_sees_its_own_namespace_and_node_only(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    one_space = watch(path="/api/v1/namespaces/gpu/pods")
    on_node = watch("fieldSelector=spec.nodeName%3Dn2", path="/api/v1/pods")

    server.create(api_objects.a_pod("p1", node="n1"), api_objects.a_pod("p2", node="n2"))
    gpu = api_objects.a_pod("p3", node="n1")
    gpu["metadata"]["namespace"] = "gpu"
    server.create(gpu)

    assert one_space.names(1) == ["ADDED p3"]
    assert on_node.names(1) == ["ADDED p2"]


def test_the_reaction_of_a_controller_follows_the_change(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    events = watch(path="/apis/policy/v1/poddisruptionbudgets")

    server.create(api_objects.a_budget("guard", {}, minAvailable=1))

    assert events.names(2) == ["ADDED guard", "MODIFIED guard"]


def test_a_watch_ends_cleanly_at_its_timeout_after_a_last_bookmark(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    quiet = watch("timeoutSeconds=1")
    talking = watch("timeoutSeconds=1&allowWatchBookmarks=1")
    newest = str(server.store.version)

    assert quiet.next() == ("", None)
    kind, bookmark = talking.next()
    assert (kind, bookmark["kind"]) == ("BOOKMARK", "Node")
    assert bookmark["metadata"]["resourceVersion"] == newest
    assert talking.next() == ("", None)


def test_history_is_bounded_and_never_expires_an_open_watch(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    idle = watch("labelSelector=rare")
    server.create(api_objects.a_node("n1"))
    version = server.store.version
    for value in range(60):
        label(server, "n1", a=str(value))
    late = watch(f"resourceVersion={version}")
    label(server, "n1", rare="yes")

    kind, status = late.next()
    assert (kind, status["code"], status["reason"]) == ("ERROR", 410, "Expired")
    assert late.next() == ("", None)
    assert idle.names(1) == ["ADDED n1"]


def test_a_hundred_watches_need_no_threads_and_leave_nothing(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    threads_before, listeners_before = threading.active_count(), len(server.store._listeners)
    watches = [watch(f"fieldSelector=metadata.name%3Dn{index}") for index in range(100)]
    # Threads of earlier tests may end meanwhile.
    assert threading.active_count() <= threads_before
    server.create(*(api_objects.a_node(f"n{index}") for index in range(100)))

    assert [each.names(1) for each in watches] == [[f"ADDED n{i}"] for i in range(100)]
    for each in watches:
        each.close()
    waiting.until(lambda: server.watch_count == 0, "the end of the watches")
    assert len(server.store._listeners) == listeners_before


def test_stopping_the_server_ends_watches_and_stalled_requests(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    server.inject(apiserver.Fault(path="n9", stall=True))
    open_watch = watch()
    stuck = http.client.HTTPConnection(*server.address, timeout=DEADLINE_S)
    stuck.request("GET", f"{apirig.NODES}/n9")
    waiting.until(lambda: server.log.count("get", "nodes") == 1, "the read")

    server.stop()

    assert open_watch.next() == ("", None)
    with pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)):
        stuck.getresponse()
    stuck.close()
    with pytest.raises(ConnectionRefusedError):
        watch()


@pytest.mark.slow
def test_stopping_the_server_closes_connections_that_just_came() -> None:
    """A connection that stays open warns when it is collected, and a warning is an error."""
    for _ in range(20):
        with contextlib.ExitStack() as clients:
            with sandbox_server.serve() as running:
                for _ in range(8):
                    clients.enter_context(socket.create_connection(running.address))
            gc.collect()
