"""What a worker writes down is what the agent reads, whatever became of the worker."""

import os
import threading
import time
from collections.abc import Iterator

import pytest

from mig_manager.adapters.nvml import gpu_progress

UUID = "GPU-00000000-0000-0000-0000-000000000003"


@pytest.fixture
def board() -> Iterator[gpu_progress.Board]:
    made = gpu_progress.Board()
    yield made
    made.close()


@pytest.fixture
def progress(board: gpu_progress.Board) -> gpu_progress.Progress:
    teller = gpu_progress.Progress()
    teller.attach(os.dup(board.fd))
    return teller


def said(board: gpu_progress.Board) -> list[tuple[str, bool]]:
    return [(str(call), call.is_under_way) for call in board.calls()]


def test_a_call_is_there_from_before_it_begins_until_after_it_returned(
    board: gpu_progress.Board, progress: gpu_progress.Progress
) -> None:
    assert said(board) == []
    progress.began("nvmlInit", 12.5)
    (call,) = board.calls()
    assert (call.function, call.gpu, call.minor, call.since_s) == ("nvmlInit", "", None, 12.5)
    assert said(board) == [("nvmlInit", True)]
    progress.ended()
    assert said(board) == [("nvmlInit", False)]


def test_a_call_names_its_gpu_as_far_as_it_is_known(
    board: gpu_progress.Board, progress: gpu_progress.Progress
) -> None:
    with progress.about(3):
        progress.began("nvmlDeviceGetUUID", 1.0)
        assert said(board) == [("nvmlDeviceGetUUID on GPU 3", True)]
        progress.names(3, UUID)
        assert said(board) == [(f"nvmlDeviceGetUUID on GPU 3 ({UUID})", True)]
        assert board.calls()[0].minor is None
        progress.names(3, UUID, 5)
        assert board.calls()[0].minor == 5
    progress.began("nvmlShutdown", 2.0)
    assert said(board) == [("nvmlShutdown", True)]
    assert board.calls()[0].minor is None


def test_each_thread_has_its_own_last_call_and_the_oldest_comes_first(
    board: gpu_progress.Board, progress: gpu_progress.Progress
) -> None:
    for number in range(3):
        thread = threading.Thread(target=progress.began, args=(f"nvml{number}", 9.0 - number))
        thread.start()
        thread.join()
    assert [call.function for call in board.calls()] == ["nvml2", "nvml1", "nvml0"]


def test_a_thread_without_a_place_on_the_board_is_left_out(
    board: gpu_progress.Board, progress: gpu_progress.Progress
) -> None:
    ready = threading.Barrier(201)

    def call() -> None:
        progress.names(1, UUID, 1)
        progress.began("nvmlInit", 1.0)
        progress.ended()
        ready.wait(20)

    threads = [threading.Thread(target=call) for _ in range(200)]
    for thread in threads:
        thread.start()
    ready.wait(20)
    for thread in threads:
        thread.join()
    assert len(board.calls()) == 128


def test_without_a_board_nothing_is_told_and_nothing_fails() -> None:
    progress = gpu_progress.Progress()
    with progress.about(1), progress.calling("dlopen"):
        progress.names(1, UUID, 1)


def test_names_too_long_for_the_board_are_cut(
    board: gpu_progress.Board, progress: gpu_progress.Progress
) -> None:
    with progress.about(3):
        progress.names(3, "G" * 500, 5)
        progress.began("n" * 500, 1.0)
        (call,) = board.calls()
    assert (len(call.function), call.minor, call.is_under_way) == (80, 5, True)


def test_a_board_with_nonsense_written_over_it_can_still_be_read(
    board: gpu_progress.Board,
) -> None:
    os.pwrite(board.fd, os.urandom(4096) + b"\1\xff\x1b" * 500, 0)
    for call in board.calls():
        assert str(call).isprintable()


def test_what_is_no_board_is_refused() -> None:
    reader, writer = os.pipe()
    with pytest.raises(OSError, match=r"."):
        gpu_progress.Progress().attach(reader)
    os.close(reader)
    os.close(writer)


def test_telling_costs_microseconds(progress: gpu_progress.Progress) -> None:
    rounds = 10_000
    since = time.perf_counter()
    for _ in range(rounds):
        progress.began("nvmlGpuInstanceGetComputeInstanceProfileInfo", 1.0)
        progress.ended()
    assert (time.perf_counter() - since) / rounds < 50e-6
