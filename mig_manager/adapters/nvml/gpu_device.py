"""One GPU within a session: its handle, facts, profiles and live instances.

All functions raise ``HardwareError`` when NVML refuses or fails. Listing placements or instances
raises NO_PERMISSION for unprivileged callers.
"""

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pynvml

from mig_manager import errors, reasons
from mig_manager.adapters.nvml import last_calls, library
from mig_manager.core import model, profile_name

Handle = Any  # an opaque NVML handle; valid until its object is destroyed, or MIG mode is switched

_MIN_LISTED = 16
"""Minimum length of an array for instances. NVML writes without a check of the length, on A30 more
than ``instanceCount``; no GPU has more than 8 GPU instances (GPUMGR_MAX_GPU_INSTANCES)."""

_VIRTUALIZATIONS = {
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_NONE: model.Virtualization.NONE,
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_PASSTHROUGH: model.Virtualization.PASSTHROUGH,
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU: model.Virtualization.VGPU,
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_HOST_VGPU: model.Virtualization.HOST,
    pynvml.NVML_GPU_VIRTUALIZATION_MODE_HOST_VSGA: model.Virtualization.HOST,
}

_GPU_INSTANCE_PROFILES = range(32)
"""Values of ``NVML_GPU_INSTANCE_PROFILE_*`` to query; a newer driver may offer unknown ones."""
_KNOWN_GPU_INSTANCE_PROFILES = 18

_COMPUTE_INSTANCE_PROFILES = range(16)
"""Values of ``NVML_COMPUTE_INSTANCE_PROFILE_*`` to query, as above."""
_KNOWN_COMPUTE_INSTANCE_PROFILES = 9

UNVERSIONED = 1
"""The unversioned query: every driver has it, and the versioned one is documented to answer
NOT_SUPPORTED while MIG is off (nvml.h, ``nvmlDeviceGetGpuInstanceProfileInfoV``)."""

EMPTY_INDEX = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT})
"""No MIG device at this index: NOT_FOUND in nvml.h, INVALID_ARGUMENT from some drivers."""

_NOT_FOUND = frozenset({pynvml.NVML_ERROR_NOT_FOUND})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuInstanceRef:
    """A live GPU instance and its handle."""

    handle: Handle
    instance_id: int
    profile_id: int
    placement: model.Placement


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComputeInstanceRef:
    """A live compute instance."""

    instance_id: int
    slices: int
    placement: model.Placement


def find(index: int, uuid: str, observed: model.Gpu | None) -> "Device":
    """Return the GPU of a plan, with its known profiles; GPU_LOST if another GPU is there.

    ``nvmlDeviceGetHandleByUUID`` attaches all GPUs to find one, and answers GPU_IS_LOST if any of
    them is lost (nvml.h). The PCI address and the index attach one.
    """
    last_calls.RECORDER.set_gpu(index, uuid)
    if observed is not None and observed.pci_address:
        by_address = pynvml.nvmlDeviceGetHandleByPciBusId
        handle = library.call(by_address, observed.pci_address.upper().encode())
    else:
        handle = library.call(pynvml.nvmlDeviceGetHandleByIndex, index)
    actual: str = library.call(pynvml.nvmlDeviceGetUUID, handle)
    if actual != uuid:
        raise errors.HardwareError(
            f"its place has another GPU, {actual}",
            reason=reasons.Reason.GPU_LOST,
            operation="nvmlDeviceGetUUID",
        )
    return Device(handle, profiles=observed.profiles if observed else None)


