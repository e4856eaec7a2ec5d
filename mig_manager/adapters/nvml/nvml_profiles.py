"""Which profiles the driver offers, each with the name that people know it by."""

from collections.abc import Iterator
from typing import Any

import pynvml

from mig_manager import errors
from mig_manager.adapters.nvml import nvml_calls
from mig_manager.core import model, profile_name

Handle = Any
"""An opaque NVML handle; valid until what it names is destroyed, or MIG mode is switched."""

_GPU_INSTANCE_PROFILES = range(32)
"""``NVML_GPU_INSTANCE_PROFILE_*`` to ask about; a newer driver may offer more than are known."""
_KNOWN_GPU_INSTANCE_PROFILES = 18

_COMPUTE_INSTANCE_PROFILES = range(16)
"""``NVML_COMPUTE_INSTANCE_PROFILE_*`` to ask about, as above."""
_KNOWN_COMPUTE_INSTANCE_PROFILES = 9

_LACKED = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED})
"""Answer about a profile that this GPU lacks."""

_UNVERSIONED = 1
"""The unversioned query: every driver has it, and the versioned one is documented to answer
NOT_SUPPORTED while MIG is off (nvml.h, ``nvmlDeviceGetGpuInstanceProfileInfoV``)."""


def gpu_instance_infos(gpu: Handle) -> Iterator[tuple[int, Any]]:
    """Yield the GPU-instance profiles that a GPU offers, by enum; none if it tells none now.

    Raises:
        HardwareError: NVML refused or failed.
    """
    ask = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
    for enum_index in _GPU_INSTANCE_PROFILES:
        try:
            info = nvml_calls.call_unless(_LACKED, ask, gpu, enum_index, _UNVERSIONED)
        except errors.HardwareError as error:
            if _is_end(error, enum_index, _KNOWN_GPU_INSTANCE_PROFILES):
                return
            continue
        if info is not None:
            yield enum_index, info


def compute_instances(gpu_instance: Handle) -> Iterator[model.ComputeInstanceProfile]:
    """Yield the compute-instance profiles that a GPU instance offers, in enum order.

    Raises:
        HardwareError: NVML refused or failed.
    """
    ask = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo
    engines = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
    for enum_index in _COMPUTE_INSTANCE_PROFILES:
        try:
            info = nvml_calls.call_unless(
                _LACKED, ask, gpu_instance, enum_index, engines, _UNVERSIONED
            )
        except errors.HardwareError as error:
            if _is_end(error, enum_index, _KNOWN_COMPUTE_INSTANCE_PROFILES):
                return
            continue
        if info is not None:
            yield model.ComputeInstanceProfile(
                profile_id=info.id,
                slices=info.sliceCount,
                multiprocessors=info.multiprocessorCount,
                max_instances=info.instanceCount,
            )


def _is_end(error: errors.HardwareError, enum_index: int, known: int) -> bool:
    """Tell whether a refusal means that the driver knows no profiles from here on.

    INVALID_ARGUMENT is the answer beyond the driver's last one (nvml.h); of those that every
    driver may know, or not yet know, each is asked about.

    Raises:
        HardwareError: It was another refusal.
    """
    if error.code != pynvml.NVML_ERROR_INVALID_ARGUMENT:
        raise error
    return enum_index >= known


def named(enum_index: int, info: Any, *, total_bytes: int) -> model.GpuInstanceProfile:
    """Turn a profile's info into our vocabulary, without placements.

    Args:
        enum_index: ``NVML_GPU_INSTANCE_PROFILE_*``.
        info: ``nvmlGpuInstanceProfileInfo_t``.
        total_bytes: Memory of the whole GPU; 0 when it is not known.

    Raises:
        HardwareError: NOT_SUPPORTED, the memory is not known, so there is no name.
    """
    return model.GpuInstanceProfile(
        profile=_name(enum_index, info, total_bytes=total_bytes),
        enum_index=enum_index,
        profile_id=info.id,
        memory_mib=info.memorySizeMB,
        multiprocessors=info.multiprocessorCount,
        max_instances=info.instanceCount,
        engines=model.Engines(
            decoders=info.decoderCount,
            encoders=info.encoderCount,
            jpegs=info.jpegCount,
            ofas=info.ofaCount,
        ),
        placements=(),
    )


def _name(enum_index: int, info: Any, *, total_bytes: int) -> model.Profile:
    memory_gb = 0
    # A GPU that uses the memory of its host has profiles of size 0: 1g.0gb on Jetson Thor.
    if info.memorySizeMB:
        if not total_bytes:
            raise errors.HardwareError(
                "the driver offers MIG profiles but tells no memory size to name them by",
                reason=errors.Reason.NOT_SUPPORTED,
                operation="nvmlDeviceGetMemoryInfo",
            )
        memory_gb = profile_name.memory_gb(instance_mib=info.memorySizeMB, total_bytes=total_bytes)
    if enum_index in profile_name.GPU_INSTANCE_PROFILES:
        return profile_name.from_nvml(
            enum_index=enum_index, slice_count=info.sliceCount, memory_gb=memory_gb
        )
    # Its name is not known, yet its instances take room: they must be seen and can be destroyed.
    return model.Profile(
        compute_slices=info.sliceCount,
        gpu_slices=info.sliceCount,
        memory_gb=memory_gb,
        attributes=(f"enum{enum_index}",),
    )
