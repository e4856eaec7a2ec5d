"""A change goes to its end, or back, whatever becomes of what is said about it."""

import contextlib
import os
import pty
import signal
import subprocess
from collections.abc import Iterator

import pytest

from testkit import nvml_faults
from tests.rigs import waiting
from tests.rigs.shell import lost_stderr
from tests.rigs.shell.shell_node import ShellNode

CREATE = "nvmlDeviceCreateGpuInstanceWithPlacement"


def run_process(node: ShellNode, *argv: str, stderr: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - our own program
        node.command(*argv),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
        timeout=180,
    )


OFTEN = ("full-disk", "closed-pipe", "stalled-reader")
SELDOM = [
    pytest.param(way, marks=pytest.mark.slow) for way in lost_stderr.WAYS if way not in OFTEN
]


@pytest.mark.slow
@pytest.mark.parametrize("way", [*OFTEN, *SELDOM])
def test_failed_change_is_rolled_back_before_output(node: ShellNode, way: str) -> None:
    before = node.geometry
    node.state.add_fault(nvml_faults.Fault(function=CREATE, first=2, code=999))

    with lost_stderr.WAYS[way]() as stderr:
        failed = run_process(node, "apply", "requested", "--debug", stderr=stderr)

    assert (failed.returncode, failed.stdout) == (1, "")
    assert node.geometry == before
    assert not node.journal.exists()


@pytest.mark.slow
@pytest.mark.parametrize("way", lost_stderr.WAYS)
def test_a_change_succeeds_although_its_remarks_cannot_be_written(
    node: ShellNode, way: str
) -> None:
    with lost_stderr.WAYS[way]() as stderr:
        done = run_process(node, "apply", "requested", "--debug", stderr=stderr)

    assert (done.returncode, done.stdout) == (0, "MIG configuration applied successfully\n")
    assert node.run("assert", "requested").status == 0


def test_a_usage_error_keeps_its_status_where_it_cannot_be_explained(node: ShellNode) -> None:
    with lost_stderr.full_disk() as stderr:
        assert run_process(node, "apply", "no-such", stderr=stderr).returncode == 2


@contextlib.contextmanager
def at_a_terminal(node: ShellNode, *argv: str) -> Iterator[tuple[int, int]]:
    """Run the program in a session of its own; give its pid and the terminal's other side."""
    command = node.command(*argv)
    pid, master = pty.fork()
    if pid == 0:
        # As after a login, also where the parent of these tests ignores it (nohup).
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(command[0], command)  # noqa: S606 - our own program
    try:
        yield pid, master
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.close(master)


@pytest.mark.slow
def test_lost_ssh_session_does_not_interrupt_a_change(node: ShellNode) -> None:
    node.state.add_fault(nvml_faults.Fault(function=CREATE, first=1, hang_s=1.0))
    with at_a_terminal(node, "apply", "requested") as (pid, master):
        waiting.until(lambda: node.is_hung, "the hanging call")
        os.close(master)
        _, status = os.waitpid(pid, 0)

    # As if it had been hung up on after its work.
    assert os.waitstatus_to_exitcode(status) == -signal.SIGHUP
    node.state.clear_faults()
    assert node.run("assert", "requested").status == 0
    assert not node.journal.exists()
