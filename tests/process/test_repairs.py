"""The process of the agent, after an XID: it reports, and may reset the GPU by nvidia-smi."""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from mig_manager.core import model
from mig_manager.sandbox.driver import states
from testkit import nvidia_smi, nvml_faults
from tests.rigs.driver import c_library
from tests.rigs.host import systemd_rig
from tests.rigs.stage import agent_stage

UsedGpus = tuple[model.ObservedGpus, dict[str, frozenset[str]]]  # GPUs, and the devices of pods


class RepairStage(agent_stage.AgentStage):
    """An agent with the library of a real driver, and ``nvidia-smi``."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__("2xA30", "--repair", "reset", "--watch-gpu-events", has_library=True)
        self._folder = folder

    def run_pods_on_all_devices(self) -> UsedGpus:
        """Apply a layout, and have a pod compute on each of its devices."""
        self.apply_layout("all-1g.6gb")
        self.run_pods([(f"pod-{n}", "nvidia.com/mig-1g.6gb", {}) for n in range(8)])
        return self.gpus.observe(), self.devices_by_pod()

    def assert_only_gpu_1_was_repaired(self, before: UsedGpus) -> None:
        """Check that all devices are back, and that the pods of GPU 0 kept theirs."""
        gpus, devices = before
        self.wait(lambda: self.allocatable() == {"nvidia.com/mig-1g.6gb": 8}, "all devices")
        assert [gpu.snapshot for gpu in self.gpus.observe()] == [gpu.snapshot for gpu in gpus]
        untouched = {*gpus[0].mig_uuids}
        kept = {name: ids for name, ids in devices.items() if ids and ids <= untouched}
        after = self.devices_by_pod()
        assert kept.keys() == self.workloads().keys()
        assert len(kept) == 4
        assert {name: after[name] for name in kept} == kept

    def wait_for_repair(self) -> None:
        """Wait for the good end of the one repair, and for an open node."""

        def ends() -> list[dict[str, Any]]:
            return [line for line in self.lines() if line["event"] == "gpu_repair_ended"]

        self.wait(lambda: bool(ends()), "the end of the repair", timeout_s=120)
        assert [line["error"] for line in ends()] == [None]
        self.wait(lambda: not self.unrestored_on_node(), "an open node")

    def start_agent(self) -> None:
        nvidia_smi.install(self._folder, self.machine.state_file)
        super().start_agent()


@pytest.fixture
def stage(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RepairStage]:
    for name, value in c_library.environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with RepairStage(tmp_path / "bin") as started:
        yield started


@pytest.mark.slow
def test_an_xid_starts_a_repair_that_returns_the_devices(stage: RepairStage) -> None:
    state = nvml_faults.SharedState(stage.machine.state_file)
    stage.apply_layout("all-1g.6gb")
    allocatable = stage.allocatable()

    stage.wait_for_listener()
    before = [[gpu.placement for gpu in each.instances] for each in state.read().gpus]
    untouched = {each.serial for each in state.read().gpus[0].instances}
    state.fail_gpu(1, action=1, xid=79)

    stage.wait_for_repair()
    stage.wait(lambda: stage.allocatable() == allocatable, "all devices")
    after = state.read().gpus
    assert [[gpu.placement for gpu in each.instances] for each in after] == before
    assert {each.serial for each in after[0].instances} == untouched
    assert [each.recovery_action for each in after] == [0, 0]


@pytest.mark.slow
def test_a_gpu_that_answers_nothing_is_repaired_by_a_restarted_agent(stage: RepairStage) -> None:
    state = nvml_faults.SharedState(stage.machine.state_file)
    before = stage.run_pods_on_all_devices()
    stage.stop_agent()
    state.add_fault(
        nvml_faults.Fault(
            function="nvmlDeviceGet[AMNPV]*", gpu=1, count=None, code=states.Code.RESET_REQUIRED
        )
    )
    assert [gpu.uuid for gpu in stage.gpus.observe().unreachable] == [before[0][1].uuid]
    stage.start_agent()

    stage.wait_for_repair()
    stage.assert_only_gpu_1_was_repaired(before)


@pytest.mark.slow
def test_an_xid_starts_a_check_that_finds_the_recovery_action() -> None:
    with agent_stage.ObservedStage("2xA30", "--watch-gpu-events") as stage:
        state = nvml_faults.SharedState(stage.machine.state_file)
        uuid = state.boards[1].uuid
        stage.apply_layout("all-1g.6gb")

        def conditions() -> dict[str, str]:
            return {each["type"]: each["status"] for each in stage.node()["status"]["conditions"]}

        stage.wait_for_listener()
        state.fail_gpu(1, action=1, xid=79)
        stage.wait(lambda: conditions().get("GpuRecoveryNeeded") == "True", "the condition")

        assert conditions()["MigReady"] == "True"
        assert stage.series("xids_total") == {f"{uuid},79": 1}
        assert stage.series("gpu_recovery_action") == {f"gpu-reset,1,{uuid}": 1}

        # Xid 154: the recovery action has changed.
        state.fail_gpu(1, xid=154)
        stage.wait(lambda: conditions()["GpuRecoveryNeeded"] == "False", "the recovery")
        assert stage.series("gpu_recovery_action") == {}


@pytest.fixture
def host(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[systemd_rig.FakeSystemd]:
    """A fake systemd, as the settings file of the agent's unit names it."""
    listed = tmp_path / "clients.yaml"
    listed.write_text(f"version: v1\nsystemd-services: [{systemd_rig.NVSM}]\n", encoding="utf-8")
    monkeypatch.setenv("WITH_SHUTDOWN_HOST_GPU_CLIENTS", "true")
    monkeypatch.setenv("GPU_CLIENTS_FILE", str(listed))
    units = {systemd_rig.NVSM: systemd_rig.Unit()}
    with systemd_rig.a_bus(tmp_path) as bus, systemd_rig.fake_systemd(bus, units) as systemd:
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", bus.address)
        yield systemd


@pytest.mark.slow
def test_agent_of_the_host_restarts_the_services_that_use_the_gpu(
    host: systemd_rig.FakeSystemd, stage: RepairStage
) -> None:
    state = nvml_faults.SharedState(stage.machine.state_file)
    before = stage.run_pods_on_all_devices()
    monitors = [
        state.add_client(gpu.uuid, name="nvsm", kind=states.ClientKind.MONITOR)
        for gpu in before[0]
    ]

    def end_monitors() -> None:
        while monitors:
            state.remove_client(monitors.pop())

    host.calls.clear()
    host.callbacks.add("StopUnit", end_monitors)
    stage.wait_for_listener()
    state.fail_gpu(1, action=1, xid=95)

    stage.wait_for_repair()

    assert [call.split()[:2] for call in host.calls] == [
        ["StopUnit", systemd_rig.NVSM],
        ["StartUnit", systemd_rig.NVSM],
    ]
    assert host.units[systemd_rig.NVSM].state == "active"
    stage.assert_only_gpu_1_was_repaired(before)
