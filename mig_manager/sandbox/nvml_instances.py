"""The C functions about GPU instances and compute instances."""

import ctypes
import operator
from collections.abc import Callable
from typing import Any

import pynvml

from mig_manager.core import model
from mig_manager.sandbox import (
    hardware,
    nvml_calls,
    nvml_driver,
    nvml_memory,
    nvml_mig,
    nvml_model,
    nvml_rules,
)

_registry = nvml_calls.Registry()
FUNCTIONS = _registry.functions
"""By C name."""

_GPU = frozenset({nvml_calls.Kind.GPU})
_GPU_INSTANCE = frozenset({nvml_calls.Kind.GPU_INSTANCE})
_COMPUTE_INSTANCE = frozenset({nvml_calls.Kind.COMPUTE_INSTANCE})


def _price(field: str) -> nvml_calls.Price:
    get: Callable[[nvml_model.Latency], float] = operator.attrgetter(field)

    def price(view: nvml_calls.View, *_: Any) -> float:
        return get(view.node.options.latency)

    return price


@_registry.change(
    "nvmlDeviceCreateGpuInstance",
    takes=nvml_calls.Kind.GPU,
    price=_price("create_gpu_instance_s"),
)
def _create(view: nvml_calls.DeviceView, profile_id: Any, handle: Any) -> nvml_model.GpuState:
    return _create_at(view, profile_id, None, handle)


@_registry.change(
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    takes=nvml_calls.Kind.GPU,
    price=_price("create_gpu_instance_s"),
)
def _create_placed(
    view: nvml_calls.DeviceView, profile_id: Any, placement: Any, handle: Any
) -> nvml_model.GpuState:
    place = _placement(placement, pynvml.c_nvmlGpuInstancePlacement_t)
    return _create_at(view, profile_id, place, handle)


@_registry.change(
    "nvmlGpuInstanceDestroy",
    takes=nvml_calls.Kind.GPU_INSTANCE,
    price=_price("destroy_gpu_instance_s"),
)
def _destroy(view: nvml_calls.DeviceView) -> nvml_model.GpuState:
    return nvml_driver.destroy_gpu_instance(view.now, view.instance)


@_registry.query("nvmlDeviceGetGpuInstances", takes=_GPU)
def _instances(view: nvml_calls.DeviceView, profile_id: Any, handles: Any, count: Any) -> None:
    nvml_driver.require_permission(view.node.options)
    nvml_driver.require_mig(view.now)
    row = view.row(profile_id)
    found = [
        view.session.handle(view.target_of(instance))
        for instance in view.gpu.instances
        if instance.profile_id == row.profile_id
    ]
    _put_handles(found, handles, count)


@_registry.query("nvmlDeviceGetGpuInstanceById", takes=_GPU)
def _instance_by_id(view: nvml_calls.DeviceView, instance_id: Any, handle: Any) -> None:
    nvml_driver.require_permission(view.node.options)
    nvml_driver.require_mig(view.now)
    wanted = nvml_memory.number(instance_id)
    for instance in view.gpu.instances:
        if instance.instance_id == wanted:
            view.put_handle(handle, view.target_of(instance))
            return
    raise nvml_model.Refused(nvml_model.Code.NOT_FOUND)


@_registry.query("nvmlGpuInstanceGetInfo", takes=_GPU_INSTANCE)
def _instance_info(view: nvml_calls.DeviceView, info: Any) -> None:
    target = nvml_memory.struct(info, pynvml.c_nvmlGpuInstanceInfo_t)
    instance = view.instance
    nvml_memory.put_handle(ctypes.byref(target), view.session.handle(view.whole))
    nvml_memory.fill(target, id=instance.instance_id, profileId=instance.profile_id)
    _fill_placement(target.placement, instance.placement)


@_registry.query("nvmlGpuInstanceGetComputeInstanceProfileInfo", takes=_GPU_INSTANCE)
def _compute_profile(
    view: nvml_calls.DeviceView, profile: Any, engine_profile: Any, info: Any
) -> None:
    row = _compute_row(view, profile, engine_profile)
    target = nvml_memory.struct(info, pynvml.c_nvmlComputeInstanceProfileInfo_t)
    nvml_memory.fill(target, **_compute_fields(view.parent, row))


@_registry.query("nvmlGpuInstanceGetComputeInstanceProfileInfoV", takes=_GPU_INSTANCE)
def _compute_profile_v(
    view: nvml_calls.DeviceView, profile: Any, engine_profile: Any, info: Any
) -> None:
    row = _compute_row(view, profile, engine_profile)
    target = nvml_memory.struct(info, pynvml.c_nvmlComputeInstanceProfileInfo_v2_t)
    nvml_memory.require_version(target, pynvml.nvmlComputeInstanceProfileInfo_v2)
    name = f"MIG {nvml_driver.compute_name(view.parent, row.slices)}".encode()
    nvml_memory.fill(target, name=name, **_compute_fields(view.parent, row))


@_registry.query("nvmlGpuInstanceGetComputeInstancePossiblePlacements", takes=_GPU_INSTANCE)
def _compute_placements(
    view: nvml_calls.DeviceView, profile_id: Any, places: Any, count: Any
) -> None:
    nvml_driver.require_permission(view.node.options)
    row = _compute_row(view, profile_id)
    nvml_memory.put_placements(
        row.placements, pynvml.c_nvmlComputeInstancePlacement_t, places, count
    )


