"""The C functions about MIG: mode, profiles, MIG devices, GPU instances and compute instances."""

import ctypes
import operator
from collections.abc import Callable
from typing import Any

import pynvml

from mig_manager.catalogue import hardware
from mig_manager.core import model
from mig_manager.sandbox.driver import calls, states, transitions

_registry = calls.Registry()
FUNCTIONS = _registry.functions
"""By C name."""

_GPU = frozenset({calls.Kind.GPU})
_DEVICE = _GPU | {calls.Kind.MIG_DEVICE}


def _mode_price(view: calls.DeviceView, mode: Any, _: Any) -> float:
    latency = view.node.options.latency
    if bool(calls.number(mode)) is view.gpu.is_enabled:
        return latency.query_s
    if view.board.product.mode_needs_reset:
        return latency.mode_with_reset_s
    return latency.mode_without_reset_s


@_registry.query("nvmlDeviceGetMigMode", takes=_GPU)
def _get_mode(view: calls.DeviceView, current: Any, pending: Any) -> None:
    if not view.board.product.is_mig_capable:
        raise states.Refused(states.Code.NOT_SUPPORTED)
    calls.put(current, ctypes.c_uint, int(view.gpu.is_enabled))
    calls.put(pending, ctypes.c_uint, int(view.gpu.is_pending))


@_registry.change("nvmlDeviceSetMigMode", takes=calls.Kind.GPU, price=_mode_price)
def _set_mode(view: calls.DeviceView, mode: Any, activation: Any) -> states.GpuState:
    gpu, status = transitions.set_mode(view.now, calls.number(mode))
    calls.put(activation, ctypes.c_uint, status)
    return gpu


@_registry.query("nvmlDeviceGetGpuInstanceProfileInfo", takes=_GPU)
def _profile_info(view: calls.DeviceView, profile: Any, info: Any) -> None:
    row = _row_by_enum(view, profile)
    if not view.gpu.is_enabled and not view.node.options.reports_profiles_while_mig_off:
        raise states.Refused(states.Code.NOT_SUPPORTED)
    target = calls.struct(info, pynvml.c_nvmlGpuInstanceProfileInfo_t)
    calls.fill(target, **_profile_fields(row))


@_registry.query("nvmlDeviceGetGpuInstanceProfileInfoV", takes=_GPU)
def _profile_info_v(view: calls.DeviceView, profile: Any, info: Any) -> None:
    row = _row_by_enum(view, profile)
    _put_profile_v2(view, row, info)


@_registry.query("nvmlDeviceGetGpuInstanceProfileInfoByIdV", takes=_GPU)
def _profile_info_by_id(view: calls.DeviceView, profile_id: Any, info: Any) -> None:
    transitions.require_capable(view.now)
    _put_profile_v2(view, view.row(profile_id), info)


@_registry.query(
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
    "nvmlDeviceGetGpuInstancePossiblePlacements",
    takes=_GPU,
)
def _placements(view: calls.DeviceView, profile_id: Any, placements: Any, count: Any) -> None:
    transitions.require_permission(view.node.options)
    transitions.require_capable(view.now)
    row = view.row(profile_id)
    calls.put_placements(row.placements, pynvml.c_nvmlGpuInstancePlacement_t, placements, count)


@_registry.query("nvmlDeviceGetGpuInstanceRemainingCapacity", takes=_GPU)
def _capacity(view: calls.DeviceView, profile_id: Any, count: Any) -> None:
    transitions.require_mig(view.now)
    row = view.row(profile_id)
    capacity = transitions.gpu_instance_capacity(view.now, row)
    calls.put(count, ctypes.c_uint, capacity)


@_registry.query("nvmlDeviceIsMigDeviceHandle", takes=_DEVICE)
def _is_mig(view: calls.DeviceView, is_mig: Any) -> None:
    calls.put(is_mig, ctypes.c_uint, int(not view.is_gpu))


@_registry.query("nvmlDeviceGetGpuInstanceId", takes=_DEVICE)
def _gpu_instance_id(view: calls.DeviceView, instance_id: Any) -> None:
    _require_mig_device(view, states.Code.NOT_SUPPORTED)
    calls.put(instance_id, ctypes.c_uint, view.instance.instance_id)


