"""KubeWorkloads on the embedded API server; ``tests/cluster/test_api.py`` has its evictions."""

from collections.abc import Iterator
from typing import Any

import pytest

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, pods
from mig_manager.core import ports
from mig_manager.core.node import cluster
from mig_manager.sandbox.apiserver import resources
from testkit import apiserver

_GPU = "nvidia.com/mig-1g.10gb"


def container(name: str = "main", *, gpus: int = 0, **fields: Any) -> dict[str, Any]:
    amounts = {_GPU: str(gpus), "cpu": "100m"} if gpus else {}
    return {"name": name, "resources": {"limits": amounts, "requests": amounts}, **fields}


def sidecar(*, gpus: int) -> dict[str, Any]:
    return container(gpus=gpus, restartPolicy="Always")


def make_pod(
    name: str = "p1", *, node: str = "n1", phase: str = "Running", **spec: Any
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}", "labels": {"a": name}},
        "spec": {"nodeName": node, "containers": [container()], **spec},
        "status": {"phase": phase},
    }


def test_a_pod_is_parsed_with_the_fields_that_the_drain_uses() -> None:
    gates = [{"name": "FEATURE_GATES", "value": "DynamicMIG=true, MPSSupport=false,"}]
    x = container("x", image="registry.example.com/x:1", env=gates)
    thing = make_pod(
        nodeSelector={"a": "b"}, containers=[x, container("y")], terminationGracePeriodSeconds=0
    )
    thing["metadata"]["annotations"] = {cluster.KEEP_ANNOTATION: "true"}
    thing["metadata"]["ownerReferences"] = [
        {"kind": "Other", "name": "o", "uid": "1", "apiVersion": "v1"},
        {"kind": "DaemonSet", "name": "d", "uid": "2", "apiVersion": "apps/v1"}
        | {"controller": True},
    ]
    thing["status"]["conditions"] = [
        {"type": kind, "status": "True"} for kind in ("Initialized", "Ready")
    ]
    assert cluster.parse_pod(thing) == cluster.Pod(
        namespace="ns",
        name="p1",
        uid="uid-p1",
        phase="Running",
        labels={"a": "p1"},
        node_selector={"a": "b"},
        owner_kind="DaemonSet",
        is_mirror=False,
        is_ready=True,
        is_terminating=False,
        gpu_resources={},
        container_names=("x", "y"),
        node_name="n1",
        is_kept=True,
        grace_s=0,
        images=("registry.example.com/x:1", ""),
        feature_gates={"DynamicMIG": True, "MPSSupport": False},
    )


def test_a_terminating_bare_pod_is_marked_as_such() -> None:
    thing = make_pod()
    thing["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    thing["metadata"]["annotations"] = {
        "kubernetes.io/config.mirror": "x",
        cluster.KEEP_ANNOTATION: "false",
    }
    pod = cluster.parse_pod(thing)
    assert (pod.owner_kind, pod.is_terminating, pod.is_mirror) == (None, True, True)
    assert (pod.is_ready, pod.is_kept) == (False, False)


@pytest.mark.parametrize(
    ("phase", "init", "expected"),
    [
        ("Pending", container(gpus=1), True),
        ("Running", container(gpus=1), False),
        ("Pending", container(), False),
        ("Pending", sidecar(gpus=1), False),
    ],
)
def test_an_init_container_may_use_a_gpu_only_while_the_pod_starts(
    phase: str, init: dict[str, Any], *, expected: bool
) -> None:
    pod = cluster.parse_pod(make_pod(phase=phase, initContainers=[init]))
    assert pod.may_run_gpu_init is expected


SINGLE = [{"name": "MIG_STRATEGY", "value": "single"}]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ""),
        ({"command": ["nvidia-device-plugin"]}, ""),
        ({"args": ["--mig-strategy=single", "--pass-device-specs"]}, "single"),
        ({"args": ["--mig-strategy", "mixed"]}, "mixed"),
        ({"args": ["--mig-strategy"]}, ""),
        ({"env": SINGLE}, "single"),
        ({"args": ["--mig-strategy=mixed"], "env": SINGLE}, "mixed"),
    ],
)
def test_the_device_plugins_strategy_is_that_of_its_options_or_its_variable(
    fields: dict[str, Any], expected: str
) -> None:
    pod = cluster.parse_pod(make_pod(containers=[container(**fields)]))
    assert pod.mig_strategy == expected


