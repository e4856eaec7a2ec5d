"""Kubelet's messages as kubelet writes them: made by Kubernetes' Go types, not by our table."""

import json
import pathlib
from collections.abc import Iterator

import pytest

from mig_manager.adapters.kubelet import pod_resources
from mig_manager.core.node import cluster
from tests import programs
from tests.adapters import kubelet_rig
from tests.sandbox import library

_HERE = pathlib.Path(__file__).parent / "kubelet_messages"


def written(name: str) -> bytes:
    """Return a message of kubelet_messages/main.go, which says what is in it."""
    return bytes.fromhex(json.loads((_HERE / "messages.json").read_text("utf-8"))[name])


@pytest.fixture
def kubelet() -> Iterator[kubelet_rig.Kubelet]:
    with kubelet_rig.a_kubelet() as running:
        yield running


def served(kubelet: kubelet_rig.Kubelet, name: str) -> pod_resources.PodResources:
    kubelet.writes = lambda _message: written(name)
    kubelet.start()
    return pod_resources.PodResources(str(kubelet.path), sleep=lambda _seconds: None)


def test_devices_and_claims_of_pods_are_read_from_what_kubelet_writes(
    kubelet: kubelet_rig.Kubelet,
) -> None:
    pods = served(kubelet, "list").assigned()

    assert pods == (
        cluster.PodDevices(
            namespace="team-a", name="train-0", device_ids=frozenset({"MIG-1", "MIG-2"})
        ),
        cluster.PodDevices(
            namespace="team-b",
            name="claims-0",
            device_ids=frozenset(),
            claim_drivers=frozenset({"gpu.nvidia.com"}),
        ),
        cluster.PodDevices(namespace="default", name="plain", device_ids=frozenset()),
    )


def test_allocatable_devices_are_read_from_what_kubelet_writes(
    kubelet: kubelet_rig.Kubelet,
) -> None:
    devices = served(kubelet, "allocatable").allocatable()

    assert devices == {"nvidia.com/mig-1g.5gb": {"MIG-1", "MIG-2"}, "nvidia.com/gpu": {"GPU-1"}}


@pytest.mark.slow
def test_the_kept_messages_are_what_kubernetes_types_write() -> None:
    printed = library.run(programs.needed("go"), "run", ".", folder=_HERE)

    assert json.loads(printed) == json.loads((_HERE / "messages.json").read_text("utf-8"))
