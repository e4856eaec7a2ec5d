"""The command line of a person, in a process of its own."""

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tests import contract

TIMEOUT_S = 240


def arguments(kubeconfig: pathlib.Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "mig_manager", "rollout", *options]
    return [*command, "--kubeconfig", str(kubeconfig), "--output-format", "json"]


def run(kubeconfig: pathlib.Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the answer."""
    with started(kubeconfig, *options) as process:
        return finished(process)


@contextlib.contextmanager
def started(kubeconfig: pathlib.Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Start a rollout and leave it to the test to end it."""
    process = subprocess.Popen(  # noqa: S603 - our own program and our own arguments
        arguments(kubeconfig, *options),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def interrupt(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    """Press Ctrl-C; return the exit status and the answer."""
    process.send_signal(signal.SIGINT)
    return finished(process)


def finished(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert out, err
    assert "Traceback" not in err
    contract.check_output(out)
    return process.returncode, json.loads(out)
