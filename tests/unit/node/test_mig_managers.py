"""Other MIG managers, found by what their public manifests say of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from mig_manager.core.node.daemons import mig_managers
from mig_manager.core.objects import pod_object
from tests.rigs.node import samples
from tests.rigs.node.samples import pod

OWN_UID = "11111111-2222-3333-4444-555555555555"
NVIDIAS, NOS = "NVIDIA's mig-manager", "nos' mig-agent"
SLICER = "OpenShift's Dynamic Accelerator Slicer"
COMPONENT, NAME = "app.kubernetes.io/component", "app.kubernetes.io/name"
OPERATORS: dict[str, Any] = {
    "labels": {"app": "nvidia-mig-manager"},
    "container_names": ("nvidia-mig-manager",),
}
DAS: dict[str, Any] = {"container_names": ("das-daemonset",)}


def manager(name: str = "some-pod", **changed: Any) -> pod_object.Pod:
    common = {"namespace": "ns", "uid": "another", "images": ("registry.example.com/app:1",)}
    return pod(name, **(common | changed))


FROM_NVIDIA = manager(
    "nvidia-mig-manager-abcde",
    **OPERATORS,
    images=("nvcr.io/nvidia/cloud-native/k8s-mig-manager:v0.15.0",),
)
DYNAMIC_DRA = manager(
    "nvidia-dra-driver-gpu-kubelet-plugin-abcde",
    labels={"nvidia-dra-driver-gpu-component": "kubelet-plugin"},
    container_names=("compute-domains", "gpus"),
    feature_gates={"DynamicMIG": True},
)
OWN_MANAGERS = [
    manager("ours", uid=OWN_UID, labels={NAME: "mig-manager"}, container_names=("mig-manager",)),
    manager(
        "in-its-place",
        uid=OWN_UID,
        **OPERATORS,
        images=("registry.example.com:5000/mig-manager:0.1.0",),
    ),
]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (FROM_NVIDIA, NVIDIAS),
        (manager(labels={"app": "nvidia-mig-manager"}), NVIDIAS),
        (manager(container_names=("log", "nvidia-mig-manager")), NVIDIAS),
        (DYNAMIC_DRA, "NVIDIA's DRA driver with DynamicMIG"),
        (manager(labels={NAME: "nos-mig-agent"}), NOS),
        (manager(labels={COMPONENT: "mig-agent"}, container_names=("mig-agent",)), NOS),
        (manager(images=("ghcr.io/nebuly-ai/nos-mig-agent@sha256:00",)), NOS),
        (manager(**DAS), SLICER),
        (
            manager(
                labels={"app": "controller-daemonset"},
                container_names=("daemonset",),
                images=("example.com/instaslicev2-daemonset:latest",),
            ),
            SLICER,
        ),
    ],
)
def test_a_foreign_manager_is_named_with_its_kind(other: pod_object.Pod, what: str) -> None:
    assert mig_managers.others([manager(), other], OWN_UID) == (f"ns/{other.name} ({what})",)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"name": "mig-manager"}, id="a pod's name alone"),
        pytest.param(
            {"container_names": ("compute-domains",), "feature_gates": {"DynamicMIG": True}},
            id="DRA for compute domains only",
        ),
        pytest.param(
            {"container_names": ("compute-domains", "gpus")}, id="DRA with static instances"
        ),
        pytest.param(
            {"container_names": ("gpus",), "feature_gates": {"DynamicMIG": False}},
            id="DRA with the gate off",
        ),
        pytest.param({"feature_gates": {"DynamicMIG": True}}, id="another driver's gate"),
        pytest.param({"labels": {COMPONENT: "mig-agent"}}, id="a component's name"),
        pytest.param(
            {"labels": {"app": "controller-daemonset"}, "container_names": ("daemonset",)},
            id="another driver's controller",
        ),
        pytest.param({"labels": samples.PLUGIN_LABELS}, id="the device plugin"),
        pytest.param({"labels": {NAME: "mig-manager"}}, id="our label on another thing"),
        *[
            pytest.param({**DAS, "phase": phase}, id=f"one that has {phase}")
            for phase in ("Succeeded", "Failed")
        ],
    ],
)
def test_software_that_changes_no_instances_is_not_a_foreign_manager(
    changed: Mapping[str, Any],
) -> None:
    for own_uid in (OWN_UID, None):
        assert mig_managers.others([manager(**changed)], own_uid) == ()


def test_agent_is_foreign_to_others_and_not_to_itself() -> None:
    assert (
        mig_managers.others(OWN_MANAGERS, OWN_UID) == mig_managers.others(OWN_MANAGERS, None) == ()
    )
    assert mig_managers.others(OWN_MANAGERS, "third") == (
        "ns/ours (another mig-manager)",
        f"ns/in-its-place ({NVIDIAS})",
    )
    unmistakable = [FROM_NVIDIA, DYNAMIC_DRA, manager(**DAS, phase="Pending")]
    assert len(mig_managers.others(unmistakable, None)) == len(unmistakable)


HAMI = manager("hami-abcde", labels={COMPONENT: "hami-device-plugin"})
VOLCANO = manager("volcano-abcde", labels={"name": "volcano-device-plugin"})
HAMIS, VOLCANOS = "hami.io/node-nvidia-register", "volcano.sh/node-vgpu-register"
REGISTERED = {
    # ``MarshalNodeDevices``, and ``EncodeNodeDevices`` before HAMi 2.8 and of volcano's.
    "json": '[{{"id":"GPU-1","count":7,"type":"NVIDIA-A30","mode":"{0}","health":true}}]',
    "fields": "GPU-1,10,40960,100,NVIDIA-A30,0,true,0,hami-core:GPU-2,1,9,100,A,0,true,1,{0}:",
    "volcano": "GPU-1,10,40960,NVIDIA-A30,true,{0}:",
}


@pytest.mark.parametrize("encoding", REGISTERED.values(), ids=REGISTERED)
@pytest.mark.parametrize(
    ("plugin", "key", "kind"),
    [
        (HAMI, HAMIS, "HAMi in MIG mode"),
        (VOLCANO, VOLCANOS, "volcano's vGPU device plugin in MIG mode"),
    ],
    ids=["HAMi", "volcano"],
)
def test_vgpu_plugin_is_a_foreign_manager_only_in_mig_mode(
    plugin: pod_object.Pod, key: str, kind: str, encoding: str
) -> None:
    in_mig_mode = {key: encoding.format("mig")}
    named = (f"ns/{plugin.name} ({kind})",)

    assert mig_managers.others([manager(), plugin], OWN_UID, in_mig_mode) == named
    assert mig_managers.is_vgpu_plugin(plugin)

    for other_mode in ("hami-core", "mps", "mig2", ""):
        registered = {key: encoding.format(other_mode)}
        assert mig_managers.others([plugin], OWN_UID, registered) == ()
    other_key = ({HAMIS, VOLCANOS} - {key}).pop()
    for annotations in ({}, {other_key: encoding.format("mig")}, {key: "["}):
        assert mig_managers.others([plugin], OWN_UID, annotations) == ()


def test_an_annotation_without_its_vgpu_plugin_is_not_a_foreign_manager() -> None:
    left_behind = {HAMIS: REGISTERED["json"].format("mig")}
    gone = dataclasses.replace(HAMI, phase="Succeeded")

    assert mig_managers.others([manager(), VOLCANO, gone], OWN_UID, left_behind) == ()
    assert not mig_managers.is_vgpu_plugin(manager())
