"""The steps of one GPU, run in order; each is done when its result is there, whoever made it."""

import ctypes
import functools
import itertools
import pathlib
import typing
from collections.abc import Callable, Sequence
from typing import TypeVar

import pynvml

from mig_manager import errors
from mig_manager.adapters.nvml import (
    gpu_progress,
    nvml_calls,
    nvml_device,
    nvml_mode,
    nvml_observe,
)
from mig_manager.core import model, steps

_GONE = frozenset({pynvml.NVML_ERROR_NOT_FOUND})

_CANNOT_PLACE = nvml_calls.UNTOLD
"""Answers to a creation at a placement by a driver that can only choose the place itself."""

_Inside = tuple[int, model.Placement]
"""The slices of a compute instance and its place."""

Patience = Callable[[Callable[[], None]], None]
"""Runs an action, and runs it again for a bounded time while it fails with IN_USE."""


def run(
    plan: steps.GpuPlan,
    patience: Patience,
    *,
    known: model.Gpu | None = None,
    proc_root: pathlib.Path | None = None,
    driver_roots: Sequence[str] = (),
) -> model.Gpu:
    """Run the steps of one GPU within an open session; stop at the first that fails.

    Args:
        plan: The steps, which may have run before, in part or in whole.
        patience: How IN_USE is tried again.
        known: The GPU as it was observed before; None: it was not.
        proc_root: Where to look for processes that hold the GPU; None: NVML's lists have to do.
        driver_roots: File systems in whose ``proc`` the driver's files may be.

    Returns:
        The GPU as it is afterwards.

    Raises:
        HardwareError: A step failed; with the GPU, the step, the NVML function and its answer,
            and for IN_USE the processes that are known to hold the GPU or the instance.
    """
    name = f"GPU {plan.gpu_index} ({plan.gpu_uuid})"
    executor = _Executor(plan, known, proc_root, driver_roots)
    with gpu_progress.PROGRESS.about(plan.gpu_index):
        for step in plan.steps:
            try:
                patience(functools.partial(executor.perform, step))
            except errors.HardwareError as error:
                told = executor.with_holders(step, error)
                raise nvml_calls.about(name, told, doing=f"cannot {describe(step)}") from error
        try:
            return executor.observe()
        except errors.HardwareError as error:
            raise nvml_calls.about(name, error, doing="cannot see what came of it") from error


def require_fresh(plan: steps.GpuPlan, known: model.Gpu | None) -> None:
    """Refuse a plan if a GPU instance that it creates exists already; call within a session.

    Somebody else made it since the plan was made, or the driver withheld it then. A rollback
    removes what the plan creates, and must not take it for that.

    Args:
        plan: The steps of one GPU that are going to be executed.
        known: The GPU as it was observed before; None: it was not.

    Raises:
        StalePlanError: Names the GPU and the instances.
        HardwareError: NVML refused or failed.
    """
    new = {
        (step.profile_id, step.placement): step.profile
        for step in plan.steps
        if isinstance(step, steps.CreateGpuInstance)
    }
    if not new or plan.changes_mode:
        return
    name = f"GPU {plan.gpu_index} ({plan.gpu_uuid})"
    with gpu_progress.PROGRESS.about(plan.gpu_index):
        try:
            device = _opened(plan.gpu_index, plan.gpu_uuid, known)
            there = device.gpu_instances(sorted({profile_id for profile_id, _ in new}))
        except errors.HardwareError as error:
            raise nvml_calls.about(name, error, doing="cannot see what is there") from error
    doomed = {
        step.gpu_instance_id for step in plan.steps if isinstance(step, steps.DestroyGpuInstance)
    }
    names = [
        f"{new[each.profile_id, each.placement]} at {each.placement}"
        for each in there
        if (each.profile_id, each.placement) in new and each.instance_id not in doomed
    ]
    if names:
        raise errors.StalePlanError(f"{name} has {', '.join(names)} already")


def describe(step: steps.Step) -> str:
    """Say in words what a step does."""
    match step:
        case steps.DestroyComputeInstance():
            return (
                f"destroy compute instance {step.compute_instance_id} ({step.profile}) "
                f"of GPU instance {step.gpu_instance_id}"
            )
        case steps.DestroyGpuInstance():
            return (
                f"destroy GPU instance {step.gpu_instance_id} ({step.profile} at {step.placement})"
            )
        case steps.SetMode():
            return f"switch MIG mode to {step.mode.value}"
        case steps.CreateGpuInstance():
            return f"create GPU instance {step.profile} at {step.placement}"
        case steps.CreateComputeInstance():
            return (
                f"create compute instance {step.profile} at {step.placement} "
                f"in the GPU instance at {step.gpu_instance_placement}"
            )
        case _:
            typing.assert_never(step)


