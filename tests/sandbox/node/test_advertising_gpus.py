"""Extended resources of simulated GPUs on the embedded API server."""

import pathlib

import pytest
import structlog

from mig_manager import errors, reasons
from mig_manager.adapters.kubernetes import api, kube_node
from mig_manager.core import model
from mig_manager.core.layout import layout_parser, selection
from mig_manager.core.planner import planner
from mig_manager.sandbox import advertising_gpus
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.rigs.node import fake_host, gpu_values, node_rig

PROFILES = pathlib.Path(__file__).parents[3] / "profiles" / "mig-parted.yaml"
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


class AdvertisingRig:
    """A node with one A100, whose devices an agent advertises."""

    def __init__(self, server: apiserver.ApiServer, kube: api.KubeApi) -> None:
        self.server = server
        self.kube = kube
        self.machine = node_rig.NodeRig(gpus=gpu_values.gpus_of("A100-SXM4-40GB"))
        self.gpus = self.started_agent()

    def started_agent(self) -> advertising_gpus.AdvertisingGpus:
        return advertising_gpus.AdvertisingGpus(
            fake_host.FakeGpus(self.machine), self.kube, name="n1"
        )

    def status(self) -> dict[str, dict[str, str]]:
        node_status: dict[str, dict[str, str]] = self.server.get(kinds.NODES, "n1")["status"]
        return node_status


@pytest.fixture
def rig(server: apiserver.ApiServer, kube: api.KubeApi) -> AdvertisingRig:
    server.create(NODE)
    return AdvertisingRig(server, kube)


def test_node_advertises_observed_devices_and_zeroes_removed_ones(rig: AdvertisingRig) -> None:
    rig.gpus.start()
    rig.gpus.observe()
    rig.started_agent().observe()

    old, present = {"nvidia.com/mig-7g.40gb": "0"}, {"nvidia.com/gpu": "1"}
    assert rig.status()["capacity"] == {"cpu": "4", **present, **old}
    assert rig.status()["allocatable"] == {"cpu": "4", **present, "nvidia.com/hostdev": "2"}
    assert rig.status()["conditions"]
    assert sum(request.verb == "patch" for request in rig.server.log.requests()) == 1

    document = layout_parser.parse(PROFILES.read_text(encoding="utf-8"), source="shipped")
    for layout in ("all-1g.5gb", "all-3g.20gb"):
        now = rig.gpus.observe()
        rig.gpus.execute(planner.plan(now, selection.select(document.layout(layout), now)))

    changed = {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "0", "nvidia.com/mig-3g.20gb": "2"}
    for field in ("capacity", "allocatable"):
        assert changed.items() <= rig.status()[field].items()


def test_a_node_that_was_registered_again_gets_its_devices_again(rig: AdvertisingRig) -> None:
    rig.gpus.observe()
    rig.server.delete(kinds.NODES, "n1")
    rig.server.create(NODE)

    rig.gpus.observe()

    assert rig.status()["allocatable"]["nvidia.com/gpu"] == "1"


def test_devices_that_a_kubelet_zeroes_are_advertised_again(rig: AdvertisingRig) -> None:
    rig.gpus.observe()
    zeroes = {"status": {"allocatable": {"nvidia.com/gpu": "0"}}}
    rig.kube.patch(f"{kube_node.path('n1')}/status", zeroes)

    rig.gpus.observe()

    assert rig.status()["allocatable"]["nvidia.com/gpu"] == "1"


def test_refused_advertisement_is_retried_and_fails_no_observation(rig: AdvertisingRig) -> None:
    rig.server.inject(apiserver.Fault(verb="patch", status=403, times=1))

    with structlog.testing.capture_logs() as logs:
        (gpu,) = rig.gpus.observe()

    assert gpu.current_mode is model.MigMode.DISABLED
    assert [entry["reason"] for entry in logs] == ["Forbidden"]
    rig.gpus.observe()
    assert rig.status()["capacity"]["nvidia.com/gpu"] == "1"


def test_unobservable_gpus_do_not_prevent_the_start(rig: AdvertisingRig) -> None:
    rig.machine.failures.add(
        "gpus.observe", errors.HardwareError("no", reason=reasons.Reason.DRIVER_NOT_LOADED)
    )

    with structlog.testing.capture_logs() as logs:
        rig.gpus.start()

    assert [entry["reason"] for entry in logs] == ["DriverNotLoaded"]
