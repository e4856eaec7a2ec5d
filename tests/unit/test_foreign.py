"""Which pods change MIG instances as we do, by what their public manifests say of them."""

from typing import Any

import pytest

from mig_manager import errors
from mig_manager.core.node import clients, cluster
from tests.unit import samples

OWN = "11111111-2222-3333-4444-555555555555"


def pod(name: str = "some-pod", **changed: Any) -> cluster.Pod:
    common = {"namespace": "ns", "uid": "another", "images": ("registry.example.com/app:1",)}
    return samples.pod(name, **(common | changed))


OPERATORS = pod(
    "nvidia-mig-manager-abcde",
    labels={"app": "nvidia-mig-manager"},
    container_names=("nvidia-mig-manager",),
    images=("nvcr.io/nvidia/cloud-native/k8s-mig-manager:v0.15.0",),
)
OURS_IN_ITS_PLACE = pod(
    "nvidia-mig-manager-fghij",
    uid=OWN,
    labels={"app": "nvidia-mig-manager"},
    container_names=("nvidia-mig-manager",),
    images=("registry.example.com:5000/mig-manager:0.1.0",),
)
DYNAMIC_DRA = pod(
    "nvidia-dra-driver-gpu-kubelet-plugin-abcde",
    labels={"nvidia-dra-driver-gpu-component": "kubelet-plugin"},
    container_names=("compute-domains", "gpus"),
    feature_gates={"DynamicMIG": True},
)
OURS = pod(
    "mig-manager-abcde",
    uid=OWN,
    labels={"app.kubernetes.io/name": "mig-manager"},
    container_names=("mig-manager",),
)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        pytest.param(OPERATORS, "NVIDIA's mig-manager", id="operator"),
        pytest.param(
            pod(labels={"app": "nvidia-mig-manager"}), "NVIDIA's mig-manager", id="by its label"
        ),
        pytest.param(
            pod(container_names=("log", "nvidia-mig-manager")),
            "NVIDIA's mig-manager",
            id="renamed",
        ),
        pytest.param(DYNAMIC_DRA, "NVIDIA's DRA driver with DynamicMIG", id="dra"),
        pytest.param(
            pod(labels={"app.kubernetes.io/name": "nos-mig-agent"}),
            "nos' mig-agent",
            id="nos by chart",
        ),
        pytest.param(
            pod(
                labels={"app.kubernetes.io/component": "mig-agent"}, container_names=("mig-agent",)
            ),
            "nos' mig-agent",
            id="nos by kustomize",
        ),
        pytest.param(
            pod(images=("ghcr.io/nebuly-ai/nos-mig-agent@sha256:00",)),
            "nos' mig-agent",
            id="nos by image",
        ),
        pytest.param(
            pod(container_names=("das-daemonset",)),
            "OpenShift's Dynamic Accelerator Slicer",
            id="slicer",
        ),
        pytest.param(
            pod(
                labels={"app": "controller-daemonset"},
                container_names=("daemonset",),
                images=("example.com/instaslicev2-daemonset:latest",),
            ),
            "OpenShift's Dynamic Accelerator Slicer",
            id="older slicer",
        ),
    ],
)
def test_a_foreign_manager_is_named_with_its_kind(other: cluster.Pod, what: str) -> None:
    assert clients.other_managers([pod(), other], OWN) == (f"ns/{other.name} ({what})",)


@pytest.mark.parametrize(
    "other",
    [OPERATORS, DYNAMIC_DRA, pod(container_names=("das-daemonset",))],
    ids=lambda pod: pod.name,
)
def test_an_unmistakably_foreign_pod_counts_even_if_our_own_pod_is_unknown(
    other: cluster.Pod,
) -> None:
    assert len(clients.other_managers([other], None)) == 1


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(pod("mig-manager"), id="a pod's name alone"),
        pytest.param(
            pod(container_names=("compute-domains",), feature_gates={"DynamicMIG": True}),
            id="DRA for compute domains only",
        ),
        pytest.param(
            pod(container_names=("compute-domains", "gpus")), id="DRA with static instances"
        ),
        pytest.param(
            pod(container_names=("gpus",), feature_gates={"DynamicMIG": False}),
            id="DRA with the gate off",
        ),
        pytest.param(pod(feature_gates={"DynamicMIG": True}), id="another driver's gate"),
        pytest.param(
            pod(labels={"app.kubernetes.io/component": "mig-agent"}), id="a component's name"
        ),
        pytest.param(
            pod(labels={"app": "controller-daemonset"}, container_names=("daemonset",)),
            id="another driver's controller",
        ),
        pytest.param(
            pod(labels={"app": "nvidia-device-plugin-daemonset"}), id="the device plugin"
        ),
        pytest.param(
            pod(labels={"app.kubernetes.io/name": "mig-manager"}), id="our label on another thing"
        ),
    ],
)
def test_software_that_changes_no_instances_is_no_foreign_manager(other: cluster.Pod) -> None:
    assert clients.other_managers([other], OWN) == ()
    assert clients.other_managers([other], None) == ()


@pytest.mark.parametrize("ours", [OURS, OURS_IN_ITS_PLACE])
def test_our_own_agent_is_not_foreign_wherever_it_runs(ours: cluster.Pod) -> None:
    assert clients.other_managers([ours], OWN) == ()


@pytest.mark.parametrize("ours", [OURS, OURS_IN_ITS_PLACE])
def test_a_pod_that_may_be_our_own_does_not_count_if_our_own_pod_is_unknown(
    ours: cluster.Pod,
) -> None:
    assert clients.other_managers([ours], None) == ()


def test_a_second_agent_is_foreign_to_one_that_knows_its_pod() -> None:
    assert clients.other_managers([OURS, OURS_IN_ITS_PLACE], "third") == (
        "ns/mig-manager-abcde (another mig-manager)",
        "ns/nvidia-mig-manager-fghij (NVIDIA's mig-manager)",
    )


@pytest.mark.parametrize(
    ("phase", "counts"),
    [("Pending", True), ("Running", True), ("Succeeded", False), ("Failed", False)],
)
def test_a_manager_counts_from_the_moment_it_may_start_until_it_has_ended(
    phase: str, *, counts: bool
) -> None:
    other = pod(phase=phase, container_names=("das-daemonset",))

    assert bool(clients.other_managers([other], OWN)) is counts


def test_the_refusal_names_every_manager_and_is_transient() -> None:
    error = clients.other_managers_error(clients.other_managers([OPERATORS, DYNAMIC_DRA], OWN))

    assert error.reason is errors.Reason.FOREIGN_MANAGER
    assert error.reason.is_transient
    assert "ns/nvidia-mig-manager-abcde (NVIDIA's mig-manager), ns/nvidia-dra-" in error.message
