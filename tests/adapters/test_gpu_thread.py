"""GPU work in a thread: the same answers, and none too late."""

import threading
from collections.abc import Sequence

import pytest

from mig_manager import errors
from mig_manager.adapters.nvml_worker import gpu_thread
from mig_manager.core import model, steps

PLAN = steps.Plan(gpus=())


class Gpus:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.executed: list[steps.Plan] = []

    def observe(self) -> model.ObservedGpus:
        if self.error:
            raise self.error
        return model.ObservedGpus()

    def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        self.executed.append(plan)
        return model.ObservedGpus()


class Hung:
    def __init__(self) -> None:
        self.let_go = threading.Event()

    def observe(self) -> model.ObservedGpus:
        self.let_go.wait()
        return model.ObservedGpus()

    def execute(self, plan: steps.Plan, seen: Sequence[model.Gpu] = ()) -> model.ObservedGpus:
        self.let_go.wait()
        return model.ObservedGpus()


def test_what_the_gpus_answer_comes_through() -> None:
    gpus = Gpus()
    within = gpu_thread.ThreadGpus(gpus, timeout_s=60.0)

    assert within.observe() == ()
    within.execute(PLAN)

    assert gpus.executed == [PLAN]
    assert not gpu_thread.is_stuck()


@pytest.mark.parametrize(
    "error",
    [errors.HardwareError("x", reason=errors.Reason.GPU_LOST), TimeoutError("x"), KeyError("x")],
)
def test_what_the_gpus_raise_comes_through(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        gpu_thread.ThreadGpus(Gpus(error), timeout_s=60.0).observe()

    assert caught.value is error


def test_a_call_that_hangs_is_given_up_and_known_to_be_stuck() -> None:
    hung = Hung()
    within = gpu_thread.ThreadGpus(hung, timeout_s=0.01)
    try:
        with pytest.raises(errors.HardwareError, match=r"no answer within 0\.01 s") as caught:
            within.observe()
        assert caught.value.reason is errors.Reason.NVML_TIMEOUT
        assert gpu_thread.is_stuck()
    finally:
        hung.let_go.set()
