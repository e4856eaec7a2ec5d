"""Watches of the embedded Kubernetes API, in peace and when they break."""

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib import parse

import pytest

from mig_manager.sandbox.apiserver import resources
from testkit import apiserver
from tests import waiting
from tests.sandbox import apirig

BOOKMARK_PERIOD_S = 0.05
DEADLINE_S = 5


class Watch:
    """An open watch, read line by line."""

    def __init__(self, server: apiserver.ApiServer, path: str, **headers: str) -> None:
        address = parse.urlsplit(server.url)
        self._connection = http.client.HTTPConnection(
            address.hostname or "", address.port, timeout=DEADLINE_S
        )
        self._connection.request("GET", path, headers=headers)
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
    with apiserver.serve(apiserver.ApiServer(bookmark_period_s=BOOKMARK_PERIOD_S)) as running:
        yield running


@pytest.fixture
def watch(server: apiserver.ApiServer) -> Iterator[Callable[[str], Watch]]:
    with contextlib.ExitStack() as stack:

        def begin(query: str = "", path: str = apirig.NODES, **headers: str) -> Watch:
            events = Watch(server, f"{path}?watch=true&{query}", **headers)
            return stack.enter_context(contextlib.closing(events))

        yield begin


Begin = Callable[..., Watch]


def label(server: apiserver.ApiServer, name: str, **labels: str) -> None:
    server.modify(resources.NODES, name, lambda node: node["metadata"]["labels"].update(labels))


