"""Run the commands that a page shows against a running demonstration."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.docs import pages

_TIMEOUT_S = 240.0
_POLL_S = 0.5
_LOOKS = re.compile(r"kubectl (get|describe) ")
_EXPORT = re.compile(r"^ *(export KUBECONFIG=\S+)$", re.MULTILINE)


class Reader:
    """A reader with two terminals.

    Args:
        home: A folder of their own.
    """

    def __init__(self, home: pathlib.Path) -> None:
        self._home = home
        self._exports: list[str] = []
        self._environ = {
            "HOME": str(home),
            "PATH": os.pathsep.join(
                (str(pathlib.Path(sys.executable).parent), os.environ["PATH"])
            ),
            "PYTHONUNBUFFERED": "1",
            "PYTHONUTF8": "1",
            "TERM": "dumb",
        }
        self._demo_log = home / "demonstration.txt"
        self._demo: subprocess.Popen[bytes] | None = None

    def take(self, step: pages.Step) -> None:
        """Run one command, and compare its output with the page."""
        match step.how:
            case "not here, the test has an environment already":
                return
            case "in the background":
                self._start(step.command)
            case "as the demonstration has printed it":
                self._exports.append(self._as_printed(step.command))
            case "":
                self._run(step)
            case other:
                raise AssertionError(f"a page says 'run: {other}', which means nothing")

    def demonstration(self) -> str:
        """Return what the demonstration has written so far."""
        return self._demo_log.read_text(encoding="utf-8")

    def _start(self, command: str) -> None:
        with self._demo_log.open("wb") as log:
            self._demo = subprocess.Popen(  # noqa: S603 - from our own page
                ["/bin/bash", "-c", f"exec {command}"],
                cwd=pages.ROOT,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + _TIMEOUT_S
        while not _EXPORT.search(self.demonstration()):
            assert self._demo.poll() is None, self.demonstration()
            assert time.monotonic() < deadline, self.demonstration()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._demo.wait(_POLL_S)

    def _as_printed(self, command: str) -> str:
        if "…" not in command:
            return command
        (printed,) = _EXPORT.findall(self.demonstration())
        pattern = re.escape(command).replace("…", ".+")
        assert re.fullmatch(pattern, printed), f"the page shows {command}, it is {printed}"
        return str(printed)

    def _run(self, step: pages.Step) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            done = subprocess.run(  # noqa: S603 - from our own page
                ["/bin/bash", "-euc", "\n".join((*self._exports, step.command))],
                cwd=pages.ROOT,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                timeout=_TIMEOUT_S,
                check=False,
            )
            assert done.returncode == 0, f"{step.command}: {done.stderr}"
            if not step.shown or pages.is_as_shown(step.shown, done.stdout):
                return
            # Only commands that read are repeated until they show the expected output.
            may_wait = _LOOKS.match(step.command) and time.monotonic() < deadline
            assert may_wait, f"{step.command}: the page shows\n{step.shown}\nit is\n{done.stdout}"

    def leave(self) -> None:
        """Press Ctrl-C."""
        if self._demo is None or self._demo.poll() is not None:
            return
        self._demo.send_signal(signal.SIGINT)
        try:
            self._demo.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._demo.pid, signal.SIGKILL)
            self._demo.wait()


@contextlib.contextmanager
def reader(home: pathlib.Path) -> Iterator[Reader]:
    """Yield a reader, and stop its demonstration at the end."""
    visitor = Reader(home)
    try:
        yield visitor
    finally:
        visitor.leave()
