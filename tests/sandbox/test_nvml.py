"""The simulated library through pynvml: sessions, devices, MIG devices, processes."""

import pathlib
import re
from typing import Any

import pynvml
import pytest

from mig_manager.catalogue import hardware
from mig_manager.sandbox.driver import library as simulated
from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.sandbox import nvml_rig


def test_calls_before_init_and_after_the_last_shutdown_are_refused_and_old_handles_void(
    start: nvml_rig.Start,
) -> None:
    start()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    assert pynvml.nvmlDeviceGetCount() == 1
    pynvml.nvmlShutdown()
    assert nvml_rig.refusal(pynvml.nvmlDeviceGetCount) == "UNINITIALIZED"
    assert nvml_rig.refusal(pynvml.nvmlShutdown) == "UNINITIALIZED"
    pynvml.nvmlInit()
    assert nvml_rig.refusal(pynvml.nvmlDeviceGetName, device) == "INVALID_ARGUMENT"


def test_without_a_node_no_driver_is_loaded(tmp_path: pathlib.Path) -> None:
    nvml_faults.install(tmp_path / "none.json")
    try:
        assert nvml_rig.refusal(pynvml.nvmlInit) == "DRIVER_NOT_LOADED"
    finally:
        simulated.uninstall()


def test_functions_that_the_driver_lacks_are_not_found(start: nvml_rig.Start) -> None:
    start(absent_functions=("nvmlDeviceGetGpuInstanceProfileInfoV",))
    device = nvml_rig.enabled()
    ask = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    assert nvml_rig.refusal(ask, device, 0) == "FUNCTION_NOT_FOUND"
    assert ask(device, 0, version=1).id == 19
    fan_speed = pynvml.nvmlDeviceGetFanSpeed
    assert nvml_rig.refusal(fan_speed, device) == "FUNCTION_NOT_FOUND"


def test_errors_have_the_texts_of_the_library(start: nvml_rig.Start) -> None:
    start()
    assert pynvml.nvmlErrorString(pynvml.NVML_ERROR_IN_USE) == "In use by another client"
    assert pynvml.nvmlErrorString(12345) == "Unknown Error"


def test_a_gpu_reports_its_identity(start: nvml_rig.Start) -> None:
    start("A30+H100")
    device = pynvml.nvmlDeviceGetHandleByIndex(1)
    pci = pynvml.nvmlDeviceGetPciInfo(device)
    assert pynvml.nvmlSystemGetDriverVersion() == "580.95.05"
    assert pynvml.nvmlSystemGetNVMLVersion() == "580.95.05"
    assert pynvml.nvmlSystemGetCudaDriverVersion() == 13000
    assert pynvml.nvmlDeviceGetName(device) == "NVIDIA H100 80GB HBM3"
    assert pynvml.nvmlDeviceGetArchitecture(device) == pynvml.NVML_DEVICE_ARCH_HOPPER
    assert pynvml.nvmlDeviceGetCudaComputeCapability(device) == (9, 0)
    assert pynvml.nvmlDeviceGetIndex(device) == 1
    assert pynvml.nvmlDeviceGetMinorNumber(device) == 1
    assert (pci.pciDeviceId, pci.busId) == (0x233010DE, "00000000:0F:00.0")
    assert pynvml.nvmlDeviceGetMemoryInfo(device).total == 81559 * 2**20
    assert pynvml.nvmlDeviceGetMemoryInfo(device, pynvml.nvmlMemory_v2).free == 81559 * 2**20
    mode = pynvml.nvmlDeviceGetVirtualizationMode(device)
    assert mode == pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE


def test_struct_of_another_version_is_refused(start: nvml_rig.Start) -> None:
    start()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert (
        nvml_rig.refusal(pynvml.nvmlDeviceGetMemoryInfo, device, 7) == "ARGUMENT_VERSION_MISMATCH"
    )


def test_a_gpu_is_found_by_index_uuid_and_pci_address(start: nvml_rig.Start) -> None:
    start("2xA30")
    second = pynvml.nvmlDeviceGetHandleByIndex(1)
    uuid = pynvml.nvmlDeviceGetUUID(second)
    assert uuid.startswith("GPU-")
    for found in (
        pynvml.nvmlDeviceGetHandleByUUID(uuid),
        pynvml.nvmlDeviceGetHandleByPciBusId("00000000:0F:00.0"),
        pynvml.nvmlDeviceGetHandleByPciBusId("0000:0f:00.0"),
    ):
        assert pynvml.nvmlDeviceGetIndex(found) == 1
    by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
    assert nvml_rig.refusal(by_index, 2) == "INVALID_ARGUMENT"
    assert nvml_rig.refusal(by_uuid, "GPU-0") == "NOT_FOUND"


def test_gpu_without_mig_supports_none_of_it(start: nvml_rig.Start) -> None:
    start("L40S")
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    unsupported = "NOT_SUPPORTED"
    assert nvml_rig.refusal(pynvml.nvmlDeviceGetMigMode, device) == unsupported
    assert nvml_rig.refusal(pynvml.nvmlDeviceSetMigMode, device, 1) == unsupported
    for version in (1, 2):
        ask = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
        assert nvml_rig.refusal(ask, device, 0, version) == unsupported
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(device) == 0


def test_handle_of_another_kind_is_invalid(device: Any) -> None:
    instance = pynvml.nvmlDeviceCreateGpuInstance(device, 9)
    for call, handle in (
        (pynvml.nvmlDeviceGetName, instance),
        (pynvml.nvmlGpuInstanceGetInfo, device),
        (pynvml.nvmlDeviceGetName, None),
    ):
        assert nvml_rig.refusal(call, handle) == "INVALID_ARGUMENT"