@pytest.mark.parametrize(
    ("containers", "inits", "expected"),
    [
        pytest.param([container()], [], 0, id="none"),
        pytest.param([container(gpus=1), container(gpus=2)], [], 3, id="sum"),
        pytest.param(
            [container(gpus=2)],
            [container(gpus=3), container(gpus=1)],
            3,
            id="the hungriest init container",
        ),
        pytest.param([container(gpus=2)], [sidecar(gpus=1)], 3, id="a sidecar adds"),
        pytest.param(
            [container(gpus=1)],
            [container(gpus=4), sidecar(gpus=2), container(gpus=3)],
            5,
            id="an init container beside the sidecar before it",
        ),
        pytest.param(
            [{"name": "x", "resources": {"limits": {_GPU: "2"}}}], [], 2, id="limits only"
        ),
    ],
)
def test_a_pods_gpu_resources_are_the_maximum_over_its_phases(
    containers: list[Any], inits: list[Any], expected: int
) -> None:
    pod = cluster.parse_pod(make_pod(containers=containers, initContainers=inits))
    assert pod.gpu_resources == ({_GPU: expected} if expected else {})


# -- over the API -----------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    with apiserver.serve() as running:
        yield running


@pytest.fixture
def workloads(server: apiserver.ApiServer) -> Iterator[pods.KubeWorkloads]:
    kube = api.KubeApi.at(server.url, sleep=lambda _seconds: None)
    yield pods.KubeWorkloads(kube, node_name="n1")
    kube.close()


def test_list_returns_the_nodes_pods_in_every_phase(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads
) -> None:
    phases = {"Pending": False, "Running": False, "Succeeded": True, "Failed": True}
    for phase in phases:
        server.store.create(make_pod(phase, phase=phase))
    server.store.create(make_pod("elsewhere", node="n2"))
    assert {pod.name: pod.is_finished for pod in workloads.list()} == phases


def test_list_reads_all_pages_and_restarts_when_the_continue_token_expired(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads
) -> None:
    for number in range(501):
        server.store.create(make_pod(f"p{number}"))
    assert len(workloads.list()) == 501
    assert server.log.count("list", "pods") == 2
    server.inject(apiserver.Fault(path="continue=", status=410))
    assert len(workloads.list()) == 501


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
    server.store.create(make_pod(**spec))
    with pytest.raises(errors.ClusterError, match="makes no sense"):
        workloads.list()


@pytest.mark.parametrize(
    ("driver", "version", "expected"),
    [
        ("nic.example.com", "v1", False),
        ("gpu.nvidia.com", "v1", True),
        (None, "v1", True),
        ("nic.example.com", "v1beta1", True),
    ],
)
def test_the_driver_of_a_claim_is_read_once_and_decides_whether_it_is_for_a_gpu(
    server: apiserver.ApiServer,
    workloads: pods.KubeWorkloads,
    driver: str | None,
    version: str,
    *,
    expected: bool,
) -> None:
    thing = make_pod(resourceClaims=[{"name": "a", "resourceClaimTemplateName": "t"}])
    thing["status"]["resourceClaimStatuses"] = [{"name": "a", "resourceClaimName": "p1-a"}]
    server.store.create(thing)
    name = "p1-a" if version == "v1" else "another"
    results = [{"driver": driver}]
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "ns"},
        "status": {"allocation": {"devices": {"results": results}}} if driver else {},
    }
    server.store.create(claim)
    assert [pod.has_claims for pod in workloads.list()] == [expected]
    server.delete(resources.CLAIMS, name, "ns")
    assert [pod.has_claims for pod in workloads.list()] == [expected]


@pytest.fixture
def pod(server: apiserver.ApiServer, workloads: pods.KubeWorkloads) -> cluster.Pod:
    server.store.create(make_pod(terminationGracePeriodSeconds=0))
    return workloads.list()[0]


@pytest.mark.parametrize(
    ("status", "message", "after_s"), [(429, "", 17), (409, "object was modified", None)]
)
def test_an_eviction_refused_for_now_is_blocked_with_the_servers_retry_after(
    server: apiserver.ApiServer,
    workloads: pods.KubeWorkloads,
    pod: cluster.Pod,
    status: int,
    message: str,
    after_s: int | None,
) -> None:
    server.inject(
        apiserver.Fault(path="/eviction", status=status, message=message, retry_after_s=after_s)
    )
    verdict = workloads.evict(pod)
    assert (verdict.answer, verdict.retry_after_s) == (ports.Eviction.BLOCKED, after_s or 0.0)


@pytest.mark.parametrize("status", [403, 500, 400])
def test_any_other_refusal_is_an_error(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads, pod: cluster.Pod, status: int
) -> None:
    server.inject(apiserver.Fault(path="/pods/p1", status=status, times=2))
    for call in (workloads.evict, workloads.delete):
        with pytest.raises(errors.ClusterError) as caught:
            call(pod)
        assert caught.value.status == status


def test_a_deletion_whose_response_was_lost_succeeds(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads, pod: cluster.Pod
) -> None:
    server.inject(apiserver.Fault(method="DELETE", reset=True, is_carried_out=True))
    workloads.delete(pod)
    assert server.log.count("delete", "pods") == 2
