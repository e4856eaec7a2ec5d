"""``apply`` as a process that is killed, hangs, or is one of several; on simulated GPUs."""

import contextlib
import os
import pathlib
import signal
from collections.abc import Sequence

import pytest

from mig_manager.adapters import host
from mig_manager.adapters.host import lock_file
from tests import waiting
from tests.shell.shell_node import Node


@pytest.fixture
def fresh(tmp_path: pathlib.Path) -> Node:
    return Node(tmp_path, "1xA100-SXM4-40GB")


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Node:
    return Node(tmp_path, "1xA100-SXM4-40GB", active="before")


CREATE = "nvmlDeviceCreateGpuInstance*"
KILLS = [
    ("nvmlInit*", 1),
    ("nvmlInit*", 2),
    ("nvmlComputeInstanceDestroy", 1),
    ("nvmlGpuInstanceDestroy", 1),
    (CREATE, 1),
    (CREATE, 2),
    ("nvmlGpuInstanceCreateComputeInstance*", 1),
    ("nvmlGpuInstanceCreateComputeInstance*", 2),
    ("nvmlShutdown", 2),
]


@pytest.mark.slow
def test_an_impossible_layout_after_a_kill_restores_the_old_instances(node: Node) -> None:
    before = node.shape
    node.kill_apply("wanted", CREATE)
    assert node.shape != before
    assert node.journal.exists()

    answer = node.run("apply", "too-much")

    assert answer.returncode == 1
    assert "the 'apply' of layout 'wanted' was left unfinished and is undone now" in answer.stderr
    assert node.shape == before
    assert not node.journal.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("function", "first"), KILLS)
@pytest.mark.parametrize("again", ["wanted", "other", "too-much"])
def test_after_a_kill_at_any_step_the_next_apply_finishes_or_undoes_it(
    node: Node, function: str, first: int, again: str
) -> None:
    before = node.shape
    node.kill_apply("wanted", function, first=first)

    answer = node.run("apply", again)

    if again == "too-much":
        assert answer.returncode == 1
        assert node.shape == before
    else:
        assert answer.returncode == 0
        assert node.run("assert", again).returncode == 0
    assert not node.journal.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("function", "first"), KILLS)
def test_after_a_kill_at_any_step_an_unknown_layout_changes_nothing(
    node: Node, function: str, first: int
) -> None:
    node.kill_apply("wanted", function, first=first)
    left = node.shape, node.journal.exists()

    assert node.run("apply", "no-such").returncode == 2

    assert (node.shape, node.journal.exists()) == left


def test_a_hung_driver_times_out_and_the_change_is_rolled_back(node: Node) -> None:
    before = node.shape
    node.hang_in(CREATE)

    answer = node.run("apply", "wanted", "--gpu-timeout-s", "5", "--in-use-timeout-s", "1")

    assert answer.returncode == 1
    assert "nvmlDeviceCreateGpuInstanceWithPlacement on GPU 0 (GPU-" in answer.stderr
    assert "the GPU worker was killed" in answer.stderr
    assert "the instances from before are back" in answer.stderr
    assert node.shape == before
    assert not node.journal.exists()


def test_an_interrupt_ends_apply_at_once_before_it_changes_anything(fresh: Node) -> None:
    fresh.hang_in("nvmlInit*")
    with fresh.started("apply", "wanted") as process:
        waiting.until(lambda: fresh.is_hung)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130

    assert not fresh.journal.exists()


@pytest.mark.parametrize(
    "argv", [("status",), ("assert", "wanted"), ("export",), ("validate",), ("plan", "wanted")]
)
def test_a_command_that_reads_from_a_hung_driver_ends_at_the_deadline(
    fresh: Node, argv: Sequence[str]
) -> None:
    fresh.hang_in("nvmlDeviceGetName")

    answer = fresh.run_process(*argv, "--gpu-timeout-s", "0.5")

    assert answer.returncode == 1
    assert "NVML gave no answer within 0.5 s" in answer.stderr
    assert "remedy: The driver does not answer; read the kernel log." in answer.stderr


def test_an_interrupt_ends_a_command_that_reads_from_a_hung_driver(fresh: Node) -> None:
    fresh.hang_in("nvmlDeviceGetName")
    with fresh.started("status") as process:
        waiting.until(lambda: fresh.is_hung)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_apply_names_the_owner_of_the_lock(fresh: Node) -> None:
    other = lock_file.LockFile(
        fresh.state.beside("manager.lock"),
        program="mig-manager agent",
        clock=host.SystemClock(),
        is_required=True,
    )
    before = fresh.shape
    with other.hold("serve all-1g.5gb"):
        answer = fresh.run("apply", "wanted", "--lock-timeout-s", "0")

    assert answer.returncode == 1
    assert f"mig-manager agent (pid {os.getpid()} on " in answer.stderr
    assert "serve all-1g.5gb, since " in answer.stderr
    assert "remedy: Wait for the other manager to finish" in answer.stderr
    assert fresh.shape == before


@pytest.mark.slow
def test_concurrent_applies_run_one_after_the_other_and_the_last_one_stays(
    tmp_path: pathlib.Path,
) -> None:
    node = Node(tmp_path, "2xA100-SXM4-40GB")
    names = ["before", "wanted", "other", "small"]
    ended: list[str] = []
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(node.started("apply", name, "--lock-timeout-s", "100"))
            for name in names
        }

        def all_have_ended() -> bool:
            ended.extend(
                name
                for name, process in processes.items()
                if name not in ended and process.poll() is not None
            )
            return len(ended) == len(names)

        waiting.until(all_have_ended, within_s=110)
        outputs = {name: process.communicate() for name, process in processes.items()}

    for name, process in processes.items():
        out, err = outputs[name]
        assert (process.returncode, out) == (0, "MIG configuration applied successfully\n"), err
        assert "left unfinished" not in err
        assert "already active" not in err
    assert [name for name in names if node.run("assert", name).returncode == 0] == ended[-1:]
    assert not node.journal.exists()
