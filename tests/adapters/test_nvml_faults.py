"""Whatever NVML answers to whatever we ask, what reaches the caller is an error of ours."""

import functools
from collections.abc import Callable
from typing import TypeVar

import pynvml
import pytest

from mig_manager import errors
from mig_manager.adapters.nvml import library
from tests.adapters.nvml_rig import Boot, Rig, ci_step, everything, gi_step, names

T = TypeVar("T")

ALL_CODES = {value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
SOME_CODES = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_UNKNOWN,
)
each_code = pytest.mark.parametrize(
    "codes",
    [
        pytest.param(SOME_CODES, id="some"),
        pytest.param(tuple(sorted(ALL_CODES)), id="all", marks=pytest.mark.slow),
    ],
)

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
    "nvmlDeviceGetHandleByPciBusId_v2",
    "nvmlDeviceGetUUID",
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


def attempt(action: Callable[[], T]) -> tuple[errors.HardwareError | None, T | None]:
    """Return the error of ours that an action raises, or what it returns."""
    try:
        return None, action()
    except errors.HardwareError as error:
        return error, None


def says_none(function: str, code: int) -> bool:
    """Return whether an answer means that there is no MIG, or no such instance."""
    if code == pynvml.NVML_ERROR_NOT_FOUND:
        return function.endswith("Instances")
    return function == "nvmlDeviceGetMigMode" and code in library.UNSUPPORTED


@each_code
@pytest.mark.parametrize("function", OBSERVING)
def test_any_answer_while_observing_is_an_error_of_ours_or_bearable(
    function: str, codes: tuple[int, ...], node: Rig
) -> None:
    create = gi_step(node.fill("1g.5gb"), "3g.20gb")
    parts = (ci_step(create, "1c.3g.20gb", start) for start in (0, 1))
    node.run(create, *parts)
    gpu = node.observe()
    asked = node.calls(function)
    node.gpus.observe()
    assert node.calls(function) > asked, "the function is not used; take it off the list"
    for code in codes:
        node.fault(function, code=code, count=None)
        failure, seen = attempt(node.observe)
        if failure is not None:
            reason = library.from_code(code, operation="").reason
            is_explained = (failure.code, failure.reason) == (code, reason)
            # Borne for one profile, it may leave too little to go on with.
            assert is_explained or failure.reason is errors.Reason.NOT_SUPPORTED
        if seen is not None and not says_none(function, code):
            # What is borne makes no instance disappear.
            assert names(seen) == names(gpu)
        node.state.clear_faults()
    assert node.observe() == gpu
    assert pynvml._nvmlLib_refcount == 0 or function == "nvmlShutdown"


@each_code
@pytest.mark.parametrize("function", CHANGING)
def test_any_answer_while_changing_is_an_error_of_ours_or_bearable(
    function: str, codes: tuple[int, ...], boot: Boot
) -> None:
    node = boot(in_use_timeout_s=0.5)
    node.gpus.execute(everything(node.fill("1g.5gb", "3g.20gb")))
    wanted = names(node.observe())
    for code in codes:
        before = node.gpus.observe()
        plan = everything(before[0])
        asked = node.calls(function)
        node.fault(function, code=code, count=None)
        # A driver that contradicts itself may fail at another function than this.
        failure, after = attempt(functools.partial(node.gpus.execute, plan, before))
        node.state.clear_faults()
        is_reported = failure is not None or (after is not None and bool(after.unreachable))
        assert is_reported or names(node.observe()) == wanted
        assert node.calls(function) > asked, "the function is not used; take it off the list"
        node.gpus.execute(everything(node.observe()))
        assert names(node.observe()) == wanted
