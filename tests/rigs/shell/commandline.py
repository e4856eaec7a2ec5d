"""The command line, in this process or as a process of its own, for tests."""

import contextlib
import dataclasses
import io
import json
import logging
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, TextIO

import structlog

from mig_manager.cli import main, registry
from mig_manager.cli.toolkit import console
from mig_manager.sandbox.driver import simulated_nvml
from tests.rigs import contract
from tests.rigs.driver import gpus_in_process

SPEC = ("--simulate", "2xA100-SXM4-40GB")
ONE_LAYOUT = """
version: v1
mig-configs:
  one:
  - devices: all
    mig-enabled: true
    mig-devices: {3g.20gb: 1, 1g.5gb: 4}
"""
_TIMEOUT_S = 240

Main = Callable[[Sequence[str], console.Console], int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    out: str
    err: str

    def __post_init__(self) -> None:
        """Hold each answer in JSON to its schema."""
        contract.check_output(self.out)

    @property
    def data(self) -> Any:
        return json.loads(self.out)


class Terminal(io.StringIO):
    """Where an answer is drawn as on a terminal."""

    def isatty(self) -> bool:
        return True


def run(  # noqa: PLR0913 - each is named where it is called
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    command: Main = main.main,
    stdin: str | Terminal = "",
    stdout: TextIO | None = None,
    program: str = registry.PROGRAM.name,
    replace_adapter: console.ReplaceAdapter = gpus_in_process.replace,
) -> Answer:
    """Run a command line in this process, which also changes simulated GPUs."""
    out, err = stdout or io.StringIO(), io.StringIO()
    terminal = console.Console(
        stdin=io.StringIO(stdin) if isinstance(stdin, str) else stdin,
        stdout=out,
        stderr=err,
        environ=environ,
        program=program,
        replace_adapter=replace_adapter,
    )
    status = command(argv, terminal)
    written = out.getvalue() if type(out) in (io.StringIO, Terminal) else ""  # type: ignore[attr-defined]
    return Answer(status=status, out=written, err=err.getvalue())


@contextlib.contextmanager
def start(
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    module: str = "mig_manager",
    stdin: int | IO[bytes] = subprocess.DEVNULL,
) -> Iterator["subprocess.Popen[str]"]:
    """Start a command line as a process, and leave it to the test to end it."""
    with subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-m", module, *argv],
        env=environ,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_answer(process: "subprocess.Popen[str]") -> Answer:
    """Wait for the end of a process, and return its answer."""
    out, err = process.communicate(timeout=_TIMEOUT_S)
    assert "Traceback" not in err, err
    return Answer(status=process.returncode, out=out, err=err)


class Shell:
    """A shell whose user has a home of their own."""

    def __init__(self, home: pathlib.Path) -> None:
        """Begin with an environment that has the home and nothing else."""
        self._home = home
        self.environ = {"HOME": str(home)}

    def file(self, text: str, name: str = "layouts.yaml") -> str:
        path = self._home / name
        path.write_text(text)
        return str(path)

    def __call__(
        self, *argv: str, stdin: str = "", program: str = registry.PROGRAM.name, **environ: str
    ) -> Answer:
        def command(argv: Sequence[str], terminal: console.Console) -> int:
            return main.main(argv, terminal, program=program)

        answer = run(argv, self.environ | environ, command=command, stdin=stdin)
        assert "Traceback" not in answer.err
        assert "internal error" not in answer.err
        return answer


def forget() -> None:
    """Undo what a command line has changed in this process."""
    simulated_nvml.load(None)
    forget_log()


def forget_log() -> None:
    structlog.reset_defaults()
    root = logging.getLogger()
    for handler in list(root.handlers):
        if type(handler).__module__ == "mig_manager.adapters.host.log":
            root.removeHandler(handler)
