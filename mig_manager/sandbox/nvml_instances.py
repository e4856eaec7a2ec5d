"""The C functions about MIG: mode, profiles, GPU instances, compute instances, MIG devices."""

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
    nvml_model,
    nvml_rules,
)

_registry = nvml_calls.Registry()
FUNCTIONS = _registry.functions
"""By C name."""

_GPU = frozenset({nvml_calls.Kind.GPU})
_MIG = frozenset({nvml_calls.Kind.MIG_DEVICE})
_GPU_INSTANCE = frozenset({nvml_calls.Kind.GPU_INSTANCE})
_COMPUTE_INSTANCE = frozenset({nvml_calls.Kind.COMPUTE_INSTANCE})
_GRAPHICS_CAPABILITY = 2


def _price(field: str) -> nvml_calls.Price:
    get: Callable[[nvml_model.Latency], float] = operator.attrgetter(field)

    def price(view: nvml_calls.View, *_: Any) -> float:
        return get(view.node.options.latency)

    return price


def _mode_price(view: nvml_calls.DeviceView, mode: Any, _: Any) -> float:
    latency = view.node.options.latency
    if bool(nvml_memory.number(mode)) is view.gpu.is_enabled:
        return latency.query_s
    if view.board.product.mode_needs_reset:
        return latency.mode_with_reset_s
    return latency.mode_without_reset_s


@_registry.query("nvmlDeviceGetMigMode", takes=_GPU)
def _get_mode(view: nvml_calls.DeviceView, current: Any, pending: Any) -> None:
    if not view.board.product.is_mig_capable:
        raise nvml_model.Refused(nvml_model.Code.NOT_SUPPORTED)
    nvml_memory.put(current, ctypes.c_uint, int(view.gpu.is_enabled))
    nvml_memory.put(pending, ctypes.c_uint, int(view.gpu.is_pending))


@_registry.change("nvmlDeviceSetMigMode", takes=nvml_calls.Kind.GPU, price=_mode_price)
def _set_mode(view: nvml_calls.DeviceView, mode: Any, activation: Any) -> nvml_model.GpuState:
    gpu, status = nvml_driver.set_mode(view.now, nvml_memory.number(mode))
    nvml_memory.put(activation, ctypes.c_uint, status)
    return gpu


@_registry.query("nvmlDeviceGetGpuInstanceProfileInfo", takes=_GPU)
def _profile_info(view: nvml_calls.DeviceView, profile: Any, info: Any) -> None:
    row = _row_by_enum(view, profile)
    if not view.gpu.is_enabled and not view.node.options.tells_profiles_while_mig_off:
        raise nvml_model.Refused(nvml_model.Code.NOT_SUPPORTED)
    target = nvml_memory.struct(info, pynvml.c_nvmlGpuInstanceProfileInfo_t)
    nvml_memory.fill(target, **_profile_fields(row))


@_registry.query("nvmlDeviceGetGpuInstanceProfileInfoV", takes=_GPU)
def _profile_info_v(view: nvml_calls.DeviceView, profile: Any, info: Any) -> None:
    row = _row_by_enum(view, profile)
    _put_profile_v2(view, row, info)


@_registry.query("nvmlDeviceGetGpuInstanceProfileInfoByIdV", takes=_GPU)
def _profile_info_by_id(view: nvml_calls.DeviceView, profile_id: Any, info: Any) -> None:
    nvml_driver.require_capable(view.now)
    _put_profile_v2(view, _row(view, profile_id), info)


@_registry.query(
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
    "nvmlDeviceGetGpuInstancePossiblePlacements",
    takes=_GPU,
)
def _placements(view: nvml_calls.DeviceView, profile_id: Any, places: Any, count: Any) -> None:
    nvml_driver.require_permission(view.node.options)
    nvml_driver.require_capable(view.now)
    row = _row(view, profile_id)
    _put_placements(row.placements, pynvml.c_nvmlGpuInstancePlacement_t, places, count)


