"""Call ``pynvml`` and translate its errors; each error names its NVML function."""

import time
from collections.abc import Callable, Collection
from typing import Any

import pynvml

from mig_manager import errors
from mig_manager.adapters.nvml import gpu_progress, nvml_meter

REASONS: dict[int, errors.Reason] = {
    pynvml.NVML_ERROR_UNINITIALIZED: errors.Reason.DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_NOT_SUPPORTED: errors.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION: errors.Reason.NO_PERMISSION,
    pynvml.NVML_ERROR_ALREADY_INITIALIZED: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_NOT_FOUND: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_INSUFFICIENT_SIZE: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: errors.Reason.DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_TIMEOUT: errors.Reason.NVML_TIMEOUT,
    pynvml.NVML_ERROR_IRQ_ISSUE: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: errors.Reason.DRIVER_NOT_LOADED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: errors.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_CORRUPTED_INFOROM: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_GPU_IS_LOST: errors.Reason.GPU_LOST,
    # A faulty GPU. As the activation status of a new MIG mode it means that the mode is pending:
    # nvml_mode tells the two apart.
    pynvml.NVML_ERROR_RESET_REQUIRED: errors.Reason.GPU_NEEDS_RESET,
    # nvml.h: the operating system or a cgroup blocks the control device.
    pynvml.NVML_ERROR_OPERATING_SYSTEM: errors.Reason.NO_PERMISSION,
    # Library and kernel module are of two versions: a container that started before an upgrade of
    # the driver, or a host whose kernel module was not loaded anew.
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: errors.Reason.DRIVER_LIBRARY_MISMATCH,
    pynvml.NVML_ERROR_IN_USE: errors.Reason.IN_USE,
    pynvml.NVML_ERROR_MEMORY: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_NO_DATA: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED: errors.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: errors.Reason.INSUFFICIENT_RESOURCES,
    pynvml.NVML_ERROR_FREQ_NOT_SUPPORTED: errors.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: errors.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_DEPRECATED: errors.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_NOT_READY: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: errors.Reason.GPU_LOST,
    pynvml.NVML_ERROR_INVALID_STATE: errors.Reason.NVML_ERROR,
    pynvml.NVML_ERROR_RESET_TYPE_NOT_SUPPORTED: errors.Reason.NOT_SUPPORTED,
    pynvml.NVML_ERROR_UNKNOWN: errors.Reason.NVML_ERROR,
}
"""What each NVML return value means to a person; complete, and a test keeps it so."""

UNOFFERED = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT})
"""Answers about a profile that this GPU lacks or this library is too old to know (nvml.h)."""

UNTOLD = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
"""Answers of a GPU or a library that does not have the fact or the function at all."""


WHOLE_DRIVER = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_TIMEOUT,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_MEMORY,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    }
)
"""Answers about library, driver or caller, whichever GPU was asked about (nvml.h)."""


def from_code(code: int, *, operation: str) -> errors.HardwareError:
    """Build the error for an NVML return value.

    Args:
        code: ``nvmlReturn_t``, other than ``NVML_SUCCESS``.
        operation: The NVML function that gave it.
    """
    return errors.HardwareError(
        f"{operation} answered {str(pynvml.NVMLError(code))!r}",
        reason=REASONS.get(code, errors.Reason.NVML_ERROR),
        operation=operation,
        code=code,
    )


def about(gpu: str, error: errors.HardwareError, *, doing: str = "") -> errors.HardwareError:
    """Return the error with the GPU it concerns, and with what was being done to it."""
    where = f"{gpu}: {doing}" if doing else gpu
    return errors.HardwareError(
        f"{where}: {error.message}",
        reason=error.reason,
        operation=error.operation,
        gpu=gpu,
        code=error.code,
    )


def call(function: Callable[..., Any], *args: object) -> Any:
    """Call a ``pynvml`` function.

    Raises:
        HardwareError: NVML answered anything but success; with operation and code, without GPU.
    """
    since = time.monotonic()
    gpu_progress.PROGRESS.began(function.__name__, since)
    try:
        return function(*args)
    except pynvml.NVMLError as error:
        raise from_code(error.value, operation=function.__name__) from error
    except pynvml.NVMLLibraryMismatchError as error:
        # Not an NVMLError: the binding's own word for a function that the library lacks.
        raise from_code(
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, operation=function.__name__
        ) from error
    except UnicodeDecodeError as error:
        # The binding takes every text for UTF-8; the path of a process need not be.
        raise from_code(pynvml.NVML_ERROR_UNKNOWN, operation=function.__name__) from error
    finally:
        gpu_progress.PROGRESS.ended()
        nvml_meter.METER.add(function.__name__, time.monotonic() - since)


def call_unless(
    codes: Collection[int],
    function: Callable[..., Any],
    *args: object,
) -> Any | None:
    """Call a ``pynvml`` function; None when NVML answers one of ``codes``.

    Raises:
        HardwareError: NVML answered another error.
    """
    try:
        return call(function, *args)
    except errors.HardwareError as error:
        if error.code in codes:
            return None
        raise
