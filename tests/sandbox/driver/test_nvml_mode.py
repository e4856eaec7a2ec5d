"""MIG mode and what depends on it, through pynvml."""

import pynvml
import pytest

from mig_manager.sandbox.driver import states
from tests.rigs.node import nvml_rig

MONITOR = states.ClientKind.MONITOR


def test_an_idle_hopper_gpu_switches_at_once_and_loses_its_instances(
    start: nvml_rig.Start,
) -> None:
    start("H100")
    device = nvml_rig.gpu_with_mig()
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(device) == 7
    instance, _ = nvml_rig.create_instances(device)
    assert pynvml.nvmlDeviceSetMigMode(device, 0) == pynvml.NVML_SUCCESS
    assert pynvml.nvmlDeviceGetMigMode(device) == [0, 0]
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(device) == 0
    nvml_rig.gpu_with_mig()
    assert nvml_rig.refusal(pynvml.nvmlGpuInstanceGetInfo, instance) == "INVALID_ARGUMENT"


def test_ampere_gpu_in_use_keeps_its_mode_with_the_other_pending(start: nvml_rig.Start) -> None:
    state = start("A100").state
    device = nvml_rig.handle()
    uuid = pynvml.nvmlDeviceGetUUID(device)
    client = state.add_client(uuid, name="dcgm", kind=MONITOR)
    assert pynvml.nvmlDeviceSetMigMode(device, 1) == pynvml.NVML_ERROR_IN_USE
    assert pynvml.nvmlDeviceGetMigMode(device) == [0, 1]
    assert pynvml.nvmlDeviceSetMigMode(device, 0) == pynvml.NVML_SUCCESS
    assert pynvml.nvmlDeviceGetMigMode(device) == [0, 0]
    state.remove_client(client)
    nvml_rig.gpu_with_mig()
    assert pynvml.nvmlDeviceGetMigMode(device) == [1, 1]
    pynvml.nvmlDeviceCreateGpuInstance(device, 19)
    assert pynvml.nvmlDeviceSetMigMode(device, 0) == pynvml.NVML_ERROR_IN_USE
    assert pynvml.nvmlDeviceGetMigMode(device) == [1, 0]


def test_hopper_gpu_switches_under_monitors_but_not_under_workloads(start: nvml_rig.Start) -> None:
    state = start("H100").state
    device = nvml_rig.handle()
    uuid = pynvml.nvmlDeviceGetUUID(device)
    state.add_client(uuid, name="dcgm", kind=MONITOR)
    assert pynvml.nvmlDeviceSetMigMode(device, 1) == pynvml.NVML_SUCCESS
    state.add_client(uuid, name="train")
    assert pynvml.nvmlDeviceSetMigMode(device, 0) == pynvml.NVML_ERROR_IN_USE
    assert pynvml.nvmlDeviceGetMigMode(device) == [1, 1]


@pytest.mark.parametrize("is_old", [False, True], ids=["new driver", "old driver"])
def test_profiles_while_mig_is_off_are_reported_by_new_drivers_only(
    start: nvml_rig.Start, *, is_old: bool
) -> None:
    start(reports_profiles_while_mig_off=not is_old)
    device = nvml_rig.handle()
    ask = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    if is_old:
        assert nvml_rig.refusal(ask, device, 2, 1) == "NOT_SUPPORTED"
    else:
        assert ask(device, 2, version=1).id == 9
    assert nvml_rig.refusal(ask, device, 2, 2) == "NOT_SUPPORTED"
    assert nvml_rig.placements(device, 9) == [(0, 4), (4, 4)]
    nvml_rig.gpu_with_mig()
    assert ask(device, 2, version=1).id == ask(device, 2, version=2).id == 9
