"""What mig-manager reads of a pod of the API."""

from typing import Any

import pytest

from mig_manager.core.node import pod_object, well_known
from tests.api_objects import a_container, a_pod

GPU = "nvidia.com/mig-1g.10gb"


def test_a_pod_is_parsed_with_the_fields_that_the_drain_uses() -> None:
    gates = [{"name": "FEATURE_GATES", "value": "DynamicMIG=true, MPSSupport=false,"}]
    x = a_container("x", image="registry.example.com/x:1", env=gates)
    containers = [x, {"name": "y"}]
    spec = {"nodeSelector": {"a": "b"}, "terminationGracePeriodSeconds": 0}
    thing = a_pod(labels={"a": "p1"}, spec=spec | {"containers": containers})
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
        namespace="default",
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
    thing = a_pod()
    thing["status"] = {"phase": "Running"}
    thing["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    thing["metadata"]["annotations"] = {
        "kubernetes.io/config.mirror": "x",
        well_known.KEEP_ANNOTATION: "false",
    }
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
    thing = a_pod()
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
    pod = pod_object.parse_pod(a_pod(spec={"containers": [a_container(**container_fields)]}))
    assert pod.mig_strategy == strategy


def gpus(*counts: int) -> list[dict[str, Any]]:
    """Return a container for each count of GPUs; a negative one is a sidecar's."""
    return [
        a_container(
            limits={"cpu": "100m"} | ({GPU: abs(count)} if count else {}),
            **({"restartPolicy": "Always"} if count < 0 else {}),
        )
        for count in counts
    ]


INITIALIZED = a_pod(spec={"initContainers": gpus(1)})


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
        thing = a_pod(spec={"containers": containers, "initContainers": inits})
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
        thing = a_pod(spec={"containers": apps, "initContainers": inits})
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        thing["status"]["initContainerStatuses"] = [{"name": "main", "state": state}]
        pod = pod_object.parse_pod(thing)
        assert pod.has_claim_init is (may_init and code != 0)


@pytest.mark.parametrize("users", [("main",), ("main", "app")])
def test_a_claim_for_an_init_containers_extended_resource_is_known_too(
    users: tuple[str, ...],
) -> None:
    thing = a_pod(
        spec={"containers": [claiming("nic") | {"name": "app"}], "initContainers": gpus(1)}
    )
    request = {"requestName": "container-0-request-0", "resourceName": GPU}
    thing["status"]["extendedResourceClaimStatus"] = {
        "resourceClaimName": "made",
        "requestMappings": [{"containerName": user, **request} for user in users],
    }
    assert pod_object.parse_pod(thing).has_claim_init is (users == ("main",))


def test_a_pods_resources_of_init_containers_that_have_ended_are_known() -> None:
    terminated = {"name": "main", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    status = INITIALIZED["status"] | {"initContainerStatuses": [terminated]}
    pod = pod_object.parse_pod(INITIALIZED | {"status": status})
    assert (pod.gpu_resources, pod.completed_resources) == ({GPU: 1}, frozenset({GPU}))
    assert pod_object.parse_pod(INITIALIZED).completed_resources == frozenset()
