"""GPU instances and compute instances, through pynvml, in the driver's check order."""

import ctypes
import dataclasses
from typing import Any

import pynvml
import pytest

from mig_manager.sandbox.driver import states
from tests.rigs.node import nvml_rig

INVALID = "INVALID_ARGUMENT"


def test_profiles_are_enumerated_by_enum_up_to_the_drivers_count(start: nvml_rig.Start) -> None:
    start("A100", profile_enum_count=17)
    device = nvml_rig.gpu_with_mig()
    ask = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    assert [ask(device, enum).id for enum in (0, 1, 2, 3, 4, 7, 9)] == [19, 14, 9, 5, 0, 20, 15]
    assert nvml_rig.refusal(ask, device, 5) == "NOT_SUPPORTED"
    assert nvml_rig.refusal(ask, device, 17) == INVALID
    assert ask(device, 7).name == "MIG 1g.5gb+me"


def test_an_instance_is_created_at_its_placement_and_listed(device: Any) -> None:
    create = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement
    info = pynvml.nvmlGpuInstanceGetInfo(create(device, 9, nvml_rig.at(0, 4)))
    assert (info.id, info.profileId) == (1, 9)
    assert (info.placement.start, info.placement.size) == (0, 4)
    assert pynvml.nvmlDeviceGetMinorNumber(info.device) == 0
    assert nvml_rig.placements(device, 9) == [(0, 4), (4, 4)]
    assert nvml_rig.refusal(create, device, 9, nvml_rig.at(0, 4)) == "INSUFFICIENT_RESOURCES"
    for profile_id, place in (
        (9, nvml_rig.at(2, 4)),
        (9, None),
        (nvml_rig.UNKNOWN, nvml_rig.at(0, 4)),
    ):
        assert nvml_rig.refusal(create, device, profile_id, place) == INVALID
    for _ in range(2):
        pynvml.nvmlDeviceCreateGpuInstance(device, 19)
    count = ctypes.c_uint()
    handles = (pynvml.c_nvmlGpuInstance_t * 7)()
    listing = pynvml.nvmlDeviceGetGpuInstances
    listing(device, 19, handles, ctypes.byref(count))
    listed_ids = [pynvml.nvmlGpuInstanceGetInfo(handles[i]).id for i in range(count.value)]
    assert listed_ids == [11, 13]
    by_id = pynvml.nvmlDeviceGetGpuInstanceById
    assert pynvml.nvmlGpuInstanceGetInfo(by_id(device, 1)).profileId == 9
    assert nvml_rig.refusal(by_id, device, 5) == "NOT_FOUND"
    unknown = nvml_rig.UNKNOWN
    assert nvml_rig.refusal(listing, device, unknown, handles, ctypes.byref(count)) == INVALID


def test_misuse_that_would_crash_the_process_is_caught(device: Any) -> None:
    by_value = pynvml.c_nvmlGpuInstancePlacement_t(0, 4)
    with pytest.raises(TypeError, match="byref"):
        pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(device, 9, by_value)
    for _ in range(2):
        pynvml.nvmlDeviceCreateGpuInstance(device, 19)
    short = (pynvml.c_nvmlGpuInstance_t * 1)()
    with pytest.raises(BufferError):
        pynvml.nvmlDeviceGetGpuInstances(device, 19, short, ctypes.byref(ctypes.c_uint()))


def test_first_instance_of_a_gpu_in_use_is_refused_and_a_later_one_is_not(
    start: nvml_rig.Start,
) -> None:
    state = start().state
    device = nvml_rig.gpu_with_mig()
    uuid = pynvml.nvmlDeviceGetUUID(device)
    create = pynvml.nvmlDeviceCreateGpuInstance
    state.add_client(uuid, name="dcgm", kind=states.ClientKind.MONITOR)
    first = create(device, 19)
    state.add_client(uuid, name="nsys")
    for instance in (first, create(device, 19)):
        pynvml.nvmlGpuInstanceDestroy(instance)
    assert nvml_rig.refusal(create, device, 19) == "IN_USE"


