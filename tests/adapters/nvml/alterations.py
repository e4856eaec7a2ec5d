"""What a driver may do otherwise than the simulated one, for ``nvml_faults.CountingLibrary``."""

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml

from mig_manager.sandbox.driver import arguments
from testkit import nvml_faults

_LAST = 6  # index of the last MIG device of a GPU with seven slices


def _in_reverse(call: Callable[..., int], gpu: Any, index: Any, device: Any) -> int:
    return call(gpu, abs(_LAST - arguments.number(index)), device)


def _with_old_form(call: Callable[..., int], device: Any, text: Any, length: Any) -> int:
    code = call(device, text, length)
    uuid = ctypes.cast(text, ctypes.c_char_p).value or b""
    if uuid.startswith(b"MIG-"):
        old = b"MIG-GPU-" + uuid.removeprefix(b"MIG-") + b"/1/0\0"
        ctypes.memmove(text, old, len(old))
    return code


def _with_other_id(call: Callable[..., int], instance: Any, info: Any) -> int:
    code = call(instance, info)
    ctypes.cast(info, ctypes.POINTER(pynvml.c_nvmlGpuInstanceInfo_t)).contents.id += 20
    return code


REVERSED_DEVICES: dict[str, nvml_faults.Alteration] = {
    "nvmlDeviceGetMigDeviceHandleByIndex": _in_reverse
}
OLD_MIG_UUIDS: dict[str, nvml_faults.Alteration] = {"nvmlDeviceGetUUID": _with_old_form}
OTHER_INSTANCE_IDS: dict[str, nvml_faults.Alteration] = {"nvmlGpuInstanceGetInfo": _with_other_id}
