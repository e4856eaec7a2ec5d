"""NodeWatch against the embedded API server, with every way a watch can fail."""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mig_manager.adapters.kubernetes import api, responses, watch
from mig_manager.core.node import cluster
from mig_manager.sandbox.apiserver import resources
from testkit import apiserver
from tests import waiting

_SOON_S = 10.0
_BRISK = watch.Times(watch_s=300, steady_s=0.0, first_wait_s=0.01, longest_wait_s=0.05)


class Follower:
    """A running NodeWatch and what it has delivered."""

    def __init__(
        self,
        server: apiserver.ApiServer,
        *,
        times: watch.Times = _BRISK,
        on_node: Callable[[cluster.NodeView], None] | None = None,
        request_timeout_s: float = 10.0,
        kind: type[api.KubeApi] = api.KubeApi,
    ) -> None:
        self.server = server
        self.views: queue.Queue[cluster.NodeView] = queue.Queue()
        self.stop = threading.Event()
        self.kube = kind.at(
            server.url, request_timeout_s=request_timeout_s, sleep=lambda _seconds: None
        )
        self.watch = watch.NodeWatch(
            self.kube, name="n1", on_node=on_node or self.views.put, stop=self.stop, times=times
        )
        self.thread = threading.Thread(target=self.watch.run)

    def layout(self) -> str | None:
        """Return the label in the next node that is delivered."""
        return self.views.get(timeout=_SOON_S).labels.get(cluster.CONFIG_LABEL)

    def wait_for_layout(self, wanted: str) -> None:
        while self.layout() != wanted:
            pass

    def wait_for_watch(self) -> None:
        """Return when the watch is open on the server's side."""
        waiting.until(lambda: self.server.watch_count == 1)


def make_node(layout: str = "one", name: str = "n1") -> dict[str, Any]:
    metadata = {"name": name, "labels": {cluster.CONFIG_LABEL: layout}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}


def label(server: apiserver.ApiServer, layout: str, name: str = "n1") -> None:
    def change(thing: dict[str, Any]) -> None:
        thing["metadata"]["labels"] = {cluster.CONFIG_LABEL: layout}

    server.modify(resources.NODES, name, change)


@contextlib.contextmanager
def following(follower: Follower) -> Iterator[Follower]:
    follower.thread.start()
    try:
        yield follower
    finally:
        follower.stop.set()
        follower.thread.join(_SOON_S)
        follower.kube.close()
        assert not follower.thread.is_alive()


@contextlib.contextmanager
def serving(*, refuses_expired_watches: bool = False) -> Iterator[apiserver.ApiServer]:
    server = apiserver.ApiServer(
        refuses_expired_watches=refuses_expired_watches, bookmark_period_s=0.05
    )
    with apiserver.serve(server) as running:
        running.store.create(make_node())
        yield running


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    with serving() as running:
        yield running


def test_only_the_named_node_and_its_changes_are_delivered(server: apiserver.ApiServer) -> None:
    server.store.create(make_node("other", "n2"))
    with following(Follower(server)) as follower:
        assert follower.layout() == "one"
        follower.wait_for_watch()
        label(server, "other two", "n2")
        label(server, "two")
        assert follower.layout() == "two"
        label(server, "three")
        assert follower.layout() == "three"


@pytest.mark.parametrize("how", [b for b in apiserver.Break if b is not apiserver.Break.STALL])
def test_an_ended_watch_resumes_without_losing_a_change(
    server: apiserver.ApiServer, how: apiserver.Break
) -> None:
    with following(Follower(server)) as follower:
        assert follower.layout() == "one"
        follower.wait_for_watch()
        server.break_watches(how)
        label(server, "two")
        follower.wait_for_layout("two")


def end_in_order(server: apiserver.ApiServer) -> None:
    """End the watch and return when the next one is asked for, which takes but a moment."""
    asked = server.log.count("watch", "nodes")
    server.break_watches(apiserver.Break.CLOSE)
    waiting.until(lambda: server.log.count("watch", "nodes") > asked)


def test_an_orderly_end_resumes_at_the_last_version(server: apiserver.ApiServer) -> None:
    with following(Follower(server)) as follower:
        assert follower.layout() == "one"
        for _ in range(3):
            follower.wait_for_watch()
            end_in_order(server)
        follower.wait_for_watch()
        label(server, "two")
        assert follower.layout() == "two"
        assert server.log.count("list", "nodes") == 1


def test_bookmarks_advance_the_resource_version(server: apiserver.ApiServer) -> None:
    with following(Follower(server)) as follower:
        assert follower.layout() == "one"
        follower.wait_for_watch()
        for number in range(20):
            server.store.create(make_node("x", f"other{number}"))
        # An earlier bookmark may still be on the way; only one after all of them will do.
        waiting.until(lambda: follower.watch._version == str(server.store.version))
        server.compact()
        server.break_watches(apiserver.Break.CLOSE)
        label(server, "two")
        assert follower.layout() == "two"
        assert server.log.count("list", "nodes") == 1


@pytest.mark.parametrize("is_refused", [True, False], ids=["as status", "in the stream"])
def test_an_expired_version_leads_to_a_new_list(*, is_refused: bool) -> None:
    with (
        serving(refuses_expired_watches=is_refused) as server,
        following(Follower(server)) as follower,
    ):
        assert follower.layout() == "one"
        follower.wait_for_watch()
        # No watch, old or new, may see the change before the history with it is gone.
        server.inject(apiserver.Fault(verb="watch", reset=True, times=10_000))
        server.break_watches(apiserver.Break.RESET)
        waiting.until(lambda: server.watch_count == 0)
        label(server, "two")
        server.compact()
        server.clear_faults()
        follower.wait_for_layout("two")
        assert server.log.count("list", "nodes") >= 2