def test_checks_are_in_the_drivers_order_and_need_permission(start: nvml_rig.Start) -> None:
    state = start().state
    device = nvml_rig.handle()
    create = pynvml.nvmlDeviceCreateGpuInstance

    def permit(*, permitted: bool) -> None:
        options = state.read().options
        state.set_options(dataclasses.replace(options, permitted=permitted))

    permit(permitted=False)
    assert nvml_rig.refusal(create, device, nvml_rig.UNKNOWN) == "NO_PERMISSION"
    permit(permitted=True)
    assert nvml_rig.refusal(create, device, nvml_rig.UNKNOWN) == "NOT_SUPPORTED"
    nvml_rig.gpu_with_mig()
    client = state.add_client(pynvml.nvmlDeviceGetUUID(device), name="train")
    assert nvml_rig.refusal(create, device, nvml_rig.UNKNOWN) == INVALID
    assert nvml_rig.refusal(create, device, 0) == "IN_USE"
    state.remove_client(client)
    instance, compute = nvml_rig.create_instances(device)
    permit(permitted=False)
    count = ctypes.byref(ctypes.c_uint())
    handles = (pynvml.c_nvmlGpuInstance_t * 2)()
    for call, *arguments in (
        (pynvml.nvmlDeviceSetMigMode, device, 0),
        (pynvml.nvmlGpuInstanceCreateComputeInstance, instance, 0),
        (pynvml.nvmlComputeInstanceDestroy, compute),
        (pynvml.nvmlGpuInstanceDestroy, instance),
        (pynvml.nvmlDeviceGetGpuInstances, device, 9, handles, count),
        (pynvml.nvmlDeviceGetGpuInstancePossiblePlacements, device, 9, None, count),
    ):
        assert nvml_rig.refusal(call, *arguments) == "NO_PERMISSION"
    assert pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 0)


@pytest.mark.parametrize("kind", list(states.ClientKind))
def test_instance_in_use_is_kept_and_a_destroyed_ones_handle_is_void(
    start: nvml_rig.Start, kind: states.ClientKind
) -> None:
    state = start().state
    device = nvml_rig.gpu_with_mig()
    instance, compute = nvml_rig.create_instances(device)
    mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 0)
    client = state.add_client(pynvml.nvmlDeviceGetUUID(mig), name="train", kind=kind)
    number = pynvml.nvmlGpuInstanceGetInfo(instance).id
    destroy, destroy_compute = pynvml.nvmlGpuInstanceDestroy, pynvml.nvmlComputeInstanceDestroy
    assert nvml_rig.refusal(destroy_compute, compute) == "IN_USE"
    state.remove_client(client)
    assert nvml_rig.refusal(destroy, instance) == "IN_USE"
    destroy_compute(compute)
    assert nvml_rig.refusal(destroy_compute, compute) == INVALID
    destroy(instance)
    new = pynvml.nvmlDeviceCreateGpuInstance(device, 9)
    assert pynvml.nvmlGpuInstanceGetInfo(new).id == number
    assert nvml_rig.refusal(pynvml.nvmlGpuInstanceGetInfo, instance) == INVALID


def test_compute_instances_share_their_gpu_instance(device: Any) -> None:
    instance = pynvml.nvmlDeviceCreateGpuInstance(device, 9)
    ask = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo
    half = ask(instance, 1, 0)
    assert (half.id, half.name, half.sharedDecoderCount) == (1, "MIG 2c.3g.20gb", 2)
    assert ask(instance, 2, 0, version=1).multiprocessorCount == 42
    assert nvml_rig.refusal(ask, instance, 8, 0) == "NOT_SUPPORTED"
    assert nvml_rig.refusal(ask, instance, 9, 0) == INVALID
    assert nvml_rig.refusal(ask, instance, 0, 1) == INVALID
    create = pynvml.nvmlGpuInstanceCreateComputeInstance
    create(instance, 1)
    assert nvml_rig.refusal(create, instance, 2) == "INSUFFICIENT_RESOURCES"
    assert nvml_rig.refusal(create, instance, 4) == "NOT_SUPPORTED"


def test_compute_instance_is_created_at_its_placement(device: Any) -> None:
    instance = pynvml.nvmlDeviceCreateGpuInstance(device, 9)
    count = ctypes.c_uint()
    placements = (pynvml.c_nvmlComputeInstancePlacement_t * 3)()
    ask = pynvml.nvmlGpuInstanceGetComputeInstancePossiblePlacements
    ask(instance, 0, placements, ctypes.byref(count))
    assert [place.start for place in placements] == [0, 1, 2]
    create = pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement
    info = pynvml.nvmlComputeInstanceGetInfo(create(instance, 0, ctypes.byref(placements[1])))
    assert (info.id, info.placement.start, info.placement.size) == (0, 1, 1)
    assert pynvml.nvmlGpuInstanceGetInfo(info.gpuInstance).profileId == 9
    again = nvml_rig.refusal(create, instance, 0, ctypes.byref(placements[1]))
    assert again == "INSUFFICIENT_RESOURCES"
    by_id = pynvml.nvmlGpuInstanceGetComputeInstanceById
    assert pynvml.nvmlComputeInstanceGetInfo(by_id(instance, 0)).placement.start == 1
    assert nvml_rig.refusal(by_id, instance, 1) == "NOT_FOUND"
    handles = (pynvml.c_nvmlComputeInstance_t * 3)()
    pynvml.nvmlGpuInstanceGetComputeInstances(instance, 0, handles, ctypes.byref(count))
    assert count.value == 1
