"""What mig-manager reads of a pod of the API."""

import dataclasses
from typing import Any

import pytest

from mig_manager.core.objects import pod_object, pod_parser, well_known
from tests.rigs.api_objects import a_container, a_pod

GPU = "nvidia.com/mig-1g.10gb"
SINGLE_OPTION = ["--mig-strategy=single", "--pass-device-specs"]


def a_full_pod() -> dict[str, Any]:
    """Return a pod in which everything is set that a running pod can have."""
    gates = [{"name": "FEATURE_GATES", "value": "DynamicMIG=true, MPSSupport=false,"}]
    x = a_container("x", image="registry.example.com/x:1", env=gates, args=SINGLE_OPTION)
    spec = {
        "nodeSelector": {"a": "b"},
        "terminationGracePeriodSeconds": 0,
        "containers": [x, {"name": "y"}],
        "initContainers": [
            a_container("init", limits={GPU: 2}),
            a_container("done", limits={"nvidia.com/gpu": 1}),
        ],
        "resourceClaims": [{"name": "nic", "resourceClaimName": "p1-nic"}],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}, {"operator": "Exists"}],
        "volumes": [
            {"name": "a", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}},
            {"name": "b", "hostPath": {"path": "/var/lib/k0s/kubelet/plugins_registry/"}},
            {"name": "c", "emptyDir": {}},
        ],
    }
    thing = a_pod(labels={"a": "p1"}, spec=spec)
    thing["metadata"]["annotations"] = {well_known.KEEP_ANNOTATION: "true"}
    thing["metadata"]["ownerReferences"] = [
        {"kind": "Other", "name": "o", "uid": "1", "apiVersion": "v1"},
        {"kind": "DaemonSet", "name": "d", "uid": "2", "apiVersion": "apps/v1"}
        | {"controller": True},
    ]
    thing["status"] |= {
        "conditions": [{"type": kind, "status": "True"} for kind in ("Initialized", "Ready")],
        "initContainerStatuses": [{"name": "done", "state": {"terminated": {"exitCode": 0}}}],
        "extendedResourceClaimStatus": {
            "resourceClaimName": "p1-gpus",
            "requestMappings": [
                {"containerName": "init", "requestName": "r0", "resourceName": GPU}
            ],
        },
    }
    return thing


def a_terminating_pod() -> dict[str, Any]:
    """Return a static pod whose grace period runs, and whose container cannot start."""
    thing = a_pod()
    waiting = {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
    thing["status"] = {"phase": "Running", "containerStatuses": [waiting]}
    thing["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    thing["metadata"]["annotations"] = {
        "kubernetes.io/config.mirror": "x",
        well_known.KEEP_ANNOTATION: "false",
    }
    return thing


EXAMPLES = (
    (
        a_full_pod(),
        pod_object.Pod(
            namespace="default",
            name="p1",
            uid="uid-p1",
            phase="Running",
            labels={"a": "p1"},
            node_selector={"a": "b"},
            owner_kind="DaemonSet",
            owner_name="d",
            is_ready=True,
            gpu_resources={GPU: 2, "nvidia.com/gpu": 1},
            container_names=("x", "y"),
            node_name="n1",
            is_kept=True,
            grace_s=0,
            has_claims=True,
            claims=("p1-nic", "p1-gpus"),
            claimed_resources=frozenset({GPU}),
            completed_resources=frozenset({"nvidia.com/gpu"}),
            has_gpu_init=True,
            has_claim_init=True,
            mounts_plugin_sockets=True,
            mounts_driver_sockets=True,
            images=("registry.example.com/x:1", ""),
            mig_strategy="single",
            feature_gates={"DynamicMIG": True, "MPSSupport": False},
            tolerated=frozenset({"nvidia.com/gpu"}),
        ),
    ),
    (
        a_terminating_pod(),
        pod_object.Pod(
            namespace="default",
            name="p1",
            uid="uid-p1",
            phase="Running",
            is_mirror=True,
            is_terminating=True,
            ends_by_s=1767323045,
            is_admitted=False,
            container_names=("main",),
            node_name="n1",
            images=("app:1",),
            waiting=pod_object.ContainerWaiting(reason="ErrImagePull", message="no such image"),
        ),
    ),
)
NOT_OF_THE_OBJECT = {"claimed_ids", "is_unbound", "is_unlisted"}
"""The fields that follow from ResourceClaims and from kubelet's list, not from the Pod."""


@pytest.mark.parametrize(("thing", "pod"), EXAMPLES, ids=["full", "terminating"])
def test_a_pod_is_parsed_with_the_fields_that_the_drain_uses(
    thing: dict[str, Any], pod: pod_object.Pod
) -> None:
    assert pod_parser.parse(thing) == pod


def test_every_field_of_a_pod_is_parsed_in_an_example() -> None:
    # A field without a default is in every example.
    bare = pod_object.Pod(namespace="", name="", uid="", phase="")

    unchanged = {
        field.name
        for field in dataclasses.fields(pod_object.Pod)
        if all(getattr(pod, field.name) == getattr(bare, field.name) for _, pod in EXAMPLES)
    }

    assert unchanged == NOT_OF_THE_OBJECT


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
    assert pod_parser.parse(thing).waiting == expected


SINGLE = [{"name": "MIG_STRATEGY", "value": "single"}]


@pytest.mark.parametrize(
    ("container_fields", "strategy"),
    [
        ({}, ""),
        ({"command": ["nvidia-device-plugin"]}, ""),
        ({"args": SINGLE_OPTION}, "single"),
        ({"args": ["--mig-strategy", "mixed"]}, "mixed"),
        ({"args": ["--mig-strategy"]}, ""),
        ({"env": SINGLE}, "single"),
        ({"args": ["--mig-strategy=mixed"], "env": SINGLE}, "mixed"),
    ],
)
def test_device_plugins_strategy_is_in_its_options_or_its_variable(
    container_fields: dict[str, Any], strategy: str
) -> None:
    pod = pod_parser.parse(a_pod(spec={"containers": [a_container(**container_fields)]}))
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
        pytest.param(gpus(1), gpus(2, -1), 2, False, id="a later sidecar gets its devices"),
        pytest.param(gpus(1), gpus(-1, 2), 3, True, id="an earlier sidecar does not"),
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
        pod = pod_parser.parse(thing)
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
        pod = pod_parser.parse(thing)
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
    assert pod_parser.parse(thing).has_claim_init is (users == ("main",))


def test_a_pods_resources_of_init_containers_that_have_ended_are_known() -> None:
    terminated = {"name": "main", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    status = INITIALIZED["status"] | {"initContainerStatuses": [terminated]}
    pod = pod_parser.parse(INITIALIZED | {"status": status})
    assert (pod.gpu_resources, pod.completed_resources) == ({GPU: 1}, frozenset({GPU}))
    assert pod_parser.parse(INITIALIZED).completed_resources == frozenset()
