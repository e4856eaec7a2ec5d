"""Commands as processes: killed, in a hung driver, interrupted, or not alone."""

import contextlib
import json
import os
import pathlib
import re
import signal
from collections.abc import Sequence

import pytest

from mig_manager.adapters import host
from mig_manager.adapters.host import lock_file
from tests.rigs import waiting
from tests.rigs.shell import commandline
from tests.rigs.shell.shell_node import ShellNode


@pytest.fixture
def fresh(tmp_path: pathlib.Path) -> ShellNode:
    return ShellNode(tmp_path, "1xA100-SXM4-40GB")


CREATE = "nvmlDeviceCreateGpuInstance*"
KILLS = [("nvmlInit*", 2), ("nvmlGpuInstanceDestroy", 1), (CREATE, 2), ("nvmlShutdown", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "first"), KILLS)
@pytest.mark.parametrize("again", ["requested", "too-much"])
def test_apply_after_a_kill_finishes_or_undoes_the_change(
    node: ShellNode, function: str, first: int, again: str
) -> None:
    before = node.geometry
    node.kill("apply", "requested", function=function, first=first)

    answer = node.run("apply", again)

    assert answer.status == (again == "too-much")
    assert node.run("assert", "before" if answer.status else again).status == 0
    assert (node.geometry == before) is (again == "too-much")
    assert not node.journal.exists()


def test_a_killed_change_of_other_gpus_is_named_before_it_is_undone(
    tmp_path: pathlib.Path,
) -> None:
    layouts = """
version: v1
mig-configs:
  first: [{devices: [0], mig-enabled: true, mig-devices: {3g.20gb: 2}}]
  second: [{devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 7}}]
"""
    node = ShellNode(tmp_path, "2xA100-SXM4-40GB", layouts=layouts, active="first")
    node.kill("apply", "second", function=CREATE, first=2)
    for argv in (("plan",), ("apply", "--dry-run"), ("assert",), ("apply",)):
        answer = node.run(*argv, "first")

        words = " ".join(answer.err.split())
        assert answer.status == 0, answer.err
        assert "the change to layout 'second' was left unfinished" in words
        assert re.search(r"restores GPU 1 \([^)]*\),? outside its layout", words)
        assert node.journal.exists() == (argv != ("apply",))


@pytest.mark.slow
def test_a_hung_driver_times_out_and_the_change_is_rolled_back(node: ShellNode) -> None:
    before = node.geometry
    node.hang_in(CREATE)

    answer = node.run_process(
        "apply", "requested", "--gpu-timeout-s", "12", "--in-use-timeout-s", "1"
    )

    assert answer.status == 1
    assert "nvmlDeviceCreateGpuInstanceWithPlacement on GPU 0 (GPU-" in answer.err
    assert "the GPU worker was killed" in answer.err
    assert "the former instances are restored" in answer.err
    assert node.geometry == before
    assert not node.journal.exists()


@pytest.mark.parametrize(
    "argv", [pytest.param(("apply", "requested"), marks=pytest.mark.slow), ("status",)]
)
def test_an_interrupt_ends_a_command_that_waits_for_a_hung_driver(
    fresh: ShellNode, argv: Sequence[str]
) -> None:
    fresh.hang_in("nvmlInit*")
    with fresh.start(*argv) as process:
        waiting.until(lambda: fresh.is_hung, "the hanging call")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130

    assert not fresh.journal.exists()


@pytest.mark.parametrize(
    "argv",
    [
        ("status",),
        ("plan", "requested"),
        *(
            pytest.param(argv, marks=pytest.mark.slow)
            for argv in (("assert", "requested"), ("export",), ("validate",))
        ),
    ],
)
def test_a_command_that_reads_from_a_hung_driver_ends_at_the_deadline(
    fresh: ShellNode, argv: Sequence[str]
) -> None:
    fresh.hang_in("nvmlDeviceGetName")

    answer = fresh.run_process(*argv, "--gpu-timeout-s", "0.5")

    assert answer.status == 1
    assert "NVML gave no answer within 0.5 s" in answer.err
    assert "remedy: The driver does not answer; read the kernel log." in answer.err


def test_apply_names_the_owner_of_the_lock(fresh: ShellNode) -> None:
    other = lock_file.LockFile(
        fresh.state.beside("manager.lock"),
        program="mig-manager agent",
        clock=host.SystemClock(),
        is_required=True,
    )
    before = fresh.geometry
    with other.hold("serve all-1g.5gb"):
        answer = fresh.run("apply", "requested", "--lock-timeout-s", "0")

    assert answer.status == 1
    assert f"mig-manager agent (pid {os.getpid()} on " in answer.err
    assert "serve all-1g.5gb, since " in answer.err
    assert "remedy: Wait for the other manager to finish" in answer.err
    assert fresh.geometry == before


@pytest.mark.slow
def test_concurrent_applies_run_one_after_the_other_and_one_layout_stays(
    tmp_path: pathlib.Path,
) -> None:
    node = ShellNode(tmp_path, "2xA100-SXM4-40GB")
    names = ["before", "requested", "other", "small"]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(node.start("apply", name, "--lock-timeout-s", "200"))
            for name in names
        ]
        answers = [commandline.wait_for_answer(process) for process in processes]

    for each in answers:
        assert (each.status, each.out) == (0, "MIG configuration applied successfully\n"), each.err
        assert "left unfinished" not in each.err
        assert "already active" not in each.err
    # The order in which processes end is not the one in which they had the lock.
    kept = json.loads(node.state.beside("verified-layout").read_text("utf-8"))["config"]
    assert [name for name in names if node.run("assert", name).status == 0] == [kept]
    assert not node.journal.exists()


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(None, marks=pytest.mark.slow),
        signal.SIGQUIT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_wait_for_idle_ends_with_the_program_or_at_a_signal(
    pair: ShellNode, number: signal.Signals | None
) -> None:
    client = pair.use("2g.10gb", gpu=1)
    before = pair.geometry
    with pair.start("apply", "requested", "--wait-for-idle", "600") as process:
        assert process.stderr
        waits = next(line for line in process.stderr if "waiting up to 600 s" in line)
        assert "train (pid 4242" in waits
        assert pair.geometry == before
        if number:
            process.send_signal(number)
        else:
            pair.state.remove_client(client)
        assert process.wait(120) == (-number if number else 0)

    assert (pair.geometry == before) is bool(number)
    assert not pair.journal.exists()
