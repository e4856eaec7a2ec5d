"""Create an instance at a placement, also with drivers that choose the placement themselves."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pynvml

from mig_manager import errors, reasons
from mig_manager.adapters.nvml import gpu_device, library
from mig_manager.core import model


class InstanceKind(NamedTuple):
    """NVML's type and functions for GPU instances, or for compute instances."""

    placement: Any
    create_at: Callable[..., Any]
    create: Callable[..., Any]
    get_info: Callable[..., Any]
    destroy: Callable[..., Any]


GPU_INSTANCES = InstanceKind(
    pynvml.c_nvmlGpuInstancePlacement_t,
    pynvml.nvmlDeviceCreateGpuInstanceWithPlacement,
    pynvml.nvmlDeviceCreateGpuInstance,
    pynvml.nvmlGpuInstanceGetInfo,
    pynvml.nvmlGpuInstanceDestroy,
)
COMPUTE_INSTANCES = InstanceKind(
    pynvml.c_nvmlComputeInstancePlacement_t,
    pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement,
    pynvml.nvmlGpuInstanceCreateComputeInstance,
    pynvml.nvmlComputeInstanceGetInfo_v2,
    pynvml.nvmlComputeInstanceDestroy,
)


def create(
    kind: InstanceKind,
    owner: gpu_device.Handle,
    profile_id: int,
    placement: model.Placement,
    *,
    once_idle: Callable[[Callable[[], object]], None],
) -> gpu_device.Handle:
    """Create an instance at a placement, also on a driver that chooses the placement itself.

    Such a driver never chooses an occupied one, so instances elsewhere stay until one fits.
    ``once_idle`` retries while a monitor uses what is destroyed again.

    Raises:
        HardwareError: The driver refused, or does not choose that placement (NOT_SUPPORTED).
    """
    # By reference, as in C: by value the library takes the numbers for an address.
    at = ctypes.byref(kind.placement(placement.start, placement.size))
    handle = library.call_unless(library.UNSUPPORTED, kind.create_at, owner, profile_id, at)
    if handle is not None:
        return handle
    elsewhere: list[tuple[model.Placement, gpu_device.Handle]] = []
    try:
        while True:
            try:
                handle = library.call(kind.create, owner, profile_id)
            except errors.HardwareError as error:
                if elsewhere and error.reason is reasons.Reason.INSUFFICIENT_RESOURCES:
                    others = ", ".join(str(each) for each, _ in elsewhere)
                    raise errors.HardwareError(
                        f"this driver chooses placements itself: {others} and never {placement}; "
                        "undone",
                        reason=reasons.Reason.NOT_SUPPORTED,
                    ) from error
                raise
            actual = gpu_device.placement(library.call(kind.get_info, handle).placement)
            if actual == placement:
                return handle
            elsewhere.append((actual, handle))
    finally:
        for _, other in reversed(elsewhere):
            once_idle(functools.partial(library.call, kind.destroy, other))
