"""NodeWatch against the embedded API server, with every way a watch can fail."""

import contextlib
import dataclasses
import itertools
import math
import operator
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog.testing

from mig_manager.adapters.kubernetes import responses, watch
from mig_manager.core import timing
from mig_manager.core.objects import node_object, well_known
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.rigs import waiting
from tests.rigs.cluster import watch_rig
from tests.rigs.cluster.watch_rig import SOON_S, FaultyApi, a_node, label, wait_for_watch


@dataclasses.dataclass
class Follower:
    """A running NodeWatch, and the label of each node that it has delivered."""

    watch: watch.NodeWatch
    layouts: "queue.Queue[str]"

    def layout(self) -> str:
        return self.layouts.get(timeout=SOON_S)

    def wait_for_layout(self, expected: str) -> None:
        while self.layout() != expected:
            pass


@contextlib.contextmanager
def following(
    server: apiserver.ApiServer,
    *,
    times: watch.WatchTimes = watch_rig.BRISK,
    listen: Callable[[str], None] = lambda _layout: None,
    request_timeout_s: float = 10.0,
) -> Iterator[Follower]:
    layouts: queue.Queue[str] = queue.Queue()

    def on_node(view: node_object.NodeView) -> None:
        listen(view.labels[well_known.CONFIG_LABEL])
        layouts.put(view.labels[well_known.CONFIG_LABEL])

    with watch_rig.faulty_api(server, request_timeout_s=request_timeout_s) as kube:
        node_watch = watch.NodeWatch(kube, name="n1", on_node=on_node, times=times)
        node_watch.start()
        try:
            yield Follower(node_watch, layouts)
        finally:
            node_watch.end()


@pytest.fixture
def follower(server: apiserver.ApiServer) -> Iterator[Follower]:
    """Follow the node; its first layout has been delivered, and the watch is open."""
    with following(server) as running:
        assert running.layout() == "one"
        wait_for_watch(server)
        yield running


def test_only_the_named_node_and_its_changes_are_delivered(
    server: apiserver.ApiServer, follower: Follower
) -> None:
    server.create(a_node("other", "n2"))
    label(server, "other two", "n2")
    for layout in ("two", "three"):
        label(server, layout)
        assert follower.layout() == layout


@pytest.mark.parametrize("how", [b for b in apiserver.Break if b is not apiserver.Break.STALL])
def test_an_ended_watch_resumes_without_losing_a_change(
    server: apiserver.ApiServer, follower: Follower, how: apiserver.Break
) -> None:
    server.break_watches(how)
    label(server, "two")
    follower.wait_for_layout("two")
    assert how is apiserver.Break.EXPIRE or server.log.count("list", "nodes") == 1


def test_a_watch_that_the_server_ends_resumes_at_the_last_bookmark(
    server: apiserver.ApiServer, follower: Follower
) -> None:
    for number in range(20):
        server.create(a_node("x", f"other{number}"))
    # An earlier bookmark may still be on the way; only one after all of them will do.
    waiting.until(lambda: follower.watch.version == str(server.store.version), "the last bookmark")
    server.compact()
    server.break_watches(apiserver.Break.CLOSE)
    label(server, "two")
    assert follower.layout() == "two"
    assert server.log.count("list", "nodes") == 1


def test_an_expired_version_leads_to_a_new_list(server: apiserver.ApiServer) -> None:
    with following(server) as follower:
        assert follower.layout() == "one"
        wait_for_watch(server)
        # No watch, old or new, may see the change before the history with it is gone.
        server.inject(apiserver.Fault(verb="watch", reset=True, times=10_000))
        server.break_watches(apiserver.Break.RESET)
        waiting.until(lambda: server.watch_count == 0, "the end of the watches")
        label(server, "two")
        server.compact()
        server.clear_faults()
        follower.wait_for_layout("two")
        assert server.log.count("list", "nodes") >= 2


@pytest.mark.parametrize(("watch_s", "stall_s"), [(300, 0.5), (1, 90)])
def test_a_silent_watch_leads_to_a_new_list(
    server: apiserver.ApiServer, watch_s: float, stall_s: float
) -> None:
    """After a restore of etcd, a watch from a later version is silent until that is reached."""
    times = dataclasses.replace(watch_rig.BRISK, watch_s=watch_s, stall_s=stall_s)
    with following(server, times=times) as follower:
        assert follower.layout() == "one"
        wait_for_watch(server)
        later = f"resourceVersion={server.store.version}(&|$)"
        server.inject(apiserver.Fault(verb="watch", path=later, stall=True, times=None))
        server.break_watches(apiserver.Break.RESET)
        waiting.until(lambda: server.log.count("watch", "nodes") == 2, "the second watch")
        label(server, "two")
        follower.wait_for_layout("two")


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
    with following(server) as follower:
        follower.wait_for_layout("one")
        wait_for_watch(server)
        label(server, "two")
        follower.wait_for_layout("two")


