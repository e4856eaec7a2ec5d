"""KubeWorkloads on the embedded API server; ``tests/cluster/test_api.py`` has its evictions."""

from typing import Any

import pytest

from mig_manager import errors
from mig_manager.adapters import cluster_reader
from mig_manager.adapters.kubernetes import api, pods
from mig_manager.core.node import evictions, pod_object, well_known
from testkit import apiserver
from tests.adapters.kube_pods import GPU, container, make_pod


def test_a_pod_is_parsed_with_the_fields_that_the_drain_uses() -> None:
    gates = [{"name": "FEATURE_GATES", "value": "DynamicMIG=true, MPSSupport=false,"}]
    x = container("x", image="registry.example.com/x:1", env=gates)
    thing = make_pod(
        nodeSelector={"a": "b"}, containers=[x, container("y")], terminationGracePeriodSeconds=0
    )
    thing["metadata"]["annotations"] = {well_known.KEEP_ANNOTATION: "true"}
    thing["metadata"]["ownerReferences"] = [
        {"kind": "Other", "name": "o", "uid": "1", "apiVersion": "v1"},
        {"kind": "DaemonSet", "name": "d", "uid": "2", "apiVersion": "apps/v1"}
        | {"controller": True},
    ]
    thing["status"]["conditions"] = [
        {"type": kind, "status": "True"} for kind in ("Initialized", "Ready")
    ]
    assert pod_object.parse_pod(thing) == pod_object.Pod(
        namespace="ns",
        name="p1",
        uid="uid-p1",
        phase="Running",
        labels={"a": "p1"},
        node_selector={"a": "b"},
        owner_kind="DaemonSet",
        owner_name="d",
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
        well_known.KEEP_ANNOTATION: "false",
    }
    del thing["status"]["startTime"]
    pod = pod_object.parse_pod(thing)
    assert pod.ends_by_s == 1767323045
    assert (pod.owner_kind, pod.is_terminating, pod.is_mirror) == (None, True, True)
    assert (pod.is_ready, pod.is_kept, pod.is_admitted) == (False, False, False)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (
            "ErrImagePull",
            pod_object.ContainerWaiting(reason="ErrImagePull", message="no such image"),
        ),
        ("ContainerCreating", None),
    ],
)
@pytest.mark.parametrize("kind", ["initContainerStatuses", "containerStatuses"])
def test_a_pod_has_the_reason_why_kubelet_cannot_start_it(
    reason: str, expected: pod_object.ContainerWaiting | None, kind: str
) -> None:
    thing = make_pod()
    waiting = {"reason": reason, "message": "no such\nimage"}
    thing["status"][kind] = [{"state": {"running": {}}}, {"state": {"waiting": waiting}}]
    assert pod_object.parse_pod(thing).waiting == expected


SINGLE = [{"name": "MIG_STRATEGY", "value": "single"}]


