"""GPU instances and compute instances, through pynvml, in the driver's check order."""

import ctypes
import dataclasses
from typing import Any

import pynvml
import pytest

from mig_manager.sandbox.driver import states
from tests.sandbox import nvml_rig


def test_profiles_are_enumerated_by_enum_up_to_the_drivers_count(start: nvml_rig.Start) -> None:
    start("A100", profile_enum_count=17)
    device = nvml_rig.enabled()
    ask = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    assert [ask(device, enum).id for enum in (0, 1, 2, 3, 4, 7, 9)] == [19, 14, 9, 5, 0, 20, 15]
    assert nvml_rig.refusal(ask, device, 5) == "NOT_SUPPORTED"
    assert nvml_rig.refusal(ask, device, 17) == "INVALID_ARGUMENT"
    assert ask(device, 7).name == "MIG 1g.5gb+me"
    by_id = pynvml.nvmlDeviceGetGpuInstanceProfileInfoById
    assert by_id(device, 9).sliceCount == 3
    assert nvml_rig.refusal(by_id, device, nvml_rig.UNKNOWN) == "INVALID_ARGUMENT"


def test_placements_do_not_depend_on_what_is_there_but_capacity_does(device: Any) -> None:
    room = pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity
    assert room(device, 19) == 7
    nvml_rig.filled(device, 9)
    assert nvml_rig.placements(device, 9) == [(0, 4), (4, 4)]
    assert (room(device, 19), room(device, 9), room(device, 0)) == (4, 1, 0)
    assert nvml_rig.refusal(room, device, nvml_rig.UNKNOWN) == "INVALID_ARGUMENT"


def test_instance_is_created_where_it_is_asked_for(device: Any) -> None:
    instance = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(device, 9, nvml_rig.at(0, 4))
    info = pynvml.nvmlGpuInstanceGetInfo(instance)
    assert (info.id, info.profileId) == (1, 9)
    assert (info.placement.start, info.placement.size) == (0, 4)
    assert pynvml.nvmlDeviceGetIndex(info.device) == 0
    create = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement
    assert nvml_rig.refusal(create, device, 9, nvml_rig.at(0, 4)) == "INSUFFICIENT_RESOURCES"
    assert nvml_rig.refusal(create, device, 9, nvml_rig.at(2, 4)) == "INVALID_ARGUMENT"
    assert nvml_rig.refusal(create, device, 9, None) == "INVALID_ARGUMENT"
    assert (
        nvml_rig.refusal(create, device, nvml_rig.UNKNOWN, nvml_rig.at(0, 4)) == "INVALID_ARGUMENT"
    )


def test_misuse_that_would_crash_the_process_is_caught(device: Any) -> None:
    by_value = pynvml.c_nvmlGpuInstancePlacement_t(0, 4)
    with pytest.raises(TypeError, match="byref"):
        pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(device, 9, by_value)
    for _ in range(2):
        pynvml.nvmlDeviceCreateGpuInstance(device, 19)
    short = (pynvml.c_nvmlGpuInstance_t * 1)()
    with pytest.raises(BufferError):
        pynvml.nvmlDeviceGetGpuInstances(device, 19, short, ctypes.byref(ctypes.c_uint()))


def test_instances_are_listed_by_profile_and_found_by_id(device: Any) -> None:
    for profile_id in (19, 9, 19):
        pynvml.nvmlDeviceCreateGpuInstance(device, profile_id)
    count = ctypes.c_uint()
    handles = (pynvml.c_nvmlGpuInstance_t * 7)()
    pynvml.nvmlDeviceGetGpuInstances(device, 19, handles, ctypes.byref(count))
    ids = [pynvml.nvmlGpuInstanceGetInfo(handles[i]).id for i in range(count.value)]
    assert ids == [11, 13]
    found = pynvml.nvmlDeviceGetGpuInstanceById(device, 1)
    assert pynvml.nvmlGpuInstanceGetInfo(found).profileId == 9
    by_id, listing = pynvml.nvmlDeviceGetGpuInstanceById, pynvml.nvmlDeviceGetGpuInstances
    assert nvml_rig.refusal(by_id, device, 5) == "NOT_FOUND"
    assert (
        nvml_rig.refusal(listing, device, nvml_rig.UNKNOWN, handles, ctypes.byref(count))
        == "INVALID_ARGUMENT"
    )


