"""MIG mode and what depends on it, through pynvml."""

import pynvml
import pytest

from mig_manager.sandbox.driver import states
from tests.sandbox import nvml_rig


@pytest.mark.parametrize(("gpu", "resetless"), [("A100", 0), ("H100", 1), ("B200", 1)])
def test_fields_report_what_a_mode_change_and_the_driver_can(
    start: nvml_rig.Start, gpu: str, resetless: int
) -> None:
    start(gpu)
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    known, newer, unknown = pynvml.nvmlDeviceGetFieldValues(device, [184, 199, 1])
    assert (known.nvmlReturn, known.value.uiVal) == (0, resetless)
    assert (newer.nvmlReturn, newer.value.uiVal) == (0, 1)
    assert unknown.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED


@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_idle_gpu_switches_mode_at_once_and_loses_its_instances(
    start: nvml_rig.Start, gpu: str
) -> None:
    start(gpu)
    device = nvml_rig.enabled()
    assert pynvml.nvmlDeviceGetMigMode(device) == [1, 1]
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(device) == 7
    instance, compute = nvml_rig.filled(device)
    if gpu == "A100":
        pynvml.nvmlComputeInstanceDestroy(compute)
        pynvml.nvmlGpuInstanceDestroy(instance)
    assert pynvml.nvmlDeviceSetMigMode(device, 0) == pynvml.NVML_SUCCESS
    assert pynvml.nvmlDeviceGetMigMode(device) == [0, 0]
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(device) == 0
    nvml_rig.enabled()
    by_id = pynvml.nvmlDeviceGetGpuInstanceById
    assert nvml_rig.refusal(by_id, device, 2) == "NOT_FOUND"
    assert nvml_rig.refusal(pynvml.nvmlGpuInstanceGetInfo, instance) == "INVALID_ARGUMENT"


def test_used_ampere_gpu_keeps_its_mode_and_has_the_other_pending_until_it_is_cancelled(
    start: nvml_rig.Start,
) -> None:
    library = start("A100")
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    client = library.state.add_client(
        pynvml.nvmlDeviceGetUUID(device), name="dcgm", kind=states.ClientKind.MONITOR
    )
    assert pynvml.nvmlDeviceSetMigMode(device, 1) == pynvml.NVML_ERROR_IN_USE
    assert pynvml.nvmlDeviceGetMigMode(device) == [0, 1]
    assert pynvml.nvmlDeviceSetMigMode(device, 0) == pynvml.NVML_SUCCESS
    assert pynvml.nvmlDeviceGetMigMode(device) == [0, 0]
    library.state.remove_client(client)
    assert pynvml.nvmlDeviceSetMigMode(device, 1) == pynvml.NVML_SUCCESS
    assert pynvml.nvmlDeviceGetMigMode(device) == [1, 1]


def test_ampere_gpu_with_instances_keeps_its_mode(start: nvml_rig.Start) -> None:
    start("A100")
    device = nvml_rig.enabled()
    pynvml.nvmlDeviceCreateGpuInstance(device, 19)
    assert pynvml.nvmlDeviceSetMigMode(device, 0) == pynvml.NVML_ERROR_IN_USE
    assert pynvml.nvmlDeviceGetMigMode(device) == [1, 0]


def test_hopper_gpu_switches_under_monitors_but_not_under_workloads(start: nvml_rig.Start) -> None:
    library = start("H100")
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    uuid = pynvml.nvmlDeviceGetUUID(device)
    library.state.add_client(uuid, name="dcgm", kind=states.ClientKind.MONITOR)
    assert pynvml.nvmlDeviceSetMigMode(device, 1) == pynvml.NVML_SUCCESS
    library.state.add_client(uuid, name="train")
    assert pynvml.nvmlDeviceSetMigMode(device, 0) == pynvml.NVML_ERROR_IN_USE
    assert pynvml.nvmlDeviceGetMigMode(device) == [1, 1]


def test_ampere_gpu_in_a_virtual_machine_waits_for_a_reboot(start: nvml_rig.Start) -> None:
    library = start("A100", virtualization=states.Virtualization.PASSTHROUGH)
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlDeviceSetMigMode(device, 1) == pynvml.NVML_ERROR_RESET_REQUIRED
    assert pynvml.nvmlDeviceGetMigMode(device) == [0, 1]
    library.state.reboot()
    assert pynvml.nvmlDeviceGetMigMode(device) == [1, 1]


@pytest.mark.parametrize(
    ("virtualization", "mode", "code"),
    [
        (states.Virtualization.VGPU, 1, "NOT_SUPPORTED"),
        (states.Virtualization.NONE, 2, "INVALID_ARGUMENT"),
    ],
    ids=["vgpu", "invalid"],
)
def test_a_mode_that_cannot_be_set_is_refused(
    start: nvml_rig.Start, virtualization: states.Virtualization, mode: int, code: str
) -> None:
    start("A100", virtualization=virtualization)
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml_rig.refusal(pynvml.nvmlDeviceSetMigMode, device, mode) == code


def test_while_mig_is_off_only_the_plain_struct_and_the_placements_are_reported(
    start: nvml_rig.Start,
) -> None:
    start()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    ask = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    assert ask(device, 2, version=1).id == 9
    assert nvml_rig.refusal(ask, device, 2, 2) == "NOT_SUPPORTED"
    assert nvml_rig.placements(device, 9) == [(0, 4), (4, 4)]
    room = pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity
    assert nvml_rig.refusal(room, device, 9) == "NOT_SUPPORTED"


def test_an_old_driver_reports_profiles_only_with_mig_on(start: nvml_rig.Start) -> None:
    start(reports_profiles_while_mig_off=False)
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    ask = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    assert nvml_rig.refusal(ask, device, 2, 1) == "NOT_SUPPORTED"
    (capable,) = pynvml.nvmlDeviceGetFieldValues(device, [199])
    assert capable.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED
    nvml_rig.enabled()
    assert ask(device, 2, version=1).id == 9