@pytest.mark.parametrize(
    "fault",
    [
        apiserver.Fault(verb="list", status=500, times=9),
        apiserver.Fault(verb="list", status=403, times=2),
        apiserver.Fault(verb="list", reset=True, times=9),
        apiserver.Fault(verb="list", truncate=True, times=9),
        apiserver.Fault(verb="watch", status=503, times=3),
        apiserver.Fault(verb="watch", status=410, times=3),
        apiserver.Fault(verb="watch", status=429, retry_after_s=1, times=2),
        apiserver.Fault(verb="watch", reset=True, times=3),
        apiserver.Fault(verb="watch", truncate=True, times=3),
    ],
    ids=lambda fault: f"{fault.verb} {fault.status or ('reset' if fault.reset else 'truncate')}",
)
def test_the_watch_recovers_from_any_response(
    server: apiserver.ApiServer, fault: apiserver.Fault
) -> None:
    server.inject(fault)
    with following(Follower(server)) as follower:
        follower.wait_for_layout("one")
        follower.wait_for_watch()
        label(server, "two")
        follower.wait_for_layout("two")


def test_a_silent_watch_is_replaced(server: apiserver.ApiServer) -> None:
    server.inject(apiserver.Fault(verb="watch", stall=True))
    times = watch.Times(watch_s=0.2, stall_s=0.3, steady_s=0.0, first_wait_s=0.01)
    with following(Follower(server, times=times)) as follower:
        assert follower.layout() == "one"
        label(server, "two")
        follower.wait_for_layout("two")


class Curt(api.KubeApi):
    """Every watch is over, in an orderly way, as soon as it is open."""

    def watch(self, *args: Any, **kwargs: Any) -> responses.WatchStream:
        opened = super().watch(*args, **kwargs)
        opened.interrupt()
        return opened


@pytest.mark.parametrize("is_orderly", [True, False])
def test_a_server_that_ends_each_watch_at_once_causes_backoff(
    server: apiserver.ApiServer, *, is_orderly: bool
) -> None:
    if not is_orderly:
        server.inject(apiserver.Fault(verb="watch", status=503, times=None))
    kind = Curt if is_orderly else api.KubeApi
    times = watch.Times(first_wait_s=0.1, longest_wait_s=60)
    with following(Follower(server, times=times, kind=kind)) as follower:
        assert follower.layout() == "one"
        assert not follower.stop.wait(1.0)
        assert 2 <= server.log.count("watch", "nodes") <= 6


def test_the_backoff_grows_to_its_limit_and_is_half_random() -> None:
    times = watch.Times(first_wait_s=1, longest_wait_s=30)
    longest = {1: 1, 2: 2, 3: 4, 6: 30, 10_000: 30}
    assert {failures: times.backoff_s(failures, 1.0) for failures in longest} == longest
    assert times.backoff_s(3, 0.0) == 2


def test_a_listener_error_does_not_end_the_watch_and_the_node_is_delivered_again(
    server: apiserver.ApiServer,
) -> None:
    heard: queue.Queue[str] = queue.Queue()
    failures = iter([True, False, True, False])

    def listen(view: cluster.NodeView) -> None:
        if next(failures, False):
            raise RuntimeError("a bug of the listener's")
        heard.put(view.labels[cluster.CONFIG_LABEL])

    with following(Follower(server, on_node=listen)) as follower:
        assert heard.get(timeout=_SOON_S) == "one"
        follower.wait_for_watch()
        label(server, "two")
        assert heard.get(timeout=_SOON_S) == "two"


def test_a_node_created_later_or_recreated_is_delivered(server: apiserver.ApiServer) -> None:
    server.delete(resources.NODES, "n1")
    with following(Follower(server)) as follower:
        follower.wait_for_watch()
        server.store.create(make_node("two"))
        assert follower.layout() == "two"
        server.delete(resources.NODES, "n1")
        server.store.create(make_node("three"))
        assert follower.layout() == "three"


def test_the_contact_is_infinitely_old_at_first_renewed_by_bookmarks_and_ages_without_a_server(
    server: apiserver.ApiServer,
) -> None:
    follower = Follower(server)
    assert follower.watch.last_contact_s == math.inf
    with following(follower):
        follower.wait_for_watch()
        before = follower.watch._contact_s
        waiting.until(lambda: follower.watch._contact_s > before)
        assert follower.watch.last_contact_s < _SOON_S
        server.stop()
        waiting.until(lambda: follower.watch.last_contact_s > 0.3)


def stops_promptly(follower: Follower) -> None:
    begun = time.monotonic()
    follower.stop.set()
    follower.thread.join(_SOON_S)
    assert not follower.thread.is_alive()
    assert time.monotonic() - begun < 2.0


def test_run_ends_soon_while_a_watch_is_idle_and_nothing_is_delivered_after_it(
    server: apiserver.ApiServer,
) -> None:
    with following(Follower(server)) as follower:
        assert follower.layout() == "one"
        follower.wait_for_watch()
        stops_promptly(follower)
        label(server, "two")
        with pytest.raises(queue.Empty):
            follower.views.get(timeout=0.2)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(apiserver.Fault(verb="list", status=403, times=None), id="backoff"),
        pytest.param(apiserver.Fault(stall=True, times=None), id="silence"),
    ],
)
def test_run_ends_soon_during_a_backoff_or_silence(
    server: apiserver.ApiServer, fault: apiserver.Fault
) -> None:
    server.inject(fault)
    times = watch.Times(first_wait_s=600, longest_wait_s=600)
    with following(Follower(server, times=times, request_timeout_s=5)) as follower:
        waiting.until(lambda: server.log.count("list", "nodes") == 1)
        stops_promptly(follower)
