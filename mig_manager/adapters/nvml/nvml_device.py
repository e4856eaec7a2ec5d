"""What both observing and executing ask of one GPU, each lasting fact once per session."""

import ctypes
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pynvml

from mig_manager import errors
from mig_manager.adapters.nvml import nvml_calls, nvml_profiles
from mig_manager.core import model

Handle = nvml_profiles.Handle

_MIN_LISTED = 16
"""Least room for a list of instances. NVML writes without asking how much room there is, and the
``instanceCount`` it promises not to exceed is known to be too small on A30; no GPU has more than
8 GPU instances (GPUMGR_MAX_GPU_INSTANCES in NVIDIA's open kernel modules)."""

_VIRTUALIZATIONS = {
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE: model.Virtualization.NONE,
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH: model.Virtualization.PASSTHROUGH,
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU: model.Virtualization.VGPU,
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_HOST_VGPU: model.Virtualization.HOST,
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_HOST_VSGA: model.Virtualization.HOST,
}

_NONE_THERE = frozenset({pynvml.NVML_ERROR_NOT_FOUND})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuInstanceRef:
    """A live GPU instance and the handle to reach it."""

    handle: Handle
    instance_id: int
    profile_id: int
    placement: model.Placement


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComputeInstanceRef:
    """A live compute instance and the handle to reach it."""

    handle: Handle
    instance_id: int
    slices: int
    placement: model.Placement