def test_mig_devices_are_pairs_of_instances_in_the_order_of_their_ids(device: Any) -> None:
    nvml_rig.filled(device, 9)
    pynvml.nvmlDeviceCreateGpuInstance(device, 19)
    parent = pynvml.nvmlDeviceCreateGpuInstance(device, 14)
    for _ in range(2):
        pynvml.nvmlGpuInstanceCreateComputeInstance(parent, 0)
    by_index = pynvml.nvmlDeviceGetMigDeviceHandleByIndex
    devices = [by_index(device, index) for index in range(3)]
    assert [pynvml.nvmlDeviceGetName(each).split(" MIG ")[1] for each in devices] == [
        "3g.20gb",
        "1c.2g.10gb",
        "1c.2g.10gb",
    ]
    assert [pynvml.nvmlDeviceGetComputeInstanceId(each) for each in devices] == [0, 0, 1]
    assert pynvml.nvmlDeviceGetGpuInstanceId(devices[0]) == 2
    assert all(pynvml.nvmlDeviceIsMigDeviceHandle(each) for each in devices)
    whole = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(devices[2])
    assert pynvml.nvmlDeviceGetIndex(whole) == 0
    attributes = pynvml.nvmlDeviceGetAttributes(devices[1])
    assert (attributes.multiprocessorCount, attributes.memorySizeMB) == (14, 9856)
    assert (attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount) == (2, 1)
    assert pynvml.nvmlDeviceGetMemoryInfo(devices[0]).total == 19968 * 2**20
    assert nvml_rig.refusal(by_index, device, 3) == "NOT_FOUND"
    assert nvml_rig.refusal(by_index, device, 7) == "INVALID_ARGUMENT"


def test_whole_gpu_is_no_mig_device(device: Any) -> None:
    assert not pynvml.nvmlDeviceIsMigDeviceHandle(device).value
    unsupported = "NOT_SUPPORTED"
    assert nvml_rig.refusal(pynvml.nvmlDeviceGetGpuInstanceId, device) == unsupported
    assert nvml_rig.refusal(pynvml.nvmlDeviceGetComputeInstanceId, device) == unsupported
    assert nvml_rig.refusal(pynvml.nvmlDeviceGetAttributes, device) == unsupported
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle
    assert nvml_rig.refusal(parent, device) == "INVALID_ARGUMENT"


def test_mig_uuids_follow_from_the_slot_and_survive_their_neighbours(device: Any) -> None:
    instance, compute = nvml_rig.filled(device, 9)

    def uuid() -> str:
        mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 0)
        found = pynvml.nvmlDeviceGetHandleByUUID(pynvml.nvmlDeviceGetUUID(mig))
        return str(pynvml.nvmlDeviceGetUUID(found))

    first = uuid()
    assert re.fullmatch(r"MIG-[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-.{12}", first)
    pynvml.nvmlDeviceCreateGpuInstance(device, 19)
    assert uuid() == first
    pynvml.nvmlComputeInstanceDestroy(compute)
    pynvml.nvmlGpuInstanceDestroy(instance)
    again = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(device, 9, nvml_rig.at(4, 4))
    pynvml.nvmlGpuInstanceCreateComputeInstance(again, 2)
    assert uuid() == first


@pytest.mark.parametrize("product", nvml_rig.MIG_CAPABLE, ids=lambda p: p.key)
def test_mig_devices_of_a_full_gpu_have_different_uuids(
    start: nvml_rig.Start, product: hardware.Product
) -> None:
    start(f"2x{product.key}")
    seen = set()
    for index in range(2):
        device = nvml_rig.enabled(index)
        smallest = product.profiles[0]
        for _ in range(smallest.max_instances):
            nvml_rig.filled(device, smallest.profile_id)
        for number in range(smallest.max_instances):
            mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, number)
            seen.add(pynvml.nvmlDeviceGetUUID(mig))
    assert len(seen) == 2 * product.max_instances


def test_processes_are_listed_for_the_gpu_and_for_their_own_mig_device(
    start: nvml_rig.Start,
) -> None:
    library = start()
    device = nvml_rig.enabled()
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(device) == []
    for _ in range(2):
        nvml_rig.filled(device, 19)
    migs = [pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index) for index in range(2)]
    uuids = [pynvml.nvmlDeviceGetUUID(mig) for mig in migs]
    state = library.state
    state.add_client(uuids[0], name="train", pid=77)
    state.add_client(uuids[1], name="serve", pid=78)
    state.add_client(pynvml.nvmlDeviceGetUUID(device), name="whole", pid=79)
    state.add_client(uuids[1], name="dcgm", kind=states.ClientKind.MONITOR)
    for ask in (
        pynvml.nvmlDeviceGetComputeRunningProcesses,
        pynvml.nvmlDeviceGetComputeRunningProcesses_v2,
    ):
        assert [(p.pid, p.gpuInstanceId) for p in ask(device)] == [
            (77, 11),
            (78, 13),
            (79, 0xFFFFFFFF),
        ]
    assert [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(migs[1])] == [78]
    assert pynvml.nvmlDeviceGetGraphicsRunningProcesses(device) == []
    assert pynvml.nvmlSystemGetProcessName(77) == "train"
    assert nvml_rig.refusal(pynvml.nvmlSystemGetProcessName, 1) == "NOT_FOUND"
    assert pynvml.nvmlDeviceGetMemoryInfo(migs[0]).used > 0