@pytest.mark.parametrize(
    ("container_fields", "strategy"),
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
def test_device_plugins_strategy_is_in_its_options_or_its_variable(
    container_fields: dict[str, Any], strategy: str
) -> None:
    pod = pod_object.parse_pod(make_pod(containers=[container(**container_fields)]))
    assert pod.mig_strategy == strategy


def gpus(*counts: int) -> list[dict[str, Any]]:
    """Return a container for each count of GPUs; a negative one is a sidecar's."""
    return [
        container(gpus=-count, restartPolicy="Always") if count < 0 else container(gpus=count)
        for count in counts
    ]


@pytest.mark.parametrize(
    ("containers", "inits", "total", "may_init"),
    [
        pytest.param(gpus(0), gpus(0), 0, False, id="none"),
        pytest.param(gpus(1, 2), [], 3, False, id="sum"),
        pytest.param(gpus(2), gpus(3, 1), 3, True, id="the hungriest init container"),
        pytest.param(gpus(1, 1), gpus(2, 1), 2, False, id="the app containers get its devices"),
        pytest.param(gpus(2), gpus(-1), 3, False, id="a sidecar adds"),
        pytest.param(gpus(1), gpus(4, -2, 3), 5, True, id="an init container beside a sidecar"),
        pytest.param(
            [{"name": "x", "resources": {"limits": {GPU: "2"}}}], [], 2, False, id="limits only"
        ),
    ],
)
def test_a_pods_gpu_resources_are_the_maximum_over_its_phases(
    containers: list[Any],
    inits: list[Any],
    total: int,
    may_init: bool,  # noqa: FBT001 - a column of the table
) -> None:
    """An init container may use them only until it has ended."""
    for code in (None, 1, 0):
        thing = make_pod(containers=containers, initContainers=inits)
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        thing["status"]["initContainerStatuses"] = [{"name": "main", "state": state}]
        pod = pod_object.parse_pod(thing)
        assert pod.gpu_resources == ({GPU: total} if total else {})
        assert pod.has_gpu_init is (may_init and code != 0)
        assert not pod.completed_resources


def claiming(*names: str, **fields: Any) -> dict[str, Any]:
    """Return a container with some of the pod's claims; ``x/y`` is only request y of claim x."""
    parts = [name.split("/") for name in names]
    claims = [dict(zip(("name", "request"), each, strict=False)) for each in parts]
    return {"name": "main", "resources": {"claims": claims}, **fields}


@pytest.mark.parametrize(
    ("apps", "inits", "may_init"),
    [
        ([claiming("nic")], [], False),
        ([claiming("nic")], [claiming("nic")], False),
        ([claiming("nic")], [claiming("gpu")], True),
        ([claiming("both/nic")], [claiming("both/gpu")], True),
        ([claiming("nic")], [claiming("gpu", restartPolicy="Always")], False),
    ],
)
def test_a_claim_of_an_init_container_alone_is_known_until_it_has_ended(
    apps: list[Any], inits: list[Any], *, may_init: bool
) -> None:
    for code in (None, 1, 0):
        thing = make_pod(containers=apps, initContainers=inits)
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        thing["status"]["initContainerStatuses"] = [{"name": "main", "state": state}]
        pod = pod_object.parse_pod(thing)
        assert pod.has_claim_init is (may_init and code != 0)


@pytest.mark.parametrize("users", [("main",), ("main", "app")])
def test_a_claim_for_an_init_containers_extended_resource_is_known_too(
    users: tuple[str, ...],
) -> None:
    thing = make_pod(containers=[claiming("nic") | {"name": "app"}], initContainers=gpus(1))
    request = {"requestName": "container-0-request-0", "resourceName": GPU}
    thing["status"]["extendedResourceClaimStatus"] = {
        "resourceClaimName": "made",
        "requestMappings": [{"containerName": user, **request} for user in users],
    }
    assert pod_object.parse_pod(thing).has_claim_init is (users == ("main",))


def test_a_pods_resources_of_init_containers_that_have_ended_are_known() -> None:
    thing = make_pod(initContainers=gpus(1))
    thing["status"]["initContainerStatuses"] = [
        {"name": "main", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    ]
    pod = pod_object.parse_pod(thing)
    assert (pod.gpu_resources, pod.completed_resources) == ({GPU: 1}, frozenset({GPU}))
    assert (
        pod_object.parse_pod(make_pod(initContainers=gpus(1))).completed_resources == frozenset()
    )


# -- over the API -----------------------------------------------------------------------------


@pytest.fixture
def workloads(kube: api.KubeApi) -> pods.KubeWorkloads:
    return pods.KubeWorkloads(kube, node_name="n1")


def test_list_returns_all_pages_of_the_nodes_pods_in_every_phase(
    server: apiserver.ApiServer, kube: api.KubeApi, workloads: pods.KubeWorkloads
) -> None:
    phases = {"Pending": False, "Running": False, "Succeeded": True, "Failed": True}
    for number, (phase, node) in enumerate([*((phase, "n1") for phase in phases), ("x", "n2")]):
        server.create(make_pod(f"a{number}", node=node, phase=phase))
    assert {pod.phase: pod.is_finished for pod in workloads.list()} == phases

    server.create(*(make_pod(f"p{number}") for number in range(497)))
    server.log.clear()
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
    server.create(make_pod(**spec))
    with pytest.raises(errors.ClusterError, match="from the Kubernetes API is malformed"):
        workloads.list()


@pytest.fixture
def pod(server: apiserver.ApiServer, workloads: pods.KubeWorkloads) -> pod_object.Pod:
    server.create(make_pod(terminationGracePeriodSeconds=0))
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
    assert (verdict.answer, verdict.retry_after_s) == (evictions.Eviction.BLOCKED, after_s or 0.0)


def test_an_eviction_that_no_dry_run_can_check_counts_as_possible(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads, pod: pod_object.Pod
) -> None:
    message = 'admission webhook "old.example.com" does not support dry run'
    server.inject(apiserver.Fault(path="/eviction", status=400, message=message))

    assert workloads.can_evict(pod).answer is evictions.Eviction.ACCEPTED


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