@_registry.query("nvmlGpuInstanceGetComputeInstanceRemainingCapacity", takes=_GPU_INSTANCE)
def _compute_capacity(view: nvml_calls.DeviceView, profile_id: Any, count: Any) -> None:
    row = _compute_row(view, profile_id)
    room = nvml_rules.room(row.placements, nvml_driver.compute_taken(view.instance))
    nvml_memory.put(count, ctypes.c_uint, room)


@_registry.change(
    "nvmlGpuInstanceCreateComputeInstance",
    takes=nvml_calls.Kind.GPU_INSTANCE,
    price=_price("create_compute_instance_s"),
)
def _create_compute(
    view: nvml_calls.DeviceView, profile_id: Any, handle: Any
) -> nvml_model.GpuState:
    return _create_compute_at(view, profile_id, None, handle)


@_registry.change(
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
    takes=nvml_calls.Kind.GPU_INSTANCE,
    price=_price("create_compute_instance_s"),
)
def _create_compute_placed(
    view: nvml_calls.DeviceView, profile_id: Any, placement: Any, handle: Any
) -> nvml_model.GpuState:
    place = _placement(placement, pynvml.c_nvmlComputeInstancePlacement_t)
    return _create_compute_at(view, profile_id, place, handle)


@_registry.change(
    "nvmlComputeInstanceDestroy",
    takes=nvml_calls.Kind.COMPUTE_INSTANCE,
    price=_price("destroy_compute_instance_s"),
)
def _destroy_compute(view: nvml_calls.DeviceView) -> nvml_model.GpuState:
    return nvml_driver.destroy_compute_instance(view.now, view.instance, view.compute)


@_registry.query("nvmlGpuInstanceGetComputeInstances", takes=_GPU_INSTANCE)
def _computes(view: nvml_calls.DeviceView, profile_id: Any, handles: Any, count: Any) -> None:
    nvml_driver.require_permission(view.node.options)
    row = _compute_row(view, profile_id)
    found = [
        view.session.handle(view.target_within(compute))
        for compute in view.instance.compute_instances
        if compute.profile_id == row.profile_id
    ]
    _put_handles(found, handles, count)


@_registry.query("nvmlGpuInstanceGetComputeInstanceById", takes=_GPU_INSTANCE)
def _compute_by_id(view: nvml_calls.DeviceView, compute_id: Any, handle: Any) -> None:
    nvml_driver.require_permission(view.node.options)
    wanted = nvml_memory.number(compute_id)
    for compute in view.instance.compute_instances:
        if compute.instance_id == wanted:
            view.put_handle(handle, view.target_within(compute))
            return
    raise nvml_model.Refused(nvml_model.Code.NOT_FOUND)


@_registry.query("nvmlComputeInstanceGetInfo_v2", takes=_COMPUTE_INSTANCE)
def _compute_info(view: nvml_calls.DeviceView, info: Any) -> None:
    kind = pynvml.c_nvmlComputeInstanceInfo_t
    target = nvml_memory.struct(info, kind)
    nvml_memory.put_handle(ctypes.byref(target), view.session.handle(view.whole))
    nvml_memory.put_handle(
        ctypes.byref(target, kind.gpuInstance.offset),
        view.session.handle(view.target_of(view.instance)),
    )
    nvml_memory.fill(target, id=view.compute.instance_id, profileId=view.compute.profile_id)
    _fill_placement(target.placement, view.compute.placement)


def _create_at(
    view: nvml_calls.DeviceView, profile_id: Any, place: model.Placement | None, handle: Any
) -> nvml_model.GpuState:
    number = nvml_memory.number(profile_id)
    gpu, instance = nvml_driver.create_gpu_instance(view.now, number, place)
    view.put_handle(handle, view.target_of(instance))
    return gpu


def _create_compute_at(
    view: nvml_calls.DeviceView, profile_id: Any, place: model.Placement | None, handle: Any
) -> nvml_model.GpuState:
    number = nvml_memory.number(profile_id)
    gpu, compute = nvml_driver.create_compute_instance(view.now, view.instance, number, place)
    view.put_handle(handle, view.target_within(compute))
    return gpu


def _compute_row(
    view: nvml_calls.DeviceView, profile_id: Any, engine_profile: Any = 0
) -> hardware.ComputeProfile:
    if nvml_memory.number(engine_profile) != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
        raise nvml_model.Refused(nvml_model.Code.INVALID_ARGUMENT)
    return nvml_driver.compute_row(view.board, view.instance, nvml_memory.number(profile_id))


def _placement(reference: Any, kind: Any) -> model.Placement:
    source = nvml_memory.struct(reference, kind)
    return model.Placement(source.start, source.size)


def _fill_placement(target: Any, placement: model.Placement) -> None:
    nvml_memory.fill(target, start=placement.start, size=placement.size)


def _put_handles(found: list[int], handles: Any, count: Any) -> None:
    nvml_memory.put_all(handles, ctypes.c_void_p, found)
    nvml_memory.put(count, ctypes.c_uint, len(found))


def _compute_fields(parent: hardware.GpuProfile, row: hardware.ComputeProfile) -> dict[str, int]:
    return {
        "id": row.profile_id,
        "sliceCount": row.slices,
        "instanceCount": row.max_instances,
        "multiprocessorCount": row.multiprocessors,
        **nvml_mig.shared_engines(parent),
    }
