"""KubeWorkloads against the embedded API server."""

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
        "metadata": {"name": name, "namespace": "ns", "labels": {"app": name}},
        "spec": {"nodeName": node, "containers": [container()], **spec},
        "status": {"phase": phase},
    }


class Rig:
    """An API server, and the pods of its node n1."""

    def __init__(self, server: apiserver.ApiServer, kube: api.KubeApi) -> None:
        self.server = server
        self.workloads = pods.KubeWorkloads(kube, node_name="n1")

    def only(self) -> cluster.Pod:
        (pod,) = self.workloads.list()
        return pod


@pytest.fixture
def rig() -> Iterator[Rig]:
    with apiserver.serve() as server:
        kube = api.KubeApi.at(server.url, sleep=lambda _seconds: None)
        yield Rig(server, kube)
        kube.close()


def test_list_returns_the_nodes_pods_in_every_phase(rig: Rig) -> None:
    phases = {"Pending": False, "Running": False, "Succeeded": True, "Failed": True}
    for phase in phases:
        rig.server.store.create(make_pod(phase, phase=phase))
    rig.server.store.create(make_pod("elsewhere", node="n2"))
    assert {pod.name: pod.is_finished for pod in rig.workloads.list()} == phases


def test_list_parses_the_fields_that_the_drain_uses(rig: Rig) -> None:
    gates = [{"name": "FEATURE_GATES", "value": "DynamicMIG=true, MPSSupport=false,"}]
    x = container("x", image="registry.example.com/x:1", env=gates)
    thing = make_pod(nodeSelector={"a": "b"}, containers=[x, container("y")])
    thing["metadata"]["uid"] = "u1"
    thing["metadata"]["ownerReferences"] = [
        {"kind": "Other", "name": "o", "uid": "1", "apiVersion": "v1"},
        {"kind": "DaemonSet", "name": "d", "uid": "2", "apiVersion": "apps/v1"}
        | {"controller": True},
    ]
    thing["status"]["conditions"] = [
        {"type": kind, "status": "True"} for kind in ("Initialized", "Ready")
    ]
    rig.server.store.create(thing)
    assert rig.only() == cluster.Pod(
        namespace="ns",
        name="p1",
        uid="u1",
        phase="Running",
        labels={"app": "p1"},
        node_selector={"a": "b"},
        owner_kind="DaemonSet",
        is_mirror=False,
        is_ready=True,
        is_terminating=False,
        gpu_resources={},
        container_names=("x", "y"),
        node_name="n1",
        images=("registry.example.com/x:1", ""),
        feature_gates={"DynamicMIG": True, "MPSSupport": False},
    )


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
    rig: Rig, phase: str, init: dict[str, Any], *, expected: bool
) -> None:
    rig.server.store.create(make_pod(phase=phase, initContainers=[init]))
    assert rig.only().may_run_gpu_init is expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ""),
        ({"command": ["nvidia-device-plugin"]}, ""),
        ({"args": ["--mig-strategy=single", "--pass-device-specs"]}, "single"),
        ({"args": ["--mig-strategy", "mixed"]}, "mixed"),
        ({"args": ["--mig-strategy"]}, ""),
        ({"env": [{"name": "MIG_STRATEGY", "value": "single"}]}, "single"),
        (
            {"args": ["--mig-strategy=mixed"]}
            | {"env": [{"name": "MIG_STRATEGY", "value": "single"}]},
            "mixed",
        ),
    ],
)
def test_the_device_plugins_strategy_is_that_of_its_options_or_its_variable(
    rig: Rig, fields: dict[str, Any], expected: str
) -> None:
    rig.server.store.create(make_pod(containers=[container(**fields)]))
    assert rig.only().mig_strategy == expected


def claim(name: str, **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "ns"},
        "status": status,
    }


def served_by(driver: str) -> dict[str, Any]:
    return {"devices": {"results": [{"driver": driver}]}}


@pytest.mark.parametrize(
    ("driver", "version", "expected"),
    [
        ("nic.example.com", "v1", False),
        ("gpu.nvidia.com", "v1", True),
        (None, "v1", True),
        ("nic.example.com", "v1beta1", True),
    ],
)
def test_the_driver_of_a_claim_decides_whether_it_is_for_a_gpu(
    rig: Rig, driver: str | None, version: str, *, expected: bool
) -> None:
    thing = make_pod(resourceClaims=[{"name": "a", "resourceClaimTemplateName": "t"}])
    thing["status"]["resourceClaimStatuses"] = [{"name": "a", "resourceClaimName": "p1-a"}]
    rig.server.store.create(thing)
    name = "p1-a" if version == "v1" else "another"
    status = {"allocation": served_by(driver)} if driver else {}
    rig.server.store.create(claim(name, **status))
    assert rig.only().has_claims is expected


def test_a_claim_is_read_once(rig: Rig) -> None:
    rig.server.store.create(make_pod(resourceClaims=[{"name": "a", "resourceClaimName": "nic"}]))
    rig.server.store.create(claim("nic", allocation=served_by("nic.example.com")))
    assert not rig.only().has_claims
    rig.server.delete(resources.CLAIMS, "nic", "ns")
    assert not rig.only().has_claims


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("false", False)])
def test_an_annotation_can_forbid_a_pods_eviction(rig: Rig, value: str, *, expected: bool) -> None:
    thing = make_pod(terminationGracePeriodSeconds=0)
    thing["metadata"]["annotations"] = {cluster.KEEP_ANNOTATION: value}
    rig.server.store.create(thing)
    assert (rig.only().is_kept, rig.only().grace_s) == (expected, 0)


