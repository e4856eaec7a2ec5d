"""A simulated node with NVML open on it, and the calls that every test of it makes."""

import contextlib
import ctypes
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pynvml
import pytest

from mig_manager.catalogue import hardware
from mig_manager.sandbox.driver import library as simulated
from mig_manager.sandbox.driver import states
from testkit import nvml_faults

Start = Callable[..., nvml_faults.CountingLibrary]
MIG_CAPABLE = tuple(p for p in hardware.products().values() if p.profiles)
UNKNOWN = 99
_ERRORS = {
    int(value): name.removeprefix("NVML_ERROR_")
    for name, value in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
}


@contextlib.contextmanager
def node(folder: pathlib.Path) -> Iterator[Start]:
    """Give a function that boots a node and opens NVML on it; undo that afterwards."""

    def boot(spec: str = "A100-SXM4-40GB", **options: Any) -> nvml_faults.CountingLibrary:
        path = folder / "node.json"
        simulated.create(spec, path, options=states.Options(**options))
        library = nvml_faults.install(path)
        pynvml.nvmlInit()
        return library

    try:
        yield boot
    finally:
        simulated.load(None)


def refusal(call: Callable[..., object], *arguments: object) -> str:
    """Make a call that must fail and return the name of NVML's error."""
    with pytest.raises(pynvml.NVMLError) as caught:
        call(*arguments)
    return str(_ERRORS[int(caught.value.value)])


def gpu(index: int = 0) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def enabled(index: int = 0) -> Any:
    """Return the handle of a GPU with MIG on."""
    device = gpu(index)
    assert pynvml.nvmlDeviceSetMigMode(device, 1) == pynvml.NVML_SUCCESS
    return device


def filled(device: Any, profile_id: int = 9) -> tuple[Any, Any]:
    """Create a GPU instance with a compute instance that spans it."""
    instance = pynvml.nvmlDeviceCreateGpuInstance(device, profile_id)
    rows = hardware.find(pynvml.nvmlDeviceGetName(device)).profiles
    row = next(row for row in rows if row.profile_id == profile_id)
    spanning = max(row.compute, key=lambda compute: compute.slices)
    return instance, pynvml.nvmlGpuInstanceCreateComputeInstance(instance, spanning.profile_id)


def placements(device: Any, profile_id: int) -> list[tuple[int, int]]:
    """Ask for the count, then for the placements, as C callers do."""
    count = ctypes.c_uint()
    ask = pynvml.nvmlDeviceGetGpuInstancePossiblePlacements
    ask(device, profile_id, None, ctypes.byref(count))
    placements = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    ask(device, profile_id, placements, ctypes.byref(count))
    return [(place.start, place.size) for place in placements]


def at(start_slice: int, size: int) -> Any:
    return ctypes.byref(pynvml.c_nvmlGpuInstancePlacement_t(start_slice, size))