class Device:
    """One GPU within one session; its profiles are asked once.

    Good until MIG mode is switched: the handle and what the driver tells may then differ.

    Args:
        handle: The GPU's.
        profiles: Its GPU-instance profiles where they were asked before; None or none: they are
            not known.
    """

    def __init__(
        self, handle: Handle, *, profiles: tuple[model.GpuInstanceProfile, ...] | None = None
    ) -> None:
        self.handle = handle
        self._memory_bytes: int | None = None
        self._profiles = profiles or None
        self._compute_placements: dict[tuple[int, int], tuple[model.Placement, ...] | None] = {}
        self._compute_profiles = {
            offered.profile_id: offered.compute_profiles
            for offered in profiles or ()
            if offered.compute_profiles
        }

    def minor(self) -> int | None:
        """Return the N of its ``/dev/nvidiaN``; None when NVML does not tell, which is no harm."""
        try:
            return int(nvml_calls.call(pynvml.nvmlDeviceGetMinorNumber, self.handle))
        except errors.HardwareError:
            return None

    def virtualization(self) -> model.Virtualization:
        """Return how this machine has the GPU; NONE where the driver does not know the question.

        Raises:
            HardwareError: NVML refused or failed.
        """
        mode = nvml_calls.call_unless(
            nvml_calls.UNTOLD, pynvml.nvmlDeviceGetVirtualizationMode, self.handle
        )
        return _VIRTUALIZATIONS.get(mode, model.Virtualization.NONE)

    def mig_mode(self) -> tuple[model.MigMode, model.MigMode] | None:
        """Return the current and the pending MIG mode; None when the GPU has no MIG.

        Raises:
            HardwareError: NVML refused or failed.
        """
        modes = nvml_calls.call_unless(nvml_calls.UNTOLD, pynvml.nvmlDeviceGetMigMode, self.handle)
        if modes is None:
            return None
        current, pending = modes
        return _mode(current), _mode(pending)

    def memory_bytes(self) -> int:
        """Return the whole memory of the GPU; 0 for a GPU that shares the memory of its host.

        Raises:
            HardwareError: NVML refused or failed.
        """
        if self._memory_bytes is None:
            memory = nvml_calls.call_unless(
                nvml_calls.UNTOLD, pynvml.nvmlDeviceGetMemoryInfo, self.handle
            )
            self._memory_bytes = 0 if memory is None else int(memory.total)
        return self._memory_bytes

    def profiles(self) -> tuple[model.GpuInstanceProfile, ...]:
        """Return the GPU-instance profiles in enum order, without their placements.

        Empty when the driver tells none while MIG is off (R535 and older).

        Raises:
            HardwareError: NVML refused or failed.
        """
        if self._profiles is None:
            self._profiles = tuple(
                nvml_profiles.named(enum_index, info, total_bytes=self.memory_bytes())
                for enum_index, info in nvml_profiles.gpu_instance_infos(self.handle)
            )
        return self._profiles

    def placements(self, profile_id: int) -> tuple[model.Placement, ...]:
        """Return where a profile can be placed, whatever is allocated now; ascending.

        Raises:
            HardwareError: NVML refused or failed; with NO_PERMISSION to unprivileged callers.
        """
        ask = pynvml.nvmlDeviceGetGpuInstancePossiblePlacements
        count = ctypes.c_uint(0)
        nvml_calls.call(ask, self.handle, profile_id, None, ctypes.byref(count))
        spans = (pynvml.c_nvmlGpuInstancePlacement_t * max(count.value, _MIN_LISTED))()
        nvml_calls.call(ask, self.handle, profile_id, spans, ctypes.byref(count))
        return tuple(sorted(_placement(spans[i]) for i in range(count.value)))

    def compute_placements(
        self, instance: GpuInstanceRef, profile_id: int
    ) -> tuple[model.Placement, ...] | None:
        """Return where a compute-instance profile can be placed in a GPU instance; ascending.

        None where the driver does not tell, as R515 and older; asked once for each profile.

        Raises:
            HardwareError: NVML refused or failed.
        """
        key = instance.profile_id, profile_id
        if key not in self._compute_placements:
            self._compute_placements[key] = self._ask_compute_placements(
                instance.handle, profile_id
            )
        return self._compute_placements[key]

    def _ask_compute_placements(
        self, gpu_instance: Handle, profile_id: int
    ) -> tuple[model.Placement, ...] | None:
        ask = pynvml.nvmlGpuInstanceGetComputeInstancePossiblePlacements
        untold = nvml_calls.UNTOLD | nvml_calls.UNOFFERED
        count = ctypes.c_uint(0)
        asked = (gpu_instance, profile_id)
        answer = nvml_calls.call_unless(untold, ask, *asked, None, ctypes.byref(count))
        if answer is None or not count.value:
            return None
        spans = (pynvml.c_nvmlComputeInstancePlacement_t * max(count.value, _MIN_LISTED))()
        nvml_calls.call(ask, *asked, spans, ctypes.byref(count))
        return tuple(sorted(_placement(spans[i]) for i in range(count.value)))

    def profile_ids(self, name: model.Profile) -> tuple[int, ...]:
        """Return the driver's ids of the profile with this name; empty when there is none.

        Raises:
            HardwareError: NVML refused or failed.
        """
        return tuple(p.profile_id for p in self.profiles() if p.profile == name)

    def gpu_instances(self, profile_ids: Iterable[int]) -> tuple[GpuInstanceRef, ...]:
        """Return the live GPU instances of these profiles, ascending by placement.

        Raises:
            HardwareError: NVML refused or failed; with NO_PERMISSION to unprivileged callers.
        """
        room = max([p.max_instances for p in self.profiles()] + [_MIN_LISTED])
        found: dict[int, GpuInstanceRef] = {}
        for profile_id in profile_ids:
            handles = (pynvml.c_nvmlGpuInstance_t * room)()
            count = _fill(pynvml.nvmlDeviceGetGpuInstances, self.handle, profile_id, handles)
            for handle in handles[:count]:
                instance = self.gpu_instance(handle)
                found[instance.instance_id] = instance
        return tuple(sorted(found.values(), key=lambda gi: (gi.placement, gi.instance_id)))

    def gpu_instance(self, handle: Handle) -> GpuInstanceRef:
        """Describe the GPU instance behind a handle.

        Raises:
            HardwareError: NVML refused or failed.
        """
        info = nvml_calls.call(pynvml.nvmlGpuInstanceGetInfo, handle)
        return GpuInstanceRef(
            handle=handle,
            instance_id=info.id,
            profile_id=info.profileId,
            placement=_placement(info.placement),
        )

    def compute_profiles(
        self, instance: GpuInstanceRef
    ) -> tuple[model.ComputeInstanceProfile, ...]:
        """Return what compute instances a GPU instance can hold, in enum order.

        Asked once for each GPU-instance profile: instances of one profile are alike.

        Raises:
            HardwareError: NVML refused or failed.
        """
        if instance.profile_id not in self._compute_profiles:
            offered = tuple(nvml_profiles.compute_instances(instance.handle))
            if not offered:
                # Without profiles no instance could be listed, and a GPU instance in use would
                # look idle.
                raise nvml_calls.from_code(
                    pynvml.NVML_ERROR_NOT_SUPPORTED,
                    operation="nvmlGpuInstanceGetComputeInstanceProfileInfo",
                )
            self._compute_profiles[instance.profile_id] = offered
        return self._compute_profiles[instance.profile_id]

    def with_compute_profiles(
        self, profiles: Iterable[model.GpuInstanceProfile]
    ) -> tuple[model.GpuInstanceProfile, ...]:
        """Return the profiles with what their instances can hold, as far as that was asked."""
        known = self._compute_profiles
        return tuple(
            dataclasses.replace(offered, compute_profiles=known[offered.profile_id])
            if offered.profile_id in known
            else offered
            for offered in profiles
        )

    def compute_instances(self, instance: GpuInstanceRef) -> tuple[ComputeInstanceRef, ...]:
        """Return the live compute instances of a GPU instance, ascending by id.

        Raises:
            HardwareError: NVML refused or failed; with NO_PERMISSION to unprivileged callers.
        """
        offered = self.compute_profiles(instance)
        room = max([p.max_instances for p in offered] + [_MIN_LISTED])
        found: dict[int, ComputeInstanceRef] = {}
        for compute_profile in offered:
            handles = (pynvml.c_nvmlComputeInstance_t * room)()
            count = _fill(
                pynvml.nvmlGpuInstanceGetComputeInstances,
                instance.handle,
                compute_profile.profile_id,
                handles,
            )
            for handle in handles[:count]:
                compute = self.compute_instance(instance, handle)
                found[compute.instance_id] = compute
        return tuple(found[instance_id] for instance_id in sorted(found))

    def compute_instance(self, instance: GpuInstanceRef, handle: Handle) -> ComputeInstanceRef:
        """Describe the compute instance behind a handle.

        Raises:
            HardwareError: NVML refused or failed.
        """
        info = nvml_calls.call(pynvml.nvmlComputeInstanceGetInfo_v2, handle)
        slices = {p.profile_id: p.slices for p in self.compute_profiles(instance)}
        return ComputeInstanceRef(
            handle=handle,
            instance_id=info.id,
            slices=slices.get(info.profileId, info.placement.size),
            placement=_placement(info.placement),
        )


def _mode(value: int) -> model.MigMode:
    return (
        model.MigMode.ENABLED if value == pynvml.NVML_DEVICE_MIG_ENABLE else model.MigMode.DISABLED
    )


def _placement(span: Any) -> model.Placement:
    return model.Placement(start=span.start, size=span.size)


def _fill(function: Callable[..., Any], owner: Handle, profile_id: int, handles: Any) -> int:
    """Let NVML write its handles of a profile into the array; return how many it wrote.

    An empty GPU is "Not Found" to some drivers, as ``nvidia-smi mig -lgi`` shows.
    """
    count = ctypes.c_uint(len(handles))
    answer = nvml_calls.call_unless(
        _NONE_THERE, function, owner, profile_id, handles, ctypes.byref(count)
    )
    return 0 if answer is None else count.value
