"""NVML functions that NVIDIA's programs call beside those that ours does.

Its import registers them, for the C library: any program may load that.
"""

import ctypes
from typing import Any

import pynvml

from mig_manager.sandbox.driver import (
    arguments,
    calls,
    device_functions,
    mig_functions,
    sessions,
    states,
    transitions,
    views,
)

_CUDA_VERSION = 13000
_CAPABILITIES = {"ampere": (8, 0), "hopper": (9, 0), "blackwell": (10, 0)}


@calls.function("nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2")
def _cuda_version(_: views.DriverView, version: Any) -> None:
    arguments.put(version, ctypes.c_int, _CUDA_VERSION)


def _struct_of_version(reference: Any, kind: Any, version: int) -> Any:
    """Return the caller's struct behind a pointer, if it has this version."""
    target = arguments.struct(reference, kind)
    if target.version != version:
        raise states.Refused(states.Code.ARGUMENT_VERSION_MISMATCH)
    return target


@calls.function("nvmlDeviceGetHandleByUUID")
def _by_uuid(view: views.DriverView, uuid: Any, device: Any) -> None:
    # nvml.h: this initialises every GPU during the search, and fails if any is lost.
    if any(gpu.is_lost for gpu in view.node.gpus):
        raise states.Refused(states.Code.GPU_IS_LOST)
    match transitions.find_device(view.node, arguments.text(uuid)):
        case None:
            raise states.Refused(states.Code.NOT_FOUND)
        case (board, states.GpuInstance() as instance, states.ComputeInstance() as compute):
            view.put_handle(device, sessions.mig_device(board.index, instance, compute))
        case (board, _, _):
            view.put_handle(device, sessions.whole(view.node, board.index))


@calls.function("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", takes=calls.DEVICE)
def _parent_device(view: views.DeviceView, handle: Any) -> None:
    if view.is_gpu:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    view.put_handle(handle, view.whole)


@calls.function("nvmlDeviceGetMemoryInfo_v2", takes=calls.DEVICE)
def _memory_info(view: views.DeviceView, info: Any) -> None:
    target = _struct_of_version(info, pynvml.c_nvmlMemory_v2_t, pynvml.nvmlMemory_v2)
    arguments.fill(target, reserved=0, **device_functions.memory(view))


@calls.function("nvmlDeviceGetGpuInstanceProfileInfoV", takes=calls.GPU)
def _profile_info(view: views.DeviceView, profile: Any, info: Any) -> None:
    row = mig_functions.row_by_enum(view, profile)
    # Drivers refuse the versioned struct while MIG is off (nvml.h).
    transitions.require_mig(view.now)
    kind, version = pynvml.c_nvmlGpuInstanceProfileInfo_v2_t, pynvml.nvmlGpuInstanceProfileInfo_v2
    target = _struct_of_version(info, kind, version)
    arguments.fill(target, name=f"MIG {row.name}".encode())
    mig_functions.fill_profile(target, row)


@calls.function("nvmlGpuInstanceGetComputeInstanceProfileInfoV", takes=calls.GPU_INSTANCE)
def _compute_profile(view: views.DeviceView, profile: Any, engine_profile: Any, info: Any) -> None:
    row = mig_functions.compute_row(view, profile, engine_profile)
    kind = pynvml.c_nvmlComputeInstanceProfileInfo_v2_t
    target = _struct_of_version(info, kind, pynvml.nvmlComputeInstanceProfileInfo_v2)
    name = transitions.compute_name(view.parent, row.slices)
    arguments.fill(target, name=f"MIG {name}".encode())
    mig_functions.fill_compute(target, view.parent, row)


@calls.function("nvmlDeviceGetCudaComputeCapability", takes=calls.DEVICE)
def _compute_capability(view: views.DeviceView, major: Any, minor: Any) -> None:
    capability = _CAPABILITIES[view.board.product.generation]
    for number, reference in zip(capability, (major, minor), strict=True):
        arguments.put(reference, ctypes.c_int, number)


@calls.function("nvmlDeviceGetAttributes_v2", takes=calls.DEVICE)
def _attributes(view: views.DeviceView, attributes: Any) -> None:
    if view.is_gpu:
        raise states.Refused(states.Code.NOT_SUPPORTED)
    row = view.parent
    compute = transitions.compute_row(view.board, view.instance, view.compute.profile_id)
    arguments.fill(
        arguments.struct(attributes, pynvml.c_nvmlDeviceAttributes),
        multiprocessorCount=compute.multiprocessors,
        gpuInstanceSliceCount=row.profile.gpu_slices,
        computeInstanceSliceCount=compute.slices,
        memorySizeMB=row.memory_mib,
        **mig_functions.shared_engines(row),
    )


@calls.function("nvmlDeviceGetTopologyCommonAncestor", takes=calls.GPU)
def _common_ancestor(_: views.DeviceView, __: Any, level: Any) -> None:
    arguments.put(level, ctypes.c_uint, pynvml.NVML_TOPOLOGY_SYSTEM)


@calls.function("nvmlDeviceGetNvLinkState", takes=calls.GPU)
def _no_link(*_: Any) -> None:
    raise states.Refused(states.Code.NOT_SUPPORTED)


def _index(view: views.DeviceView) -> int:
    if not view.is_gpu:
        raise states.Refused(states.Code.NOT_SUPPORTED)
    return view.board.index


calls.numbers(
    calls.DEVICE,
    {
        "nvmlDeviceGetIndex": _index,
        "nvmlDeviceIsMigDeviceHandle": lambda view: not view.is_gpu,
        "nvmlDeviceGetBrand": lambda _: pynvml.NVML_BRAND_NVIDIA,
    },
)
