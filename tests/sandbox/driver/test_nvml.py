"""The simulated library through pynvml: sessions, devices, MIG devices, processes."""

import pathlib
import re
from typing import Any

import pynvml
import pytest

from mig_manager.catalogue import product_table
from mig_manager.sandbox.driver import simulated_nvml, states
from testkit import nvml_faults
from tests.rigs.node import nvml_rig


def test_calls_outside_a_session_are_refused_and_old_handles_void(start: nvml_rig.Start) -> None:
    start()
    device = nvml_rig.handle()
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    assert pynvml.nvmlDeviceGetCount() == 1
    pynvml.nvmlShutdown()
    assert nvml_rig.refusal(pynvml.nvmlDeviceGetCount) == "UNINITIALIZED"
    assert nvml_rig.refusal(pynvml.nvmlShutdown) == "UNINITIALIZED"
    pynvml.nvmlInit()
    assert nvml_rig.refusal(pynvml.nvmlDeviceGetName, device) == "INVALID_ARGUMENT"


def test_no_driver_is_loaded_without_a_node_or_after_uninstalling(
    tmp_path: pathlib.Path, start: nvml_rig.Start
) -> None:
    start()
    nvml_faults.install(tmp_path / "none" / "node.json")
    assert nvml_rig.refusal(pynvml.nvmlInit) == "DRIVER_NOT_LOADED"
    assert not (tmp_path / "none").exists()
    simulated_nvml.load(None)
    assert nvml_rig.refusal(pynvml.nvmlDeviceGetCount) == "UNINITIALIZED"


def test_missing_functions_are_not_found_and_errors_have_texts(start: nvml_rig.Start) -> None:
    start(absent_functions=("nvmlDeviceGetGpuInstanceProfileInfoV",))
    device = nvml_rig.gpu_with_mig()
    ask = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    assert nvml_rig.refusal(ask, device, 0) == "FUNCTION_NOT_FOUND"
    assert ask(device, 0, version=1).id == 19
    assert nvml_rig.refusal(pynvml.nvmlDeviceGetFanSpeed, device) == "FUNCTION_NOT_FOUND"
    assert pynvml.nvmlErrorString(pynvml.NVML_ERROR_IN_USE) == "In use by another client"
    assert pynvml.nvmlErrorString(12345) == "Unknown Error"


def test_a_gpu_reports_its_identity_and_is_found_by_it(start: nvml_rig.Start) -> None:
    start("A30+H100")
    device = nvml_rig.handle(1)
    pci = pynvml.nvmlDeviceGetPciInfo(device)
    assert pynvml.nvmlSystemGetDriverVersion() == "580.95.05"
    assert pynvml.nvmlDeviceGetName(device) == "NVIDIA H100 80GB HBM3"
    assert pynvml.nvmlDeviceGetArchitecture(device) == pynvml.NVML_DEVICE_ARCH_HOPPER
    assert pynvml.nvmlDeviceGetMinorNumber(device) == 1
    assert (pci.pciDeviceId, pci.busId) == (0x233010DE, "00000000:0F:00.0")
    assert pynvml.nvmlDeviceGetMemoryInfo(device).total == 81559 * 2**20
    assert pynvml.nvmlDeviceGetMemoryInfo(device, pynvml.nvmlMemory_v2).free == 81559 * 2**20
    wrong = nvml_rig.refusal(pynvml.nvmlDeviceGetMemoryInfo, device, 7)
    assert wrong == "ARGUMENT_VERSION_MISMATCH"
    uuid = pynvml.nvmlDeviceGetUUID(device)
    assert uuid.startswith("GPU-")
    for handle in (
        pynvml.nvmlDeviceGetHandleByUUID(uuid),
        pynvml.nvmlDeviceGetHandleByPciBusId("00000000:0F:00.0"),
        pynvml.nvmlDeviceGetHandleByPciBusId("0000:0f:00.0"),
    ):
        assert pynvml.nvmlDeviceGetIndex(handle) == 1
    assert nvml_rig.refusal(nvml_rig.handle, 2) == "INVALID_ARGUMENT"
    assert nvml_rig.refusal(pynvml.nvmlDeviceGetHandleByUUID, "GPU-0") == "NOT_FOUND"


def test_gpu_without_mig_supports_none_of_it(start: nvml_rig.Start) -> None:
    start("L40S")
    device = nvml_rig.handle()
    profile = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    for call, *arguments in (
        (pynvml.nvmlDeviceGetMigMode,),
        (pynvml.nvmlDeviceSetMigMode, 1),
        (profile, 0, 1),
        (profile, 0, 2),
    ):
        assert nvml_rig.refusal(call, device, *arguments) == "NOT_SUPPORTED"
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(device) == 0
    events = pynvml.nvmlDeviceGetSupportedEventTypes(device)
    assert events & pynvml.nvmlEventMigConfigChange == 0


