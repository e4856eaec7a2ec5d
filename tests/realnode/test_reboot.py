"""A node that goes down and comes up again: no MIG instance survives it."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

import pytest

from mig_manager.core import model
from testkit import nvml_faults
from tests.realnode import contract_keys, manifests, node_state, real_cluster
from tests.rigs import waiting
from tests.rigs.host import systemd_rig

pytestmark = pytest.mark.realnode

BALANCED = [
    ["1g.5gb", "1g.5gb", "2g.10gb", "3g.20gb"],
    ["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"],
]
BUS = "/run/nvidia/simulated/bus"


@pytest.fixture
def shape() -> real_cluster.ClusterShape:
    return real_cluster.ClusterShape(gpus="1xA100-SXM4-40GB+1xH100-SXM5-80GB")


def modes(cluster: real_cluster.RealCluster) -> list[bool]:
    """Return whether MIG mode is on, for each GPU."""
    return [gpu.is_enabled for gpu in cluster.driver.gpus.read().gpus]


def profiles(cluster: real_cluster.RealCluster) -> list[list[str]]:
    return [sorted(each) for each in cluster.driver.profiles()]


def assert_usable(cluster: real_cluster.RealCluster, workload: str, pods: int) -> None:
    """Check that a workload's pods run, each on one MIG device that exists."""
    waiting.until(lambda: len(cluster.running(workload)) == pods, f"{workload}", within_s=90)
    used = [use.devices for use in node_state.use(cluster, workload).values()]
    assert [len(devices) for devices in used] == [1] * pods


def test_rebooted_node_gets_its_layout_and_workload_without_an_eviction(
    cluster: real_cluster.RealCluster,
) -> None:
    cluster.apply_layout("all-balanced")
    cluster.deploy("train", "mig-3g.40gb")
    assert profiles(cluster) == BALANCED
    log, instances = cluster.listen(), cluster.driver.instances()

    cluster.reboot()

    assert modes(cluster) == [True, False]
    waiting.until(lambda: profiles(cluster) == BALANCED, "the layout", within_s=90)
    assert not instances & cluster.driver.instances()
    assert_usable(cluster, "train", 1)
    # The pod may run before the agent has seen that all devices are schedulable.
    waiting.until(lambda: cluster.is_idle(real_cluster.NODE), "the end of the run")
    node_state.assert_at_rest(cluster)
    assert log.evicted_pods() == []


def test_node_rebooted_during_creation_ends_with_the_requested_layout(
    cluster: real_cluster.RealCluster,
) -> None:
    cluster.ensure_layout("all-balanced")
    hangs = nvml_faults.Fault(function="nvmlDeviceCreateGpuInstance*", first=3, hang_s=8.0)
    cluster.driver.gpus.add_fault(hangs)
    cluster.request("all-1g.10gb")
    waiting.until(lambda: cluster.driver.gpus.faults()[0].strikes > 0, "the change")
    # The agent publishes a phase beside its work.
    cluster.wait_for_phase("Execute")

    cluster.reboot()

    assert cluster.outcome("all-1g.10gb")["state"] == "success"
    assert profiles(cluster) == [["1g.10gb"] * 4, ["1g.10gb"] * 7]
    cluster.deploy("all", "mig-1g.10gb", 11)
    node_state.assert_at_rest(cluster)


@contextlib.contextmanager
def logind(folder: pathlib.Path) -> Iterator[systemd_rig.FakeSystemd]:
    """A system bus with a fake systemd-logind."""
    with systemd_rig.a_bus(folder) as bus, systemd_rig.fake_systemd(bus) as answering:
        yield answering


def test_agent_reboots_the_node_once_for_a_mode_that_needs_it(
    expendable_cluster: real_cluster.RealCluster,
) -> None:
    cluster = expendable_cluster
    cluster.ensure_layout("all-balanced")
    environ = {"WITH_REBOOT": "true", "DBUS_SYSTEM_BUS_ADDRESS": f"unix:path=/host{BUS}"}
    with logind(cluster.node.folder / "driver") as host:
        cluster.install("privileged", manifests.settings(**environ))
        gpus = cluster.driver.gpus
        passthrough = model.Virtualization.PASSTHROUGH
        gpus.set_options(dataclasses.replace(gpus.read().options, virtualization=passthrough))
        cluster.request("all-disabled")
        waiting.until(lambda: "Reboot False" in host.calls, "the request for a reboot")
        assert cluster.labels()[contract_keys.STATE_LABEL] == "rebooting"
        assert contract_keys.RECONFIGURING_TAINT in cluster.taints()

        cluster.reboot()

        assert cluster.outcome("all-disabled")["state"] == "success"
        assert modes(cluster) == [False, False]
        waiting.until(lambda: cluster.allocatable() == {"gpu": 2}, "both GPUs")
        node_state.assert_at_rest(cluster)
        assert host.calls == ["Reboot False"]
