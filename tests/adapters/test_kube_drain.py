"""A drain against the embedded API server and its budget controller."""

from typing import Any

import pytest

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, pods
from mig_manager.agent import drain, settings
from mig_manager.core import ports
from mig_manager.sandbox.apiserver import resources
from testkit import apiserver
from tests import fakes, gpu_values, waiting
from tests.adapters.test_kube_pod_watch import followers
from tests.adapters.test_kube_pods import container

DEVICE = gpu_values.mig_uuid("destroyed")


def replica(name: str, *, node: str) -> dict[str, Any]:
    is_running = bool(node)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "labels": {"app": "serving"},
            "ownerReferences": [
                {"kind": "StatefulSet", "name": "s", "uid": "1", "controller": True}
            ],
        },
        "spec": {"containers": [container(gpus=1)]} | ({"nodeName": node} if node else {}),
        "status": {
            "phase": "Running" if is_running else "Pending",
            "conditions": [{"type": "Ready", "status": str(is_running)}],
        },
    }


def draining(
    workloads: pods.KubeWorkloads,
    allocations: ports.DeviceAllocations,
    clock: fakes.FakeClock,
    *,
    timeout_s: float,
) -> drain.Drain:
    return drain.Drain(
        workloads,
        allocations,
        clock,
        order=drain.Order(
            affected=frozenset({DEVICE}),
            limits=settings.Limits(drain_timeout_s=timeout_s),
        ),
        announce=drain.Announcements(on_round=lambda _message: None, on_force=lambda _names: None),
    )


@pytest.mark.parametrize("next_node", ["", "n2"])
def test_a_rolling_drain_continues_only_when_another_node_has_room(next_node: str) -> None:
    gone: list[str] = []
    with apiserver.serve() as server:
        for name in ("a", "b"):
            server.store.create(replica(name, node="n1"))
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
        client = api.KubeApi.at(server.url, sleep=lambda _seconds: None)
        workloads = pods.KubeWorkloads(client, node_name="n1")
        silent = fakes.NodeRig(gpus=(), kubelet_is_silent=True).allocations
        ours = draining(workloads, silent, clock, timeout_s=20)
        request = fakes.FakeRequest(clock)
        found = drain.survey(workloads, silent)
        if next_node:
            assert ours.run(found, request) == 2
        else:
            with pytest.raises(
                errors.DrainError, match="no node has room for ns/a-next"
            ) as caught:
                ours.run(found, request)
            assert caught.value.reason is errors.Reason.DRAIN_STALLED
            assert caught.value.pods == ("ns/b",)
            assert caught.value.keeps_closed
        client.close()

    assert gone == (["a", "b"] if next_node else ["a"])


@pytest.mark.parametrize("how", [None, *apiserver.Break])
def test_a_drain_ends_soon_after_its_pod_is_gone_even_if_the_watch_breaks(
    how: apiserver.Break | None,
) -> None:
    with apiserver.serve() as server:
        server.store.create(replica("a", node="n1"))
        client = api.KubeApi.at(server.url, sleep=lambda _seconds: None)
        pod_watch = pods.PodWatch(client, node_name="n1", on_change=lambda: None)
        clock = fakes.FakeClock()
        workloads = pods.KubeWorkloads(
            client, node_name="n1", watch=pod_watch, monotonic=clock.monotonic
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
        silent = fakes.NodeRig(gpus=(), kubelet_is_silent=True).allocations
        ours = draining(workloads, silent, clock, timeout_s=30)
        pod_watch.expect_change()
        found = drain.survey(workloads, silent)
        waiting.until(lambda: workloads.watched() is not None)

        assert ours.run(found, fakes.FakeRequest(clock)) == 1
        # At the latest when the last list is too old to trust a silent watch.
        assert gone_at[0] <= clock.now_s < gone_at[0] + 12
        assert server.log.count("list", "pods") < (8 if how is None else 40)

        pod_watch.dismiss()
        server.clear_faults()
        waiting.until(lambda: not followers())
        client.close()
