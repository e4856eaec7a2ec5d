"""Notes of NVML calls in shared memory, and calls in a thread that may never return."""

import os
import threading
import time
from collections.abc import Iterator

import pytest

from mig_manager import errors, reasons
from mig_manager.adapters.host import call_thread
from mig_manager.adapters.nvml import last_calls

UUID = "GPU-00000000-0000-0000-0000-000000000003"


@pytest.fixture
def memory() -> Iterator[last_calls.LastCalls]:
    made = last_calls.LastCalls()
    yield made
    made.close()


@pytest.fixture
def recorder(memory: last_calls.LastCalls) -> last_calls.Recorder:
    made = last_calls.Recorder()
    made.attach(os.dup(memory.fd))
    return made


def calls_in(memory: last_calls.LastCalls) -> list[tuple[str, bool]]:
    return [(str(call), call.is_running) for call in memory.read()]


def test_a_call_is_noted_before_it_begins_and_after_it_returned(
    memory: last_calls.LastCalls, recorder: last_calls.Recorder
) -> None:
    assert calls_in(memory) == []
    recorder.began("nvmlInit", 12.5)
    (call,) = memory.read()
    assert (call.function, call.gpu, call.minor, call.since_s) == ("nvmlInit", "", None, 12.5)
    assert calls_in(memory) == [("nvmlInit", True)]
    recorder.record_return()
    assert calls_in(memory) == [("nvmlInit", False)]


def test_a_call_names_its_gpu_as_far_as_it_is_known(
    memory: last_calls.LastCalls, recorder: last_calls.Recorder
) -> None:
    with recorder.on_gpu(3):
        recorder.began("nvmlDeviceGetUUID", 1.0)
        assert calls_in(memory) == [("nvmlDeviceGetUUID on GPU 3", True)]
        recorder.set_gpu(3, UUID)
        assert calls_in(memory) == [(f"nvmlDeviceGetUUID on GPU 3 ({UUID})", True)]
        assert memory.read()[0].minor is None
        recorder.set_gpu(3, UUID, 5)
        assert memory.read()[0].minor == 5
    recorder.began("nvmlShutdown", 2.0)
    assert calls_in(memory) == [("nvmlShutdown", True)]
    assert memory.read()[0].minor is None


def test_each_thread_has_its_own_last_call_and_the_oldest_comes_first(
    memory: last_calls.LastCalls, recorder: last_calls.Recorder
) -> None:
    for number in range(3):
        thread = threading.Thread(target=recorder.began, args=(f"nvml{number}", 9.0 - number))
        thread.start()
        thread.join()
    assert [call.function for call in memory.read()] == ["nvml2", "nvml1", "nvml0"]


def test_a_thread_without_a_slot_is_left_out(
    memory: last_calls.LastCalls, recorder: last_calls.Recorder
) -> None:
    ready = threading.Barrier(201)

    def call() -> None:
        recorder.set_gpu(1, UUID, 1)
        recorder.began("nvmlInit", 1.0)
        recorder.record_return()
        ready.wait(60)

    threads = [threading.Thread(target=call) for _ in range(200)]
    for thread in threads:
        thread.start()
    ready.wait(60)
    for thread in threads:
        thread.join()
    assert len(memory.read()) == 128


def test_names_that_are_too_long_are_cut(
    memory: last_calls.LastCalls, recorder: last_calls.Recorder
) -> None:
    with recorder.on_gpu(3):
        recorder.set_gpu(3, "G" * 500, 5)
        recorder.began("n" * 500, 1.0)
        (call,) = memory.read()
    assert (len(call.function), call.minor, call.is_running) == (80, 5, True)


def test_memory_that_was_overwritten_can_still_be_read(memory: last_calls.LastCalls) -> None:
    os.pwrite(memory.fd, b"\1\xff\x1b" * 2000, 0)
    calls = memory.read()
    assert len(calls) > 10
    assert all(str(call).isprintable() for call in calls)


def test_a_note_takes_microseconds(recorder: last_calls.Recorder) -> None:
    rounds = 10_000
    since = time.thread_time()
    for _ in range(rounds):
        recorder.began("nvmlGpuInstanceGetComputeInstanceProfileInfo", 1.0)
        recorder.record_return()
    assert (time.thread_time() - since) / rounds < 50e-6


# -- calls in a thread ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [errors.HardwareError("x", reason=reasons.Reason.GPU_LOST), TimeoutError("x"), KeyError("x")],
)
def test_a_call_in_a_thread_returns_its_result_or_raises_its_error(error: Exception) -> None:
    def fail() -> None:
        raise error

    assert call_thread.CallThread(lambda: 7).result() == 7
    with pytest.raises(type(error)) as caught:
        call_thread.CallThread(fail).result()
    assert caught.value is error
