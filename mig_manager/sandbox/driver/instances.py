"""The C functions about GPU instances and compute instances."""

import ctypes
import operator
from collections.abc import Callable
from typing import Any

import pynvml

from mig_manager.catalogue import hardware
from mig_manager.core import model
from mig_manager.sandbox.driver import calls, memory, mig, rules, states, transitions

_registry = calls.Registry()
FUNCTIONS = _registry.functions
"""By C name."""

_GPU = frozenset({calls.Kind.GPU})
_GPU_INSTANCE = frozenset({calls.Kind.GPU_INSTANCE})
_COMPUTE_INSTANCE = frozenset({calls.Kind.COMPUTE_INSTANCE})


def _price(field: str) -> calls.Price:
    get: Callable[[states.Latency], float] = operator.attrgetter(field)

    def price(view: calls.View, *_: Any) -> float:
        return get(view.node.options.latency)

    return price


@_registry.change(
    "nvmlDeviceCreateGpuInstance",
    takes=calls.Kind.GPU,
    price=_price("create_gpu_instance_s"),
)
def _create(view: calls.DeviceView, profile_id: Any, handle: Any) -> states.GpuState:
    return _create_at(view, profile_id, None, handle)


@_registry.change(
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    takes=calls.Kind.GPU,
    price=_price("create_gpu_instance_s"),
)
def _create_placed(
    view: calls.DeviceView, profile_id: Any, placement: Any, handle: Any
) -> states.GpuState:
    place = _placement(placement, pynvml.c_nvmlGpuInstancePlacement_t)
    return _create_at(view, profile_id, place, handle)


@_registry.change(
    "nvmlGpuInstanceDestroy",
    takes=calls.Kind.GPU_INSTANCE,
    price=_price("destroy_gpu_instance_s"),
)
def _destroy(view: calls.DeviceView) -> states.GpuState:
    return transitions.destroy_gpu_instance(view.now, view.instance)


@_registry.query("nvmlDeviceGetGpuInstances", takes=_GPU)
def _instances(view: calls.DeviceView, profile_id: Any, handles: Any, count: Any) -> None:
    transitions.require_permission(view.node.options)
    transitions.require_mig(view.now)
    row = view.row(profile_id)
    found = [
        view.session.handle(view.target_of(instance))
        for instance in view.gpu.instances
        if instance.profile_id == row.profile_id
    ]
    _put_handles(found, handles, count)


@_registry.query("nvmlDeviceGetGpuInstanceById", takes=_GPU)
def _instance_by_id(view: calls.DeviceView, instance_id: Any, handle: Any) -> None:
    transitions.require_permission(view.node.options)
    transitions.require_mig(view.now)
    wanted = memory.number(instance_id)
    for instance in view.gpu.instances:
        if instance.instance_id == wanted:
            view.put_handle(handle, view.target_of(instance))
            return
    raise states.Refused(states.Code.NOT_FOUND)


@_registry.query("nvmlGpuInstanceGetInfo", takes=_GPU_INSTANCE)
def _instance_info(view: calls.DeviceView, info: Any) -> None:
    target = memory.struct(info, pynvml.c_nvmlGpuInstanceInfo_t)
    instance = view.instance
    memory.put_handle(ctypes.byref(target), view.session.handle(view.whole))
    memory.fill(target, id=instance.instance_id, profileId=instance.profile_id)
    _fill_placement(target.placement, instance.placement)


@_registry.query("nvmlGpuInstanceGetComputeInstanceProfileInfo", takes=_GPU_INSTANCE)
def _compute_profile(view: calls.DeviceView, profile: Any, engine_profile: Any, info: Any) -> None:
    row = _compute_row(view, profile, engine_profile)
    target = memory.struct(info, pynvml.c_nvmlComputeInstanceProfileInfo_t)
    memory.fill(target, **_compute_fields(view.parent, row))


@_registry.query("nvmlGpuInstanceGetComputeInstanceProfileInfoV", takes=_GPU_INSTANCE)
def _compute_profile_v(
    view: calls.DeviceView, profile: Any, engine_profile: Any, info: Any
) -> None:
    row = _compute_row(view, profile, engine_profile)
    target = memory.struct(info, pynvml.c_nvmlComputeInstanceProfileInfo_v2_t)
    memory.require_version(target, pynvml.nvmlComputeInstanceProfileInfo_v2)
    name = f"MIG {transitions.compute_name(view.parent, row.slices)}".encode()
    memory.fill(target, name=name, **_compute_fields(view.parent, row))


@_registry.query("nvmlGpuInstanceGetComputeInstancePossiblePlacements", takes=_GPU_INSTANCE)
def _compute_placements(view: calls.DeviceView, profile_id: Any, places: Any, count: Any) -> None:
    transitions.require_permission(view.node.options)
    row = _compute_row(view, profile_id)
    memory.put_placements(row.placements, pynvml.c_nvmlComputeInstancePlacement_t, places, count)