@_registry.query("nvmlDeviceGetComputeInstanceId", takes=_DEVICE)
def _compute_instance_id(view: calls.DeviceView, instance_id: Any) -> None:
    _require_mig_device(view, states.Code.NOT_SUPPORTED)
    calls.put(instance_id, ctypes.c_uint, view.compute.instance_id)


@_registry.query("nvmlDeviceGetMaxMigDeviceCount", takes=_GPU)
def _max_mig_devices(view: calls.DeviceView, count: Any) -> None:
    maximum = view.board.product.max_instances if view.gpu.is_enabled else 0
    calls.put(count, ctypes.c_uint, maximum)


@_registry.query("nvmlDeviceGetMigDeviceHandleByIndex", takes=_GPU)
def _mig_device(view: calls.DeviceView, index: Any, handle: Any) -> None:
    transitions.require_mig(view.now)
    devices = transitions.mig_devices(view.gpu)
    requested = calls.number(index)
    if requested >= view.board.product.max_instances:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    if requested >= len(devices):
        raise states.Refused(states.Code.NOT_FOUND)
    view.put_handle(handle, calls.mig_device(view.target.gpu, *devices[requested]))


@_registry.query("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", takes=_DEVICE)
def _parent_device(view: calls.DeviceView, handle: Any) -> None:
    _require_mig_device(view, states.Code.INVALID_ARGUMENT)
    view.put_handle(handle, view.whole)


@_registry.query("nvmlDeviceGetAttributes_v2", takes=_DEVICE)
def _attributes(view: calls.DeviceView, attributes: Any) -> None:
    _require_mig_device(view, states.Code.NOT_SUPPORTED)
    row = view.parent
    compute = transitions.compute_row(view.board, view.instance, view.compute.profile_id)
    calls.fill(
        calls.struct(attributes, pynvml.c_nvmlDeviceAttributes),
        multiprocessorCount=compute.multiprocessors,
        gpuInstanceSliceCount=row.slices,
        computeInstanceSliceCount=compute.slices,
        memorySizeMB=row.memory_mib,
        **_shared_engines(row),
    )


def _shared_engines(row: hardware.GpuProfile) -> dict[str, int]:
    """Return the struct fields of the engines that compute instances share: all of them."""
    return {
        "sharedCopyEngineCount": row.copy_engines,
        "sharedDecoderCount": row.engines.decoders,
        "sharedEncoderCount": row.engines.encoders,
        "sharedJpegCount": row.engines.jpegs,
        "sharedOfaCount": row.engines.ofas,
    }


def _row_by_enum(view: calls.DeviceView, profile: Any) -> hardware.GpuProfile:
    number = calls.number(profile)
    if not 0 <= number < view.node.options.profile_enum_count:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    for row in view.board.product.profiles:
        if row.enum_index == number:
            return row
    raise states.Refused(states.Code.NOT_SUPPORTED)


def _require_mig_device(view: calls.DeviceView, code: states.Code) -> None:
    if view.is_gpu:
        raise states.Refused(code)


def _put_profile_v2(view: calls.DeviceView, row: hardware.GpuProfile, info: Any) -> None:
    """Write the versioned struct, which drivers refuse to while MIG is off (``nvml.h``)."""
    transitions.require_mig(view.now)
    target = calls.struct(info, pynvml.c_nvmlGpuInstanceProfileInfo_v2_t)
    calls.require_version(target, pynvml.nvmlGpuInstanceProfileInfo_v2)
    calls.fill(target, name=f"MIG {row.name}".encode(), **_profile_fields(row))


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


# -- instances ---------------------------------------------------------------------------------


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
    requested = calls.number(instance_id)
    for instance in view.gpu.instances:
        if instance.instance_id == requested:
            view.put_handle(handle, view.target_of(instance))
            return
    raise states.Refused(states.Code.NOT_FOUND)


@_registry.query("nvmlGpuInstanceGetInfo", takes=_GPU_INSTANCE)
def _instance_info(view: calls.DeviceView, info: Any) -> None:
    target = calls.struct(info, pynvml.c_nvmlGpuInstanceInfo_t)
    instance = view.instance
    calls.put_handle(ctypes.byref(target), view.session.handle(view.whole))
    calls.fill(target, id=instance.instance_id, profileId=instance.profile_id)
    _fill_placement(target.placement, instance.placement)


