"""What the watches of node, pods and fleet have in common, and the watch of a node's pods."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog.testing

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, fleet, pods, watch
from mig_manager.agent import agent_settings
from mig_manager.agent.pods import drain, drain_scope
from mig_manager.core import pod_rights
from mig_manager.core.node import gpu_use
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.rigs import api_objects, waiting
from tests.rigs.cluster.watch_rig import (
    BRISK,
    SOON_S,
    FaultyApi,
    label,
    wait_for_watch,
)
from tests.rigs.node import agents, driver_rules, fakes, node_rig, parts


@contextlib.contextmanager
def node_followed(kube: api.KubeApi, notify: Callable[[], None]) -> Iterator[None]:
    follower = watch.NodeWatch(kube, name="n1", on_node=lambda _: notify())
    follower.start()
    try:
        yield
    finally:
        follower.end()


@contextlib.contextmanager
def pods_followed(kube: api.KubeApi, notify: Callable[[], None]) -> Iterator[None]:
    pod_watch = pods.PodWatch(kube, node_name="n1", on_change=notify)
    pod_watch.expect_change()
    with contextlib.suppress(Exception):
        pod_watch.first_list()
    try:
        yield
    finally:
        pod_watch.dismiss()


@contextlib.contextmanager
def fleet_followed(kube: api.KubeApi, notify: Callable[[], None]) -> Iterator[None]:
    class NotifyingFleet(fleet.Fleet):
        def on_change(self, kind: str, item: Any) -> None:
            super().on_change(kind, item)
            notify()

    with contextlib.closing(NotifyingFleet(kube, selector="")) as nodes:
        nodes.start()
        yield


@pytest.mark.parametrize("follow", [node_followed, pods_followed, fleet_followed])
def test_an_unexpected_error_does_not_end_a_watch(
    server: apiserver.ApiServer,
    faulty_api: FaultyApi,
    follow: Callable[..., contextlib.AbstractContextManager[None]],
) -> None:
    news = threading.Semaphore(0)
    faulty_api.faults = 2

    with structlog.testing.capture_logs() as logs, follow(faulty_api, news.release):
        wait_for_watch(server)
        while news.acquire(blocking=False):
            pass
        label(server, "two")
        server.create(api_objects.a_pod())
        assert news.acquire(timeout=SOON_S)

    assert faulty_api.faults == 0
    logged = [entry["event"] for entry in logs if entry["log_level"] == "error"]
    assert len(logged) == 2
    assert logged[0].endswith("_watch_error")
    # A dead connection is detected before the second bookmark is due: there is one each minute.
    assert 0 < faulty_api.timeout_s < 120


def test_a_fleet_reports_trouble_after_an_unexpected_error(
    server: apiserver.ApiServer, faulty_api: FaultyApi
) -> None:
    nodes = fleet.Fleet(faulty_api, selector="", times=BRISK)
    faulty_api.faults = 1000
    nodes.start()
    with contextlib.closing(nodes), structlog.testing.capture_logs():
        waiting.until(lambda: nodes.trouble == "internal error: LookupError: a bug", "the bug")
        label(server, "two")
        faulty_api.faults = 0
        waiting.until(
            lambda: [node.requested for node in nodes.nodes()] == ["two"] and not nodes.trouble,
            "the changed node",
        )
        nodes.nodes()
        began_s = time.monotonic()
        nodes.wait(0.2)
        assert time.monotonic() - began_s >= 0.2


# -- the watch of a node's pods ---------------------------------------------------------------


@dataclasses.dataclass
class PodFollower:
    """A PodWatch, and how often a pod changed."""

    watch: pods.PodWatch
    news: threading.Semaphore

    def hears(self) -> bool:
        return self.news.acquire(timeout=SOON_S)

    def names(self) -> set[str] | None:
        followed = self.watch.pods()
        return None if followed is None else {pod.name for pod in followed}


def pod_watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pods-watch"]


@pytest.fixture
def of_pods(faulty_api: FaultyApi) -> Iterator[PodFollower]:
    news = threading.Semaphore(0)
    pod_watch = pods.PodWatch(faulty_api, node_name="n1", on_change=news.release)
    yield PodFollower(pod_watch, news)
    pod_watch.dismiss()
    waiting.until(lambda: not pod_watches(), "the end of the watch of pods")


@pytest.fixture
def workloads(faulty_api: FaultyApi, of_pods: PodFollower) -> pods.KubeWorkloads:
    return pods.KubeWorkloads(
        faulty_api, node_name="n1", clock=fakes.FakeClock(), watch=of_pods.watch
    )


def start_watch(server: apiserver.ApiServer, of_pods: PodFollower) -> None:
    of_pods.watch.expect_change()
    assert of_pods.watch.first_list() == ()
    wait_for_watch(server)


def test_pods_are_listed_and_watched_only_once_a_change_is_expected(
    server: apiserver.ApiServer, of_pods: PodFollower
) -> None:
    assert pod_watches() == []
    start_watch(server, of_pods)
    of_pods.watch.expect_change()
    assert of_pods.watch.first_list() is None


def test_only_changes_of_the_nodes_own_pods_are_reported(
    server: apiserver.ApiServer, of_pods: PodFollower
) -> None:
    start_watch(server, of_pods)

    server.create(api_objects.a_pod("elsewhere", node="n2"), api_objects.a_pod("here"))

    assert of_pods.hears()
    assert not of_pods.news.acquire(blocking=False)


def test_a_dismissed_pod_watch_ends_until_the_next_change_is_expected(
    server: apiserver.ApiServer, of_pods: PodFollower
) -> None:
    start_watch(server, of_pods)

    of_pods.watch.dismiss()
    of_pods.watch.dismiss()
    waiting.until(lambda: server.watch_count == 0, "the end of the watches")
    server.create(api_objects.a_pod("meanwhile"))
    assert not of_pods.news.acquire(blocking=False)

    of_pods.watch.expect_change()
    assert [pod.name for pod in of_pods.watch.first_list() or ()] == ["meanwhile"]
    assert of_pods.hears()


def test_a_forbidden_pod_watch_is_logged_once_and_opened_again(
    server: apiserver.ApiServer, of_pods: PodFollower
) -> None:
    server.inject(apiserver.Fault(verb="watch", resource="pods", status=403, times=2))
    with structlog.testing.capture_logs() as logs:
        of_pods.watch.expect_change()
        of_pods.watch.first_list()
        waiting.until(lambda: of_pods.names() == set(), "the pods")
    assert [entry["event"] for entry in logs] == ["collection_watch_lost"]


@pytest.mark.parametrize("how", [apiserver.Break.EXPIRE, apiserver.Break.RESET])
def test_pods_are_returned_only_while_the_watch_is_up_to_date(
    server: apiserver.ApiServer, of_pods: PodFollower, how: apiserver.Break
) -> None:
    for name, node in (("old", "n1"), ("elsewhere", "n2")):
        server.create(api_objects.a_pod(name, node=node))
    assert of_pods.names() is None
    of_pods.watch.expect_change()
    assert [pod.name for pod in of_pods.watch.first_list() or ()] == ["old"]
    waiting.until(lambda: of_pods.names() == {"old"}, "the pods")
    server.create(api_objects.a_pod("new"))
    server.delete(kinds.PODS, "old", "default")
    waiting.until(lambda: of_pods.names() == {"new"}, "the pods")

    server.inject(apiserver.Fault(verb="watch", resource="pods", status=500, times=None))
    server.break_watches(how)
    waiting.until(lambda: of_pods.names() is None, "pods that are unknown")
    server.delete(kinds.PODS, "new", "default")
    server.clear_faults()
    waiting.until(lambda: of_pods.names() == set(), "the pods")
    of_pods.watch.dismiss()
    assert of_pods.names() is None


def test_kept_watch_outlives_a_run_until_it_is_released(
    server: apiserver.ApiServer, of_pods: PodFollower
) -> None:
    of_pods.watch.keep()
    of_pods.watch.expect_change()
    wait_for_watch(server)
    of_pods.watch.dismiss()
    server.create(api_objects.a_pod("here"))
    waiting.until(lambda: of_pods.names() == {"here"}, "the pods")
    assert server.watch_count == 1

    of_pods.watch.release()
    waiting.until(lambda: server.watch_count == 0, "the end of the watches")
    assert of_pods.names() is None


def test_change_of_use_is_reported_only_for_pods_that_may_use_a_gpu(
    server: apiserver.ApiServer, faulty_api: FaultyApi
) -> None:
    used = threading.Semaphore(0)
    pod_watch = pods.PodWatch(
        faulty_api, node_name="n1", on_change=lambda: None, on_use=used.release
    )
    follower = PodFollower(pod_watch, used)
    with_gpu = api_objects.a_pod("a", limits={"nvidia.com/gpu": 1})

    pod_watch.keep()
    server.create(api_objects.a_pod("plain"))
    waiting.until(lambda: follower.names() == {"plain"}, "the pods")
    assert not used.acquire(blocking=False)
    server.create(with_gpu)
    assert follower.hears()
    server.delete(kinds.PODS, "plain", "default")
    waiting.until(lambda: follower.names() == {"a"}, "the pods")
    assert not used.acquire(blocking=False)
    server.delete(kinds.PODS, "a", "default")
    assert follower.hears()

    pod_watch.release()
    waiting.until(lambda: not pod_watches(), "the end of the watch of pods")


def test_present_pods_need_no_request_while_they_are_watched(
    server: apiserver.ApiServer, of_pods: PodFollower, workloads: pods.KubeWorkloads
) -> None:
    server.create(api_objects.a_pod("here"))

    assert [pod.name for pod in workloads.present()] == ["here"]
    assert server.log.count("list", "pods") == 1
    of_pods.watch.keep()
    waiting.until(lambda: of_pods.names() == {"here"}, "the pods")
    lists = server.log.count("list", "pods")
    assert [pod.name for pod in workloads.present()] == ["here"]
    assert server.log.count("list", "pods") == lists
    # Which devices a claim stands for is not in the pod.
    server.create(api_objects.a_pod("claiming", spec={"resourceClaims": [{"name": "gpu"}]}))
    waiting.until(lambda: of_pods.names() == {"here", "claiming"}, "the pods")
    assert {pod.name for pod in workloads.present()} == {"here", "claiming"}
    assert server.log.count("list", "pods") == lists + 1
    of_pods.watch.release()


@pytest.mark.parametrize("how", [None, *apiserver.Break])
def test_a_drain_ends_soon_after_its_pod_is_gone_even_if_the_watch_breaks(
    server: apiserver.ApiServer, kube: api.KubeApi, how: apiserver.Break | None
) -> None:
    server.store.create(api_objects.a_pod("a", limits={"nvidia.com/gpu": 1}))
    rig = node_rig.NodeRig(gpus=(), kubelet=parts.Kubelet(is_silent=True))
    pod_watch = pods.PodWatch(kube, node_name="n1", on_change=lambda: None)
    clock = rig.clock
    workloads = pods.KubeWorkloads(kube, node_name="n1", clock=clock, watch=pod_watch)
    gone_at: list[float] = []

    def act() -> None:
        if how and clock.now_s >= 3 and not server.faults_waiting():
            server.inject(apiserver.Fault(verb="watch", status=500, times=None))
            server.break_watches(how)
        if clock.now_s >= 6 and not gone_at:
            server.delete(kinds.PODS, "a", "default")
            gone_at.append(clock.now_s)

    clock.on_wait.append(act)
    pod_watch.expect_change()
    destroyed = frozenset({driver_rules.mig_uuid("destroyed")})
    # Where every device goes, no answer of kubelet is needed.
    usage = gpu_use.Usage(pods=workloads.list(), assigned=None, known_ids=destroyed)
    waiting.until(lambda: workloads.from_watch() is not None, "the watch of pods")

    attempt = agents.new_attempt(
        rig,
        "one-slice-changed",
        agent_settings.RunSettings(drain_timeout_s=30),
        fakes.FakeCancellation(clock),
        workloads=workloads,
    )
    scope = drain_scope.DrainScope(affected=destroyed, rights=pod_rights.Evict())
    node_drain = drain.Drain.start_or_continue(attempt, scope, usage)
    node_drain.run()
    assert node_drain.evictions.removals.count == 1
    # At the latest when the last list is too old to trust a silent watch.
    assert gone_at[0] <= clock.now_s < gone_at[0] + 12
    assert server.log.count("list", "pods") < (8 if how is None else 40)

    pod_watch.dismiss()
    server.clear_faults()
    waiting.until(lambda: not pod_watches(), "the end of the watch of pods")


def test_one_list_serves_the_caller_and_the_watch(
    server: apiserver.ApiServer, of_pods: PodFollower, workloads: pods.KubeWorkloads
) -> None:
    server.create(api_objects.a_pod("here"))
    of_pods.watch.expect_change()

    assert [pod.name for pod in workloads.list()] == ["here"]
    waiting.until(lambda: of_pods.names() == {"here"}, "the pods")
    assert server.log.count("list", "pods") == 1
    workloads.list()
    assert server.log.count("list", "pods") == 2


def test_a_first_list_that_fails_is_reported_and_the_watch_goes_on(
    server: apiserver.ApiServer, of_pods: PodFollower, workloads: pods.KubeWorkloads
) -> None:
    server.inject(apiserver.Fault(verb="list", resource="pods", status=403, times=1))
    of_pods.watch.expect_change()

    with pytest.raises(errors.ClusterError):
        workloads.list()
    waiting.until(lambda: of_pods.names() == set(), "the pods")
