"""KubeWorkloads on the embedded API server; ``tests/cluster/test_api.py`` has its evictions."""

from typing import Any

import pytest

from mig_manager import errors
from mig_manager.adapters import cluster_reader
from mig_manager.adapters.kubernetes import api, pods
from mig_manager.core.node import eviction_rules
from mig_manager.core.objects import pod_object
from testkit import apiserver
from tests.rigs.api_objects import a_pod


def test_list_returns_all_pages_also_if_its_version_expires_on_the_way(
    server: apiserver.ApiServer, kube: api.KubeApi, workloads: pods.KubeWorkloads
) -> None:
    server.create(*(a_pod(f"p{number}") for number in range(501)))

    assert len(workloads.list()) == 501
    assert server.log.count("list", "pods") == 2
    server.inject(apiserver.Fault(path="continue=", status=410))
    assert len(workloads.list()) == 501
    # Commands list without KubeWorkloads.
    server.inject(apiserver.Fault(path="continue=", status=410))
    assert len(cluster_reader.ClusterReader(kube.get).every_gpu_pod()) == 0


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [{"name": "x", "resources": {"limits": 3}}]},
        {"terminationGracePeriodSeconds": float("inf")},
    ],
)
def test_a_malformed_pod_is_an_error(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads, spec: dict[str, Any]
) -> None:
    server.create(a_pod(spec=spec))
    with pytest.raises(errors.ClusterError, match="from the Kubernetes API is malformed"):
        workloads.list()


@pytest.fixture
def pod(server: apiserver.ApiServer, workloads: pods.KubeWorkloads) -> pod_object.Pod:
    server.create(a_pod(spec={"terminationGracePeriodSeconds": 0}))
    return workloads.list()[0]


@pytest.mark.parametrize(
    ("status", "message", "after_s"),
    [
        (429, "", 17),
        (409, "object was modified", None),
        (400, 'admission webhook "drains.example.com" denied the request: not yet', None),
        (422, "ValidatingAdmissionPolicy 'night' with binding 'night' denied request: day", None),
    ],
)
def test_eviction_refused_for_now_has_the_servers_retry_after(
    server: apiserver.ApiServer,
    workloads: pods.KubeWorkloads,
    pod: pod_object.Pod,
    status: int,
    message: str,
    after_s: int | None,
) -> None:
    server.inject(
        apiserver.Fault(path="/eviction", status=status, message=message, retry_after_s=after_s)
    )
    verdict = workloads.evict(pod)
    assert (verdict.answer, verdict.retry_after_s) == (
        eviction_rules.EvictionAnswer.BLOCKED,
        after_s or 0.0,
    )


def test_an_eviction_that_no_dry_run_can_check_counts_as_possible(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads, pod: pod_object.Pod
) -> None:
    message = 'admission webhook "old.example.com" does not support dry run'
    server.inject(apiserver.Fault(path="/eviction", status=400, message=message))

    assert workloads.can_evict(pod).answer is eviction_rules.EvictionAnswer.ACCEPTED


def test_admission_webhooks_learn_that_an_eviction_is_a_dry_run(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads, pod: pod_object.Pod
) -> None:
    workloads.can_evict(pod)
    workloads.evict(pod)

    # Their review has the dry run of the request, not the one in the Eviction.
    sent = server.log.requests(resource="pods/eviction")
    assert [each.query.get("dryRun") for each in sent] == ["All", None]


@pytest.mark.parametrize("status", [403, 500, 400])
def test_any_other_refusal_is_an_error(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads, pod: pod_object.Pod, status: int
) -> None:
    server.inject(apiserver.Fault(path="/pods/p1", status=status, times=2))
    for call in (workloads.evict, workloads.delete):
        with pytest.raises(errors.ClusterError) as caught:
            call(pod)
        assert caught.value.status == status


def test_a_deletion_whose_response_was_lost_succeeds(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads, pod: pod_object.Pod
) -> None:
    server.inject(apiserver.Fault(method="DELETE", reset=True, is_carried_out=True))
    workloads.delete(pod)
    assert server.log.count("delete", "pods") == 2
