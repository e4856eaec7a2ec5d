"""What NVML's functions can answer beside success, as data.

Source: ``nvml.h`` of NVML API version 13, the ``@return`` list of each function; the same lists
are in NVIDIA's public NVML API reference (https://docs.nvidia.com/deploy/nvml-api/).
"""

from collections.abc import Mapping

import pynvml

UNINITIALIZED = pynvml.NVML_ERROR_UNINITIALIZED
INVALID_ARGUMENT = pynvml.NVML_ERROR_INVALID_ARGUMENT
NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
NO_PERMISSION = pynvml.NVML_ERROR_NO_PERMISSION
NOT_FOUND = pynvml.NVML_ERROR_NOT_FOUND
INSUFFICIENT_SIZE = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
INSUFFICIENT_POWER = pynvml.NVML_ERROR_INSUFFICIENT_POWER
DRIVER_NOT_LOADED = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
TIMEOUT = pynvml.NVML_ERROR_TIMEOUT
IRQ_ISSUE = pynvml.NVML_ERROR_IRQ_ISSUE
GPU_IS_LOST = pynvml.NVML_ERROR_GPU_IS_LOST
RESET_REQUIRED = pynvml.NVML_ERROR_RESET_REQUIRED
IN_USE = pynvml.NVML_ERROR_IN_USE
INSUFFICIENT_RESOURCES = pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES
UNKNOWN = pynvml.NVML_ERROR_UNKNOWN

EVERYWHERE = (UNKNOWN, GPU_IS_LOST, TIMEOUT, DRIVER_NOT_LOADED)
"""What every function may meet, whether its list has it or not."""

_MIG_QUERY = (UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION)
_BY_ID = (*_MIG_QUERY, NOT_FOUND)
_INFO = (UNINITIALIZED, INVALID_ARGUMENT, NO_PERMISSION)
_CREATION = (*_MIG_QUERY, INSUFFICIENT_RESOURCES)
_PLAIN = (UNINITIALIZED, INVALID_ARGUMENT, UNKNOWN)
_PROCESSES = (
    *(UNINITIALIZED, INSUFFICIENT_SIZE, NO_PERMISSION, INVALID_ARGUMENT, GPU_IS_LOST),
    *(NOT_SUPPORTED, UNKNOWN),
)
_INSTANCE_ID = (UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, UNKNOWN)