def test_a_watch_from_nowhere_begins_with_what_is_there(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    server.store.create(apirig.a_node("n1"))
    unset, zero = watch(), watch("resourceVersion=0")

    server.store.create(apirig.a_node("n2"))
    label(server, "n1", a="b")
    server.delete(resources.NODES, "n2")

    expected = ["ADDED n1", "ADDED n2", "MODIFIED n1", "DELETED n2"]
    assert unset.names(4) == expected
    assert zero.names(4) == expected


def test_what_enters_or_leaves_a_selection_is_added_or_deleted(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    server.store.create(apirig.a_node("n1"))
    events = watch("labelSelector=mode%3Don")

    label(server, "n1", mode="on")
    label(server, "n1", other="x")
    label(server, "n1", mode="off")
    label(server, "n1", other="y")
    label(server, "n1", mode="on")

    added, modified, deleted, again = (events.next() for _ in range(4))
    assert [added[0], modified[0], deleted[0], again[0]] == [
        "ADDED", "MODIFIED", "DELETED", "ADDED",
    ]  # fmt: skip
    assert deleted[1]["metadata"]["labels"]["mode"] == "on"
    version = int(deleted[1]["metadata"]["resourceVersion"])
    assert version == int(modified[1]["metadata"]["resourceVersion"]) + 1


def test_a_watch_sees_its_own_namespace_name_and_node_only(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    one_node = watch("fieldSelector=metadata.name%3Dn2")
    one_space = watch(path="/api/v1/namespaces/gpu/pods")
    on_node = watch("fieldSelector=spec.nodeName%3Dn2", path="/api/v1/pods")

    server.store.create(apirig.a_node("n1"))
    server.store.create(apirig.a_node("n2"))
    server.store.create(apirig.a_pod("p1", node="n1"))
    server.store.create(apirig.a_pod("p2", node="n2"))
    gpu = apirig.a_pod("p3", node="n1")
    gpu["metadata"]["namespace"] = "gpu"
    server.store.create(gpu)

    assert one_node.names(1) == ["ADDED n2"]
    assert one_space.names(1) == ["ADDED p3"]
    assert on_node.names(1) == ["ADDED p2"]


def test_what_a_controller_writes_in_answer_to_a_change_comes_after_it(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    seen: list[str] = []
    server.store.subscribe(lambda record: seen.append(record.change.value))
    events = watch(path="/apis/policy/v1/poddisruptionbudgets")

    server.store.create(apirig.a_budget("guard", {}, minAvailable=1))

    assert events.names(2) == ["ADDED guard", "MODIFIED guard"]
    assert seen == ["ADDED", "MODIFIED"]


def test_bookmarks_carry_the_version_of_the_whole_store(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    events = watch("allowWatchBookmarks=true&fieldSelector=metadata.name%3Dother")
    server.store.create(apirig.a_node("n1"))
    wanted = str(server.store.version)

    seen = ""
    while seen != wanted:
        kind, thing = events.next()
        assert (kind, thing["kind"]) == ("BOOKMARK", "Node")
        seen = thing["metadata"]["resourceVersion"]


def test_a_watch_ends_cleanly_at_its_timeout_after_a_last_bookmark(watch: Begin) -> None:
    quiet, talking = watch("timeoutSeconds=1"), watch("timeoutSeconds=1&allowWatchBookmarks=1")

    assert quiet.next() == ("", None)
    kinds: list[str] = []
    while not kinds or kinds[-1]:
        kinds.append(talking.next()[0])
    assert kinds[-2] == "BOOKMARK"


@pytest.mark.parametrize("is_refused", [False, True], ids=["event", "refused"])
def test_a_forgotten_version_is_an_error_event_in_the_stream_or_refused_at_once(
    *, is_refused: bool
) -> None:
    api = apiserver.ApiServer(refuses_expired_watches=is_refused)
    with apiserver.serve(api) as server:
        server.compact()
        with contextlib.closing(Watch(server, f"{apirig.NODES}?watch=1&resourceVersion=1")) as it:
            kind, status = ("", json.loads(it.response.read())) if is_refused else it.next()
            end = it.next()

    assert it.response.status == (410 if is_refused else 200)
    assert (kind, status["code"]) == ("" if is_refused else "ERROR", 410)
    assert (status["kind"], status["reason"], end) == ("Status", "Expired", ("", None))


def test_history_is_bounded_but_an_open_watch_never_falls_out_of_it() -> None:
    with apiserver.serve(apiserver.ApiServer(history_limit=10)) as server:
        idle = Watch(server, f"{apirig.NODES}?watch=1&labelSelector=rare")
        server.store.create(apirig.a_node("n1"))
        version = server.store.version
        for value in range(50):
            label(server, "n1", a=str(value))
        late = Watch(server, f"{apirig.NODES}?watch=1&resourceVersion={version}")
        label(server, "n1", rare="yes")

        assert late.next()[0] == "ERROR"
        assert idle.names(1) == ["ADDED n1"]
        idle.close()
        late.close()


def test_a_table_watch_sends_tables(server: apiserver.ApiServer, watch: Begin) -> None:
    server.store.create(apirig.a_node("n1"))
    kind, table = watch(Accept=apirig.TABLE).next()

    assert (kind, table["kind"]) == ("ADDED", "Table")
    assert table["rows"][0]["cells"][0] == "n1"


def test_a_watcher_that_leaves_is_forgotten(server: apiserver.ApiServer, watch: Begin) -> None:
    events = watch()
    waiting.until(lambda: server.watch_count == 1)

    events.close()

    waiting.until(lambda: server.watch_count == 0)


def test_three_hundred_watchers_each_see_their_own_node(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    threads_before = threading.active_count()
    watches = [watch(f"fieldSelector=metadata.name%3Dn{index}") for index in range(300)]
    assert threading.active_count() == threads_before
    for index in range(300):
        server.store.create(apirig.a_node(f"n{index}"))

    assert [each.names(1) for each in watches] == [[f"ADDED n{i}"] for i in range(300)]


# Breaks and faults


def test_watches_can_be_closed_or_expired_under_way(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    closed = watch()
    server.break_watches(apiserver.Break.CLOSE)
    assert closed.next() == ("", None)

    expired = watch()
    server.break_watches(apiserver.Break.EXPIRE)
    kind, status = expired.next()
    assert (kind, status["code"]) == ("ERROR", 410)
    assert expired.next() == ("", None)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        (apiserver.Break.RESET, ConnectionResetError),
        (apiserver.Break.TRUNCATE, (http.client.IncompleteRead, json.JSONDecodeError)),
    ],
    ids=["reset", "truncate"],
)
def test_watches_can_be_broken_under_way(
    server: apiserver.ApiServer, watch: Begin, how: apiserver.Break, error: type[Exception]
) -> None:
    events = watch()

    server.break_watches(how)

    with pytest.raises(error):
        events.next()


def test_a_stalled_watch_stays_open_and_says_nothing(
    server: apiserver.ApiServer, watch: Begin
) -> None:
    begun = watch("allowWatchBookmarks=1&timeoutSeconds=1")
    server.break_watches(apiserver.Break.STALL)
    server.inject(apiserver.Fault(verb="watch", stall=True))
    born = watch()
    server.store.create(apirig.a_node("n1"))

    assert born.response.status == 200
    for silent in (begun, born):
        silent._connection.sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            silent.next()


def test_stopping_the_server_ends_watches_and_stalled_requests() -> None:
    with apiserver.serve() as server:
        server.inject(apiserver.Fault(path="n9", stall=True))
        open_watch = Watch(server, f"{apirig.NODES}?watch=1")
        stuck = http.client.HTTPConnection(*server.address, timeout=DEADLINE_S)
        stuck.request("GET", f"{apirig.NODES}/n9")
        waiting.until(lambda: server.log.count("get", "nodes") == 1)

    assert open_watch.next() == ("", None)
    with pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)):
        stuck.getresponse()
    open_watch.close()
    stuck.close()
    with pytest.raises(ConnectionRefusedError):
        Watch(server, apirig.NODES)


def test_a_fault_strikes_the_requests_it_is_meant_for(server: apiserver.ApiServer) -> None:
    server.store.create(apirig.a_node("n1"))
    server.inject(apiserver.Fault(method="GET", path="nodes/n1", skip=1, times=2, status=503))
    server.inject(apiserver.Fault(verb="list", status=429, retry_after_s=7, times=None))
    ask = apirig.Client(server)

    codes = [ask("GET", f"{apirig.NODES}/n1").code for _ in range(4)]
    lists = [ask("GET", apirig.NODES) for _ in range(3)]
    server.clear_faults()

    assert codes == [200, 503, 503, 200]
    assert [each.code for each in lists] == [429] * 3
    assert lists[0].headers["Retry-After"] == "7"
    assert lists[0].body["details"]["retryAfterSeconds"] == 7
    assert ask("GET", apirig.NODES).code == 200
    ask.http.clear()


def test_an_answer_can_be_lost_after_the_request_has_been_carried_out(
    server: apiserver.ApiServer,
) -> None:
    server.inject(apiserver.Fault(method="POST", reset=True, is_carried_out=True))
    server.inject(apiserver.Fault(method="POST", reset=True))

    for name in ("n1", "n2"):
        connection = http.client.HTTPConnection(*server.address, timeout=DEADLINE_S)
        connection.request("POST", apirig.NODES, json.dumps(apirig.a_node(name)))
        with pytest.raises(ConnectionResetError):
            connection.getresponse()
        connection.close()

    assert server.store.find(resources.NODES, "n1")
    assert not server.store.find(resources.NODES, "n2")


def test_requests_are_logged_with_who_asked_what(server: apiserver.ApiServer) -> None:
    ask = apirig.Client(server)
    ask("GET", f"{apirig.NODES}?limit=1", user_agent="mig-manager/1", authorization="Bearer t")
    ask.evict("p1")
    ask("GET", "/version")
    ask.http.clear()

    listed, evicted, version = server.log.requests()
    assert (listed.verb, listed.resource, listed.query) == ("list", "nodes", {"limit": "1"})
    assert (listed.user_agent, listed.token) == ("mig-manager/1", "t")
    assert (evicted.verb, evicted.resource) == ("create", "pods/eviction")
    assert (version.verb, version.path) == ("", "/version")
    assert server.log.count("create", "pods/eviction") == 1
    server.log.clear()
    assert server.log.requests() == []
