"""Observe one GPU: its facts, MIG mode, profiles and instances, as a ``model.Gpu``."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

import pynvml

from mig_manager import errors, reasons
from mig_manager.adapters.nvml import gpu_device, last_calls, library
from mig_manager.core import model

_ARCHITECTURES = {
    pynvml.NVML_DEVICE_ARCH_AMPERE: model.Architecture.AMPERE,
    pynvml.NVML_DEVICE_ARCH_HOPPER: model.Architecture.HOPPER,
    pynvml.NVML_DEVICE_ARCH_BLACKWELL: model.Architecture.BLACKWELL,
}

RECOVERY_ACTIONS = (
    model.RecoveryAction.NONE,
    model.RecoveryAction.GPU_RESET,
    model.RecoveryAction.NODE_REBOOT,
    model.RecoveryAction.DRAIN_P2P,
    model.RecoveryAction.DRAIN_AND_RESET,
    model.RecoveryAction.RECOVER_IMEX_DOMAIN,
    model.RecoveryAction.BUS_RESET,
    model.RecoveryAction.SYSTEM_REBOOT,
)
"""By the values of ``nvmlDeviceGpuRecoveryAction_t``; older bindings have only the first five."""

_CHANGING = gpu_device.EMPTY_INDEX | {pynvml.NVML_ERROR_NOT_SUPPORTED}
"""Answers about an instance, or a MIG mode, that another program has just removed."""
_OF_INSTANCES = frozenset(
    {
        "nvmlComputeInstanceGetInfo_v2",
        "nvmlDeviceGetComputeInstanceId",
        "nvmlDeviceGetGpuInstanceId",
        "nvmlDeviceGetGpuInstancePossiblePlacements",
        "nvmlDeviceGetGpuInstanceProfileInfo",
        "nvmlDeviceGetGpuInstances",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetUUID",
        "nvmlGpuInstanceGetComputeInstanceProfileInfo",
        "nvmlGpuInstanceGetComputeInstances",
        "nvmlGpuInstanceGetInfo",
    }
)
"""Functions that give such an answer; from any other one it means something else."""


def observe(
    index: int, *, records_minor: bool = False, retries: int = 2
) -> model.Gpu | model.UnreachableGpu:
    """Observe one GPU within an open session, or return why it is unreachable.

    ``records_minor`` records its device node for the error of a hung call. ``retries`` are for a
    GPU that another program changes meanwhile.

    Raises:
        HardwareError: The whole driver failed, or the caller may not list instances.
    """
    uuid = ""
    handle = None
    try:
        with last_calls.RECORDER.on_gpu(index):
            handle = library.call(pynvml.nvmlDeviceGetHandleByIndex, index)
            uuid = library.call(pynvml.nvmlDeviceGetUUID, handle)
            last_calls.RECORDER.set_gpu(index, uuid)
            device = gpu_device.Device(handle)
            if records_minor:
                last_calls.RECORDER.set_gpu(index, uuid, device.minor())
            return observe_in_full(index, uuid, device)
    except errors.HardwareError as error:
        if retries and error.code in _CHANGING and error.operation in _OF_INSTANCES:
            return observe(index, records_minor=records_minor, retries=retries - 1)
        # A container without a GPU's device node gets no handle. A container that lacks only the
        # privilege to list instances gets one, and an unreachable GPU would hide the cause.
        is_unprivileged = handle is not None and error.reason is reasons.Reason.NO_PERMISSION
        if error.code in library.WHOLE_DRIVER or is_unprivileged:
            name = f"GPU {index} ({uuid})" if uuid else f"GPU {index}"
            error.begin_with(name)
            raise
        action = None
        if handle is not None:
            # A GPU that requires a reset may still say so.
            with contextlib.suppress(errors.HardwareError):
                action = _recovery_action(_fields(handle))
        return model.UnreachableGpu(
            index=index,
            uuid=uuid,
            reason=error.reason,
            code=error.code,
            message=error.message,
            recovery_action=action,
        )


def observe_again(earlier: model.Gpu, device: gpu_device.Device) -> model.Gpu:
    """Observe again what can change of a GPU while its MIG mode stays."""
    current, pending = device.mig_mode() or (None, None)
    if current is not earlier.current_mode:
        # Its profiles may have changed as well.
        return observe_in_full(earlier.index, earlier.uuid, gpu_device.Device(device.handle))
    action = earlier.recovery_action
    if earlier.needs_recovery:
        action = _recovery_action(_fields(device.handle))
    return _with_instances(
        dataclasses.replace(
            earlier, current_mode=current, pending_mode=pending, recovery_action=action
        ),
        device,
    )


def observe_in_full(index: int, uuid: str, device: gpu_device.Device) -> model.Gpu:
    """Observe everything about a GPU whose handle is known."""
    # The GPU of a system on a chip is no PCI device (Jetson Thor).
    pci = library.call_unless(library.UNSUPPORTED, pynvml.nvmlDeviceGetPciInfo, device.handle)
    modes = device.mig_mode()
    current, pending = modes or (None, None)
    value = library.call_unless(
        library.UNSUPPORTED, pynvml.nvmlDeviceGetArchitecture, device.handle
    )
    architecture = _ARCHITECTURES.get(value, model.Architecture.OTHER)
    fields = _fields(device.handle)
    bare = model.Gpu(
        index=index,
        uuid=uuid,
        name=library.call(pynvml.nvmlDeviceGetName, device.handle),
        architecture=architecture,
        pci_address=pci.busId.lower() if pci else "",
        pci_device_id=pci.pciDeviceId if pci else 0,
        pci_subsystem_id=pci.pciSubSystemId if pci else 0,
        memory_mib=device.memory_bytes // 2**20,
        current_mode=current,
        pending_mode=pending,
        mode_change_needs_reset=current is not None and _needs_reset(fields, architecture),
        profiles=() if current is None else _profiles(device, current),
        gpu_instances=(),
        virtualization=device.virtualization(),
        recovery_action=_recovery_action(fields),
    )
    return _with_instances(bare, device)


def _with_instances(bare: model.Gpu, device: gpu_device.Device) -> model.Gpu:
    """Return the GPU with its instances, and the compute-instance profiles that they report."""
    is_on = bare.current_mode is model.MigMode.ENABLED
    instances = _gpu_instances(device) if is_on else ()
    profiles = None if bare.profiles is None else device.with_compute_profiles(bare.profiles)
    return dataclasses.replace(bare, gpu_instances=instances, profiles=profiles)


def _fields(handle: object) -> dict[int, int]:
    """Return the field values that the driver knows, by field; older drivers know fewer."""
    values = library.call_unless(
        library.UNSUPPORTED | library.UNOFFERED,
        pynvml.nvmlDeviceGetFieldValues,
        handle,
        [
            pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED,
            pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
        ],
    )
    successes = (each for each in values or () if each.nvmlReturn == pynvml.NVML_SUCCESS)
    return {each.fieldId: each.value.uiVal for each in successes}


def _needs_reset(fields: Mapping[int, int], architecture: model.Architecture) -> bool:
    """Return whether a change of MIG mode resets the GPU.

    Newer drivers report it (field 184 of nvml.h). Of the older generations only Ampere resets
    (NVIDIA MIG User Guide, "Enable MIG Mode").
    """
    is_resetless = fields.get(pynvml.NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED)
    if is_resetless is not None:
        return not is_resetless
    return architecture is model.Architecture.AMPERE


def _recovery_action(fields: Mapping[int, int]) -> model.RecoveryAction | None:
    """Return the recovery action (field 230 of nvml.h); None from drivers without the field."""
    value = fields.get(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)
    if value is None:
        return None
    is_known = value < len(RECOVERY_ACTIONS)
    return RECOVERY_ACTIONS[value] if is_known else model.RecoveryAction.OTHER


def _profiles(
    device: gpu_device.Device, mode: model.MigMode
) -> tuple[model.GpuInstanceProfile, ...] | None:
    """Return the profiles with placements; None if driver or missing privilege withholds them."""
    if not device.profiles():
        return None
    try:
        return tuple(
            dataclasses.replace(each, placements=device.placements(each.profile_id))
            for each in device.profiles()
        )
    except errors.HardwareError as error:
        if error.reason is reasons.Reason.NO_PERMISSION or (
            error.reason is reasons.Reason.NOT_SUPPORTED and mode is model.MigMode.DISABLED
        ):
            return None
        raise


def _gpu_instances(device: gpu_device.Device) -> tuple[model.GpuInstance, ...]:
    names = {each.profile_id: each.profile for each in device.profiles()}
    if not names:
        # Instances are listed by profile, so they would be missing.
        raise library.from_code(
            pynvml.NVML_ERROR_NOT_SUPPORTED, operation="nvmlDeviceGetGpuInstanceProfileInfo"
        )
    instances = [
        (instance, device.compute_instances(instance)) for instance in device.gpu_instances(names)
    ]
    for instance, _ in instances:
        if instance.profile_id not in names:
            raise errors.HardwareError(
                f"GPU instance {instance.instance_id} has profile {instance.profile_id}, "
                "which this GPU does not offer",
                reason=reasons.Reason.NVML_ERROR,
                operation="nvmlGpuInstanceGetInfo",
            )
    uuids = _mig_uuids(
        device, {gi.instance_id: [ci.instance_id for ci in inside] for gi, inside in instances}
    )
    return tuple(
        model.GpuInstance(
            instance_id=gi.instance_id,
            profile=names[gi.profile_id],
            profile_id=gi.profile_id,
            placement=gi.placement,
            compute_instances=tuple(
                model.ComputeInstance(
                    instance_id=ci.instance_id,
                    profile=dataclasses.replace(names[gi.profile_id], compute_slices=ci.slices),
                    placement=ci.placement,
                    uuid=uuids.get((gi.instance_id, ci.instance_id)),
                )
                for ci in inside
            ),
        )
        for gi, inside in instances
    )


def _mig_uuids(
    device: gpu_device.Device, compute_ids: Mapping[int, Sequence[int]]
) -> dict[tuple[int, int], str]:
    """Return MIG device UUIDs by the ids of GPU instance and compute instance.

    An instance's ``device`` is the parent GPU.
    """
    missing = {
        (instance_id, each) for instance_id, inside in compute_ids.items() for each in inside
    }
    if not missing:
        return {}
    uuids: dict[tuple[int, int], str] = {}
    for handle in device.mig_devices():
        instance_id: int = library.call(pynvml.nvmlDeviceGetGpuInstanceId, handle)
        match compute_ids.get(instance_id):
            case [only]:
                compute_id = only
            case _:
                compute_id = library.call(pynvml.nvmlDeviceGetComputeInstanceId, handle)
        uuids[instance_id, compute_id] = library.call(pynvml.nvmlDeviceGetUUID, handle)
        missing.discard((instance_id, compute_id))
        if not missing:
            break
    return uuids
