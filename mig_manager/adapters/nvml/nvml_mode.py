"""MIG mode: switched, and judged by what the driver says afterwards.

NVML succeeds even when the new mode stays pending; why it does is in a second value, the
activation status (``nvml.h``, ``nvmlDeviceSetMigMode``). Neither is the last word: what counts is
the current and the pending mode, asked again of a handle that was asked for again.
"""

import pynvml

from mig_manager import errors
from mig_manager.adapters.nvml import nvml_calls, nvml_device
from mig_manager.core import model

_OPERATION = "nvmlDeviceSetMigMode"

_MODES = {
    model.MigMode.DISABLED: pynvml.NVML_DEVICE_MIG_DISABLE,
    model.MigMode.ENABLED: pynvml.NVML_DEVICE_MIG_ENABLE,
}


def is_in_force(device: nvml_device.Device, mode: model.MigMode) -> bool:
    """Tell whether a GPU is in a mode, and no other is pending.

    Raises:
        HardwareError: NVML refused or failed.
    """
    return device.mig_mode() == (mode, mode)


def ask_for(device: nvml_device.Device, mode: model.MigMode) -> int:
    """Ask for a mode; the handle of the GPU must not be used any more afterwards.

    Returns:
        The activation status, which ``require`` takes.

    Raises:
        HardwareError: NVML refused or failed; with NOT_SUPPORTED and why to a vGPU guest.
    """
    try:
        return int(nvml_calls.call(pynvml.nvmlDeviceSetMigMode, device.handle, _MODES[mode]))
    except errors.HardwareError as error:
        is_guest = (
            error.reason is errors.Reason.NOT_SUPPORTED
            and device.virtualization() is model.Virtualization.VGPU
        )
        if is_guest:
            error.add("this machine has a vGPU, whose MIG mode is up to its host")
        raise


def require(device: nvml_device.Device, mode: model.MigMode, activation: int) -> None:
    """Require that a mode is in force.

    Args:
        device: The GPU, found again after the switch.
        mode: What was asked for.
        activation: What ``ask_for`` returned.

    Raises:
        HardwareError: IN_USE: clients keep the GPU from it. RESET_REQUIRED or, where no reset can
            be had, REBOOT_REQUIRED: the mode is pending. VERIFY_FAILED: it is not even that.
    """
    modes = device.mig_mode()
    if modes == (mode, mode):
        return
    if activation == pynvml.NVML_ERROR_IN_USE:
        raise nvml_calls.from_code(activation, operation=_OPERATION)
    if modes is not None and modes[1] is mode:
        raise _pending(device, activation)
    if activation != pynvml.NVML_SUCCESS:
        raise nvml_calls.from_code(activation, operation=_OPERATION)
    raise errors.HardwareError(
        f"{_OPERATION} reported success, yet the mode is neither in force nor pending",
        reason=errors.Reason.VERIFY_FAILED,
        operation=_OPERATION,
    )


def _pending(device: nvml_device.Device, activation: int) -> errors.HardwareError:
    """Return the error for a mode that waits; its status may also be NOT_SUPPORTED.

    That is what virtual machines are told (NVIDIA MIG User Guide, "Enable MIG Mode").
    """
    said = (
        f"{_OPERATION} reported success"
        if activation == pynvml.NVML_SUCCESS
        else nvml_calls.from_code(activation, operation=_OPERATION).message
    )
    reason, what = errors.Reason.RESET_REQUIRED, "yet the mode waits for a reset"
    if device.virtualization() is model.Virtualization.PASSTHROUGH:
        reason = errors.Reason.REBOOT_REQUIRED
        what = (
            "and the mode is pending: the GPU is passed through to this virtual machine, inside "
            "which no reset can help, only a reboot of it"
        )
    return errors.HardwareError(
        f"{said}, {what}", reason=reason, operation=_OPERATION, code=activation
    )