@_registry.query("nvmlGpuInstanceGetComputeInstanceProfileInfo", takes=_GPU_INSTANCE)
def _compute_profile(view: calls.DeviceView, profile: Any, engine_profile: Any, info: Any) -> None:
    row = _compute_row(view, profile, engine_profile)
    target = calls.struct(info, pynvml.c_nvmlComputeInstanceProfileInfo_t)
    calls.fill(target, **_compute_fields(view.parent, row))


@_registry.query("nvmlGpuInstanceGetComputeInstanceProfileInfoV", takes=_GPU_INSTANCE)
def _compute_profile_v(
    view: calls.DeviceView, profile: Any, engine_profile: Any, info: Any
) -> None:
    row = _compute_row(view, profile, engine_profile)
    target = calls.struct(info, pynvml.c_nvmlComputeInstanceProfileInfo_v2_t)
    calls.require_version(target, pynvml.nvmlComputeInstanceProfileInfo_v2)
    name = f"MIG {transitions.compute_name(view.parent, row.slices)}".encode()
    calls.fill(target, name=name, **_compute_fields(view.parent, row))


@_registry.query("nvmlGpuInstanceGetComputeInstancePossiblePlacements", takes=_GPU_INSTANCE)
def _compute_placements(
    view: calls.DeviceView, profile_id: Any, placements: Any, count: Any
) -> None:
    transitions.require_permission(view.node.options)
    row = _compute_row(view, profile_id)
    calls.put_placements(
        row.placements, pynvml.c_nvmlComputeInstancePlacement_t, placements, count
    )


@_registry.query("nvmlGpuInstanceGetComputeInstanceRemainingCapacity", takes=_GPU_INSTANCE)
def _compute_capacity(view: calls.DeviceView, profile_id: Any, count: Any) -> None:
    row = _compute_row(view, profile_id)
    room = transitions.room(row.placements, transitions.compute_taken(view.instance))
    calls.put(count, ctypes.c_uint, room)


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
    requested = calls.number(compute_id)
    for compute in view.instance.compute_instances:
        if compute.instance_id == requested:
            view.put_handle(handle, view.target_within(compute))
            return
    raise states.Refused(states.Code.NOT_FOUND)


@_registry.query("nvmlComputeInstanceGetInfo_v2", takes=_COMPUTE_INSTANCE)
def _compute_info(view: calls.DeviceView, info: Any) -> None:
    kind = pynvml.c_nvmlComputeInstanceInfo_t
    target = calls.struct(info, kind)
    calls.put_handle(ctypes.byref(target), view.session.handle(view.whole))
    calls.put_handle(
        ctypes.byref(target, kind.gpuInstance.offset),
        view.session.handle(view.target_of(view.instance)),
    )
    calls.fill(target, id=view.compute.instance_id, profileId=view.compute.profile_id)
    _fill_placement(target.placement, view.compute.placement)


def _create_at(
    view: calls.DeviceView, profile_id: Any, place: model.Placement | None, handle: Any
) -> states.GpuState:
    number = calls.number(profile_id)
    gpu, instance = transitions.create_gpu_instance(view.now, number, place)
    view.put_handle(handle, view.target_of(instance))
    return gpu


def _create_compute_at(
    view: calls.DeviceView, profile_id: Any, place: model.Placement | None, handle: Any
) -> states.GpuState:
    number = calls.number(profile_id)
    gpu, compute = transitions.create_compute_instance(view.now, view.instance, number, place)
    view.put_handle(handle, view.target_within(compute))
    return gpu


def _compute_row(
    view: calls.DeviceView, profile_id: Any, engine_profile: Any = 0
) -> hardware.ComputeProfile:
    if calls.number(engine_profile) != pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    return transitions.compute_row(view.board, view.instance, calls.number(profile_id))


def _placement(reference: Any, kind: Any) -> model.Placement:
    source = calls.struct(reference, kind)
    return model.Placement(source.start, source.size)


def _fill_placement(target: Any, placement: model.Placement) -> None:
    calls.fill(target, start=placement.start, size=placement.size)


def _put_handles(found: list[int], handles: Any, count: Any) -> None:
    calls.put_all(handles, ctypes.c_void_p, found)
    calls.put(count, ctypes.c_uint, len(found))


def _compute_fields(parent: hardware.GpuProfile, row: hardware.ComputeProfile) -> dict[str, int]:
    return {
        "id": row.profile_id,
        "sliceCount": row.slices,
        "instanceCount": row.max_instances,
        "multiprocessorCount": row.multiprocessors,
        **_shared_engines(parent),
    }
