"""Whatever NVML answers to whatever we ask, what reaches the caller is an error of ours."""

from collections.abc import Callable
from typing import TypeVar

import pynvml
import pytest

from mig_manager import errors, reasons
from mig_manager.adapters.nvml import library
from mig_manager.core import model
from tests.rigs.layout_table import gpu_in_words
from tests.rigs.node.gpu_values import ci_step, gi_step
from tests.rigs.node.nvml_rig import Boot, NvmlRig, everything

T = TypeVar("T")

ALL_CODES = {value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}


def each_code(*some: int) -> pytest.MarkDecorator:
    every = pytest.param(tuple(sorted(ALL_CODES)), id="all", marks=pytest.mark.slow)
    return pytest.mark.parametrize("codes", [pytest.param(some, id="some"), every])


def attempt(action: Callable[[], T]) -> tuple[errors.HardwareError | None, T | None]:
    """Return the error of ours that an action raises, or what it returns."""
    try:
        return None, action()
    except errors.HardwareError as error:
        return error, None


def functions_called_by(rig: NvmlRig, action: Callable[[], object]) -> list[str]:
    """Return the C functions that an action calls."""
    before = rig.library.counts.copy()
    action()
    return sorted(rig.library.counts - before)


def says_none(function: str, code: int) -> bool:
    """Return whether an answer means that there is no MIG, or no such instance."""
    if code == pynvml.NVML_ERROR_NOT_FOUND:
        return function.endswith("Instances")
    return function == "nvmlDeviceGetMigMode" and code in library.UNSUPPORTED


@pytest.mark.slow
@each_code(pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN)
def test_any_answer_while_observing_is_tolerated_or_a_typed_error(
    codes: tuple[int, ...], rig: NvmlRig
) -> None:
    create = gi_step(rig.fill("1g.5gb"), "3g.20gb")
    rig.execute(create, *(ci_step(create, "1c.3g.20gb", start) for start in (0, 1)))
    gpu = rig.observe()
    functions = functions_called_by(rig, rig.gpus.observe)
    assert len(functions) >= 23
    for function in functions:
        for code in codes:
            rig.fault(function, code=code, count=None)
            failure, observed = attempt(rig.observe)
            if failure is not None:
                reason = library.from_code(code, operation="").reason
                is_explained = (failure.code, failure.reason) == (code, reason)
                # Borne for one profile, it may leave too little to go on with.
                assert is_explained or failure.reason is reasons.Reason.NOT_SUPPORTED
            if observed is not None and not says_none(function, code):
                # What is borne makes no instance disappear.
                assert gpu_in_words(observed) == gpu_in_words(gpu), function
            rig.state.clear_faults()
        assert rig.observe() == gpu
        assert pynvml._nvmlLib_refcount == 0 or function == "nvmlShutdown"


@pytest.mark.slow
@each_code(pynvml.NVML_ERROR_NOT_SUPPORTED)
def test_any_answer_while_changing_is_tolerated_or_a_typed_error(
    codes: tuple[int, ...], boot: Boot
) -> None:
    rig = boot(in_use_timeout_s=0.5)
    rig.gpus.execute(everything(rig.fill("1g.5gb", "3g.20gb")))
    expected = gpu_in_words(rig.observe())

    def change() -> model.ObservedGpus:
        return rig.gpus.execute(everything(before[0]), before)

    before = rig.gpus.observe()
    functions = functions_called_by(rig, change)
    assert len(functions) >= 20
    for function in functions:
        for code in codes:
            rig.fault(function, code=code, count=None)
            # A driver that contradicts itself may fail at another function than this.
            failure, after = attempt(change)
            rig.state.clear_faults()
            is_reported = failure is not None or (after is not None and bool(after.unreachable))
            assert is_reported or gpu_in_words(rig.observe()) == expected
            before = rig.gpus.execute(everything(rig.observe()))
            assert gpu_in_words(before[0]) == expected
