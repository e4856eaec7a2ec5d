"""NVML functions that NVIDIA's programs call beside those that ours does.

Its import registers them, for the C library: any program may load that.
"""

import ctypes
from typing import Any

import pynvml

from mig_manager.sandbox.driver import calls, mig_functions, states, transitions

_CUDA_VERSION = 13000
_CAPABILITIES = {"ampere": (8, 0), "hopper": (9, 0), "blackwell": (10, 0)}


@calls.function("nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2")
def _cuda_version(_: calls.DriverView, version: Any) -> None:
    calls.put(version, ctypes.c_int, _CUDA_VERSION)


@calls.function("nvmlDeviceGetCudaComputeCapability", takes=calls.DEVICE)
def _compute_capability(view: calls.DeviceView, major: Any, minor: Any) -> None:
    capability = _CAPABILITIES[view.board.product.generation]
    for number, reference in zip(capability, (major, minor), strict=True):
        calls.put(reference, ctypes.c_int, number)


@calls.function("nvmlDeviceGetAttributes_v2", takes=calls.DEVICE)
def _attributes(view: calls.DeviceView, attributes: Any) -> None:
    if view.is_gpu:
        raise states.Refused(states.Code.NOT_SUPPORTED)
    row = view.parent
    compute = transitions.compute_row(view.board, view.instance, view.compute.profile_id)
    calls.fill(
        calls.struct(attributes, pynvml.c_nvmlDeviceAttributes),
        multiprocessorCount=compute.multiprocessors,
        gpuInstanceSliceCount=row.profile.gpu_slices,
        computeInstanceSliceCount=compute.slices,
        memorySizeMB=row.memory_mib,
        **mig_functions.shared_engines(row),
    )


@calls.function("nvmlDeviceGetTopologyCommonAncestor", takes=calls.GPU)
def _common_ancestor(_: calls.DeviceView, __: Any, level: Any) -> None:
    calls.put(level, ctypes.c_uint, pynvml.NVML_TOPOLOGY_SYSTEM)


@calls.function("nvmlDeviceGetNvLinkState", takes=calls.GPU)
def _no_link(*_: Any) -> None:
    raise states.Refused(states.Code.NOT_SUPPORTED)


calls.numbers(
    calls.DEVICE,
    {
        "nvmlDeviceIsMigDeviceHandle": lambda view: not view.is_gpu,
        "nvmlDeviceGetBrand": lambda _: pynvml.NVML_BRAND_NVIDIA,
    },
)
