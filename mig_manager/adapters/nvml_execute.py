"""The steps of one GPU, run in order; each is done when its result is there, whoever made it."""

import ctypes
import functools
import pathlib
import typing
from collections.abc import Callable

import pynvml

from mig_manager import errors
from mig_manager.adapters import (
    gpu_progress,
    nvml_device,
    nvml_errors,
    nvml_holders,
    nvml_mode,
    nvml_profiles,
)
from mig_manager.core import model

_GONE = frozenset({pynvml.NVML_ERROR_NOT_FOUND})

_CANNOT_PLACE = nvml_errors.UNTOLD
"""Answers to a creation at a placement by a driver that can only choose the place itself."""

Patience = Callable[[Callable[[], None]], None]
"""Runs an action, and runs it again for a bounded time while it fails with IN_USE."""


def run(plan: model.GpuPlan, patience: Patience, *, proc_root: pathlib.Path | None = None) -> None:
    """Run the steps of one GPU within an open session; stop at the first that fails.

    Args:
        plan: The steps, which may have run before, in part or in whole.
        patience: How IN_USE is tried again.
        proc_root: Where to look for processes that hold the GPU; None: NVML's lists have to do.

    Raises:
        HardwareError: A step failed; with the GPU, the step, the NVML function and its answer,
            and for IN_USE the processes that are known to hold the GPU or the instance.
    """
    name = f"GPU {plan.gpu_index} ({plan.gpu_uuid})"
    executor = _Executor(plan, proc_root)
    with gpu_progress.PROGRESS.about(plan.gpu_index):
        for step in plan.steps:
            try:
                patience(functools.partial(executor.perform, step))
            except errors.HardwareError as error:
                told = executor.with_holders(step, error)
                raise nvml_errors.about(name, told, doing=f"cannot {describe(step)}") from error


def describe(step: model.Step) -> str:
    """Say in words what a step does."""
    match step:
        case model.DestroyComputeInstance():
            return (
                f"destroy compute instance {step.compute_instance_id} ({step.profile}) "
                f"of GPU instance {step.gpu_instance_id}"
            )
        case model.DestroyGpuInstance():
            return (
                f"destroy GPU instance {step.gpu_instance_id} ({step.profile} at {step.placement})"
            )
        case model.SetMode():
            return f"switch MIG mode to {step.mode.value}"
        case model.CreateGpuInstance():
            return f"create GPU instance {step.profile} at {step.placement}"
        case model.CreateComputeInstance():
            return (
                f"create compute instance {step.profile} at {step.placement} "
                f"in the GPU instance at {step.gpu_instance_placement}"
            )
        case _:
            typing.assert_never(step)


