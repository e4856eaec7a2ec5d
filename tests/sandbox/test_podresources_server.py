import pathlib
import tempfile
from collections.abc import Iterator

import pytest

from mig_manager import errors
from mig_manager.adapters import pod_resources
from mig_manager.core.node import cluster
from mig_manager.sandbox.node import device_manager, objects

_SMALL = "nvidia.com/mig-1g.5gb"


@pytest.fixture
def manager() -> device_manager.DeviceManager:
    result = device_manager.DeviceManager(forget_s=300)
    result.register({_SMALL: ("MIG-a", "MIG-b"), "nvidia.com/gpu": ("GPU-0",)})
    return result


@pytest.fixture
def client(manager: device_manager.DeviceManager) -> Iterator[pod_resources.PodResources]:
    # A test's own directory has too long a name for a socket.
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "pod-resources", "kubelet.sock")
        with device_manager.PodResourcesServer(path, manager):
            yield pod_resources.PodResources(str(path))


def pod(name: str) -> objects.JsonObject:
    manifest = objects.gpu_pod(name, _SMALL, namespace="team")
    manifest["metadata"]["uid"] = name
    manifest["spec"]["containers"].append({"name": "log", "image": "log"})
    return manifest


def test_pods_are_listed_with_the_devices_of_their_containers_until_they_are_released(
    manager: device_manager.DeviceManager, client: pod_resources.PodResources
) -> None:
    manager.admit(pod("p1"))

    expected = cluster.PodDevices(namespace="team", name="p1", device_ids=frozenset({"MIG-a"}))
    assert client.assigned() == (expected,)
    manager.release("p1")
    assert client.assigned() == ()


def test_allocatable_are_all_healthy_devices_in_use_or_not(
    manager: device_manager.DeviceManager, client: pod_resources.PodResources
) -> None:
    manager.admit(pod("p1"))
    manager.disconnect(["nvidia.com/gpu"], 1.0)

    assert client.allocatable() == {_SMALL: frozenset({"MIG-a", "MIG-b"})}


def test_the_socket_goes_with_the_server(manager: device_manager.DeviceManager) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kubelet.sock")
        with device_manager.PodResourcesServer(path, manager):
            assert path.is_socket()

        assert not path.exists()


def test_a_path_that_no_socket_can_have_is_refused(manager: device_manager.DeviceManager) -> None:
    with pytest.raises(errors.UsageError, match="107 bytes"):
        device_manager.PodResourcesServer(pathlib.Path("/" + "x" * 107), manager)