class _Executor:
    """Performs steps on one GPU; finds the GPU anew after each switch of MIG mode.

    What instances there are is asked once for each profile, and kept up from then on: nobody else
    changes the GPU meanwhile. A step that fails puts that in doubt, and all is asked again.
    """

    def __init__(
        self,
        plan: steps.GpuPlan,
        known: model.Gpu | None,
        proc_root: pathlib.Path | None,
        driver_roots: Sequence[str],
    ) -> None:
        self._gpu_index = plan.gpu_index
        self._gpu_uuid = plan.gpu_uuid
        self._known = known
        self._proc_root = proc_root
        self._driver_roots = driver_roots
        self._device: nvml_device.Device | None = None
        self._forget()

    def _forget(self) -> None:
        self._by_id: dict[int, nvml_device.GpuInstanceRef] = {}
        """GPU instances that were asked for by id."""
        self._by_profile: dict[int, list[nvml_device.GpuInstanceRef]] = {}
        """All GPU instances of the profiles that were asked about."""
        self._inside: dict[int, list[_Inside]] = {}
        """All compute instances of GPU instances, by the id of these."""

    def perform(self, step: steps.Step) -> None:
        """Perform a step, or find that its result is there already."""
        try:
            self._perform(step)
        except errors.HardwareError:
            self._forget()
            raise

    def _perform(self, step: steps.Step) -> None:
        match step:
            case steps.DestroyComputeInstance():
                self._destroy_compute_instance(step)
            case steps.DestroyGpuInstance():
                self._destroy_gpu_instance(step)
            case steps.SetMode():
                self._set_mode(step)
            case steps.CreateGpuInstance():
                self._create_gpu_instance(step)
            case steps.CreateComputeInstance():
                self._create_compute_instance(step)
            case _:
                typing.assert_never(step)

    def observe(self) -> model.Gpu:
        """Return the GPU as it is now, by the driver's word alone."""
        if self._known is None:
            return nvml_observe.anew(self._gpu_index, self._gpu_uuid, self._open())
        return nvml_observe.again(self._known, self._open())

    def with_holders(self, step: steps.Step, error: errors.HardwareError) -> errors.HardwareError:
        """Add who holds the GPU to an IN_USE error; return any other as it is."""
        if error.reason is not errors.Reason.IN_USE:
            return error
        instance_id: int | None
        match step:
            case steps.DestroyComputeInstance() | steps.DestroyGpuInstance():
                instance_id = step.gpu_instance_id
            case _:
                instance_id = None
        from mig_manager.adapters.nvml import processes as gpu_processes  # noqa: PLC0415 - seldom needed

        try:
            return gpu_processes.named(
                error,
                self._open(),
                gpu_instance_id=instance_id,
                proc_root=self._proc_root,
                driver_roots=self._driver_roots,
            )
        except errors.HardwareError:
            return error

    def _open(self) -> nvml_device.Device:
        if self._device is None:
            self._device = _opened(self._gpu_index, self._gpu_uuid, self._known)
            if self._proc_root is not None:
                # Anew each time, because a switch of MIG mode may change it (nvml.h).
                minor = self._device.minor()
                gpu_progress.PROGRESS.names(self._gpu_index, self._gpu_uuid, minor)
        return self._device

    def _destroy_compute_instance(self, step: steps.DestroyComputeInstance) -> None:
        device = self._open()
        instance = self._gpu_instance(step.gpu_instance_id)
        # Ids are used again: another instance under this id is not the one to destroy.
        if instance is None or not self._has_profile(instance, step.profile.gpu_instance):
            return
        handle = nvml_calls.call_unless(
            _GONE,
            pynvml.nvmlGpuInstanceGetComputeInstanceById,
            instance.handle,
            step.compute_instance_id,
        )
        if handle is None:
            return
        if device.compute_instance(instance, handle).slices == step.profile.compute_slices:
            nvml_calls.call_unless(_GONE, pynvml.nvmlComputeInstanceDestroy, handle)
            self._inside.pop(instance.instance_id, None)

    def _destroy_gpu_instance(self, step: steps.DestroyGpuInstance) -> None:
        instance = self._gpu_instance(step.gpu_instance_id)
        if instance is None or instance.placement != step.placement:
            return
        if self._has_profile(instance, step.profile):
            nvml_calls.call_unless(_GONE, pynvml.nvmlGpuInstanceDestroy, instance.handle)
            del self._by_id[instance.instance_id]
            # Its id may soon be that of another, and its place free.
            self._inside.pop(instance.instance_id, None)
            self._by_profile.pop(instance.profile_id, None)

    def _gpu_instance(self, instance_id: int) -> nvml_device.GpuInstanceRef | None:
        """Find a GPU instance; None when it is gone, be it with MIG mode."""
        if instance_id in self._by_id:
            return self._by_id[instance_id]
        device = self._open()
        try:
            handle = nvml_calls.call_unless(
                _GONE, pynvml.nvmlDeviceGetGpuInstanceById, device.handle, instance_id
            )
        except errors.HardwareError as error:
            if error.reason is errors.Reason.NOT_SUPPORTED and self._is_mig_off():
                return None
            raise
        if handle is None:
            return None
        return self._by_id.setdefault(instance_id, device.gpu_instance(handle))

    def _is_mig_off(self) -> bool:
        modes = self._open().mig_mode()
        return modes is None or modes[0] is model.MigMode.DISABLED

    def _has_profile(self, instance: nvml_device.GpuInstanceRef, name: model.Profile) -> bool:
        return instance.profile_id in self._open().profile_ids(name)

    def _set_mode(self, step: steps.SetMode) -> None:
        device = self._open()
        if nvml_mode.is_in_force(device, step.mode):
            return
        try:
            activation = nvml_mode.ask_for(device, step.mode)
        finally:
            # A switch may detach the GPU and attach it again, which can change its handle
            # (nvml.h); one that failed may have got as far as that.
            self._device = None
            # And what the driver tells of profiles may now differ.
            self._known = None
            self._forget()
        nvml_mode.require(self._open(), step.mode, activation)

    def _create_gpu_instance(self, step: steps.CreateGpuInstance) -> None:
        device = self._open()
        there = self._gpu_instances(step.profile_id)
        if any(instance.placement == step.placement for instance in there):
            return
        created = _create_placed(device, step)
        there.append(created)
        self._inside[created.instance_id] = []

    def _gpu_instances(self, profile_id: int) -> list[nvml_device.GpuInstanceRef]:
        if profile_id not in self._by_profile:
            self._by_profile[profile_id] = list(self._open().gpu_instances([profile_id]))
        return self._by_profile[profile_id]

    def _create_compute_instance(self, step: steps.CreateComputeInstance) -> None:
        device = self._open()
        instance = self._gpu_instance_at(step)
        inside = self._compute_instances(instance)
        for slices, span in inside:
            if slices == step.profile.compute_slices and (
                step.profile.spans or span == step.placement
            ):
                return
        offered = _compute_profile(device.compute_profiles(instance), step.profile)
        if step.profile.spans:
            nvml_calls.call(
                pynvml.nvmlGpuInstanceCreateComputeInstance, instance.handle, offered.profile_id
            )
        else:
            _create_part(device, instance, offered.profile_id, step.placement)
        inside.append((step.profile.compute_slices, step.placement))

    def _compute_instances(self, instance: nvml_device.GpuInstanceRef) -> list[_Inside]:
        if instance.instance_id not in self._inside:
            self._inside[instance.instance_id] = [
                (compute.slices, compute.placement)
                for compute in self._open().compute_instances(instance)
            ]
        return self._inside[instance.instance_id]

    def _gpu_instance_at(self, step: steps.CreateComputeInstance) -> nvml_device.GpuInstanceRef:
        profile_ids = self._open().profile_ids(step.profile.gpu_instance)
        # Asked for only if it is not among those that are known.
        listed = (instance for each in profile_ids for instance in self._gpu_instances(each))
        for instance in itertools.chain(self._by_id.values(), listed):
            is_there = instance.placement == step.gpu_instance_placement
            if is_there and instance.profile_id in profile_ids:
                return instance
        raise errors.HardwareError(
            f"there is no GPU instance {step.profile.gpu_instance} at "
            f"{step.gpu_instance_placement}",
            reason=errors.Reason.VERIFY_FAILED,
        )


