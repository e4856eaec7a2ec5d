"""The devices that kubelet gives to pods, and the socket on which it lists them."""

import copy
import pathlib
import tempfile
from collections.abc import Iterator

import pytest

from mig_manager import errors
from mig_manager.adapters import pod_resources
from mig_manager.core.node import cluster
from mig_manager.sandbox.node import device_manager, objects

_SMALL = "nvidia.com/mig-1g.5gb"


def pod(name: str, count: int = 1) -> objects.JsonObject:
    manifest = objects.gpu_pod(name, _SMALL)
    manifest["metadata"]["uid"] = f"uid-{name}"
    manifest["spec"]["containers"][0]["resources"]["limits"][_SMALL] = str(count)
    return manifest


@pytest.fixture
def manager() -> device_manager.DeviceManager:
    result = device_manager.DeviceManager(forget_s=300)
    result.register({_SMALL: ("MIG-a", "MIG-b", "MIG-c")})
    return result


def test_no_device_is_given_twice(manager: device_manager.DeviceManager) -> None:
    first = manager.admit(pod("p1"))
    second = manager.admit(pod("p2", 2))

    assert first.device_ids | second.device_ids == {"MIG-a", "MIG-b", "MIG-c"}
    assert manager.admit(pod("p1")) == first
    with pytest.raises(device_manager.ShortageError, match="0 healthy and free"):
        manager.admit(pod("p3"))
    assert manager.assigned() == (first, second)


def test_released_devices_are_free_again(manager: device_manager.DeviceManager) -> None:
    manager.admit(pod("p1", 3))
    manager.release("uid-p1")

    assert len(manager.admit(pod("p2", 3)).device_ids) == 3


def test_a_device_of_a_running_pod_stays_its_own_when_the_plugin_comes_back(
    manager: device_manager.DeviceManager,
) -> None:
    manager.admit(pod("p1", 2))
    manager.disconnect([_SMALL], 10.0)
    manager.register({_SMALL: ("MIG-a", "MIG-b", "MIG-d")})

    assert manager.admit(pod("p2")).device_ids == {"MIG-d"}


def test_a_device_keeps_its_owner_under_another_resource_name(
    manager: device_manager.DeviceManager,
) -> None:
    manager.admit(pod("p1", 3))
    manager.register({"nvidia.com/gpu": ("MIG-a",)})

    assert manager.assigned()[0].device_ids == {"MIG-a", "MIG-b", "MIG-c"}
    other = objects.gpu_pod("p2", "nvidia.com/gpu")
    other["metadata"]["uid"] = "uid-p2"
    with pytest.raises(device_manager.ShortageError):
        manager.admit(other)


def test_without_its_plugin_a_resource_is_not_allocatable_but_keeps_its_capacity(
    manager: device_manager.DeviceManager,
) -> None:
    manager.disconnect([_SMALL], 10.0)

    assert manager.status(11.0) == ({_SMALL: 3}, {_SMALL: 0})
    assert manager.status(311.0) == ({_SMALL: 0}, {_SMALL: 0})
    assert manager.allocatable() == {}
    with pytest.raises(device_manager.ShortageError):
        manager.admit(pod("p1"))
    manager.register({"nvidia.com/gpu": ("GPU-0",)})
    assert manager.status(11.0)[1] == {_SMALL: 0, "nvidia.com/gpu": 1}


def test_app_containers_inherit_the_devices_of_init_containers(
    manager: device_manager.DeviceManager,
) -> None:
    wanted = pod("p1", 1)
    initial = copy.deepcopy(wanted["spec"]["containers"][0])
    initial["name"] = "warm-up"
    initial["resources"]["limits"][_SMALL] = "2"
    wanted["spec"]["initContainers"] = [initial]

    allocation = manager.admit(wanted)

    assert len(allocation.device_ids) == 2
    assert list(allocation.containers) == ["cuda"]
    assert len(allocation.containers["cuda"][_SMALL]) == 1


def test_a_machine_that_went_down_shows_its_resources_and_offers_and_lends_nothing(
    manager: device_manager.DeviceManager,
) -> None:
    manager.admit(pod("p1"))
    manager.lose_power(10.0)

    assert manager.status(11.0) == ({_SMALL: 3}, {_SMALL: 0})
    assert manager.assigned() == ()
    with pytest.raises(device_manager.ShortageError):
        manager.admit(pod("p1"))


@pytest.fixture
def client(manager: device_manager.DeviceManager) -> Iterator[pod_resources.PodResources]:
    # A test's own directory has too long a name for a socket.
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "pod-resources", "kubelet.sock")
        with device_manager.PodResourcesServer(path, manager):
            assert path.is_socket()
            yield pod_resources.PodResources(str(path))
        assert not path.exists()


def test_pods_are_listed_with_the_devices_of_their_containers_until_they_are_released(
    manager: device_manager.DeviceManager, client: pod_resources.PodResources
) -> None:
    manifest = pod("p1", 2)
    manifest["metadata"]["namespace"] = "team"
    manifest["spec"]["containers"].append({"name": "log", "image": "log"})
    device_ids = manager.admit(manifest).device_ids

    expected = cluster.PodDevices(namespace="team", name="p1", device_ids=device_ids)
    assert client.assigned() == (expected,)
    manager.release("uid-p1")
    assert client.assigned() == ()


def test_allocatable_are_all_healthy_devices_in_use_or_not(
    manager: device_manager.DeviceManager, client: pod_resources.PodResources
) -> None:
    manager.admit(pod("p1"))
    manager.register({"nvidia.com/gpu": ("GPU-0",)})
    manager.disconnect(["nvidia.com/gpu"], 1.0)

    assert client.allocatable() == {_SMALL: frozenset({"MIG-a", "MIG-b", "MIG-c"})}


def test_a_path_that_no_socket_can_have_is_refused(manager: device_manager.DeviceManager) -> None:
    with pytest.raises(errors.UsageError, match="107 bytes"):
        device_manager.PodResourcesServer(pathlib.Path("/" + "x" * 107), manager)
