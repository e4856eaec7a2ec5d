"""The whole sandbox node: real HTTP, real gRPC, the simulated NVML underneath."""

import contextlib
import dataclasses
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pynvml
import pytest

from mig_manager.adapters import pod_resources
from mig_manager.adapters.kubernetes import api
from mig_manager.core.node import well_known
from mig_manager.sandbox.driver import library as simulated
from mig_manager.sandbox.node import device_plugin, objects, sandbox_node
from testkit import apiserver, nvml_faults
from tests import waiting
from tests.sandbox import monitors

_SMALL = "nvidia.com/mig-1g.5gb"
_GPU = "nvidia.com/gpu"
_SMALL_ID = 19
"""GPU-instance profile 1g.5gb of an A100; its compute instance has profile 0."""

_PLUGIN = f"/apis/apps/v1/namespaces/gpu-operator/daemonsets/{objects.PLUGIN_NAME}"
_HOLD = {"key": well_known.HOLD_TAINT, "effect": "NoSchedule"}

_QUICK = sandbox_node.NodeOptions(
    name="n1", tick_s=0.05, pod_start_s=0.02, pod_stop_s=0.02, plugin_start_s=0.05
)


class Rig:
    """A cluster with one node, as an administrator at a shell has it."""

    def __init__(
        self, url: str, state_file: pathlib.Path, sandbox: sandbox_node.SandboxNode
    ) -> None:
        self.sandbox = sandbox
        self.state_file = state_file
        self.api = api.KubeApi.at(url)
        socket = sandbox.options.pod_resources_socket
        self.pod_resources = pod_resources.PodResources(str(socket))

    def node(self) -> objects.JsonObject:
        return self.api.get("/api/v1/nodes/n1")

    def pods(self, namespace: str = "default") -> list[objects.JsonObject]:
        return list(self.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"])

    def pod(self, name: str) -> objects.JsonObject:
        return next((p for p in self.pods() if objects.name(p) == name), {})

    def allocatable(self) -> dict[str, int]:
        return objects.devices(self.node())

    def patch(self, change: dict[str, object]) -> None:
        self.api.patch("/api/v1/nodes/n1", change)

    def label(self, key: str, value: str) -> None:
        self.patch({"metadata": {"labels": {key: value}}})

    def taint(self, *taints: dict[str, str]) -> None:
        self.patch({"spec": {"taints": list(taints)}})

    def create(self, name: str) -> None:
        self.api.post("/api/v1/namespaces/default/pods", objects.gpu_pod(name, _SMALL))

    def delete(self, pod: objects.JsonObject) -> None:
        path = f"/api/v1/namespaces/{objects.namespace(pod)}/pods/{objects.name(pod)}"
        self.api.delete(path)

    def clients(self, name: str) -> list[str]:
        """Return how processes of this name use the GPUs, one word for each GPU."""
        clients = nvml_faults.SharedState(self.state_file).read().clients
        return [client.kind.value for client in clients if name in client.name]

    def uuids(self) -> frozenset[str]:
        gpus = device_plugin.observe(nvml_faults.SharedState(self.state_file))
        return frozenset(uuid for gpu in gpus for uuid in gpu.mig_devices)

    def phase(self, name: str) -> str:
        pod = self.pod(name)
        return objects.phase(pod) if pod else "gone"


@pytest.fixture
def state_file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "nvml.json"
    simulated.create("8xa100-sxm4-40gb", path)
    return path


@contextlib.contextmanager
def running(state_file: pathlib.Path, options: sandbox_node.NodeOptions) -> Iterator[Rig]:
    # The socket's path must be short; a test's own directory has too long a name.
    with tempfile.TemporaryDirectory() as folder, apiserver.serve() as server:
        socket = pathlib.Path(folder, "kubelet.sock")
        options = dataclasses.replace(options, pod_resources_socket=socket)
        with sandbox_node.SandboxNode(server.url, state_file, options=options) as sandbox:
            rig = Rig(server.url, state_file, sandbox)
            with contextlib.closing(rig.api):
                yield rig
        watched = ("sandbox-n1", "sandbox-watch", "sandbox-podresources")
        assert not [t.name for t in threading.enumerate() if t.name.startswith(watched)]


@pytest.fixture
def rig(state_file: pathlib.Path) -> Iterator[Rig]:
    """A node as the GPU operator deploys it."""
    with running(state_file, _QUICK) as result:
        yield result


@pytest.fixture
def plain_rig(state_file: pathlib.Path) -> Iterator[Rig]:
    """A node whose plugin came from the static manifest."""
    options = dataclasses.replace(_QUICK, deploy_style=objects.DeployStyle.PLAIN)
    with running(state_file, options) as result:
        yield result


def stays_away(condition: Callable[[], bool], seconds: float = 0.3) -> bool:
    """Watch for several ticks that something does not happen."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return False
        threading.Event().wait(0.02)
    return True


def plugin(rig: Rig) -> objects.JsonObject | None:
    pods = [*rig.pods("gpu-operator"), *rig.pods("kube-system")]
    return next((pod for pod in pods if objects.is_plugin(pod)), None)


def wait_for_plugin(rig: Rig) -> objects.JsonObject:
    waiting.until(lambda: objects.is_ready(plugin(rig) or {}))
    found = plugin(rig)
    assert found is not None
    return found


@contextlib.contextmanager
def driver(state_file: pathlib.Path) -> Iterator[None]:
    nvml_faults.install(state_file)
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()
        simulated.load(None)


def partition(state_file: pathlib.Path, *gpus: int, count: int = 7) -> None:
    """Enable MIG on GPUs and create small instances, as an administrator with nvidia-smi."""
    with driver(state_file):
        for index in gpus:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            if pynvml.nvmlDeviceGetMigMode(handle)[0] == 0:
                assert pynvml.nvmlDeviceSetMigMode(handle, 1) == pynvml.NVML_SUCCESS
            for _ in range(count):
                instance = pynvml.nvmlDeviceCreateGpuInstance(handle, _SMALL_ID)
                pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 0)


def destroy(state_file: pathlib.Path, uuid: str) -> None:
    with driver(state_file):
        device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
        instance = pynvml.nvmlDeviceGetGpuInstanceById(
            parent, pynvml.nvmlDeviceGetGpuInstanceId(device)
        )
        compute = pynvml.nvmlGpuInstanceGetComputeInstanceById(
            instance, pynvml.nvmlDeviceGetComputeInstanceId(device)
        )
        pynvml.nvmlComputeInstanceDestroy(compute)
        pynvml.nvmlGpuInstanceDestroy(instance)


def test_a_new_node_has_the_labels_of_feature_discovery_and_whole_gpus(rig: Rig) -> None:
    labels = objects.labels(rig.node())
    assert labels["nvidia.com/gpu.product"] == "NVIDIA-A100-SXM4-40GB"
    assert labels["nvidia.com/gpu.count"] == "8"
    assert labels["nvidia.com/mig.capable"] == "true"
    assert labels[well_known.PLUGIN_DEPLOY_LABEL] == "true"

    waiting.until(lambda: rig.allocatable() == {_GPU: 8})
    assert objects.is_ready(rig.node())
    waiting.until(lambda: (rig.api.get(_PLUGIN).get("status") or {}).get("numberReady") == 1)


def test_new_instances_are_allocatable_only_after_a_restart_of_the_plugin(plain_rig: Rig) -> None:
    rig = plain_rig
    # While it runs, the plugin keeps an Ampere GPU from changing its mode; hold it off.
    waiting.until(lambda: rig.allocatable() == {_GPU: 8})
    rig.taint(_HOLD)
    rig.delete(wait_for_plugin(rig))
    waiting.until(lambda: rig.allocatable() == {_GPU: 0})
    partition(rig.state_file, *range(8), count=6)
    rig.taint()
    waiting.until(lambda: rig.allocatable() == {_GPU: 0, _SMALL: 48})
    partition(rig.state_file, *range(8), count=1)
    assert stays_away(lambda: rig.allocatable() == {_GPU: 0, _SMALL: 56})

    rig.delete(wait_for_plugin(rig))

    waiting.until(lambda: rig.allocatable() == {_GPU: 0, _SMALL: 56})
    assert rig.pod_resources.allocatable()[_SMALL] == rig.uuids()


def test_the_pause_label_removes_the_plugin_and_true_brings_a_new_one(rig: Rig) -> None:
    old = wait_for_plugin(rig)
    waiting.until(lambda: rig.clients("plugin") == ["monitor"] * 8)
    rig.label(well_known.PLUGIN_DEPLOY_LABEL, well_known.PAUSED_VALUE)
    waiting.until(lambda: plugin(rig) is None)
    assert stays_away(lambda: plugin(rig) is not None)
    assert not rig.clients("plugin")
    rig.label(well_known.PLUGIN_DEPLOY_LABEL, "true")

    assert objects.uid(wait_for_plugin(rig)) != objects.uid(old)
    rig.api.delete(_PLUGIN)
    waiting.until(lambda: plugin(rig) is None)


def test_hold_taint_keeps_a_plain_plugin_away_and_a_cordon_does_not(plain_rig: Rig) -> None:
    old = wait_for_plugin(plain_rig)
    plain_rig.taint(_HOLD)
    assert stays_away(lambda: plugin(plain_rig) is None)
    plain_rig.delete(old)
    waiting.until(lambda: plugin(plain_rig) is None)
    assert stays_away(lambda: plugin(plain_rig) is not None)
    plain_rig.patch({"spec": {"taints": [], "unschedulable": True}})

    new = wait_for_plugin(plain_rig)
    assert objects.name(new) != objects.name(old)


def test_pods_get_own_devices_and_one_more_waits_for_a_release(state_file: pathlib.Path) -> None:
    partition(state_file, 0, count=2)
    with running(state_file, _QUICK) as rig:
        waiting.until(lambda: rig.allocatable().get(_SMALL) == 2)
        for name in ("p1", "p2"):
            rig.create(name)
        waiting.until(lambda: {*map(rig.phase, ("p1", "p2"))} == {"Running"})
        rig.create("p3")
        waiting.until(lambda: "insufficient" in str(rig.pod("p3").get("status")))

        shown = {p.key: p.device_ids for p in rig.pod_resources.assigned() if p.device_ids}
        assert frozenset().union(*shown.values()) == rig.uuids()
        assert all(len(ids) == 1 for ids in shown.values())
        rig.delete(rig.pod("p1"))
        waiting.until(lambda: rig.phase("p3") == "Running")


def test_a_busy_instance_cannot_be_destroyed_until_its_pod_has_gone(
    state_file: pathlib.Path,
) -> None:
    partition(state_file, 0, count=1)
    with running(state_file, dataclasses.replace(_QUICK, pod_stop_s=1.5)) as rig:
        waiting.until(lambda: rig.allocatable().get(_SMALL) == 1)
        rig.create("p1")
        waiting.until(lambda: rig.phase("p1") == "Running")
        (uuid,) = rig.uuids()
        with pytest.raises(pynvml.NVMLError_InUse):
            destroy(state_file, uuid)
        metadata = {"name": "p1", "namespace": "default"}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        rig.api.post("/api/v1/namespaces/default/pods/p1/eviction", body)
        # Its grace is 30 s and it needs a second and a half of it: time enough to check.
        assert rig.pod("p1")["metadata"]["deletionTimestamp"]
        with pytest.raises(pynvml.NVMLError_InUse):
            destroy(state_file, uuid)
        waiting.until(lambda: rig.phase("p1") == "gone")

        destroy(state_file, uuid)

        assert not rig.uuids()


def test_stale_plugin_offers_a_dead_device_that_no_container_can_use(
    state_file: pathlib.Path,
) -> None:
    partition(state_file, 0, count=1)
    with running(state_file, _QUICK) as rig:
        waiting.until(lambda: rig.allocatable().get(_SMALL) == 1)
        (uuid,) = rig.uuids()
        destroy(state_file, uuid)
        rig.create("p1")
        waiting.until(lambda: "RunContainerError" in str(rig.pod("p1")))

        assert rig.pod_resources.allocatable()[_SMALL] == {uuid}


def test_a_monitor_watches_every_gpu_while_its_label_lets_it_in(rig: Rig) -> None:
    rig.api.post("/apis/apps/v1/namespaces/gpu-operator/daemonsets", monitors.daemon_set())
    label = f"{well_known.DEPLOY_LABEL_PREFIX}dcgm-exporter"
    rig.label(label, "true")
    waiting.until(lambda: rig.clients("dcgm") == ["monitor"] * 8)
    rig.label(label, well_known.PAUSED_VALUE)

    waiting.until(lambda: not rig.clients("dcgm"))


def test_reboot_destroys_instances_and_brings_the_plugin_back(state_file: pathlib.Path) -> None:
    partition(state_file, 0, count=1)
    with running(state_file, _QUICK) as rig:
        waiting.until(lambda: rig.allocatable() == {_GPU: 7, _SMALL: 1})
        rig.create("p1")
        waiting.until(lambda: rig.phase("p1") == "Running")
        old = wait_for_plugin(rig)

        rig.sandbox.reboot()

        assert rig.phase("p1") == "Failed"
        assert not any(pod.device_ids for pod in rig.pod_resources.assigned())
        waiting.until(lambda: rig.allocatable() == {_GPU: 7, _SMALL: 0})
        new = wait_for_plugin(rig)
        assert objects.uid(new) == objects.uid(old)
        assert objects.restart_count(new) == 1
        assert nvml_faults.SharedState(state_file).read().boots == 1