class Device:
    """One GPU within one session, valid until its MIG mode is switched."""

    def __init__(
        self, handle: Handle, *, profiles: tuple[model.GpuInstanceProfile, ...] | None = None
    ) -> None:
        self.handle = handle
        self._profiles = profiles or None
        self._compute_placements: dict[tuple[int, int], tuple[model.Placement, ...] | None] = {}
        self._compute_profiles = {
            each.profile_id: each.compute_profiles
            for each in profiles or ()
            if each.compute_profiles
        }

    def minor(self) -> int | None:
        """Return the N of its ``/dev/nvidiaN``; None if NVML does not report it."""
        try:
            return int(library.call(pynvml.nvmlDeviceGetMinorNumber, self.handle))
        except errors.HardwareError:
            return None

    def virtualization(self) -> model.Virtualization:
        """Return how the GPU is virtualized; NONE if the driver cannot report it."""
        mode = library.call_unless(
            library.UNSUPPORTED, pynvml.nvmlDeviceGetVirtualizationMode, self.handle
        )
        return _VIRTUALIZATIONS.get(mode, model.Virtualization.NONE)

    def mig_mode(self) -> tuple[model.MigMode, model.MigMode] | None:
        """Return the current and the pending MIG mode; None when the GPU has no MIG."""
        modes = library.call_unless(library.UNSUPPORTED, pynvml.nvmlDeviceGetMigMode, self.handle)
        if modes is None:
            return None
        current, pending = (
            model.MigMode.ENABLED
            if mode == pynvml.NVML_DEVICE_MIG_ENABLE
            else model.MigMode.DISABLED
            for mode in modes
        )
        return current, pending

    @functools.cached_property
    def memory_bytes(self) -> int:
        """The memory of the whole GPU; 0 for a GPU that shares the memory of its host."""
        memory = library.call_unless(
            library.UNSUPPORTED, pynvml.nvmlDeviceGetMemoryInfo, self.handle
        )
        return 0 if memory is None else int(memory.total)

    def profiles(self) -> tuple[model.GpuInstanceProfile, ...]:
        """Return the profiles in enum order; empty while MIG is off on R535 and older."""
        if self._profiles is None:
            get = pynvml.nvmlDeviceGetGpuInstanceProfileInfo
            infos = _profile_infos(
                _GPU_INSTANCE_PROFILES,
                _KNOWN_GPU_INSTANCE_PROFILES,
                lambda enum_index: library.call(get, self.handle, enum_index, UNVERSIONED),
            )
            self._profiles = tuple(
                model.GpuInstanceProfile(
                    profile=_name(enum_index, info, total_bytes=self.memory_bytes),
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
                for enum_index, info in infos
            )
        return self._profiles

    def placements(self, profile_id: int) -> tuple[model.Placement, ...]:
        """Return the placements of a profile, free or not, ascending."""
        function = pynvml.nvmlDeviceGetGpuInstancePossiblePlacements
        kind = pynvml.c_nvmlGpuInstancePlacement_t
        return _placements(function, kind, self.handle, profile_id, frozenset())

    def compute_placements(
        self, instance: GpuInstanceRef, profile_id: int
    ) -> tuple[model.Placement, ...] | None:
        """Return the placements of a profile, ascending; None if unreported (R515 and older)."""
        key = instance.profile_id, profile_id
        if key not in self._compute_placements:
            function = pynvml.nvmlGpuInstanceGetComputeInstancePossiblePlacements
            kind = pynvml.c_nvmlComputeInstancePlacement_t
            unreported = library.UNSUPPORTED | library.UNOFFERED
            placements = _placements(function, kind, instance.handle, profile_id, unreported)
            self._compute_placements[key] = placements or None
        return self._compute_placements[key]

    def profile_ids(self, name: model.Profile) -> tuple[int, ...]:
        """Return the driver's ids of the profile with this name."""
        return tuple(p.profile_id for p in self.profiles() if p.profile == name)

    def gpu_instances(self, profile_ids: Iterable[int]) -> tuple[GpuInstanceRef, ...]:
        """Return the live GPU instances of these profiles, ascending by placement."""
        room = max([p.max_instances for p in self.profiles()] + [_MIN_LISTED])
        function = pynvml.nvmlDeviceGetGpuInstances
        by_id: dict[int, GpuInstanceRef] = {}
        for profile_id in profile_ids:
            handles = (pynvml.c_nvmlGpuInstance_t * room)()
            for handle in _list_handles(function, self.handle, profile_id, handles):
                instance = self.gpu_instance(handle)
                by_id[instance.instance_id] = instance
        return tuple(sorted(by_id.values(), key=lambda gi: (gi.placement, gi.instance_id)))

    def gpu_instance(self, handle: Handle) -> GpuInstanceRef:
        """Return the GPU instance of a handle."""
        info = library.call(pynvml.nvmlGpuInstanceGetInfo, handle)
        return GpuInstanceRef(
            handle=handle,
            instance_id=info.id,
            profile_id=info.profileId,
            placement=placement(info.placement),
        )

    def compute_profiles(
        self, instance: GpuInstanceRef
    ) -> tuple[model.ComputeInstanceProfile, ...]:
        """Return the compute-instance profiles, queried once for each GPU-instance profile."""
        if instance.profile_id not in self._compute_profiles:
            get = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo
            shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
            infos = _profile_infos(
                _COMPUTE_INSTANCE_PROFILES,
                _KNOWN_COMPUTE_INSTANCE_PROFILES,
                lambda index: library.call(get, instance.handle, index, shared, UNVERSIONED),
            )
            profiles = tuple(
                model.ComputeInstanceProfile(
                    profile_id=info.id,
                    slices=info.sliceCount,
                    multiprocessors=info.multiprocessorCount,
                    max_instances=info.instanceCount,
                )
                for _, info in infos
            )
            if not profiles:
                # Without profiles no instance could be listed, and a GPU instance in use would
                # seem idle.
                raise library.from_code(
                    pynvml.NVML_ERROR_NOT_SUPPORTED,
                    operation="nvmlGpuInstanceGetComputeInstanceProfileInfo",
                )
            self._compute_profiles[instance.profile_id] = profiles
        return self._compute_profiles[instance.profile_id]

    def with_compute_profiles(
        self, profiles: Iterable[model.GpuInstanceProfile]
    ) -> tuple[model.GpuInstanceProfile, ...]:
        """Return the profiles with the compute-instance profiles queried so far."""
        by_profile_id = self._compute_profiles
        return tuple(
            dataclasses.replace(each, compute_profiles=by_profile_id[each.profile_id])
            if each.profile_id in by_profile_id
            else each
            for each in profiles
        )

    def mig_devices(self) -> Iterator[Handle]:
        """Yield the MIG devices in the driver's order; NVML lists them by index, with gaps."""
        get = pynvml.nvmlDeviceGetMigDeviceHandleByIndex
        for index in range(library.call(pynvml.nvmlDeviceGetMaxMigDeviceCount, self.handle)):
            handle = library.call_unless(EMPTY_INDEX, get, self.handle, index)
            if handle is not None:
                yield handle

    def compute_instances(self, instance: GpuInstanceRef) -> tuple[ComputeInstanceRef, ...]:
        """Return the live compute instances of a GPU instance, ascending by id."""
        profiles = self.compute_profiles(instance)
        room = max([p.max_instances for p in profiles] + [_MIN_LISTED])
        function = pynvml.nvmlGpuInstanceGetComputeInstances
        by_id: dict[int, ComputeInstanceRef] = {}
        for profile in profiles:
            handles = (pynvml.c_nvmlComputeInstance_t * room)()
            for handle in _list_handles(function, instance.handle, profile.profile_id, handles):
                compute = self.compute_instance(instance, handle)
                by_id[compute.instance_id] = compute
        return tuple(by_id[instance_id] for instance_id in sorted(by_id))

    def compute_instance(self, instance: GpuInstanceRef, handle: Handle) -> ComputeInstanceRef:
        """Return the compute instance of a handle."""
        info = library.call(pynvml.nvmlComputeInstanceGetInfo_v2, handle)
        slices = {p.profile_id: p.slices for p in self.compute_profiles(instance)}
        return ComputeInstanceRef(
            instance_id=info.id,
            slices=slices.get(info.profileId, info.placement.size),
            placement=placement(info.placement),
        )


def _profile_infos(
    enum_indices: range, known_count: int, query: Callable[[int], Any]
) -> Iterator[tuple[int, Any]]:
    """Yield enum index and info of the profiles that the driver offers.

    INVALID_ARGUMENT is the answer beyond the driver's last profile (nvml.h), and from an older
    driver for any profile, so all ``known_count`` profiles are queried.
    """
    for enum_index in enum_indices:
        try:
            yield enum_index, query(enum_index)
        except errors.HardwareError as error:
            if error.code not in library.UNOFFERED:
                raise
            if error.code == pynvml.NVML_ERROR_INVALID_ARGUMENT and enum_index >= known_count:
                return


def _name(enum_index: int, info: Any, *, total_bytes: int) -> model.Profile:
    memory_gb = 0
    # A GPU that uses the memory of its host has profiles of size 0: 1g.0gb on Jetson Thor.
    if info.memorySizeMB:
        if not total_bytes:
            raise errors.HardwareError(
                "the driver offers MIG profiles but reports no memory size to name them by",
                reason=reasons.Reason.NOT_SUPPORTED,
                operation="nvmlDeviceGetMemoryInfo",
            )
        memory_gb = profile_name.nominal_gb(
            instance_mib=info.memorySizeMB, total_bytes=total_bytes
        )
    if enum_index in profile_name.GPU_INSTANCE_PROFILES:
        return profile_name.from_nvml(
            enum_index=enum_index, slice_count=info.sliceCount, memory_gb=memory_gb
        )
    # Its name is unknown, but its instances are reported and can be destroyed.
    return model.Profile(
        compute_slices=info.sliceCount,
        gpu_slices=info.sliceCount,
        memory_gb=memory_gb,
        attributes=(f"enum{enum_index}",),
    )


def _placements(
    function: Callable[..., Any],
    kind: Any,
    owner: Handle,
    profile_id: int,
    unreported: frozenset[int],
) -> tuple[model.Placement, ...]:
    """Return the placements of a profile, ascending; none if NVML answers with ``unreported``."""
    count = ctypes.c_uint(0)
    size = ctypes.byref(count)
    if library.call_unless(unreported, function, owner, profile_id, None, size) is None:
        return ()
    spans = (kind * max(count.value, _MIN_LISTED))()
    library.call(function, owner, profile_id, spans, size)
    return tuple(sorted(map(placement, spans[: count.value])))


def placement(span: Any) -> model.Placement:
    """Return the placement in one of NVML's structs."""
    return model.Placement(start=span.start, size=span.size)


def _list_handles(
    function: Callable[..., Any], owner: Handle, profile_id: int, handles: Any
) -> list[Handle]:
    """Have NVML write the handles of a profile's instances to an array; return these handles.

    Some drivers answer NOT_FOUND for an empty GPU, as ``nvidia-smi mig -lgi`` shows.
    """
    count = ctypes.c_uint(len(handles))
    size = ctypes.byref(count)
    answer = library.call_unless(_NOT_FOUND, function, owner, profile_id, handles, size)
    return [] if answer is None else handles[: count.value]
