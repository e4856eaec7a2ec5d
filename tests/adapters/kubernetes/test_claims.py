"""ResourceClaims and ResourceSlices on the embedded API server, and the requests they cost."""

import contextlib
from typing import Any

import pytest

from mig_manager import errors, reasons
from mig_manager.adapters.kubernetes import api, device_claims, pod_claims, pods
from mig_manager.core.node import gpu_use
from mig_manager.core.objects import pod_object, well_known
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.adapters.kubernetes import kube_rig
from tests.adapters.kubernetes.kube_rig import answer, refuse
from tests.rigs import waiting
from tests.rigs.api_objects import a_claim, a_device, a_pod, a_resource_slice
from tests.rigs.node import fakes

DRIVER = well_known.GPU_CLAIM_DRIVER
ONE = frozenset({"MIG-0"})


def claiming(name: str, *results: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a pod and its claims, with an allocation each."""
    named = [{"name": str(number)} for number, _ in enumerate(results)]
    thing = a_pod(name, spec={"resourceClaims": named})
    thing["status"]["resourceClaimStatuses"] = [
        {"name": str(number), "resourceClaimName": f"{name}-{number}"}
        for number, _ in enumerate(results)
    ]
    made = [
        a_claim(*filter(None, [result]), name=f"{name}-{number}")
        for number, result in enumerate(results)
    ]
    return [thing, *made]


def on(device: str, *, driver: str = DRIVER, **more: Any) -> dict[str, Any]:
    return {"driver": driver, "pool": "n1", "device": device, **more}


@pytest.mark.parametrize(
    ("results", "claimed"),
    [
        ([on("d0")], {"MIG-0"}),
        ([on("d0"), on("d1"), on("x", driver="nic.example.com")], {"MIG-0", "MIG-1"}),
        ([on("x", driver="nic.example.com")], set()),
        ([on("d0", adminAccess=True)], set()),
        ([on("d0"), on("unlisted")], None),
        ([on("d0"), None], None),
    ],
)
def test_a_pod_has_the_devices_of_its_claims_if_all_are_known(
    server: apiserver.ApiServer,
    workloads: pods.KubeWorkloads,
    results: list[dict[str, Any] | None],
    claimed: set[str] | None,
) -> None:
    others = a_resource_slice(a_device("unlisted", uuid="MIG-9"), node="n2")
    server.create(
        *claiming("p1", *results),
        a_resource_slice(a_device("d0", uuid="MIG-0"), a_device("d1", uuid="MIG-1")),
        others,
        a_resource_slice(a_device("unlisted", uuid="MIG-9"), driver="other.example.com"),
    )

    for _ in range(2):
        (pod,) = workloads.list()
        assert pod.claimed_ids == claimed
        assert pod.has_claims is (claimed is None or bool(claimed))


def test_a_claim_that_was_never_created_is_ignored(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads
) -> None:
    one, claim = claiming("p1", on("d0"))
    one["spec"]["resourceClaims"].append({"name": "1", "resourceClaimTemplateName": "t"})
    none = a_pod("p2", spec={"resourceClaims": [{"name": "1", "resourceClaimTemplateName": "t"}]})
    for thing in (one, none):
        thing["status"].setdefault("resourceClaimStatuses", []).append({"name": "1"})
    server.create(one, none, claim, a_resource_slice(a_device("d0", uuid="MIG-0")))

    assert {pod.name: pod.claimed_ids for pod in workloads.list()} == {"p1": ONE, "p2": None}
    assert [pod.name for pod in workloads.list() if pod.has_claims] == ["p1"]


def test_an_extended_resource_has_the_device_of_the_schedulers_claim(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads
) -> None:
    thing, claim = claiming("p1", on("d0"))
    del thing["spec"]["resourceClaims"], thing["status"]["resourceClaimStatuses"]
    container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    thing["spec"]["containers"] = [container]
    thing["status"]["extendedResourceClaimStatus"] = {
        "resourceClaimName": "p1-0",
        "requestMappings": [
            {
                "containerName": "main",
                "requestName": "container-0-request-0",
                "resourceName": "nvidia.com/gpu",
            }
        ],
    }
    other = a_device("d1", uuid="MIG-1")
    server.create(thing, claim, a_resource_slice(a_device("d0", uuid="MIG-0"), other))

    listed = workloads.list()

    # Kubelet shows the driver, and no device.
    by_kubelet = pod_object.PodDevices(
        namespace="default", name="p1", device_ids=frozenset(), claim_drivers=frozenset({DRIVER})
    )
    usage = gpu_use.Usage(pods=listed, assigned=(by_kubelet,))
    assert usage.users(ONE) == listed
    assert usage.users(frozenset({"MIG-1"})) == ()


def test_claims_are_read_once_for_each_pod_and_slices_once_for_all(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads
) -> None:
    for name, device in (("p1", "d0"), ("p2", "d1")):
        server.create(*claiming(name, on(device)))
    server.create(a_resource_slice(a_device("d0", uuid="MIG-0"), a_device("d1", uuid="MIG-1")))

    for _ in range(3):
        assert [pod.claimed_ids for pod in workloads.list()] == [ONE, frozenset({"MIG-1"})]

    assert server.log.count("get", "resourceclaims") == 2
    assert server.log.count("list", "resourceslices") == 1


def test_a_claim_for_a_gpu_is_remembered_when_it_is_gone(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads
) -> None:
    server.create(*claiming("p1", on("d0")), a_resource_slice(a_device("d0", uuid="MIG-0")))
    assert [pod.claimed_ids for pod in workloads.list()] == [ONE]
    server.delete(kinds.CLAIMS, "p1-0", "default")
    assert [pod.claimed_ids for pod in workloads.list()] == [ONE]


@pytest.mark.parametrize(
    ("phase", "later_phase", "now"),
    [
        ("Pending", "Pending", "MIG-new"),
        ("Pending", "Running", "MIG-new"),
        ("Running", "Running", "MIG-0"),
    ],
)
def test_a_pod_has_the_device_of_the_newest_slice_until_it_has_started(
    server: apiserver.ApiServer,
    workloads: pods.KubeWorkloads,
    phase: str,
    later_phase: str,
    now: str,
) -> None:
    thing, claim = claiming("p1", on("d0"))
    thing["status"]["phase"] = phase
    server.create(thing, claim, a_resource_slice(a_device("d0", uuid="MIG-0")))
    assert [pod.claimed_ids for pod in workloads.list()] == [ONE]

    server.delete(kinds.SLICES, f"n1-{DRIVER}-x", "")
    assert [pod.claimed_ids for pod in workloads.list()] == [ONE]
    server.create(a_resource_slice(a_device("d0", uuid="MIG-new")))
    server.merge(kinds.PODS, "p1", {"status": {"phase": later_phase}}, namespace="default")
    for _ in range(2):
        assert [pod.claimed_ids for pod in workloads.list()] == [frozenset({now})]


@pytest.mark.parametrize("missing", ["claim", "version"])
def test_a_claim_that_cannot_be_read_may_be_for_a_gpu(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads, missing: str
) -> None:
    pod, claim = claiming("p1", on("x", driver="nic.example.com"))
    server.create(pod)
    if missing == "version":
        server.create(claim)
        fault = apiserver.Fault(path="/apis/resource.k8s.io/", status=404, times=3)
        server.inject(fault)
    (listed_pod,) = workloads.list()
    assert (listed_pod.has_claims, listed_pod.claimed_ids) == (True, None)


def test_api_version_is_discovered_once_and_again_after_an_upgrade() -> None:
    page, gone = (
        {"items": [a_resource_slice(a_device("d0", version="v1beta1", uuid="MIG-0"))]},
        refuse(404),
    )
    with kube_rig.KubeServer() as server:
        server.script = [gone, gone, answer(page), answer(page), gone, answer(page)]
        slices = pod_claims.KubeSlices(server.kube, node_name="n1")

        for _ in range(3):
            assert [each.uuids for each in slices.list() or ()] == [{"d0": "MIG-0"}]

        versions = [path.split("/")[3] for _, path, _, _ in server.requests]
        assert versions == ["v1", "v1beta2", *["v1beta1"] * 3, "v1"]


def test_no_claims_are_requested_for_pods_without_claims(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads
) -> None:
    server.create(a_pod())
    workloads.list()
    assert server.log.count("list", "resourceslices") == 0
    assert server.log.count("get", "resourceclaims") == 0


def test_slices_are_unknown_where_the_api_has_none(
    server: apiserver.ApiServer, kube: api.KubeApi
) -> None:
    server.inject(apiserver.Fault(path="/resourceslices", status=404, times=3))
    assert pod_claims.KubeSlices(kube, node_name="n1").list() is None


@pytest.mark.parametrize("spec", [{}, {"pool": {"name": "n1", "resourceSliceCount": "many"}}])
def test_a_malformed_slice_is_an_error_and_its_devices_are_unknown(
    server: apiserver.ApiServer,
    kube: api.KubeApi,
    workloads: pods.KubeWorkloads,
    spec: dict[str, Any],
) -> None:
    thing = a_resource_slice()
    thing["spec"] = {"driver": DRIVER, "nodeName": "n1", **spec}
    server.create(*claiming("p1", on("d0")), thing)
    with pytest.raises(errors.ClusterError, match="from the Kubernetes API is malformed"):
        pod_claims.KubeSlices(kube, node_name="n1").list()
    assert [pod.claimed_ids for pod in workloads.list()] == [None]


def test_the_slices_of_the_driver_on_this_node_are_deleted_and_no_others(
    server: apiserver.ApiServer, kube: api.KubeApi
) -> None:
    server.create(
        a_resource_slice(),
        a_resource_slice(node="n2"),
        a_resource_slice(driver="other.example.com"),
    )
    pod_claims.KubeSlices(kube, node_name="n1").delete()
    names = {each["metadata"]["name"] for each in server.objects(kinds.SLICES)}
    assert names == {"n2-gpu.nvidia.com-x", "n1-other.example.com-x"}


@pytest.mark.parametrize("suffixes", ["x", "abc"])
def test_one_slice_that_may_not_be_deleted_keeps_no_other(
    server: apiserver.ApiServer, kube: api.KubeApi, suffixes: str
) -> None:
    server.create(*(a_resource_slice(suffix=suffix) for suffix in suffixes))
    server.inject(apiserver.Fault(method="DELETE", path="/resourceslices", status=403, times=1))
    slices = pod_claims.KubeSlices(kube, node_name="n1")
    slices.delete()
    assert len(slices.list() or ()) == 1


def test_refusal_by_a_starting_server_is_not_a_missing_right() -> None:
    with kube_rig.KubeServer() as server:
        server.script = [kube_rig.reset, *[refuse(403)] * 3]
        error = kube_rig.failure(pod_claims.KubeSlices(server.kube, node_name="n1").list)
        assert error.reason is reasons.Reason.API_UNAVAILABLE

        server.script = [refuse(403)] * 99
        devices = device_claims.DeviceClaims(server.kube, lambda: None, lambda: None)
        with contextlib.closing(devices) as watched:
            watched.start()
            waiting.until(lambda: len(server.script) < 99 - 4, "the attempts")
            assert not watched.is_current


@pytest.mark.parametrize("path", ["/resourceclaims", "/resourceslices"])
@pytest.mark.parametrize("status", [401, 503])
def test_claim_is_unknown_while_the_api_fails_and_read_by_the_next_list(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads, path: str, status: int
) -> None:
    server.create(*claiming("p1", on("d0")), a_resource_slice(a_device("d0", uuid="MIG-0")))
    server.inject(apiserver.Fault(path=path, status=status, times=4 if status == 503 else 1))
    with pytest.raises(errors.ClusterError):
        workloads.list()
    assert [pod.claimed_ids for pod in workloads.list()] == [ONE]


def test_claims_are_read_again_some_minutes_after_the_api_forbade_it(
    server: apiserver.ApiServer, kube: api.KubeApi
) -> None:
    clock = fakes.FakeClock()
    workloads = pods.KubeWorkloads(kube, node_name="n1", clock=clock)
    server.create(
        *claiming("p1", on("d0")),
        *claiming("p2", on("d0")),
        a_resource_slice(a_device("d0", uuid="MIG-0")),
    )
    server.inject(apiserver.Fault(path="/resourceclaims", status=403, times=1))
    for at_s, claimed in ((0.0, None), (299.0, None), (300.0, ONE)):
        clock.now_s = at_s
        assert [pod.claimed_ids for pod in workloads.list()] == [claimed, claimed], at_s
    assert server.log.count("get", "resourceclaims") == 3


def test_unstarted_pods_need_one_request_a_list_once_claims_are_read(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads
) -> None:
    for number in range(5):
        thing, claim = claiming(f"p{number}", on("d0"))
        thing["status"]["phase"] = "Pending"
        server.create(thing, claim)
    server.create(a_resource_slice(a_device("d0", uuid="MIG-0")))
    for _ in range(3):
        assert {pod.claimed_ids for pod in workloads.list()} == {ONE}
    assert server.log.count("get", "resourceclaims") == 5
    assert server.log.count("list", "resourceslices") == 3


def reserve(
    server: apiserver.ApiServer, name: str, result: dict[str, Any] | None, *, node: str = ""
) -> None:
    """Create a pod, and a claim that is reserved for it."""
    thing, claim = claiming(name, result)
    if not node:
        del thing["spec"]["nodeName"]
    if name == "finished":
        thing["status"]["phase"] = "Failed"
    server.create(thing)
    uid = server.get(kinds.PODS, name, "default")["metadata"]["uid"]
    claim["status"]["reservedFor"] = [{"resource": "pods", "name": name, "uid": uid}]
    server.create(claim)
    if name == "gone":
        server.delete(kinds.PODS, name, "default")


def test_pods_about_to_be_bound_have_the_devices_reserved_for_them(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads
) -> None:
    server.create(a_resource_slice(a_device("d0", uuid="MIG-0"), a_device("d1", uuid="MIG-1")))
    server.create(a_resource_slice(a_device("d0", uuid="MIG-9"), node="n2"))
    reserve(server, "bound", on("d0"), node="n1")
    reserve(server, "unbound", on("d1"))
    reserve(server, "unknown", on("d9"))
    for name, result in {
        "finished": on("d1"),
        "gone": on("d1"),
        "elsewhere": on("d0") | {"pool": "n2"},
        "monitor": on("d1", adminAccess=True),
        "network": on("d1", driver="nic.example.com"),
        "unallocated": None,
    }.items():
        reserve(server, name, result)
    bound = workloads.list()

    unbound = workloads.unbound(bound)

    assert {pod.name: pod.claimed_ids for pod in unbound} == {
        "unbound": frozenset({"MIG-1"}),
        "unknown": None,
    }
    assert all(pod.is_unbound and pod.has_claims for pod in unbound)
    server.inject(apiserver.Fault(path="/resourceclaims", status=403, times=1))
    assert workloads.unbound(bound) == ()


def test_a_new_agent_knows_who_has_devices_of_slices_that_are_gone(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads
) -> None:
    server.create(a_resource_slice(a_device("d0", uuid="MIG-9"), node="n2"))
    reserve(server, "p1", on("d0"))
    reserve(server, "elsewhere", on("d0") | {"pool": "n2"})

    (pod,) = workloads.unbound(())

    assert (pod.name, pod.has_claims, pod.claimed_ids) == ("p1", True, None)


def test_slices_that_kubelet_has_deleted_still_name_reserved_devices(
    server: apiserver.ApiServer, workloads: pods.KubeWorkloads
) -> None:
    listed = a_resource_slice(a_device("d0", uuid="MIG-0"))
    server.create(listed)
    reserve(server, "p1", on("d0"))
    assert [pod.claimed_ids for pod in workloads.unbound(())] == [ONE]

    server.delete(kinds.SLICES, listed["metadata"]["name"], "")

    assert [pod.claimed_ids for pod in workloads.unbound(())] == [ONE]