@_registry.query("nvmlGpuInstanceGetComputeInstanceRemainingCapacity", takes=_GPU_INSTANCE)
def _compute_capacity(view: calls.DeviceView, profile_id: Any, count: Any) -> None:
    row = _compute_row(view, profile_id)
    room = rules.room(row.placements, transitions.compute_taken(view.instance))
    memory.put(count, ctypes.c_uint, room)


@_registry.change(
    "nvmlGpuInstanceCreateComputeInstance",
    takes=calls.Kind.GPU_INSTANCE,
    price=_price("create_compute_instance_s"),
)
def _create_compute(view: calls.DeviceView, profile_id: Any, handle: Any) -> states.GpuState:
    return _create_compute_at(view, profile_id, None, handle)


@_registry.change(
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
    takes=calls.Kind.GPU_INSTANCE,
    price=_price("create_compute_instance_s"),
)
def _create_compute_placed(
    view: calls.DeviceView, profile_id: Any, placement: Any, handle: Any
) -> states.GpuState:
    place = _placement(placement, pynvml.c_nvmlComputeInstancePlacement_t)
    return _create_compute_at(view, profile_id, place, handle)


@_registry.change(
    "nvmlComputeInstanceDestroy",
    takes=calls.Kind.COMPUTE_INSTANCE,
    price=_price("destroy_compute_instance_s"),
)
def _destroy_compute(view: calls.DeviceView) -> states.GpuState:
    return transitions.destroy_compute_instance(view.now, view.instance, view.compute)


@_registry.query("nvmlGpuInstanceGetComputeInstances", takes=_GPU_INSTANCE)
def _computes(view: calls.DeviceView, profile_id: Any, handles: Any, count: Any) -> None:
    transitions.require_permission(view.node.options)
    row = _compute_row(view, profile_id)
    found = [
        view.session.handle(view.target_within(compute))
        for compute in view.instance.compute_instances
        if compute.profile_id == row.profile_id
    ]
    _put_handles(found, handles, count)


@_registry.query("nvmlGpuInstanceGetComputeInstanceById", takes=_GPU_INSTANCE)
def _compute_by_id(view: calls.DeviceView, compute_id: Any, handle: Any) -> None:
    transitions.require_permission(view.node.options)
    wanted = memory.number(compute_id)
    for compute in view.instance.compute_instances:
        if compute.instance_id == wanted:
            view.put_handle(handle, view.target_within(compute))
            return
    raise states.Refused(states.Code.NOT_FOUND)


@_registry.query("nvmlComputeInstanceGetInfo_v2", takes=_COMPUTE_INSTANCE)
def _compute_info(view: calls.DeviceView, info: Any) -> None:
    kind = pynvml.c_nvmlComputeInstanceInfo_t
    target = memory.struct(info, kind)
    memory.put_handle(ctypes.byref(target), view.session.handle(view.whole))
    memory.put_handle(
        ctypes.byref(target, kind.gpuInstance.offset),
        view.session.handle(view.target_of(view.instance)),
    )
    memory.fill(target, id=view.compute.instance_id, profileId=view.compute.profile_id)
    _fill_placement(target.placement, view.compute.placement)


def _create_at(
    view: calls.DeviceView, profile_id: Any, place: model.Placement | None, handle: Any
) -> states.GpuState:
    number = memory.number(profile_id)
    gpu, instance = transitions.create_gpu_instance(view.now, number, place)
    view.put_handle(handle, view.target_of(instance))
    return gpu


def _create_compute_at(
    view: calls.DeviceView, profile_id: Any, place: model.Placement | None, handle: Any
) -> states.GpuState:
    number = memory.number(profile_id)
    gpu, compute = transitions.create_compute_instance(view.now, view.instance, number, place)
    view.put_handle(handle, view.target_within(compute))
    return gpu


def _compute_row(
    view: calls.DeviceView, profile_id: Any, engine_profile: Any = 0
) -> hardware.ComputeProfile:
    if memory.number(engine_profile) != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    return transitions.compute_row(view.board, view.instance, memory.number(profile_id))


def _placement(reference: Any, kind: Any) -> model.Placement:
    source = memory.struct(reference, kind)
    return model.Placement(source.start, source.size)


def _fill_placement(target: Any, placement: model.Placement) -> None:
    memory.fill(target, start=placement.start, size=placement.size)


def _put_handles(found: list[int], handles: Any, count: Any) -> None:
    memory.put_all(handles, ctypes.c_void_p, found)
    memory.put(count, ctypes.c_uint, len(found))


def _compute_fields(parent: hardware.GpuProfile, row: hardware.ComputeProfile) -> dict[str, int]:
    return {
        "id": row.profile_id,
        "sliceCount": row.slices,
        "instanceCount": row.max_instances,
        "multiprocessorCount": row.multiprocessors,
        **mig.shared_engines(parent),
    }
