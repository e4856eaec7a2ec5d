"""PodNews against the embedded API server: it wakes who waits, and nothing depends on it."""

import threading
from collections.abc import Iterator

import pytest
import structlog.testing

from mig_manager.adapters.kubernetes import api, pods
from testkit import apiserver
from tests import waiting

_PODS = "/api/v1/namespaces/default/pods"
_SOON_S = 30.0


class Rig:
    """A server, and how often a pod changed."""

    def __init__(self, server: apiserver.ApiServer) -> None:
        self.server = server
        self.kube = api.KubeApi.at(server.url, sleep=lambda _seconds: None)
        self.heard = threading.Semaphore(0)
        self.watch = pods.PodWatch(self.kube, node_name="n1", on_change=self.heard.release)

    def start_pod(self, name: str, node: str) -> None:
        self.kube.post(
            _PODS,
            {
                "metadata": {"name": name},
                "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i"}]},
            },
        )

    def hears(self) -> bool:
        return self.heard.acquire(timeout=_SOON_S)


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    with apiserver.serve() as running:
        yield running


@pytest.fixture
def rig(server: apiserver.ApiServer) -> Iterator[Rig]:
    rig = Rig(server)
    yield rig
    rig.watch.dismiss()
    waiting.until(lambda: not followers())
    rig.kube.close()


def followers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pod-watch"]


def test_only_changes_of_pods_on_the_node_are_reported(rig: Rig) -> None:
    rig.start_pod("here-before", "n1")
    rig.watch.expect_change()
    rig.watch.expect_change()
    assert rig.hears()
    rig.start_pod("elsewhere", "n2")
    rig.start_pod("here", "n1")
    assert rig.hears()
    assert not rig.heard.acquire(blocking=False)
    assert rig.server.watch_count == 1


def test_observing_gpus_starts_no_pod_watch(rig: Rig) -> None:
    rig.watch.prepare()
    assert followers() == []


def test_the_pod_watch_ends_with_the_run(rig: Rig) -> None:
    rig.watch.expect_change()
    waiting.until(lambda: rig.server.watch_count == 1)
    rig.watch.dismiss()
    rig.watch.dismiss()
    waiting.until(lambda: rig.server.watch_count == 0)
    rig.watch.expect_change()
    rig.start_pod("here", "n1")
    assert rig.hears()


def test_a_forbidden_pod_watch_is_logged_once_and_not_retried(rig: Rig) -> None:
    rig.server.inject(apiserver.Fault(verb="watch", resource="pods", status=403, times=None))
    with structlog.testing.capture_logs() as logs:
        rig.watch.expect_change()
        waiting.until(lambda: not followers())
        rig.watch.dismiss()
        rig.watch.expect_change()
    assert [entry["event"] for entry in logs] == ["pods_not_watched"]
    assert followers() == []


def test_a_broken_watch_is_reopened(rig: Rig) -> None:
    rig.server.inject(apiserver.Fault(verb="watch", resource="pods", status=500, times=1))
    rig.watch.expect_change()
    rig.start_pod("here", "n1")
    assert rig.hears()


def shown(rig: Rig) -> set[str] | None:
    found = rig.watch.pods()
    return None if found is None else {pod.name for pod in found}


def test_pods_are_returned_while_the_watch_is_up_to_date(rig: Rig) -> None:
    rig.start_pod("old", "n1")
    rig.start_pod("elsewhere", "n2")
    assert shown(rig) is None
    rig.watch.expect_change()
    waiting.until(lambda: shown(rig) == {"old"})
    rig.start_pod("new", "n1")
    rig.kube.delete(f"{_PODS}/old", {"gracePeriodSeconds": 0})
    waiting.until(lambda: shown(rig) == {"new"})
    rig.watch.dismiss()
    assert shown(rig) is None


@pytest.mark.parametrize("how", [apiserver.Break.EXPIRE, apiserver.Break.RESET])
def test_a_broken_watch_returns_no_pods_and_current_ones_after_it_recovers(
    rig: Rig, how: apiserver.Break
) -> None:
    rig.start_pod("old", "n1")
    rig.watch.expect_change()
    waiting.until(lambda: shown(rig) == {"old"})
    rig.server.inject(apiserver.Fault(verb="watch", resource="pods", status=500, times=None))
    rig.server.break_watches(how)
    waiting.until(lambda: shown(rig) is None)
    rig.kube.delete(f"{_PODS}/old", {"gracePeriodSeconds": 0})
    rig.server.clear_faults()
    waiting.until(lambda: shown(rig) == set())
