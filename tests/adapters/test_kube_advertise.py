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
from mig_manager.sandbox.driver import library as simulated
from testkit import apiserver, nvml_faults

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    with apiserver.serve() as running:
        running.store.create(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": "n1"},
                "status": {
                    "capacity": {"cpu": "4", "nvidia.com/mig-7g.40gb": "1"},
                    "allocatable": {"cpu": "4", "nvidia.com/hostdev": "2"},
                    "conditions": [{"type": "Ready", "status": "True"}],
                },
            }
        )
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


def apply(gpus: node.AdvertisingGpus, layout: str) -> None:
    text = (ROOT / "profiles" / "mig-parted.yaml").read_text(encoding="utf-8")
    now = gpus.observe()
    wanted = config.select(config.parse(text, source="shipped").layout(layout), now)
    gpus.execute(planner.plan(now, wanted))
    gpus.observe()


def status(kube: api.KubeApi) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = kube.get("/api/v1/nodes/n1")["status"]
    return found


def writes(server: apiserver.ApiServer) -> int:
    return sum(request.verb == "patch" for request in server.log.requests())


def test_the_node_advertises_present_devices_and_zeroes_removed_ones(
    gpus: node.AdvertisingGpus, kube: api.KubeApi
) -> None:
    gpus.start()

    assert status(kube)["capacity"] == {
        "cpu": "4",
        "nvidia.com/gpu": "1",
        "nvidia.com/mig-7g.40gb": "0",
    }
    assert status(kube)["allocatable"] == {
        "cpu": "4",
        "nvidia.com/gpu": "1",
        "nvidia.com/hostdev": "2",
    }
    assert status(kube)["conditions"]


def test_a_gpu_change_is_advertised_at_the_next_observation(
    gpus: node.AdvertisingGpus, kube: api.KubeApi
) -> None:
    apply(gpus, "all-1g.5gb")
    apply(gpus, "all-3g.20gb")

    for field in ("capacity", "allocatable"):
        advertised = status(kube)[field]
        assert advertised["nvidia.com/gpu"] == "0"
        assert advertised["nvidia.com/mig-1g.5gb"] == "0"
        assert advertised["nvidia.com/mig-3g.20gb"] == "2"


def test_unchanged_resources_are_not_written_again(
    gpus: node.AdvertisingGpus, real_gpus: nvml_gpus.NvmlGpus, server: apiserver.ApiServer
) -> None:
    gpus.observe()
    gpus.observe()
    with_restart = api.KubeApi.at(server.url)
    node.AdvertisingGpus(real_gpus, with_restart, name="n1").observe()
    with_restart.close()

    assert writes(server) == 1


def test_a_refused_advertisement_is_retried_and_does_not_fail_the_observation(
    gpus: node.AdvertisingGpus, kube: api.KubeApi, server: apiserver.ApiServer
) -> None:
    server.inject(apiserver.Fault(verb="patch", status=403, times=1))

    with structlog.testing.capture_logs() as logs:
        (gpu,) = gpus.observe()

    assert gpu.current_mode is model.MigMode.DISABLED
    assert [entry["reason"] for entry in logs] == ["Forbidden"]
    gpus.observe()
    assert status(kube)["capacity"]["nvidia.com/gpu"] == "1"


def test_unobservable_gpus_do_not_prevent_the_start(kube: api.KubeApi) -> None:
    class Broken:
        def observe(self) -> model.ObservedGpus:
            raise errors.HardwareError("no", reason=errors.Reason.DRIVER_NOT_LOADED)

        def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
            raise AssertionError(plan)

    with structlog.testing.capture_logs() as logs:
        node.AdvertisingGpus(Broken(), kube, name="n1").start()

    assert [entry["reason"] for entry in logs] == ["DriverNotLoaded"]
