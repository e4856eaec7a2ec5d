"""ResourceClaims and ResourceSlices, from values alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_manager.core import model
from mig_manager.core.node import gpu_use
from mig_manager.core.node.daemons import clients, mig_managers
from mig_manager.core.node.devices import claims
from mig_manager.core.objects import pod_object, pod_parser, well_known
from tests.rigs.api_objects import a_claim, a_device, a_resource_slice
from tests.rigs.node import driver_rules, gpu_values, samples

DRIVER = well_known.GPU_CLAIM_DRIVER
ONE, OTHER = frozenset({driver_rules.mig_uuid("1")}), frozenset({driver_rules.mig_uuid("2")})
OF_DRIVER: dict[str, Any] = {
    "container_names": ("compute-domains", "gpus"),
    "owner_kind": "DaemonSet",
    "mounts_driver_sockets": True,
}


def of_gpus(gpus: tuple[model.Gpu, ...]) -> tuple[claims.Slice, ...]:
    uuids = gpu_values.device_uuids(gpus)
    devices = [a_device(f"d{n}", uuid=uuid) for n, uuid in enumerate(sorted(uuids))]
    return (claims.parse_slice(a_resource_slice(*devices)),)


# -- claims -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "devices"),
    [
        ({"driver": DRIVER}, {("n1", "d0")}),
        ({"driver": DRIVER, "adminAccess": False}, {("n1", "d0")}),
        ({"driver": DRIVER, "adminAccess": True}, set()),
        ({"driver": "nic.example.com"}, set()),
    ],
)
def test_a_claim_has_the_devices_of_the_driver_without_those_of_monitors(
    result: Mapping[str, Any], devices: set[claims.Device]
) -> None:
    claim = a_claim({"pool": "n1", "device": "d0", **result})
    assert claims.parse_claim(claim) == frozenset(devices)


@pytest.mark.parametrize("claim", [{}, {"status": {}}, {"status": {"allocation": None}}])
def test_a_claim_without_an_allocation_has_no_known_devices(claim: Mapping[str, Any]) -> None:
    assert claims.parse_claim(claim) is None


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_device_has_the_uuid_that_the_newest_slices_of_its_pool_give(version: str) -> None:
    old, new = (
        claims.parse_slice(
            a_resource_slice(a_device("d0", version=version, uuid=uuid), generation=number)
        )
        for number, uuid in enumerate(("MIG-old", "MIG-new"))
    )
    for slices in ((old, new), (new, old)):
        assert claims.resolve({("n1", "d0")}, slices) == frozenset({"MIG-new"})
        assert claims.resolve((), slices) == frozenset()


@pytest.mark.parametrize("device", [("n1", "d1"), ("n2", "d0"), ("n1", "abstract")])
def test_devices_are_unknown_where_one_has_no_uuid_in_a_slice(device: claims.Device) -> None:
    item = a_resource_slice(a_device("d0", uuid="MIG-1"), a_device("abstract", type="mig"))
    slices = (claims.parse_slice(item),)
    assert claims.resolve({("n1", "d0"), device}, slices) is None


# -- affected pods ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claimed", "leaves", "whole"),
    [(ONE, True, True), (ONE | OTHER, True, True), (OTHER, False, True), ((), False, False)],
)
def test_pod_counts_for_its_claimed_devices_whatever_kubelet_reports(
    claimed: frozenset[str], *, leaves: bool, whole: bool
) -> None:
    pod = samples.pod(gpu_resources={}, claimed_ids=frozenset(claimed), has_claims=bool(claimed))
    for drivers in ((), (DRIVER,)):
        reported = pod_object.PodDevices(
            namespace="default",
            name="p",
            device_ids=frozenset(),
            claim_drivers=frozenset(drivers),
        )
        for assigned in (None, (), (reported,)):
            usage = gpu_use.Usage(pods=(pod,), assigned=assigned)
            assert bool(usage.users(ONE)) is leaves
            assert bool(usage.users(None)) is whole
            assert leaves is False or not usage.why_uncertain(pod)


# -- the driver and its slices ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "is_driver"),
    [
        ({}, True),
        ({"container_names": ("gpus",)}, True),
        ({"container_names": ("compute-domains",)}, False),
        ({"owner_kind": None}, False),
        ({"mounts_driver_sockets": False}, False),
    ],
)
def test_dra_driver_is_known_by_owner_container_and_sockets(
    changed: Mapping[str, Any], *, is_driver: bool
) -> None:
    pod = samples.pod(**{**OF_DRIVER, **changed})
    assert claims.is_driver(pod) is is_driver
    assert not clients.is_device_plugin(pod)


@pytest.mark.parametrize(
    ("path", "is_seen"),
    [
        ("/var/lib/kubelet/plugins_registry", True),
        ("/var/snap/microk8s/common/var/lib/kubelet/plugins_registry/", True),
        ("/var/lib/kubelet/plugins", False),
    ],
)
def test_the_folder_of_kubelets_drivers_is_known_by_its_name(path: str, *, is_seen: bool) -> None:
    item = a_driver_pod({"name": "gpus"})
    item["spec"]["volumes"] = [{"name": "x", "hostPath": {"path": path}}]
    assert pod_parser.parse(item).mounts_driver_sockets is is_seen


def a_driver_pod(container: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "gpu", "name": "dra", "uid": "1"},
        "spec": {"containers": [container]},
    }


@pytest.mark.parametrize(
    ("container", "is_dynamic"),
    [
        ({"env": [{"name": "FEATURE_GATES", "value": "MPSSupport=false,DynamicMIG=true,"}]}, True),
        ({"args": ["gpu-kubelet-plugin", "--feature-gates=DynamicMIG=true"]}, True),
        ({"command": ["sh", "-c", 'x --feature-gates "A=false,DynamicMIG=true" -v 4']}, True),
        ({"args": ["--feature-gates", "DynamicMIG=false"]}, False),
        ({"env": [{"name": "FEATURE_GATES", "value": "MPSSupport=true"}]}, False),
    ],
)
def test_a_driver_with_dynamic_mig_is_refused_and_named_and_no_other(
    container: Mapping[str, Any], *, is_dynamic: bool
) -> None:
    pod = pod_parser.parse(a_driver_pod({"name": "gpus", **container}))
    why = ("gpu/dra (NVIDIA's DRA driver with DynamicMIG)",) if is_dynamic else ()
    assert mig_managers.others([pod], "own") == why


@given(st.frozensets(st.sampled_from(range(4))), st.booleans())
def test_any_device_too_few_or_too_many_is_explained(missing: frozenset[int], more: bool) -> None:  # noqa: FBT001 - drawn
    gpus = samples.balanced_gpu()
    (whole,) = of_gpus(gpus)
    uuids = {name: uuid for name, uuid in whole.uuids.items() if int(name[1:]) not in missing}
    uuids |= {"extra": "MIG-of-yesterday"} if more else {}
    why = claims.why_not_advertised(gpus, (dataclasses.replace(whole, uuids=uuids),))
    assert bool(why) is bool(missing or more)
    if why:
        assert f"{4 - len(missing)} exist, 4 are expected" in why


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_only_taints_that_keep_pods_away_are_named(version: str) -> None:
    faulty, informed = (a_device(name, version=version, uuid=name) for name in ("d0", "d1"))
    taints = [
        {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"},
        {"key": "gpu.nvidia.com/gpu-lost", "effect": "NoExecute"},
        {"key": "gpu.nvidia.com/unmonitored", "effect": "None"},
    ]
    faulty.get("basic", faulty)["taints"] = taints
    informed.get("basic", informed)["taints"] = taints[2:]
    slices = (claims.parse_slice(a_resource_slice(faulty, informed)),)
    assert claims.tainted_devices(slices) == (
        "d0 (gpu.nvidia.com/xid=79, gpu.nvidia.com/gpu-lost)",
    )


OFF = tuple(
    samples.gpu(samples.A100, mode=model.MigMode.DISABLED, index=number) for number in (1, 2)
)
BALANCED = samples.balanced_gpu()
ALL = model.ObservedGpus((*BALANCED, *OFF))
(WHOLE,) = of_gpus(BALANCED)
PARTIAL = gpu_values.seen_of(OFF, {OFF[1].uuid})
VFIO = claims.parse_slice(
    a_resource_slice(a_device("gpu-vfio-0", uuid="its-own", type="vfio"), node="n2")
)
UNBORN = dataclasses.replace(WHOLE, uuids={**WHOLE.uuids, "gpu-0-mig-7g40gb-0-0": ""})
FIRST_OF_TWO = dataclasses.replace(WHOLE, generation=2, count=2)


@pytest.mark.parametrize(
    ("gpus", "slices", "why"),
    [
        pytest.param(ALL, of_gpus(ALL), "", id="exactly the devices"),
        pytest.param(BALANCED, (WHOLE, VFIO), "", id="a GPU for virtual machines"),
        pytest.param(
            BALANCED,
            (UNBORN,),
            "5 devices: 4 exist, 4 are expected, 1 have no UUID (see DynamicMIG)",
            id="devices that do not exist yet",
        ),
        pytest.param(
            BALANCED,
            (WHOLE, FIRST_OF_TWO),
            "the DRA driver has published 1 of 2 ResourceSlices",
            id="an incomplete generation",
        ),
        pytest.param(BALANCED, (), "list 0 devices", id="none"),
        pytest.param(PARTIAL, of_gpus(OFF), "", id="devices of an unreachable GPU"),
        pytest.param(PARTIAL, of_gpus(OFF[1:]), "expected", id="only those"),
    ],
)
def test_slices_are_right_with_exactly_the_gpus_devices(
    gpus: model.ObservedGpus, slices: tuple[claims.Slice, ...], why: str
) -> None:
    reason = claims.why_not_advertised(gpus, slices)
    assert why in reason if why else not reason


def test_a_claim_for_a_virtual_machines_gpu_has_its_own_uuid() -> None:
    assert claims.resolve({("n2", "gpu-vfio-0")}, (VFIO,)) == frozenset({"its-own"})
