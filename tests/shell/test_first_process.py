"""The program as process 1 of a PID namespace, as in a container without an init."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.rigs import waiting

UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc")
STAND_IN = """
import pathlib, time
pathlib.Path({reached!r}).touch()
while True:
    time.sleep(0.1)
"""
"""A signal that comes just before a sleep is served after it, so each is short."""


@pytest.fixture(autouse=True)
def _pid_namespace() -> None:
    attempt = shutil.which("unshare") and subprocess.run(  # noqa: S603 - no input of others
        [*UNSHARE, "true"], check=False, capture_output=True
    )
    if attempt and attempt.returncode == 0:
        return
    pytest.skip("a PID namespace is not permitted here")


@contextlib.contextmanager
def first_process(*argv: str, path: pathlib.Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the program as process 1; what ends is reported by unshare, in its own status."""
    environ = os.environ | {"PYTHONPATH": str(path)}
    command = [*UNSHARE, "--kill-child", sys.executable, "-m", "mig_manager", *argv]
    with subprocess.Popen(command, env=environ) as outside:  # noqa: S603 - our own program
        try:
            yield outside
        finally:
            outside.kill()


def child_of(process: "subprocess.Popen[bytes]") -> int:
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return int(children.read_text().split()[0])


@pytest.mark.parametrize("module", ["argparse", "tenacity"])
def test_sigterm_ends_an_agent_that_is_still_importing(
    tmp_path: pathlib.Path, module: str
) -> None:
    # A module that takes for ever to import stands for one that takes a moment too long.
    reached = tmp_path / "reached"
    (tmp_path / f"{module}.py").write_text(STAND_IN.format(reached=str(reached)))

    with first_process("agent", "--node-name", "n1", path=tmp_path) as outside:
        waiting.until(reached.exists, "the point of the change")
        os.kill(child_of(outside), signal.SIGTERM)
        status = outside.wait(timeout=120)

    assert status == 128 + signal.SIGTERM
