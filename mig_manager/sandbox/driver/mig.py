"""The C functions about MIG on a GPU: its mode, its profiles, and its MIG devices."""

import ctypes
from typing import Any

import pynvml

from mig_manager.catalogue import hardware
from mig_manager.sandbox.driver import calls, memory, states, transitions

_registry = calls.Registry()
FUNCTIONS = _registry.functions
"""By C name."""

_GPU = frozenset({calls.Kind.GPU})
_DEVICE = _GPU | {calls.Kind.MIG_DEVICE}


def _mode_price(view: calls.DeviceView, mode: Any, _: Any) -> float:
    latency = view.node.options.latency
    if bool(memory.number(mode)) is view.gpu.is_enabled:
        return latency.query_s
    if view.board.product.mode_needs_reset:
        return latency.mode_with_reset_s
    return latency.mode_without_reset_s


@_registry.query("nvmlDeviceGetMigMode", takes=_GPU)
def _get_mode(view: calls.DeviceView, current: Any, pending: Any) -> None:
    if not view.board.product.is_mig_capable:
        raise states.Refused(states.Code.NOT_SUPPORTED)
    memory.put(current, ctypes.c_uint, int(view.gpu.is_enabled))
    memory.put(pending, ctypes.c_uint, int(view.gpu.is_pending))


@_registry.change("nvmlDeviceSetMigMode", takes=calls.Kind.GPU, price=_mode_price)
def _set_mode(view: calls.DeviceView, mode: Any, activation: Any) -> states.GpuState:
    gpu, status = transitions.set_mode(view.now, memory.number(mode))
    memory.put(activation, ctypes.c_uint, status)
    return gpu


@_registry.query("nvmlDeviceGetGpuInstanceProfileInfo", takes=_GPU)
def _profile_info(view: calls.DeviceView, profile: Any, info: Any) -> None:
    row = _row_by_enum(view, profile)
    if not view.gpu.is_enabled and not view.node.options.tells_profiles_while_mig_off:
        raise states.Refused(states.Code.NOT_SUPPORTED)
    target = memory.struct(info, pynvml.c_nvmlGpuInstanceProfileInfo_t)
    memory.fill(target, **_profile_fields(row))


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
def _placements(view: calls.DeviceView, profile_id: Any, places: Any, count: Any) -> None:
    transitions.require_permission(view.node.options)
    transitions.require_capable(view.now)
    row = view.row(profile_id)
    memory.put_placements(row.placements, pynvml.c_nvmlGpuInstancePlacement_t, places, count)


@_registry.query("nvmlDeviceGetGpuInstanceRemainingCapacity", takes=_GPU)
def _capacity(view: calls.DeviceView, profile_id: Any, count: Any) -> None:
    transitions.require_mig(view.now)
    row = view.row(profile_id)
    capacity = transitions.gpu_instance_capacity(view.now, row)
    memory.put(count, ctypes.c_uint, capacity)


@_registry.query("nvmlDeviceIsMigDeviceHandle", takes=_DEVICE)
def _is_mig(view: calls.DeviceView, is_mig: Any) -> None:
    memory.put(is_mig, ctypes.c_uint, int(not view.is_gpu))


@_registry.query("nvmlDeviceGetGpuInstanceId", takes=_DEVICE)
def _gpu_instance_id(view: calls.DeviceView, instance_id: Any) -> None:
    _require_mig_device(view, states.Code.NOT_SUPPORTED)
    memory.put(instance_id, ctypes.c_uint, view.instance.instance_id)


@_registry.query("nvmlDeviceGetComputeInstanceId", takes=_DEVICE)
def _compute_instance_id(view: calls.DeviceView, instance_id: Any) -> None:
    _require_mig_device(view, states.Code.NOT_SUPPORTED)
    memory.put(instance_id, ctypes.c_uint, view.compute.instance_id)


@_registry.query("nvmlDeviceGetMaxMigDeviceCount", takes=_GPU)
def _max_mig_devices(view: calls.DeviceView, count: Any) -> None:
    maximum = view.board.product.max_instances if view.gpu.is_enabled else 0
    memory.put(count, ctypes.c_uint, maximum)


@_registry.query("nvmlDeviceGetMigDeviceHandleByIndex", takes=_GPU)
def _mig_device(view: calls.DeviceView, index: Any, handle: Any) -> None:
    transitions.require_mig(view.now)
    devices = transitions.mig_devices(view.gpu)
    wanted = memory.number(index)
    if wanted >= view.board.product.max_instances:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    if wanted >= len(devices):
        raise states.Refused(states.Code.NOT_FOUND)
    view.put_handle(handle, calls.mig_device(view.target.gpu, *devices[wanted]))


@_registry.query("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", takes=_DEVICE)
def _parent_device(view: calls.DeviceView, handle: Any) -> None:
    _require_mig_device(view, states.Code.INVALID_ARGUMENT)
    view.put_handle(handle, view.whole)


@_registry.query("nvmlDeviceGetAttributes_v2", takes=_DEVICE)
def _attributes(view: calls.DeviceView, attributes: Any) -> None:
    _require_mig_device(view, states.Code.NOT_SUPPORTED)
    row = view.parent
    compute = transitions.compute_row(view.board, view.instance, view.compute.profile_id)
    memory.fill(
        memory.struct(attributes, pynvml.c_nvmlDeviceAttributes),
        multiprocessorCount=compute.multiprocessors,
        gpuInstanceSliceCount=row.slices,
        computeInstanceSliceCount=compute.slices,
        memorySizeMB=row.memory_mib,
        **shared_engines(row),
    )


def shared_engines(row: hardware.GpuProfile) -> dict[str, int]:
    """Return the struct fields of the engines that compute instances share.

    These are all of their GPU instance's.
    """
    return {
        "sharedCopyEngineCount": row.copy_engines,
        "sharedDecoderCount": row.engines.decoders,
        "sharedEncoderCount": row.engines.encoders,
        "sharedJpegCount": row.engines.jpegs,
        "sharedOfaCount": row.engines.ofas,
    }


def _row_by_enum(view: calls.DeviceView, profile: Any) -> hardware.GpuProfile:
    number = memory.number(profile)
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
    target = memory.struct(info, pynvml.c_nvmlGpuInstanceProfileInfo_v2_t)
    memory.require_version(target, pynvml.nvmlGpuInstanceProfileInfo_v2)
    memory.fill(target, name=f"MIG {row.name}".encode(), **_profile_fields(row))


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