def _opened(index: int, uuid: str, known: model.Gpu | None) -> nvml_device.Device:
    """Find a GPU; the profiles that it was seen to offer are not asked for again."""
    gpu_progress.PROGRESS.names(index, uuid)
    return nvml_device.Device(
        _handle(index, uuid, known), profiles=known.profiles if known else None
    )


def _handle(index: int, uuid: str, known: model.Gpu | None) -> nvml_device.Handle:
    """Return the handle of one GPU, and have NVML attach no other.

    ``nvmlDeviceGetHandleByUUID`` attaches every GPU to find the one, and answers GPU_IS_LOST where
    any of them is lost (nvml.h). The PCI address and the index attach one.

    Raises:
        HardwareError: NVML refused or failed; GPU_LOST: another GPU is in its place.
    """
    if known is not None and known.pci_address:
        by_address = pynvml.nvmlDeviceGetHandleByPciBusId
        handle = nvml_calls.call(by_address, known.pci_address.upper().encode())
    else:
        handle = nvml_calls.call(pynvml.nvmlDeviceGetHandleByIndex, index)
    there: str = nvml_calls.call(pynvml.nvmlDeviceGetUUID, handle)
    if there != uuid:
        raise errors.HardwareError(
            f"its place has another GPU, {there}",
            reason=errors.Reason.GPU_LOST,
            operation="nvmlDeviceGetUUID",
        )
    return handle