def test_handle_of_another_kind_or_unknown_mode_is_refused(device: Any) -> None:
    instance = pynvml.nvmlDeviceCreateGpuInstance(device, 9)
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle
    for call, *arguments, code in (
        (pynvml.nvmlDeviceSetMigMode, device, 2, "INVALID_ARGUMENT"),
        (pynvml.nvmlDeviceGetName, instance, "INVALID_ARGUMENT"),
        (pynvml.nvmlGpuInstanceGetInfo, device, "INVALID_ARGUMENT"),
        (pynvml.nvmlDeviceGetName, None, "INVALID_ARGUMENT"),
        (parent, device, "INVALID_ARGUMENT"),
        (pynvml.nvmlDeviceGetGpuInstanceId, device, "NOT_SUPPORTED"),
        (pynvml.nvmlDeviceGetComputeInstanceId, device, "NOT_SUPPORTED"),
    ):
        assert nvml_rig.refusal(call, *arguments) == code


def test_mig_devices_are_pairs_of_instances_in_the_order_of_their_ids(device: Any) -> None:
    nvml_rig.create_instances(device, 9)
    pynvml.nvmlDeviceCreateGpuInstance(device, 19)
    parent = pynvml.nvmlDeviceCreateGpuInstance(device, 14)
    for _ in range(2):
        pynvml.nvmlGpuInstanceCreateComputeInstance(parent, 0)
    by_index = pynvml.nvmlDeviceGetMigDeviceHandleByIndex
    devices = [by_index(device, index) for index in range(3)]
    names = [pynvml.nvmlDeviceGetName(each).split(" MIG ")[1] for each in devices]
    assert names == ["3g.20gb", "1c.2g.10gb", "1c.2g.10gb"]
    assert [pynvml.nvmlDeviceGetComputeInstanceId(each) for each in devices] == [0, 0, 1]
    assert pynvml.nvmlDeviceGetGpuInstanceId(devices[0]) == 2
    whole = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(devices[2])
    assert pynvml.nvmlDeviceGetIndex(whole) == 0
    assert pynvml.nvmlDeviceGetMemoryInfo(devices[0]).total == 19968 * 2**20
    assert nvml_rig.refusal(by_index, device, 3) == "NOT_FOUND"
    assert nvml_rig.refusal(by_index, device, 7) == "INVALID_ARGUMENT"


def test_mig_uuids_follow_from_the_slot_and_survive_their_neighbours(device: Any) -> None:
    instance, compute = nvml_rig.create_instances(device, 9)

    def uuid() -> str:
        mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 0)
        handle = pynvml.nvmlDeviceGetHandleByUUID(pynvml.nvmlDeviceGetUUID(mig))
        return str(pynvml.nvmlDeviceGetUUID(handle))

    first = uuid()
    assert re.fullmatch(r"MIG-[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-.{12}", first)
    pynvml.nvmlDeviceCreateGpuInstance(device, 19)
    assert uuid() == first
    pynvml.nvmlComputeInstanceDestroy(compute)
    pynvml.nvmlGpuInstanceDestroy(instance)
    again = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(device, 9, nvml_rig.at(4, 4))
    pynvml.nvmlGpuInstanceCreateComputeInstance(again, 2)
    assert uuid() == first


@pytest.mark.parametrize("product", nvml_rig.ONE_OF_EACH_GRID, ids=lambda p: p.key)
def test_mig_devices_of_a_full_gpu_have_different_uuids(
    start: nvml_rig.Start, product: product_table.Product
) -> None:
    start(f"2x{product.key}")
    uuids = set()
    for index in range(2):
        device = nvml_rig.gpu_with_mig(index)
        smallest = product.profiles[0]
        for _ in range(smallest.max_instances):
            nvml_rig.create_instances(device, smallest.profile_id)
        for number in range(smallest.max_instances):
            mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, number)
            uuids.add(pynvml.nvmlDeviceGetUUID(mig))
    assert len(uuids) == 2 * product.max_instances


def test_processes_are_listed_for_the_gpu_and_for_their_own_mig_device(
    start: nvml_rig.Start,
) -> None:
    state = start().state
    device = nvml_rig.gpu_with_mig()
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses
    assert processes(device) == []
    for _ in range(2):
        nvml_rig.create_instances(device, 19)
    migs = [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index) for index in range(2)]
    uuids = [pynvml.nvmlDeviceGetUUID(mig) for mig in migs]
    state.add_client(uuids[0], name="train", pid=77)
    state.add_client(uuids[1], name="serve", pid=78)
    state.add_client(pynvml.nvmlDeviceGetUUID(device), name="whole", pid=79)
    state.add_client(uuids[1], name="dcgm", kind=states.ClientKind.MONITOR)
    listed = [(p.pid, p.gpuInstanceId) for p in processes(device)]
    assert listed == [(77, 11), (78, 13), (79, 0xFFFFFFFF)]
    assert [p.pid for p in processes(migs[1])] == [78]
    assert pynvml.nvmlDeviceGetGraphicsRunningProcesses(device) == []
    assert pynvml.nvmlSystemGetProcessName(77) == "train"
    assert nvml_rig.refusal(pynvml.nvmlSystemGetProcessName, 1) == "NOT_FOUND"
    assert pynvml.nvmlDeviceGetMemoryInfo(migs[0]).used > 0