def test_first_instance_of_a_gpu_in_use_is_refused_and_a_later_one_is_not(
    start: nvml_rig.Start,
) -> None:
    library = start()
    device = nvml_rig.enabled()
    uuid = pynvml.nvmlDeviceGetUUID(device)
    create = pynvml.nvmlDeviceCreateGpuInstance
    library.state.add_client(uuid, name="dcgm", kind=states.ClientKind.MONITOR)
    create(device, 19)
    library.state.add_client(uuid, name="nsys")
    create(device, 19)
    for instance_id in (11, 13):
        found = pynvml.nvmlDeviceGetGpuInstanceById(device, instance_id)
        pynvml.nvmlGpuInstanceDestroy(found)
    assert nvml_rig.refusal(create, device, 19) == "IN_USE"


def test_checks_come_in_the_drivers_order(start: nvml_rig.Start) -> None:
    library = start(permitted=False)
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    uuid = pynvml.nvmlDeviceGetUUID(device)
    create = pynvml.nvmlDeviceCreateGpuInstance

    def permit(*, permitted: bool) -> None:
        options = library.state.read().options
        library.state.set_options(dataclasses.replace(options, permitted=permitted))

    assert nvml_rig.refusal(create, device, nvml_rig.UNKNOWN) == "NO_PERMISSION"
    permit(permitted=True)
    assert nvml_rig.refusal(create, device, nvml_rig.UNKNOWN) == "NOT_SUPPORTED"
    nvml_rig.enabled()
    library.state.add_client(uuid, name="train")
    assert nvml_rig.refusal(create, device, nvml_rig.UNKNOWN) == "INVALID_ARGUMENT"
    assert nvml_rig.refusal(create, device, 0) == "IN_USE"


def test_without_permission_nothing_is_changed_or_listed(start: nvml_rig.Start) -> None:
    library = start()
    device = nvml_rig.enabled()
    instance, compute = nvml_rig.filled(device)
    options = library.state.read().options
    library.state.set_options(dataclasses.replace(options, permitted=False))
    count = ctypes.byref(ctypes.c_uint())
    handles = (pynvml.c_nvmlGpuInstance_t * 2)()
    for call, *arguments in (
        (pynvml.nvmlDeviceSetMigMode, device, 0),
        (pynvml.nvmlDeviceCreateGpuInstance, device, 9),
        (pynvml.nvmlGpuInstanceCreateComputeInstance, instance, 0),
        (pynvml.nvmlComputeInstanceDestroy, compute),
        (pynvml.nvmlGpuInstanceDestroy, instance),
        (pynvml.nvmlDeviceGetGpuInstances, device, 9, handles, count),
        (pynvml.nvmlDeviceGetGpuInstancePossiblePlacements, device, 9, None, count),
    ):
        assert nvml_rig.refusal(call, *arguments) == "NO_PERMISSION"
    assert pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 0)


def test_instance_with_a_compute_instance_is_not_destroyed(start: nvml_rig.Start) -> None:
    start()
    instance, compute = nvml_rig.filled(nvml_rig.enabled())
    destroy = pynvml.nvmlGpuInstanceDestroy
    assert nvml_rig.refusal(destroy, instance) == "IN_USE"
    pynvml.nvmlComputeInstanceDestroy(compute)
    destroy(instance)
    assert nvml_rig.refusal(destroy, instance) == "INVALID_ARGUMENT"
    assert nvml_rig.refusal(pynvml.nvmlComputeInstanceDestroy, compute) == "INVALID_ARGUMENT"