def test_a_terminating_bare_pod_is_marked_as_terminating(rig: Rig) -> None:
    thing = make_pod()
    thing["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    thing["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "x"}
    rig.server.store.create(thing)
    pod = rig.only()
    assert (pod.owner_kind, pod.is_terminating, pod.is_mirror) == (None, True, True)
    assert not pod.is_ready


def test_list_reads_all_pages_and_restarts_when_the_continue_token_expired(rig: Rig) -> None:
    for number in range(501):
        rig.server.store.create(make_pod(f"p{number}"))
    assert len(rig.workloads.list()) == 501
    assert rig.server.log.count("list", "pods") == 2
    rig.server.inject(apiserver.Fault(path="continue=", status=410))
    assert len(rig.workloads.list()) == 501


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [{"name": "x", "resources": {"limits": 3}}]},
        {"terminationGracePeriodSeconds": float("inf")},
    ],
)
def test_a_malformed_pod_is_an_error(rig: Rig, spec: dict[str, Any]) -> None:
    rig.server.store.create(make_pod(**spec))
    with pytest.raises(errors.ClusterError, match="makes no sense"):
        rig.workloads.list()


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
    rig: Rig, containers: list[Any], inits: list[Any], expected: int
) -> None:
    rig.server.store.create(make_pod(containers=containers, initContainers=inits))
    assert rig.only().gpu_resources == ({_GPU: expected} if expected else {})


def test_a_dry_run_evicts_no_pod_and_an_eviction_has_the_pods_own_grace_period(rig: Rig) -> None:
    rig.server.store.create(make_pod(terminationGracePeriodSeconds=77))
    assert rig.workloads.can_evict(rig.only()).answer is ports.Eviction.ACCEPTED
    assert not rig.only().is_terminating
    assert rig.workloads.evict(rig.only()).answer is ports.Eviction.ACCEPTED
    thing = rig.server.get(resources.PODS, "p1", "ns")
    assert thing["metadata"]["deletionGracePeriodSeconds"] == 77


def test_a_missing_or_replaced_pod_counts_as_gone(rig: Rig) -> None:
    rig.server.store.create(make_pod())
    pod = rig.only()
    rig.server.delete(resources.PODS, "p1", "ns")
    assert rig.workloads.evict(pod).answer is ports.Eviction.GONE
    rig.workloads.delete(pod)
    rig.server.store.create(make_pod())
    assert rig.workloads.evict(pod).answer is ports.Eviction.GONE
    rig.workloads.delete(pod)
    assert not rig.only().is_terminating


@pytest.mark.parametrize(
    ("names", "why"),
    [(["keep-one"], "keep-one"), (["keep-one", "keep-two"], "PodDisruptionBudget")],
)
def test_disruption_budgets_block_and_are_named(rig: Rig, names: list[str], why: str) -> None:
    for name in names:
        rig.server.store.create(
            {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": {"name": name, "namespace": "ns"},
                "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "p1"}}},
            }
        )
    thing = make_pod()
    thing["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    rig.server.store.create(thing)
    verdict = rig.workloads.evict(rig.only())
    assert verdict.answer is ports.Eviction.BLOCKED
    assert why in verdict.why
    assert rig.server.log.count("create", "pods/eviction") == 1


@pytest.mark.parametrize(
    ("status", "message", "after_s"), [(429, "", 17), (409, "object was modified", None)]
)
def test_an_eviction_refused_for_now_is_blocked_with_the_servers_retry_after(
    rig: Rig, status: int, message: str, after_s: int | None
) -> None:
    rig.server.store.create(make_pod())
    rig.server.inject(
        apiserver.Fault(path="/eviction", status=status, message=message, retry_after_s=after_s)
    )
    verdict = rig.workloads.evict(rig.only())
    assert (verdict.answer, verdict.retry_after_s) == (ports.Eviction.BLOCKED, after_s or 0.0)
    assert rig.server.log.count("create", "pods/eviction") <= 1


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (403, errors.Reason.FORBIDDEN),
        (500, errors.Reason.API_UNAVAILABLE),
        (400, errors.Reason.API_ERROR),
    ],
)
def test_any_other_refusal_is_an_error(rig: Rig, status: int, reason: errors.Reason) -> None:
    rig.server.store.create(make_pod())
    for path, call in (("/eviction", rig.workloads.evict), ("/pods/p1", rig.workloads.delete)):
        pod = rig.only()
        rig.server.inject(apiserver.Fault(path=path, status=status))
        with pytest.raises(errors.ClusterError) as caught:
            call(pod)
        assert caught.value.reason is reason
        rig.server.clear_faults()


def test_a_pod_is_deleted_with_its_own_grace_period(rig: Rig) -> None:
    rig.server.store.create(make_pod(terminationGracePeriodSeconds=5))
    rig.workloads.delete(rig.only())
    assert rig.only().is_terminating


def test_a_deletion_whose_response_was_lost_succeeds(rig: Rig) -> None:
    rig.server.store.create(make_pod(terminationGracePeriodSeconds=0))
    pod = rig.only()
    rig.server.inject(apiserver.Fault(method="DELETE", reset=True, is_carried_out=True))
    rig.workloads.delete(pod)
    assert rig.server.log.count("delete", "pods") == 2