@_registry.query("nvmlDeviceGetGpuInstanceRemainingCapacity", takes=_GPU)
def _capacity(view: nvml_calls.DeviceView, profile_id: Any, count: Any) -> None:
    nvml_driver.require_mig(view.now)
    row = _row(view, profile_id)
    capacity = nvml_driver.gpu_instance_capacity(view.now, row)
    nvml_memory.put(count, ctypes.c_uint, capacity)


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
    row = _row(view, profile_id)
    found = [
        view.session.handle(_gpu_instance(view, instance))
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
            view.put_handle(handle, _gpu_instance(view, instance))
            return
    raise nvml_model.Refused(nvml_model.Code.NOT_FOUND)


@_registry.query("nvmlGpuInstanceGetInfo", takes=_GPU_INSTANCE)
def _instance_info(view: nvml_calls.DeviceView, info: Any) -> None:
    target = nvml_memory.struct(info, pynvml.c_nvmlGpuInstanceInfo_t)
    instance = view.instance
    nvml_memory.put_handle(ctypes.byref(target), view.session.handle(_gpu(view)))
    nvml_memory.fill(target, id=instance.instance_id, profileId=instance.profile_id)
    _fill_placement(target.placement, instance.placement)


@_registry.query("nvmlGpuInstanceGetComputeInstanceProfileInfo", takes=_GPU_INSTANCE)
def _compute_profile(
    view: nvml_calls.DeviceView, profile: Any, engine_profile: Any, info: Any
) -> None:
    row = _compute_row(view, profile, engine_profile)
    target = nvml_memory.struct(info, pynvml.c_nvmlComputeInstanceProfileInfo_t)
    nvml_memory.fill(target, **_compute_fields(_parent(view), row))


@_registry.query("nvmlGpuInstanceGetComputeInstanceProfileInfoV", takes=_GPU_INSTANCE)
def _compute_profile_v(
    view: nvml_calls.DeviceView, profile: Any, engine_profile: Any, info: Any
) -> None:
    row = _compute_row(view, profile, engine_profile)
    target = nvml_memory.struct(info, pynvml.c_nvmlComputeInstanceProfileInfo_v2_t)
    nvml_memory.require_version(target, pynvml.nvmlComputeInstanceProfileInfo_v2)
    name = f"MIG {nvml_driver.compute_name(_parent(view), row.slices)}".encode()
    nvml_memory.fill(target, name=name, **_compute_fields(_parent(view), row))


@_registry.query("nvmlGpuInstanceGetComputeInstancePossiblePlacements", takes=_GPU_INSTANCE)
def _compute_placements(
    view: nvml_calls.DeviceView, profile_id: Any, places: Any, count: Any
) -> None:
    nvml_driver.require_permission(view.node.options)
    row = _compute_row(view, profile_id)
    _put_placements(row.placements, pynvml.c_nvmlComputeInstancePlacement_t, places, count)


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
        view.session.handle(_compute_instance(view, compute))
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
            view.put_handle(handle, _compute_instance(view, compute))
            return
    raise nvml_model.Refused(nvml_model.Code.NOT_FOUND)


@_registry.query("nvmlComputeInstanceGetInfo_v2", takes=_COMPUTE_INSTANCE)
def _compute_info(view: nvml_calls.DeviceView, info: Any) -> None:
    kind = pynvml.c_nvmlComputeInstanceInfo_t
    target = nvml_memory.struct(info, kind)
    nvml_memory.put_handle(ctypes.byref(target), view.session.handle(_gpu(view)))
    nvml_memory.put_handle(
        ctypes.byref(target, kind.gpuInstance.offset),
        view.session.handle(_gpu_instance(view, view.instance)),
    )
    nvml_memory.fill(target, id=view.compute.instance_id, profileId=view.compute.profile_id)
    _fill_placement(target.placement, view.compute.placement)


@_registry.query("nvmlDeviceIsMigDeviceHandle", takes=_GPU | _MIG)
def _is_mig(view: nvml_calls.DeviceView, is_mig: Any) -> None:
    nvml_memory.put(is_mig, ctypes.c_uint, int(not view.is_gpu))


@_registry.query("nvmlDeviceGetGpuInstanceId", takes=_GPU | _MIG)
def _gpu_instance_id(view: nvml_calls.DeviceView, instance_id: Any) -> None:
    _require_mig_device(view, nvml_model.Code.NOT_SUPPORTED)
    nvml_memory.put(instance_id, ctypes.c_uint, view.instance.instance_id)


@_registry.query("nvmlDeviceGetComputeInstanceId", takes=_GPU | _MIG)
def _compute_instance_id(view: nvml_calls.DeviceView, instance_id: Any) -> None:
    _require_mig_device(view, nvml_model.Code.NOT_SUPPORTED)
    nvml_memory.put(instance_id, ctypes.c_uint, view.compute.instance_id)


@_registry.query("nvmlDeviceGetMaxMigDeviceCount", takes=_GPU)
def _max_mig_devices(view: nvml_calls.DeviceView, count: Any) -> None:
    maximum = view.board.product.max_instances if view.gpu.is_enabled else 0
    nvml_memory.put(count, ctypes.c_uint, maximum)


@_registry.query("nvmlDeviceGetMigDeviceHandleByIndex", takes=_GPU)
def _mig_device(view: nvml_calls.DeviceView, index: Any, handle: Any) -> None:
    nvml_driver.require_mig(view.now)
    devices = nvml_driver.mig_devices(view.gpu)
    wanted = nvml_memory.number(index)
    if wanted >= view.board.product.max_instances:
        raise nvml_model.Refused(nvml_model.Code.INVALID_ARGUMENT)
    if wanted >= len(devices):
        raise nvml_model.Refused(nvml_model.Code.NOT_FOUND)
    view.put_handle(handle, nvml_calls.mig_device(view.target.gpu, *devices[wanted]))


@_registry.query("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", takes=_GPU | _MIG)
def _parent_device(view: nvml_calls.DeviceView, handle: Any) -> None:
    _require_mig_device(view, nvml_model.Code.INVALID_ARGUMENT)
    view.put_handle(handle, _gpu(view))


@_registry.query("nvmlDeviceGetAttributes_v2", takes=_GPU | _MIG)
def _attributes(view: nvml_calls.DeviceView, attributes: Any) -> None:
    _require_mig_device(view, nvml_model.Code.NOT_SUPPORTED)
    row = _parent(view)
    compute = nvml_driver.compute_row(view.board, view.instance, view.compute.profile_id)
    nvml_memory.fill(
        nvml_memory.struct(attributes, pynvml.c_nvmlDeviceAttributes),
        multiprocessorCount=compute.multiprocessors,
        gpuInstanceSliceCount=row.slices,
        computeInstanceSliceCount=compute.slices,
        memorySizeMB=row.memory_mib,
        **_shared_engines(row),
    )


def _create_at(
    view: nvml_calls.DeviceView, profile_id: Any, place: model.Placement | None, handle: Any
) -> nvml_model.GpuState:
    number = nvml_memory.number(profile_id)
    gpu, instance = nvml_driver.create_gpu_instance(view.now, number, place)
    view.put_handle(handle, _gpu_instance(view, instance))
    return gpu


def _create_compute_at(
    view: nvml_calls.DeviceView, profile_id: Any, place: model.Placement | None, handle: Any
) -> nvml_model.GpuState:
    number = nvml_memory.number(profile_id)
    gpu, compute = nvml_driver.create_compute_instance(view.now, view.instance, number, place)
    view.put_handle(handle, _compute_instance(view, compute))
    return gpu


def _gpu(view: nvml_calls.DeviceView) -> nvml_calls.Target:
    return nvml_calls.Target(kind=nvml_calls.Kind.GPU, gpu=view.target.gpu)


def _gpu_instance(
    view: nvml_calls.DeviceView, instance: nvml_model.GpuInstance
) -> nvml_calls.Target:
    return nvml_calls.Target(
        kind=nvml_calls.Kind.GPU_INSTANCE, gpu=view.target.gpu, instance=instance.serial
    )


def _compute_instance(
    view: nvml_calls.DeviceView, compute: nvml_model.ComputeInstance
) -> nvml_calls.Target:
    return nvml_calls.Target(
        kind=nvml_calls.Kind.COMPUTE_INSTANCE,
        gpu=view.target.gpu,
        instance=view.instance.serial,
        compute=compute.serial,
    )


def _row(view: nvml_calls.DeviceView, profile_id: Any) -> hardware.GpuProfile:
    return view.board.row(nvml_memory.number(profile_id))


def _row_by_enum(view: nvml_calls.DeviceView, profile: Any) -> hardware.GpuProfile:
    number = nvml_memory.number(profile)
    if not 0 <= number < view.node.options.profile_enum_count:
        raise nvml_model.Refused(nvml_model.Code.INVALID_ARGUMENT)
    for row in view.board.product.profiles:
        if row.enum_index == number:
            return row
    raise nvml_model.Refused(nvml_model.Code.NOT_SUPPORTED)


def _parent(view: nvml_calls.DeviceView) -> hardware.GpuProfile:
    """Return the profile of the GPU instance."""
    return view.board.row(view.instance.profile_id)


def _compute_row(
    view: nvml_calls.DeviceView, profile_id: Any, engine_profile: Any = 0
) -> hardware.ComputeProfile:
    if nvml_memory.number(engine_profile) != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
        raise nvml_model.Refused(nvml_model.Code.INVALID_ARGUMENT)
    return nvml_driver.compute_row(view.board, view.instance, nvml_memory.number(profile_id))


def _require_mig_device(view: nvml_calls.DeviceView, code: nvml_model.Code) -> None:
    if view.is_gpu:
        raise nvml_model.Refused(code)


def _placement(reference: Any, kind: Any) -> model.Placement:
    source = nvml_memory.struct(reference, kind)
    return model.Placement(source.start, source.size)


def _fill_placement(target: Any, placement: model.Placement) -> None:
    nvml_memory.fill(target, start=placement.start, size=placement.size)


def _put_placements(
    placements: tuple[model.Placement, ...], kind: Any, places: Any, count: Any
) -> None:
    """Write placements and their number; only the number where the caller has no array."""
    if places is not None:
        values = [kind(start=place.start, size=place.size) for place in placements]
        nvml_memory.put_all(places, kind, values)
    nvml_memory.put(count, ctypes.c_uint, len(placements))


def _put_handles(found: list[int], handles: Any, count: Any) -> None:
    nvml_memory.put_all(handles, ctypes.c_void_p, found)
    nvml_memory.put(count, ctypes.c_uint, len(found))


def _put_profile_v2(view: nvml_calls.DeviceView, row: hardware.GpuProfile, info: Any) -> None:
    """Write the versioned struct, which drivers refuse to while MIG is off (``nvml.h``)."""
    nvml_driver.require_mig(view.now)
    target = nvml_memory.struct(info, pynvml.c_nvmlGpuInstanceProfileInfo_v2_t)
    nvml_memory.require_version(target, pynvml.nvmlGpuInstanceProfileInfo_v2)
    nvml_memory.fill(target, name=f"MIG {row.name}".encode(), **_profile_fields(row))


def _profile_fields(row: hardware.GpuProfile) -> dict[str, int]:
    return {
        "id": row.profile_id,
        "isP2pSupported": 0,
        "sliceCount": row.slices,
        "instanceCount": row.max_instances,
        "multiprocessorCount": row.multiprocessors,
        "copyEngineCount": row.copy_engines,
        "decoderCount": row.engines.decoders,
        "encoderCount": row.engines.encoders,
        "jpegCount": row.engines.jpegs,
        "ofaCount": row.engines.ofas,
        "memorySizeMB": row.memory_mib,
    }


def _compute_fields(parent: hardware.GpuProfile, row: hardware.ComputeProfile) -> dict[str, int]:
    return {
        "id": row.profile_id,
        "sliceCount": row.slices,
        "instanceCount": row.max_instances,
        "multiprocessorCount": row.multiprocessors,
        **_shared_engines(parent),
    }


def _shared_engines(row: hardware.GpuProfile) -> dict[str, int]:
    """Return the engines that compute instances share: all of their GPU instance's."""
    return {
        "sharedCopyEngineCount": row.copy_engines,
        "sharedDecoderCount": row.engines.decoders,
        "sharedEncoderCount": row.engines.encoders,
        "sharedJpegCount": row.engines.jpegs,
        "sharedOfaCount": row.engines.ofas,
    }
