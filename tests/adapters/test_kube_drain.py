"""A drain against the embedded API server and its budget controller."""

from collections.abc import Iterator
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, pods
from mig_manager.agent import drain, settings
from mig_manager.sandbox.apiserver import resources
from testkit import apiserver
from tests import fakes, gpu_values, waiting
from tests.adapters.test_kube_pods import container
from tests.adapters.test_kube_watch import pod_watches

SILENT = fakes.NodeRig(gpus=(), kubelet_is_silent=True).allocations


def replica(name: str, *, node: str) -> dict[str, Any]:
    owner = {"kind": "StatefulSet", "name": "s", "uid": "1", "controller": True}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "labels": {"app": "serving"},
            "ownerReferences": [owner],
        },
        "spec": {"containers": [container(gpus=1)]} | ({"nodeName": node} if node else {}),
        "status": {
            "phase": "Running" if node else "Pending",
            "conditions": [{"type": "Ready", "status": str(bool(node))}],
        },
    }


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    with apiserver.serve() as running:
        running.store.create(replica("a", node="n1"))
        yield running


@pytest.fixture
def kube(server: apiserver.ApiServer) -> Iterator[api.KubeApi]:
    client = api.KubeApi.at(server.url, sleep=lambda _seconds: None)
    yield client
    client.close()


def run(workloads: pods.KubeWorkloads, clock: fakes.FakeClock, found: drain.Usage) -> int:
    destroyed = frozenset({gpu_values.mig_uuid("destroyed")})
    return drain.Drain(
        workloads,
        SILENT,
        clock,
        order=drain.Order(affected=destroyed, limits=settings.Limits(drain_timeout_s=30)),
        announce=drain.Announcements(on_round=lambda _message: None, on_force=lambda _names: None),
    ).run(found, fakes.FakeRequest(clock))


@pytest.mark.parametrize("next_node", ["", "n2"])
def test_a_rolling_drain_continues_only_when_another_node_has_room(
    server: apiserver.ApiServer, kube: api.KubeApi, next_node: str
) -> None:
    gone: list[str] = []
    server.store.create(replica("b", node="n1"))
    server.store.create(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "guard", "namespace": "ns", "generation": 1},
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "serving"}}},
        }
    )
    clock = fakes.FakeClock()

    def replace() -> None:
        for pod in server.objects(resources.PODS, "ns"):
            name = pod["metadata"]["name"]
            if "deletionTimestamp" in pod["metadata"]:
                server.delete(resources.PODS, name, "ns")
                server.store.create(replica(f"{name}-next", node=next_node))
                gone.append(name)

    clock.on_wait.append(replace)
    workloads = pods.KubeWorkloads(kube, node_name="n1")
    found = drain.survey(workloads, SILENT)
    if next_node:
        assert run(workloads, clock, found) == 2
    else:
        with pytest.raises(errors.DrainError, match="no node has room for ns/a-next") as caught:
            run(workloads, clock, found)
        assert caught.value.reason is errors.Reason.DRAIN_STALLED
        assert caught.value.pods == ("ns/b",)
        assert caught.value.keeps_closed

    assert gone == (["a", "b"] if next_node else ["a"])


@pytest.mark.parametrize("how", [None, *apiserver.Break])
def test_a_drain_ends_soon_after_its_pod_is_gone_even_if_the_watch_breaks(
    server: apiserver.ApiServer, kube: api.KubeApi, how: apiserver.Break | None
) -> None:
    pod_watch = pods.PodWatch(kube, node_name="n1", on_change=lambda: None)
    clock = fakes.FakeClock()
    workloads = pods.KubeWorkloads(
        kube, node_name="n1", watch=pod_watch, monotonic=clock.monotonic
    )
    gone_at: list[float] = []

    def act() -> None:
        if how and clock.now_s >= 3 and not server.faults_waiting():
            server.inject(apiserver.Fault(verb="watch", status=500, times=None))
            server.break_watches(how)
        if clock.now_s >= 6 and not gone_at:
            server.delete(resources.PODS, "a", "ns")
            gone_at.append(clock.now_s)

    clock.on_wait.append(act)
    pod_watch.expect_change()
    found = drain.survey(workloads, SILENT)
    waiting.until(lambda: workloads.watched() is not None)

    assert run(workloads, clock, found) == 1
    # At the latest when the last list is too old to trust a silent watch.
    assert gone_at[0] <= clock.now_s < gone_at[0] + 12
    assert server.log.count("list", "pods") < (8 if how is None else 40)

    pod_watch.dismiss()
    server.clear_faults()
    waiting.until(lambda: not pod_watches())