DOCUMENTED: Mapping[str, tuple[int, ...]] = {
    "nvmlInitWithFlags": (DRIVER_NOT_LOADED, NO_PERMISSION, UNKNOWN),
    "nvmlShutdown": (UNINITIALIZED, UNKNOWN),
    "nvmlDeviceGetCount_v2": _PLAIN,
    "nvmlDeviceGetHandleByIndex_v2": (
        *(UNINITIALIZED, INVALID_ARGUMENT, INSUFFICIENT_POWER, NO_PERMISSION),
        *(IRQ_ISSUE, GPU_IS_LOST, UNKNOWN),
    ),
    "nvmlDeviceGetHandleByPciBusId_v2": (
        *(UNINITIALIZED, INVALID_ARGUMENT, NOT_FOUND, INSUFFICIENT_POWER, NO_PERMISSION),
        *(IRQ_ISSUE, GPU_IS_LOST, UNKNOWN),
    ),
    "nvmlDeviceGetUUID": (
        *(UNINITIALIZED, INVALID_ARGUMENT, INSUFFICIENT_SIZE, NOT_SUPPORTED),
        *(GPU_IS_LOST, UNKNOWN),
    ),
    "nvmlDeviceGetName": (
        *(UNINITIALIZED, INVALID_ARGUMENT, INSUFFICIENT_SIZE, GPU_IS_LOST, UNKNOWN),
    ),
    "nvmlDeviceGetPciInfo_v3": (UNINITIALIZED, INVALID_ARGUMENT, GPU_IS_LOST, UNKNOWN),
    "nvmlDeviceGetMemoryInfo": (
        *(UNINITIALIZED, NO_PERMISSION, INVALID_ARGUMENT, GPU_IS_LOST, NOT_SUPPORTED, UNKNOWN),
    ),
    "nvmlDeviceGetArchitecture": (UNINITIALIZED, INVALID_ARGUMENT),
    "nvmlDeviceGetVirtualizationMode": (UNINITIALIZED, INVALID_ARGUMENT, GPU_IS_LOST, UNKNOWN),
    "nvmlDeviceGetMinorNumber": (
        *(UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, GPU_IS_LOST, UNKNOWN),
    ),
    "nvmlDeviceGetComputeRunningProcesses_v3": _PROCESSES,
    "nvmlDeviceGetGraphicsRunningProcesses_v3": _PROCESSES,
    "nvmlSystemGetProcessName": (
        *(UNINITIALIZED, INVALID_ARGUMENT, NOT_FOUND, NO_PERMISSION, UNKNOWN),
    ),
    "nvmlDeviceGetMigMode": (UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, UNKNOWN),
    "nvmlDeviceSetMigMode": _MIG_QUERY,
    "nvmlDeviceGetFieldValues": (INVALID_ARGUMENT,),
    "nvmlDeviceGetGpuInstanceProfileInfo": _MIG_QUERY,
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2": _MIG_QUERY,
    "nvmlDeviceGetGpuInstances": _MIG_QUERY,
    "nvmlDeviceGetGpuInstanceById": _BY_ID,
    "nvmlGpuInstanceGetInfo": _INFO,
    "nvmlGpuInstanceGetComputeInstanceProfileInfo": _MIG_QUERY,
    "nvmlGpuInstanceGetComputeInstancePossiblePlacements": _MIG_QUERY,
    "nvmlGpuInstanceGetComputeInstances": _MIG_QUERY,
    "nvmlGpuInstanceGetComputeInstanceById": _BY_ID,
    "nvmlComputeInstanceGetInfo_v2": _INFO,
    "nvmlDeviceGetMaxMigDeviceCount": _PLAIN,
    "nvmlDeviceGetMigDeviceHandleByIndex": (
        *(UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, UNKNOWN),
    ),
    "nvmlDeviceGetGpuInstanceId": _INSTANCE_ID,
    "nvmlDeviceGetComputeInstanceId": _INSTANCE_ID,
    "nvmlDeviceCreateGpuInstanceWithPlacement": _CREATION,
    "nvmlGpuInstanceDestroy": (*_MIG_QUERY, IN_USE),
    "nvmlGpuInstanceCreateComputeInstance": _CREATION,
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement": _CREATION,
    "nvmlComputeInstanceDestroy": (UNINITIALIZED, INVALID_ARGUMENT, NO_PERMISSION, IN_USE),
}

BESIDE: Mapping[str, tuple[int, ...]] = {
    "nvmlDeviceSetMigMode": (IN_USE, RESET_REQUIRED),
    "nvmlDeviceCreateGpuInstanceWithPlacement": (IN_USE,),
    "nvmlDeviceGetGpuInstances": (NOT_FOUND,),
    "nvmlGpuInstanceGetComputeInstances": (NOT_FOUND,),
}
"""Answers that no list has and drivers give all the same: public threads report them."""

CHANGES = frozenset(
    {
        "nvmlDeviceSetMigMode",
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceDestroy",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
        "nvmlComputeInstanceDestroy",
    }
)
"""The functions that change a GPU."""


def codes_of(function: str) -> tuple[int, ...]:
    """Return every code to try on a function, each once.

    Raises:
        KeyError: The table does not know the function.
    """
    return tuple(dict.fromkeys((*DOCUMENTED[function], *BESIDE.get(function, ()), *EVERYWHERE)))


def name_of(code: int) -> str:
    """Return the name of a code as ``nvml.h`` has it, without its prefix."""
    names = (n for n in dir(pynvml) if n.startswith("NVML_ERROR_"))
    return next(n.removeprefix("NVML_ERROR_") for n in names if getattr(pynvml, n) == code)
