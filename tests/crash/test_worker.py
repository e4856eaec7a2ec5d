"""The agent is killed while its real GPU worker is in the middle of a change of the GPUs."""

import contextlib
import dataclasses
import os
import select
from collections.abc import Callable

import pytest

from mig_manager.sandbox.driver import states
from testkit import nvml_faults
from tests.crash import changes, kill_case
from tests.crash.crash_stage import CrashStage
from tests.rigs import waiting
from tests.rigs.host import processes

_LONG_S = 60.0
_END_S = 30.0
_CHANGES = (
    (changes.FIRST_HOPPER, "nvmlDeviceSetMigMode"),
    (changes.ONE_SLICE, "nvmlComputeInstanceDestroy"),
    (changes.ONE_SLICE, "nvmlGpuInstanceDestroy"),
    (changes.ONE_SLICE, "nvmlDeviceCreateGpuInstance*"),
    (changes.ONE_SLICE, "nvmlGpuInstanceCreateComputeInstance*"),
)


def ends(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(_END_S * 1000))


def kill_at_work(crash_stage: CrashStage, is_at_work: Callable[[], bool]) -> None:
    """Kill an agent when a condition holds; check that its workers die, too."""
    crash_stage.label(crash_stage.change.layout)
    agent = crash_stage.spawn(has_worker=True)
    waiting.until(is_at_work, "the worker")
    with contextlib.ExitStack() as stack:
        workers = [os.pidfd_open(pid) for pid in processes.children(agent.pid)]
        for worker in workers:
            stack.callback(os.close, worker)
        agent.kill()
        assert workers
        assert all(ends(worker) for worker in workers)


def gpu_changes(crash_stage: CrashStage) -> int:
    """Return how often the GPUs have changed."""
    return sum(gpu.changes for gpu in crash_stage.state.read().gpus)


@pytest.mark.parametrize(
    ("change", "function"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] if number else [], id=each[1].rstrip("*"))
        for number, each in enumerate(_CHANGES)
    ],
)
def test_worker_in_a_driver_call_dies_with_its_agent(
    change: changes.ProcessChange, function: str, recorder: kill_case.Recorder
) -> None:
    recording = recorder(change)
    with CrashStage(change, recording.start) as crash_stage:
        crash_stage.state.add_fault(nvml_faults.Fault(function=function, hang_s=_LONG_S))

        kill_at_work(
            crash_stage, lambda: any(armed.strikes for armed in crash_stage.state.faults())
        )

        crash_stage.state.clear_faults()
        assert kill_case.recovery_problems(crash_stage) == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "nth", "latency"),
    [
        (changes.FIRST_HOPPER, 1, states.Latency(mode_without_reset_s=_LONG_S)),
        (changes.ONE_SLICE, 1, states.Latency(destroy_compute_instance_s=_LONG_S)),
        (changes.ONE_SLICE, 2, states.Latency(destroy_gpu_instance_s=_LONG_S)),
        (changes.ONE_SLICE, 3, states.Latency(create_gpu_instance_s=_LONG_S)),
        (changes.ONE_SLICE, 4, states.Latency(create_compute_instance_s=_LONG_S)),
    ],
    ids=["mode", "destroy-ci", "destroy-gi", "create-gi", "create-ci"],
)
def test_steps_of_a_killed_worker_are_resumed_or_undone(
    change: changes.ProcessChange, nth: int, latency: states.Latency, recorder: kill_case.Recorder
) -> None:
    recording = recorder(change)
    with CrashStage(change, recording.start) as crash_stage:
        usual = crash_stage.state.read().options
        crash_stage.state.set_options(dataclasses.replace(usual, latency=latency))
        before = gpu_changes(crash_stage)

        # The driver has done it and takes its time to say so.
        kill_at_work(crash_stage, lambda: gpu_changes(crash_stage) == before + nth)

        crash_stage.state.set_options(usual)
        assert kill_case.recovery_problems(crash_stage) == ()