class _Executor:
    """Performs steps on one GPU; finds the GPU anew after each switch of MIG mode."""

    def __init__(self, plan: model.GpuPlan, proc_root: pathlib.Path | None) -> None:
        self._gpu_index = plan.gpu_index
        self._gpu_uuid = plan.gpu_uuid
        self._proc_root = proc_root
        self._device: nvml_device.Device | None = None

    def perform(self, step: model.Step) -> None:
        """Perform a step, or find that its result is there already."""
        match step:
            case model.DestroyComputeInstance():
                self._destroy_compute_instance(step)
            case model.DestroyGpuInstance():
                self._destroy_gpu_instance(step)
            case model.SetMode():
                self._set_mode(step)
            case model.CreateGpuInstance():
                self._create_gpu_instance(step)
            case model.CreateComputeInstance():
                self._create_compute_instance(step)
            case _:
                typing.assert_never(step)

    def with_holders(self, step: model.Step, error: errors.HardwareError) -> errors.HardwareError:
        """Add who holds the GPU to an IN_USE error; return any other as it is."""
        if error.reason is not errors.Reason.IN_USE:
            return error
        instance_id: int | None
        match step:
            case model.DestroyComputeInstance() | model.DestroyGpuInstance():
                instance_id = step.gpu_instance_id
            case _:
                instance_id = None
        try:
            return nvml_holders.named(
                error, self._open(), gpu_instance_id=instance_id, proc_root=self._proc_root
            )
        except errors.HardwareError:
            return error

    def _open(self) -> nvml_device.Device:
        if self._device is None:
            gpu_progress.PROGRESS.names(self._gpu_index, self._gpu_uuid)
            self._device = nvml_device.Device(
                nvml_errors.call(pynvml.nvmlDeviceGetHandleByUUID, self._gpu_uuid)
            )
            if self._proc_root is not None:
                # Anew each time, because a switch of MIG mode may change it (nvml.h).
                minor = self._device.minor()
                gpu_progress.PROGRESS.names(self._gpu_index, self._gpu_uuid, minor)
        return self._device

    def _destroy_compute_instance(self, step: model.DestroyComputeInstance) -> None:
        device = self._open()
        instance = self._gpu_instance(step.gpu_instance_id)
        # Ids are used again: another instance under this id is not the one to destroy.
        if instance is None or not self._has_profile(instance, step.profile.gpu_instance):
            return
        handle = nvml_errors.call_unless(
            _GONE,
            pynvml.nvmlGpuInstanceGetComputeInstanceById,
            instance.handle,
            step.compute_instance_id,
        )
        if handle is None:
            return
        if device.compute_instance(instance, handle).slices == step.profile.compute_slices:
            nvml_errors.call_unless(_GONE, pynvml.nvmlComputeInstanceDestroy, handle)

    def _destroy_gpu_instance(self, step: model.DestroyGpuInstance) -> None:
        instance = self._gpu_instance(step.gpu_instance_id)
        if instance is None or instance.placement != step.placement:
            return
        if self._has_profile(instance, step.profile):
            nvml_errors.call_unless(_GONE, pynvml.nvmlGpuInstanceDestroy, instance.handle)

    def _gpu_instance(self, instance_id: int) -> nvml_device.GpuInstanceRef | None:
        """Find a GPU instance; None when it is gone, be it with MIG mode."""
        device = self._open()
        try:
            handle = nvml_errors.call_unless(
                _GONE, pynvml.nvmlDeviceGetGpuInstanceById, device.handle, instance_id
            )
        except errors.HardwareError as error:
            if error.reason is errors.Reason.NOT_SUPPORTED and self._is_mig_off():
                return None
            raise
        return None if handle is None else device.gpu_instance(handle)

    def _is_mig_off(self) -> bool:
        modes = self._open().mig_mode()
        return modes is None or modes[0] is model.MigMode.DISABLED

    def _has_profile(self, instance: nvml_device.GpuInstanceRef, name: model.Profile) -> bool:
        return instance.profile_id in self._open().profile_ids(name)

    def _set_mode(self, step: model.SetMode) -> None:
        device = self._open()
        if nvml_mode.is_in_force(device, step.mode):
            return
        try:
            activation = nvml_mode.ask_for(device, step.mode)
        finally:
            # A switch may detach the GPU and attach it again, which can change its handle
            # (nvml.h); one that failed may have got as far as that.
            self._device = None
        nvml_mode.require(self._open(), step.mode, activation)

    def _create_gpu_instance(self, step: model.CreateGpuInstance) -> None:
        device = self._open()
        there = device.gpu_instances([step.profile_id])
        if any(instance.placement == step.placement for instance in there):
            return
        # By reference, as C takes it: by value the library follows the numbers as an address.
        placement = pynvml.c_nvmlGpuInstancePlacement_t(step.placement.start, step.placement.size)
        created = nvml_errors.call_unless(
            _CANNOT_PLACE,
            pynvml.nvmlDeviceCreateGpuInstanceWithPlacement,
            device.handle,
            step.profile_id,
            ctypes.byref(placement),
        )
        if created is not None:
            return
        created = nvml_errors.call(
            pynvml.nvmlDeviceCreateGpuInstance, device.handle, step.profile_id
        )
        landed = device.gpu_instance(created).placement
        if landed != step.placement:
            nvml_errors.call(pynvml.nvmlGpuInstanceDestroy, created)
            raise _misplaced("nvmlDeviceCreateGpuInstance", landed)

    def _create_compute_instance(self, step: model.CreateComputeInstance) -> None:
        device = self._open()
        instance = self._gpu_instance_at(step)
        for there in device.compute_instances(instance):
            if there.slices == step.profile.compute_slices and (
                step.profile.spans or there.placement == step.placement
            ):
                return
        offered = _compute_profile(device.compute_profiles(instance), step.profile)
        if step.profile.spans:
            nvml_errors.call(
                pynvml.nvmlGpuInstanceCreateComputeInstance, instance.handle, offered.profile_id
            )
        else:
            _create_part(device, instance, offered.profile_id, step.placement)

    def _gpu_instance_at(self, step: model.CreateComputeInstance) -> nvml_device.GpuInstanceRef:
        device = self._open()
        for instance in device.gpu_instances(device.profile_ids(step.profile.gpu_instance)):
            if instance.placement == step.gpu_instance_placement:
                return instance
        raise errors.HardwareError(
            f"there is no GPU instance {step.profile.gpu_instance} at "
            f"{step.gpu_instance_placement}",
            reason=errors.Reason.VERIFY_FAILED,
        )


def _compute_profile(
    offered: tuple[nvml_profiles.ComputeProfile, ...], name: model.Profile
) -> nvml_profiles.ComputeProfile:
    """Choose the compute-instance profile for a name among those the GPU instance offers.

    The profile that spans is the one with most multiprocessors: in a double-memory ``1g`` on
    Hopper that is 1_SLICE_REV1 (7) with 26, of which 1_SLICE (0) would leave ten idle. A part
    is the plain profile of its size, which comes first.
    """
    fitting = [candidate for candidate in offered if candidate.slices == name.compute_slices]
    if not fitting:
        raise errors.HardwareError(
            f"{name.gpu_instance} offers no compute instance of {name.compute_slices} slices",
            reason=errors.Reason.NOT_SUPPORTED,
            operation="nvmlGpuInstanceGetComputeInstanceProfileInfo",
        )
    if name.spans:
        return max(fitting, key=lambda candidate: candidate.multiprocessors)
    return fitting[0]


def _create_part(
    device: nvml_device.Device,
    instance: nvml_device.GpuInstanceRef,
    profile_id: int,
    placement: model.Placement,
) -> None:
    span = pynvml.c_nvmlComputeInstancePlacement_t(placement.start, placement.size)
    created = nvml_errors.call_unless(
        _CANNOT_PLACE,
        pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement,
        instance.handle,
        profile_id,
        ctypes.byref(span),
    )
    if created is not None:
        return
    created = nvml_errors.call(
        pynvml.nvmlGpuInstanceCreateComputeInstance, instance.handle, profile_id
    )
    landed = device.compute_instance(instance, created).placement
    if landed != placement:
        nvml_errors.call(pynvml.nvmlComputeInstanceDestroy, created)
        raise _misplaced("nvmlGpuInstanceCreateComputeInstance", landed)


def _misplaced(operation: str, landed: model.Placement) -> errors.HardwareError:
    return errors.HardwareError(
        f"this driver chooses placements itself, and chose {landed}; undone",
        reason=errors.Reason.NOT_SUPPORTED,
        operation=operation,
    )
