"""A drain over the embedded API server, with every way its watch can break."""

import pytest

from mig_manager.adapters.kubernetes import api, pods
from mig_manager.agent import drain, settings
from mig_manager.sandbox.apiserver import resources
from testkit import apiserver
from tests import fakes, gpu_values, waiting
from tests.adapters import test_kube_pods, test_kube_watch

server, kube = test_kube_watch.server, test_kube_watch.kube


@pytest.mark.parametrize("how", [None, *apiserver.Break])
def test_a_drain_ends_soon_after_its_pod_is_gone_even_if_the_watch_breaks(
    server: apiserver.ApiServer, kube: api.KubeApi, how: apiserver.Break | None
) -> None:
    server.store.create(
        test_kube_pods.make_pod("a", containers=[test_kube_pods.container(gpus=1)])
    )
    silent = fakes.NodeRig(gpus=(), kubelet_is_silent=True).allocations
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
    found = drain.survey(workloads, silent)
    waiting.until(lambda: workloads.watched() is not None)

    ours = drain.Drain(
        workloads,
        silent,
        clock,
        order=drain.Order(
            affected=frozenset({gpu_values.mig_uuid("destroyed")}),
            limits=settings.Limits(drain_timeout_s=30),
        ),
        on_round=lambda _message: None,
        on_force=lambda _names: None,
    )
    assert ours.run(found, fakes.FakeRequest(clock)) == 1
    # At the latest when the last list is too old to trust a silent watch.
    assert gone_at[0] <= clock.now_s < gone_at[0] + 12
    assert server.log.count("list", "pods") < (8 if how is None else 40)

    pod_watch.dismiss()
    server.clear_faults()
    waiting.until(lambda: not test_kube_watch.pod_watches())
