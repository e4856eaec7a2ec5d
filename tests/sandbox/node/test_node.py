"""The whole sandbox node without an agent: real HTTP, real gRPC, the simulated NVML underneath."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from mig_manager import errors
from mig_manager.adapters import pod_resources
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import well_known
from mig_manager.core.planner import planner
from mig_manager.sandbox.node import cluster_view, manifests, objects
from testkit import nvml_faults
from tests.rigs.cluster import monitors
from tests.rigs.node import samples
from tests.rigs.stage import agent_stage

_SMALL = "nvidia.com/mig-1g.10gb"
_PLUGIN = f"/apis/apps/v1/namespaces/gpu-operator/daemonsets/{objects.PLUGIN_NAME}"


class SandboxStage(agent_stage.AgentStage):
    """A node of two H100, which switch MIG while the plugin runs."""

    def __init__(self) -> None:
        super().__init__("2xH100")

    def start_agent(self) -> None:
        """Leave everything to the tests."""

    def partition(self, count: int) -> None:
        """Have this many small instances on the first GPU."""
        gpus = self.gpus.observe()
        desired = samples.desired_gpu({"1g.10gb": count})
        self.gpus.execute(planner.plan(gpus, {gpus[0].uuid: desired}), gpus)

    def plugin(self) -> objects.JsonObject | None:
        pods = self.cluster.list(cluster_view.WatchedKind.POD)
        return next((pod for pod in pods if objects.is_plugin(pod)), None)

    def restart_plugin(self) -> None:
        self.cluster.delete(cluster_view.WatchedKind.POD, self.plugin() or {})

    def offers(self, small: int) -> None:
        """Wait until these devices are allocatable."""
        expected = {resources.GPU: 1, _SMALL: small} if small else {resources.GPU: 2}
        self.wait(lambda: self.allocatable() == expected, f"{small} small devices")

    def shows(self, name: str, text: str) -> None:
        """Wait until a text is in the status of a pod."""
        self.wait(lambda: text in str(self.workloads().get(name, {}).get("status")), text)

    def create(self, *names: str) -> None:
        for name in names:
            self.cluster.create(cluster_view.WatchedKind.POD, manifests.gpu_pod(name, _SMALL))

    def clients(self, name: str) -> list[str]:
        """Return how processes of this name use the GPUs, one word for each GPU."""
        clients = nvml_faults.SharedState(self.machine.state_file).read().clients
        return [client.kind.value for client in clients if name in client.name]

    def uuids(self) -> frozenset[str]:
        return frozenset(uuid for gpu in self.gpus.observe() for uuid in gpu.mig_uuids)


@pytest.fixture
def stage() -> Iterator[SandboxStage]:
    with SandboxStage() as result:
        yield result


def stays_so(condition: Callable[[], bool]) -> bool:
    """Watch for several ticks that something stays as it is."""
    return all(condition() for _ in range(10) if not threading.Event().wait(0.03))


def test_a_new_node_has_the_labels_of_feature_discovery_and_whole_gpus(
    stage: SandboxStage,
) -> None:
    labels = objects.labels(stage.node())
    assert labels["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3"
    assert labels["nvidia.com/gpu.count"] == "2"
    assert labels["nvidia.com/mig.capable"] == "true"
    assert labels[well_known.PLUGIN_DEPLOY_LABEL] == "true"

    stage.offers(0)
    assert objects.is_ready(stage.node())
    stage.wait(lambda: (stage.api.get(_PLUGIN).get("status") or {}).get("numberReady") == 1, "it")
    assert stage.clients("plugin") == ["monitor"] * 2
    stage.api.delete(_PLUGIN)
    stage.wait(lambda: not stage.plugin() and not stage.clients("plugin"), "its end")


def test_new_instances_are_allocatable_only_after_a_restart_of_the_plugin(
    stage: SandboxStage,
) -> None:
    stage.partition(2)
    assert stays_so(lambda: stage.allocatable() == {resources.GPU: 2})

    stage.restart_plugin()

    stage.offers(2)
    kubelet = pod_resources.PodResources(str(stage.machine.socket))
    assert kubelet.allocatable()[_SMALL] == stage.uuids()


def test_pods_get_own_devices_and_one_more_waits_for_a_release(stage: SandboxStage) -> None:
    stage.partition(2)
    stage.restart_plugin()
    stage.offers(2)
    stage.run_pods([(name, _SMALL, {}) for name in ("p1", "p2")])
    stage.create("p3")
    stage.shows("p3", f"insufficient {_SMALL}")

    devices = [ids for ids in stage.devices_by_pod().values() if ids]
    assert [len(ids) for ids in devices] == [1, 1]
    assert frozenset().union(*devices) == stage.uuids()
    stage.cluster.delete(cluster_view.WatchedKind.POD, stage.workloads()["p1"])
    stage.shows("p3", "Running")


def test_stale_plugin_offers_a_dead_device_that_no_container_can_use(stage: SandboxStage) -> None:
    stage.partition(1)
    stage.restart_plugin()
    stage.offers(1)
    stage.partition(0)
    stage.create("p1")
    stage.shows("p1", "RunContainerError")


def test_a_monitor_watches_every_gpu_while_its_label_allows_it(stage: SandboxStage) -> None:
    stage.cluster.create(cluster_view.WatchedKind.DAEMON_SET, monitors.daemon_set())
    label = f"{well_known.DEPLOY_LABEL_PREFIX}dcgm-exporter"
    for value, expected in (("true", ["monitor"] * 2), (well_known.PAUSED_VALUE, [])):
        change = {"metadata": {"labels": {label: value}}}
        stage.cluster.patch(cluster_view.WatchedKind.NODE, stage.node(), change)
        stage.wait(lambda: stage.clients("dcgm") == expected, f"{expected}")  # noqa: B023

    def has_only_the_plugin() -> bool:
        return all(map(objects.is_plugin, stage.cluster.list(cluster_view.WatchedKind.POD)))

    stage.wait(has_only_the_plugin, "the end of the monitor")
    assert stays_so(has_only_the_plugin)


def test_reboot_destroys_instances_and_brings_the_plugin_back(stage: SandboxStage) -> None:
    stage.partition(1)
    stage.restart_plugin()
    stage.offers(1)
    stage.run_pods([("p1", _SMALL, {})])
    old = stage.plugin()

    stage.sandboxes[0].reboot()

    assert "p1" not in stage.workloads()
    assert not any(stage.devices_by_pod().values())
    stage.offers(0)
    new = stage.plugin()
    assert old
    assert new
    assert objects.uid(new) == objects.uid(old)
    assert objects.restart_count(new) == 1
    assert nvml_faults.SharedState(stage.machine.state_file).read().boots == 1


def test_a_state_that_cannot_be_saved_at_the_end_is_no_bug() -> None:
    with contextlib.ExitStack() as ending:
        state = ending.enter_context(SandboxStage()).machine.state_file
        state.with_name(f"{state.name}.new").mkdir()
        with pytest.raises(errors.UsageError, match="cannot write the files of the simulated no"):
            ending.close()
    assert not state.parent.exists()