@pytest.mark.parametrize("kind", list(states.ClientKind))
def test_an_instance_in_use_is_not_destroyed(
    start: nvml_rig.Start, kind: states.ClientKind
) -> None:
    library = start()
    device = nvml_rig.enabled()
    _, compute = nvml_rig.filled(device)
    mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 0)
    client = library.state.add_client(pynvml.nvmlDeviceGetUUID(mig), name="train", kind=kind)
    destroy = pynvml.nvmlComputeInstanceDestroy
    assert nvml_rig.refusal(destroy, compute) == "IN_USE"
    library.state.remove_client(client)
    destroy(compute)


def test_handle_of_a_destroyed_instance_is_not_that_of_its_successor(device: Any) -> None:
    old = pynvml.nvmlDeviceCreateGpuInstance(device, 9)
    number = pynvml.nvmlGpuInstanceGetInfo(old).id
    pynvml.nvmlGpuInstanceDestroy(old)
    new = pynvml.nvmlDeviceCreateGpuInstance(device, 9)
    assert pynvml.nvmlGpuInstanceGetInfo(new).id == number
    assert nvml_rig.refusal(pynvml.nvmlGpuInstanceGetInfo, old) == "INVALID_ARGUMENT"


def test_compute_instances_share_their_gpu_instance(device: Any) -> None:
    instance = pynvml.nvmlDeviceCreateGpuInstance(device, 9)
    ask = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo
    half = ask(instance, 1, 0)
    assert (half.id, half.name, half.sharedDecoderCount) == (1, "MIG 2c.3g.20gb", 2)
    assert ask(instance, 2, 0, version=1).multiprocessorCount == 42
    assert nvml_rig.refusal(ask, instance, 8, 0) == "NOT_SUPPORTED"
    assert nvml_rig.refusal(ask, instance, 9, 0) == "INVALID_ARGUMENT"
    assert nvml_rig.refusal(ask, instance, 0, 1) == "INVALID_ARGUMENT"
    room = pynvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity
    assert room(instance, 0) == 3
    create = pynvml.nvmlGpuInstanceCreateComputeInstance
    create(instance, 1)
    assert (room(instance, 0), room(instance, 1)) == (1, 0)
    assert nvml_rig.refusal(create, instance, 2) == "INSUFFICIENT_RESOURCES"
    assert nvml_rig.refusal(create, instance, 4) == "NOT_SUPPORTED"


def test_compute_instance_is_created_where_it_is_asked_for(device: Any) -> None:
    instance = pynvml.nvmlDeviceCreateGpuInstance(device, 9)
    count = ctypes.c_uint()
    placements = (pynvml.c_nvmlComputeInstancePlacement_t * 3)()
    ask = pynvml.nvmlGpuInstanceGetComputeInstancePossiblePlacements
    ask(instance, 0, placements, ctypes.byref(count))
    assert [place.start for place in placements] == [0, 1, 2]
    create = pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement
    made = create(instance, 0, ctypes.byref(placements[1]))
    info = pynvml.nvmlComputeInstanceGetInfo(made)
    assert (info.id, info.placement.start, info.placement.size) == (0, 1, 1)
    assert pynvml.nvmlGpuInstanceGetInfo(info.gpuInstance).profileId == 9
    assert (
        nvml_rig.refusal(create, instance, 0, ctypes.byref(placements[1]))
        == "INSUFFICIENT_RESOURCES"
    )
    found = pynvml.nvmlGpuInstanceGetComputeInstanceById(instance, 0)
    assert pynvml.nvmlComputeInstanceGetInfo(found).placement.start == 1
    by_id = pynvml.nvmlGpuInstanceGetComputeInstanceById
    assert nvml_rig.refusal(by_id, instance, 1) == "NOT_FOUND"
    handles = (pynvml.c_nvmlComputeInstance_t * 3)()
    pynvml.nvmlGpuInstanceGetComputeInstances(instance, 0, handles, ctypes.byref(count))
    assert count.value == 1
