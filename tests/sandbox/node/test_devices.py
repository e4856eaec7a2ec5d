"""The devices that kubelet gives to pods, and the socket on which it lists them."""

import pathlib
import tempfile

import pytest

from mig_manager import errors
from mig_manager.adapters import pod_resources
from mig_manager.core.objects import pod_object
from mig_manager.sandbox.node import device_manager, manifests, objects
from tests.rigs.node import fakes

_SMALL = "nvidia.com/mig-1g.5gb"
_GPU = "nvidia.com/gpu"


def pod(name: str, count: int = 1, resource: str = _SMALL) -> objects.JsonObject:
    manifest = manifests.gpu_pod(name, resource)
    manifest["metadata"]["uid"] = f"uid-{name}"
    manifest["spec"]["containers"][0]["resources"]["limits"][resource] = str(count)
    return manifest


@pytest.fixture
def manager() -> device_manager.DeviceManager:
    result = device_manager.DeviceManager(fakes.FakeClock())
    result.register({_SMALL: ("MIG-a", "MIG-b", "MIG-c")})
    return result


def test_no_device_is_given_twice_until_it_is_released(
    manager: device_manager.DeviceManager,
) -> None:
    first = manager.admit(pod("p1"))
    second = manager.admit(pod("p2", 2))

    assert first.device_ids | second.device_ids == {"MIG-a", "MIG-b", "MIG-c"}
    assert manager.admit(pod("p1")) == first
    with pytest.raises(device_manager.ShortageError, match="0 healthy and free"):
        manager.admit(pod("p3"))
    assert manager.allocations() == (first, second)
    manager.release("uid-p1")
    assert manager.admit(pod("p3")).device_ids == first.device_ids


def test_device_stays_with_its_pod_when_the_plugin_returns(
    manager: device_manager.DeviceManager,
) -> None:
    manager.admit(pod("p1", 2))
    manager.disconnect([_SMALL])
    manager.register({_SMALL: ("MIG-a", "MIG-b", "MIG-d"), _GPU: ("MIG-a",)})

    assert manager.admit(pod("p2")).device_ids == {"MIG-d"}
    with pytest.raises(device_manager.ShortageError):
        manager.admit(pod("p3", resource=_GPU))


def test_resource_without_its_plugin_keeps_only_its_capacity(
    manager: device_manager.DeviceManager,
) -> None:
    manager.admit(pod("p1"))
    manager.disconnect([_SMALL])

    assert len(manager.allocations()) == 1
    assert manager.status() == ({_SMALL: 3}, {_SMALL: 0})
    assert manager.allocatable() == {}
    with pytest.raises(device_manager.ShortageError):
        manager.admit(pod("p2"))
    manager.register({_GPU: ("GPU-0",)})
    assert manager.status()[1] == {_SMALL: 0, _GPU: 1}


def test_the_socket_lists_the_devices_of_pods_and_all_healthy_ones(
    manager: device_manager.DeviceManager,
) -> None:
    manifest = pod("p1", 2)
    manifest["metadata"]["namespace"] = "team"
    manifest["spec"]["containers"].append({"name": "log", "image": "log"})
    device_ids = manager.admit(manifest).device_ids
    manager.register({_GPU: ("GPU-0",)})
    manager.disconnect([_GPU])

    expected = pod_object.PodDevices(
        namespace="team", name="p1", device_ids=device_ids, gpu_resources=frozenset({_SMALL})
    )
    # A test's own directory has too long a name for a socket.
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "pod-resources", "kubelet.sock")
        with device_manager.serving_pod_resources(path, manager):
            client = pod_resources.PodResources(str(path))
            assert client.assigned_devices() == (expected,)
            assert client.allocatable() == {_SMALL: frozenset({"MIG-a", "MIG-b", "MIG-c"})}
            manager.release("uid-p1")
            assert client.assigned_devices() == ()
        assert not path.exists()


def test_a_path_too_long_for_a_socket_is_refused(manager: device_manager.DeviceManager) -> None:
    serving = device_manager.serving_pod_resources(pathlib.Path("/" + "x" * 107), manager)
    with pytest.raises(errors.UsageError, match="107 bytes"), serving:
        pass