class Pauses(threading.Event):
    """Records the pauses of a watch instead of making them, and stops it after some."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        self.seconds: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        if len(self.seconds) == self._number:
            self.set()
        return self.is_set()


REFUSED_LISTS = apiserver.Fault(verb="list", status=403, times=7)
REFUSED_WATCHES = apiserver.Fault(verb="watch", status=503, times=None)


@pytest.mark.parametrize(
    ("fault", "steady_s", "longest_s"),
    [
        pytest.param(REFUSED_LISTS, 0.0, [1, 2, 4, 8, 16, 30, 30, 1, 1], id="then steady watches"),
        pytest.param(REFUSED_WATCHES, 0.0, [1, 2, 4], id="refused watches"),
        pytest.param(None, 10.0, [1, 2, 4], id="watches that end at once"),
    ],
)
def test_backoff_grows_with_jitter_until_a_watch_is_steady(
    server: apiserver.ApiServer,
    faulty_api: FaultyApi,
    monkeypatch: pytest.MonkeyPatch,
    fault: apiserver.Fault | None,
    steady_s: float,
    longest_s: list[float],
) -> None:
    opened = FaultyApi.watch

    def end_at_once(faulty_api: FaultyApi, *args: Any, **options: Any) -> responses.WatchStream:
        stream = opened(faulty_api, *args, **options)
        stream.interrupt()
        return stream

    monkeypatch.setattr(FaultyApi, "watch", end_at_once)
    if fault is not None:
        server.inject(fault)
    backoff = timing.Backoff(first_s=1, max_s=30, factor=2.0, jitter=lambda: 0.5)
    times = watch.WatchTimes(steady_s=steady_s, pauses=backoff)
    stop = Pauses(len(longest_s))
    node_watch = watch.NodeWatch(
        faulty_api, name="n1", on_node=lambda _: None, stop=stop, times=times
    )
    node_watch.start()
    waiting.until(stop.is_set, "the pauses")
    node_watch.end()

    assert stop.seconds == [0.75 * each for each in longest_s]


def test_listener_error_keeps_the_watch_and_delivers_the_node_again(
    server: apiserver.ApiServer,
) -> None:
    failures = iter([True, False, True, False])

    def listen(_layout: str) -> None:
        if next(failures, False):
            raise RuntimeError("a bug of the listener's")

    with structlog.testing.capture_logs(), following(server, listen=listen) as follower:
        assert follower.layout() == "one"
        wait_for_watch(server)
        label(server, "two")
        assert follower.layout() == "two"


def test_a_node_created_later_or_recreated_is_delivered(server: apiserver.ApiServer) -> None:
    server.delete(kinds.NODES, "n1")
    with following(server) as follower:
        wait_for_watch(server)
        server.create(a_node("two"))
        assert follower.layout() == "two"
        server.delete(kinds.NODES, "n1")
        server.create(a_node("three"))
        assert follower.layout() == "three"


def test_contact_is_renewed_by_bookmarks_and_ages_without_a_server(
    server: apiserver.ApiServer, faulty_api: FaultyApi, follower: Follower
) -> None:
    unused = watch.NodeWatch(faulty_api, name="n1", on_node=lambda _: None)
    assert unused.last_contact_s == math.inf
    ages = itertools.pairwise(iter(lambda: follower.watch.last_contact_s, math.inf))
    waiting.until(lambda: operator.gt(*next(ages)), "a bookmark")
    assert follower.watch.last_contact_s < SOON_S
    server.stop()
    waiting.until(lambda: follower.watch.last_contact_s > 0.3, "a contact of some age")


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(None, id="an idle watch"),
        pytest.param(apiserver.Fault(verb="list", status=403, times=None), id="backoff"),
        pytest.param(apiserver.Fault(stall=True, times=None), id="silence"),
    ],
)
def test_a_watch_can_be_ended_during_any_wait(
    server: apiserver.ApiServer, fault: apiserver.Fault | None
) -> None:
    if fault:
        server.inject(fault)
    times = watch.WatchTimes(pauses=timing.Backoff(first_s=600, max_s=600))
    before = {*threading.enumerate()}
    with following(server, times=times, request_timeout_s=600):
        waiting.until(lambda: server.log.count("list", "nodes") == 1, "the list")
        if not fault:
            wait_for_watch(server)
        started = {*threading.enumerate()} - before
        (thread,) = (each for each in started if each.name == "node-watch")
    # No thread is left that could deliver anything, but in a request without an answer.
    if not (fault and fault.stall):
        thread.join(SOON_S)
        assert not thread.is_alive()
