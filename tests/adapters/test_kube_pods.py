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


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    with apiserver.serve() as running:
        yield running


@pytest.fixture
def workloads(server: apiserver.ApiServer) -> Iterator[pods.KubeWorkloads]:
    client = api.KubeApi.at(server.url, sleep=lambda _seconds: None)
    yield pods.KubeWorkloads(client, node_name="n1")
    client.close()


def only(workloads: pods.KubeWorkloads) -> cluster.Pod:
    (pod,) = workloads.list()
    return pod


class TestList:
    def test_list_returns_the_nodes_pods_in_every_phase(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        for phase in ("Pending", "Running", "Succeeded", "Failed"):
            server.store.create(make_pod(phase.lower(), phase=phase))
        server.store.create(make_pod("elsewhere", node="n2"))
        found = {pod.key: pod.is_finished for pod in workloads.list()}
        assert found == {
            "ns/pending": False,
            "ns/running": False,
            "ns/succeeded": True,
            "ns/failed": True,
        }

    def test_list_parses_the_fields_that_the_drain_uses(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        gates = [{"name": "FEATURE_GATES", "value": "DynamicMIG=true, MPSSupport=false,"}]
        x = container("x", image="registry.example.com/x:1", env=gates)
        thing = make_pod(nodeSelector={"a": "b"}, containers=[x, container("y")])
        thing["metadata"]["uid"] = "u1"
        thing["metadata"]["ownerReferences"] = [
            {"kind": "Other", "name": "o", "uid": "1", "apiVersion": "v1"},
            {
                "kind": "DaemonSet",
                "name": "d",
                "uid": "2",
                "apiVersion": "apps/v1",
                "controller": True,
            },
        ]
        thing["status"]["conditions"] = [
            {"type": "Initialized", "status": "True"},
            {"type": "Ready", "status": "True"},
        ]
        server.store.create(thing)
        assert only(workloads) == cluster.Pod(
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
            ("Pending", container(gpus=1, restartPolicy="Always"), False),
        ],
    )
    def test_an_init_container_may_use_a_gpu_only_while_the_pod_starts(
        self,
        server: apiserver.ApiServer,
        workloads: pods.KubeWorkloads,
        phase: str,
        init: dict[str, Any],
        *,
        expected: bool,
    ) -> None:
        server.store.create(make_pod(phase=phase, initContainers=[init]))
        assert only(workloads).may_run_gpu_init is expected

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
        self,
        server: apiserver.ApiServer,
        workloads: pods.KubeWorkloads,
        fields: dict[str, Any],
        expected: str,
    ) -> None:
        server.store.create(make_pod(containers=[container(**fields)]))
        assert only(workloads).mig_strategy == expected

    @pytest.mark.parametrize("claims", [[], [{"name": "c", "resourceClaimName": "c"}]])
    def test_resource_claims_of_a_pod_are_detected(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads, claims: list[Any]
    ) -> None:
        server.store.create(make_pod(resourceClaims=claims))
        assert only(workloads).has_claims is bool(claims)

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
        self,
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
        results = [{"driver": driver}]
        server.store.create(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": "p1-a" if version == "v1" else "another", "namespace": "ns"},
                "status": {"allocation": {"devices": {"results": results}}} if driver else {},
            }
        )
        assert only(workloads).has_claims is expected

    def test_a_claim_is_read_once(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        server.store.create(make_pod(resourceClaims=[{"name": "a", "resourceClaimName": "nic"}]))
        claim = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": "nic", "namespace": "ns"},
            "status": {"allocation": {"devices": {"results": [{"driver": "nic.example.com"}]}}},
        }
        server.store.create(claim)
        assert not only(workloads).has_claims
        server.store.delete(resources.CLAIMS, "nic", "ns")
        assert not only(workloads).has_claims

    @pytest.mark.parametrize(("value", "expected"), [("true", True), ("false", False)])
    def test_an_annotation_can_forbid_a_pods_eviction(
        self,
        server: apiserver.ApiServer,
        workloads: pods.KubeWorkloads,
        value: str,
        *,
        expected: bool,
    ) -> None:
        thing = make_pod(terminationGracePeriodSeconds=0)
        thing["metadata"]["annotations"] = {cluster.KEEP_ANNOTATION: value}
        server.store.create(thing)
        assert (only(workloads).is_kept, only(workloads).grace_s) == (expected, 0)

    def test_a_terminating_bare_pod_is_marked_as_terminating(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        thing = make_pod()
        thing["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
        thing["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "x"}
        server.store.create(thing)
        pod = only(workloads)
        assert (pod.owner_kind, pod.is_terminating, pod.is_mirror) == (None, True, True)
        assert not pod.is_ready

    def test_list_reads_all_pages(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        for number in range(501):
            server.store.create(make_pod(f"p{number}"))
        assert len(workloads.list()) == 501
        assert server.log.count("list", "pods") == 2

    def test_list_restarts_when_the_continue_token_expired(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        for number in range(501):
            server.store.create(make_pod(f"p{number}"))
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
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads, spec: dict[str, Any]
    ) -> None:
        server.store.create(make_pod(**spec))
        with pytest.raises(errors.ClusterError, match="makes no sense"):
            workloads.list()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({"containers": [container()]}, 0, id="none"),
        pytest.param({"containers": [container(gpus=1), container(gpus=2)]}, 3, id="sum"),
        pytest.param(
            {
                "containers": [container(gpus=2)],
                "initContainers": [container(gpus=3), container(gpus=1)],
            },
            3,
            id="the hungriest init container",
        ),
        pytest.param(
            {
                "containers": [container(gpus=2)],
                "initContainers": [container(gpus=1, restartPolicy="Always")],
            },
            3,
            id="a sidecar adds",
        ),
        pytest.param(
            {
                "containers": [container(gpus=1)],
                "initContainers": [
                    container(gpus=4),
                    container(gpus=2, restartPolicy="Always"),
                    container(gpus=3),
                ],
            },
            5,
            id="an init container beside the sidecar before it",
        ),
        pytest.param(
            {"containers": [{"name": "x", "resources": {"limits": {_GPU: "2"}}}]},
            2,
            id="limits only",
        ),
    ],
)
def test_a_pods_gpu_resources_are_the_maximum_over_its_phases(
    server: apiserver.ApiServer,
    workloads: pods.KubeWorkloads,
    spec: dict[str, Any],
    expected: int,
) -> None:
    server.store.create(make_pod(**spec))
    assert only(workloads).gpu_resources == ({_GPU: expected} if expected else {})


class TestEvict:
    def test_a_dry_run_returns_the_verdict_and_evicts_no_pod(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        server.store.create(make_pod())
        assert workloads.can_evict(only(workloads)).answer is ports.Eviction.ACCEPTED
        assert not only(workloads).is_terminating

    def test_a_pod_is_evicted_with_its_own_grace_period(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        server.store.create(make_pod(terminationGracePeriodSeconds=77))
        assert workloads.evict(only(workloads)).answer is ports.Eviction.ACCEPTED
        thing = server.store.get(resources.PODS, "p1", "ns")
        assert thing["metadata"]["deletionGracePeriodSeconds"] == 77

    def test_a_missing_pod_is_gone(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        server.store.create(make_pod())
        pod = only(workloads)
        server.store.delete(resources.PODS, "p1", "ns")
        assert workloads.evict(pod).answer is ports.Eviction.GONE

    def test_a_replacement_of_the_same_name_is_not_evicted(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        server.store.create(make_pod())
        pod = only(workloads)
        server.store.delete(resources.PODS, "p1", "ns")
        server.store.create(make_pod())
        assert workloads.evict(pod).answer is ports.Eviction.GONE
        assert not only(workloads).is_terminating

    def test_a_disruption_budget_blocks_and_is_named(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        self._budget(server, "keep-one")
        server.store.create(make_pod())
        verdict = workloads.evict(only(workloads))
        assert verdict.answer is ports.Eviction.BLOCKED
        assert "keep-one" in verdict.why
        assert server.log.count("create", "pods/eviction") == 1

    def test_two_budgets_for_a_pod_block_it(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        self._budget(server, "keep-one")
        self._budget(server, "keep-two")
        thing = make_pod()
        thing["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
        server.store.create(thing)
        verdict = workloads.evict(only(workloads))
        assert verdict.answer is ports.Eviction.BLOCKED
        assert "PodDisruptionBudget" in verdict.why

    def test_a_refused_eviction_returns_the_servers_retry_after(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        server.store.create(make_pod())
        server.inject(apiserver.Fault(path="/eviction", status=429, retry_after_s=17))
        verdict = workloads.evict(only(workloads))
        assert (verdict.answer, verdict.retry_after_s) == (ports.Eviction.BLOCKED, 17.0)
        assert server.log.count("create", "pods/eviction") <= 1

    def test_a_write_conflict_blocks_the_eviction_for_now(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        server.store.create(make_pod())
        server.inject(apiserver.Fault(path="/eviction", status=409, message="object was modified"))
        assert workloads.evict(only(workloads)).answer is ports.Eviction.BLOCKED

    @pytest.mark.parametrize(
        ("status", "reason"),
        [
            (403, errors.Reason.FORBIDDEN),
            (500, errors.Reason.API_UNAVAILABLE),
            (400, errors.Reason.API_ERROR),
        ],
    )
    def test_any_other_refusal_is_an_error(
        self,
        server: apiserver.ApiServer,
        workloads: pods.KubeWorkloads,
        status: int,
        reason: errors.Reason,
    ) -> None:
        server.store.create(make_pod())
        server.inject(apiserver.Fault(path="/eviction", status=status))
        with pytest.raises(errors.ClusterError) as caught:
            workloads.evict(only(workloads))
        assert caught.value.reason is reason

    @staticmethod
    def _budget(server: apiserver.ApiServer, name: str) -> None:
        server.store.create(
            {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": {"name": name, "namespace": "ns"},
                "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "p1"}}},
            }
        )


class TestDelete:
    def test_a_pod_is_deleted_with_its_own_grace_period(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        server.store.create(make_pod(terminationGracePeriodSeconds=5))
        workloads.delete(only(workloads))
        assert only(workloads).is_terminating

    def test_a_missing_or_replaced_pod_counts_as_deleted(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        server.store.create(make_pod())
        pod = only(workloads)
        server.store.delete(resources.PODS, "p1", "ns")
        workloads.delete(pod)
        server.store.create(make_pod())
        workloads.delete(pod)
        assert not only(workloads).is_terminating

    def test_a_deletion_whose_response_was_lost_succeeds(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        server.store.create(make_pod(terminationGracePeriodSeconds=0))
        pod = only(workloads)
        server.inject(apiserver.Fault(method="DELETE", reset=True, is_carried_out=True))
        workloads.delete(pod)
        assert server.log.count("delete", "pods") == 2

    def test_a_refusal_is_an_error(
        self, server: apiserver.ApiServer, workloads: pods.KubeWorkloads
    ) -> None:
        server.store.create(make_pod())
        server.inject(apiserver.Fault(method="DELETE", status=403))
        with pytest.raises(errors.ClusterError) as caught:
            workloads.delete(only(workloads))
        assert caught.value.reason is errors.Reason.FORBIDDEN
