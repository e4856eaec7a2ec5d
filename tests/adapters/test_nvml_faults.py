"""Whatever NVML answers to whatever we ask, what reaches the caller is an error of ours."""

import functools
import pathlib
from collections.abc import Callable
from typing import TypeVar

import pynvml
import pytest

from mig_manager import errors
from mig_manager.adapters import nvml_errors
from mig_manager.sandbox import nvml_model
from tests.adapters import nvml_rig

T = TypeVar("T")

CODES = sorted(nvml_errors.REASONS)

OBSERVING = (
    "nvmlInitWithFlags",
    "nvmlDeviceGetCount_v2",
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetGpuInstanceProfileInfo",
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
    "nvmlDeviceGetGpuInstances",
    "nvmlGpuInstanceGetInfo",
    "nvmlGpuInstanceGetComputeInstanceProfileInfo",
    "nvmlGpuInstanceGetComputeInstances",
    "nvmlComputeInstanceGetInfo_v2",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlShutdown",
)
CHANGING = (
    "nvmlInitWithFlags",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceSetMigMode",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetGpuInstanceProfileInfo",
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceGetGpuInstanceById",
    "nvmlGpuInstanceGetInfo",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceDestroy",
    "nvmlGpuInstanceGetComputeInstanceProfileInfo",
    "nvmlGpuInstanceGetComputeInstances",
    "nvmlGpuInstanceGetComputeInstanceById",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement",
    "nvmlComputeInstanceGetInfo_v2",
    "nvmlComputeInstanceDestroy",
    "nvmlShutdown",
)


def everything(node: nvml_rig.Rig) -> None:
    """Run each kind of step on a GPU with two instances, which are replaced by two others."""
    before = node.observe()
    parted = nvml_rig.gi_step(before, "3g.20gb", 0)
    whole = nvml_rig.gi_step(before, "2g.10gb", 4)
    node.run(
        *nvml_rig.end_steps(before),
        nvml_rig.mode_step(before, nvml_rig.OFF),
        nvml_rig.mode_step(before, nvml_rig.ON),
        parted,
        nvml_rig.ci_step(parted, "1c.3g.20gb", 1),
        whole,
        nvml_rig.ci_step(whole, "2g.10gb"),
    )


def attempt(action: Callable[[], T]) -> tuple[errors.HardwareError | None, T | None]:
    """Return the error of ours that an action raises, or what it returns."""
    try:
        return None, action()
    except errors.HardwareError as error:
        return error, None


def says_none(function: str, code: int) -> bool:
    """Tell whether an answer means that there is no MIG, or no such instance."""
    if code == pynvml.NVML_ERROR_NOT_FOUND:
        return function.endswith("Instances")
    return function == "nvmlDeviceGetMigMode" and code in nvml_errors.UNTOLD


@pytest.mark.parametrize("function", OBSERVING)
def test_any_answer_while_observing_is_an_error_of_ours_or_bearable(
    function: str, tmp_path: pathlib.Path
) -> None:
    with nvml_rig.rig(tmp_path / "state") as node:
        gpu = node.fill("1g.5gb", "3g.20gb")
        asked = node.calls(function)
        node.gpus.observe()
        assert node.calls(function) > asked, "the function is not used; take it off the list"
        for code in CODES:
            node.state.add_fault(nvml_model.Fault(function=function, code=code, count=None))
            failure, seen = attempt(node.observe)
            if failure is not None:
                assert failure.code == code
                assert failure.reason is nvml_errors.REASONS[code]
            if seen is not None and not says_none(function, code):
                # What is borne makes no instance disappear.
                assert nvml_rig.names(seen) == nvml_rig.names(gpu)
            node.state.clear_faults()
        assert node.observe() == gpu
        assert pynvml._nvmlLib_refcount == 0 or function == "nvmlShutdown"


@pytest.mark.parametrize("function", CHANGING)
def test_any_answer_while_changing_is_an_error_of_ours_or_bearable(
    function: str, tmp_path: pathlib.Path
) -> None:
    with nvml_rig.rig(tmp_path / "state", in_use_timeout_s=0.5) as node:
        node.fill("1g.5gb", "3g.20gb")
        asked = node.calls(function)
        everything(node)
        assert node.calls(function) > asked, "the function is not used; take it off the list"
        for code in CODES:
            plan_is_made = node.observe()
            assert plan_is_made.gpu_instances
            node.state.add_fault(nvml_model.Fault(function=function, code=code, count=None))
            failure, _ = attempt(functools.partial(everything, node))
            assert failure is None or failure.code in (code, None)
            node.state.clear_faults()
            everything(node)