def _create_placed(
    device: nvml_device.Device, step: steps.CreateGpuInstance
) -> nvml_device.GpuInstanceRef:
    # By reference, as C takes it: by value the library follows the numbers as an address.
    placement = pynvml.c_nvmlGpuInstancePlacement_t(step.placement.start, step.placement.size)
    handle = nvml_calls.call_unless(
        _CANNOT_PLACE,
        pynvml.nvmlDeviceCreateGpuInstanceWithPlacement,
        device.handle,
        step.profile_id,
        ctypes.byref(placement),
    )
    if handle is not None:
        return device.gpu_instance(handle)

    def create() -> nvml_device.GpuInstanceRef:
        created = nvml_calls.call(
            pynvml.nvmlDeviceCreateGpuInstance, device.handle, step.profile_id
        )
        return device.gpu_instance(created)

    return _created_at(step.placement, create, pynvml.nvmlGpuInstanceDestroy)


class _Created(typing.Protocol):
    """An instance that was just created."""

    @property
    def handle(self) -> nvml_device.Handle: ...

    @property
    def placement(self) -> model.Placement: ...


_Instance = TypeVar("_Instance", bound=_Created)


def _created_at(
    placement: model.Placement,
    create: Callable[[], _Instance],
    destroy: Callable[[nvml_device.Handle], None],
) -> _Instance:
    """Create an instance at a placement on a driver that chooses the placement itself.

    Instances of one profile do not overlap, and the driver never chooses an occupied placement.
    So an instance that lands elsewhere stays until one lands where it is wanted.

    Raises:
        HardwareError: The driver refused, or does not choose that placement (NOT_SUPPORTED).
    """
    elsewhere: list[_Instance] = []
    try:
        while True:
            try:
                created = create()
            except errors.HardwareError as error:
                if elsewhere and error.reason is errors.Reason.INSUFFICIENT_RESOURCES:
                    raise _misplaced(placement, elsewhere) from error
                raise
            if created.placement == placement:
                return created
            elsewhere.append(created)
    finally:
        for each in reversed(elsewhere):
            nvml_calls.call(destroy, each.handle)


def _compute_profile(
    offered: tuple[model.ComputeInstanceProfile, ...], name: model.Profile
) -> model.ComputeInstanceProfile:
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
    possible = device.compute_placements(instance, profile_id)
    if possible is not None and placement not in possible:
        # The plan places by the rules of the open kernel modules, the layout names no place, and
        # this driver has other rules: it chooses.
        nvml_calls.call(pynvml.nvmlGpuInstanceCreateComputeInstance, instance.handle, profile_id)
        return
    span = pynvml.c_nvmlComputeInstancePlacement_t(placement.start, placement.size)
    created = nvml_calls.call_unless(
        _CANNOT_PLACE,
        pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement,
        instance.handle,
        profile_id,
        ctypes.byref(span),
    )
    if created is not None:
        return

    def create() -> nvml_device.ComputeInstanceRef:
        handle = nvml_calls.call(
            pynvml.nvmlGpuInstanceCreateComputeInstance, instance.handle, profile_id
        )
        return device.compute_instance(instance, handle)

    _created_at(placement, create, pynvml.nvmlComputeInstanceDestroy)


def _misplaced(placement: model.Placement, elsewhere: Sequence[_Created]) -> errors.HardwareError:
    chosen = ", ".join(str(each.placement) for each in elsewhere)
    return errors.HardwareError(
        f"this driver chooses placements itself: {chosen} and never {placement}; undone",
        reason=errors.Reason.NOT_SUPPORTED,
    )
