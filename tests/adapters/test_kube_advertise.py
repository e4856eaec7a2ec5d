"""Extended resources of simulated GPUs on the embedded API server."""

import pathlib
from collections.abc import Iterator, Sequence

import pytest
import structlog

from mig_manager import errors
from mig_manager.adapters import host
from mig_manager.adapters.kubernetes import api, node
from mig_manager.adapters.nvml import gpus as nvml_gpus
from mig_manager.core import model, steps
from mig_manager.core.layout import config
from mig_manager.core.planner import planner
from mig_manager.sandbox.apiserver import resources
from mig_manager.sandbox.driver import library as simulated
from testkit import apiserver, nvml_faults

ROOT = pathlib.Path(__file__).parents[2]
NODE = {
    "apiVersion": "v1",
    "kind": "Node",
    "metadata": {"name": "n1"},
    "status": {
        "capacity": {"cpu": "4", "nvidia.com/mig-7g.40gb": "1"},
        "allocatable": {"cpu": "4", "nvidia.com/hostdev": "2"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    with apiserver.serve() as running:
        running.store.create(NODE)
        yield running


@pytest.fixture
def kube(server: apiserver.ApiServer) -> Iterator[api.KubeApi]:
    client = api.KubeApi.at(server.url, sleep=lambda _seconds: None)
    yield client
    client.close()


@pytest.fixture
def real_gpus(tmp_path: pathlib.Path) -> Iterator[nvml_gpus.NvmlGpus]:
    simulated.create("1xA100-SXM4-40GB", tmp_path / "gpus.json")
    nvml_faults.install(tmp_path / "gpus.json")
    yield nvml_gpus.NvmlGpus(clock=host.SystemClock())
    simulated.uninstall()


@pytest.fixture
def gpus(real_gpus: nvml_gpus.NvmlGpus, kube: api.KubeApi) -> node.AdvertisingGpus:
    return node.AdvertisingGpus(real_gpus, kube, name="n1")


def test_the_node_advertises_the_devices_of_each_observation_once_and_zeroes_removed_ones(
    gpus: node.AdvertisingGpus,
    real_gpus: nvml_gpus.NvmlGpus,
    kube: api.KubeApi,
    server: apiserver.ApiServer,
) -> None:
    gpus.start()
    gpus.observe()
    # The next one is that of an agent that was restarted.
    node.AdvertisingGpus(real_gpus, kube, name="n1").observe()

    status = server.get(resources.NODES, "n1")["status"]
    old, present = {"nvidia.com/mig-7g.40gb": "0"}, {"nvidia.com/gpu": "1"}
    assert status["capacity"] == {"cpu": "4", **present, **old}
    assert status["allocatable"] == {"cpu": "4", **present, "nvidia.com/hostdev": "2"}
    assert status["conditions"]
    assert sum(request.verb == "patch" for request in server.log.requests()) == 1

    text = (ROOT / "profiles" / "mig-parted.yaml").read_text(encoding="utf-8")
    for layout in ("all-1g.5gb", "all-3g.20gb"):
        now = gpus.observe()
        wanted = config.select(config.parse(text, source="shipped").layout(layout), now)
        gpus.execute(planner.plan(now, wanted))
        gpus.observe()

    status = server.get(resources.NODES, "n1")["status"]
    changed = {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "0", "nvidia.com/mig-3g.20gb": "2"}
    for field in ("capacity", "allocatable"):
        assert changed.items() <= status[field].items()


def test_a_refused_advertisement_is_retried_and_does_not_fail_the_observation(
    gpus: node.AdvertisingGpus, server: apiserver.ApiServer
) -> None:
    server.inject(apiserver.Fault(verb="patch", status=403, times=1))

    with structlog.testing.capture_logs() as logs:
        (gpu,) = gpus.observe()

    assert gpu.current_mode is model.MigMode.DISABLED
    assert [entry["reason"] for entry in logs] == ["Forbidden"]
    gpus.observe()
    assert server.get(resources.NODES, "n1")["status"]["capacity"]["nvidia.com/gpu"] == "1"


def test_unobservable_gpus_do_not_prevent_the_start(kube: api.KubeApi) -> None:
    class Broken:
        def observe(self) -> model.ObservedGpus:
            raise errors.HardwareError("no", reason=errors.Reason.DRIVER_NOT_LOADED)

        def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
            raise AssertionError(plan)

    with structlog.testing.capture_logs() as logs:
        node.AdvertisingGpus(Broken(), kube, name="n1").start()

    assert [entry["reason"] for entry in logs] == ["DriverNotLoaded"]
