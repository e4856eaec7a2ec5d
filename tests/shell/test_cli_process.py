"""The command line as a process: its streams and its signals."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from mig_manager.cli.toolkit import signals
from tests.rigs.shell.commandline import SPEC

PROGRAM = (sys.executable, "-m", "mig_manager")


def program(*argv: str, folder: pathlib.Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(  # noqa: S603 - our own program
        argv,
        env=os.environ | {"XDG_STATE_HOME": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "stream", ["0<", *(pytest.param(each, marks=pytest.mark.slow) for each in ("1>", "2>"))]
)
def test_a_closed_stream_counts_as_an_empty_one(tmp_path: pathlib.Path, stream: str) -> None:
    command = [*PROGRAM, "apply", "-f", "-", "all", *SPEC]
    closing = ("/bin/sh", "-c", f'exec "$@" {stream}&-', "sh")
    with program(*closing, *command, folder=tmp_path) as child:
        _, stderr = child.communicate(
            "{version: v1, mig-configs: {all: [{devices: all, mig-enabled: false}]}}"
        )

    # Without its input there is no document, hence no layout.
    assert child.returncode == (2 if stream == "0<" else 0)
    assert "internal error" not in stderr


def test_a_closed_pipe_is_no_error(tmp_path: pathlib.Path) -> None:
    with program(*PROGRAM, "status", *SPEC, folder=tmp_path) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert "Broken" not in child.stderr.read()
    assert child.returncode == 141


@pytest.mark.parametrize("package", ["mig_manager", "mig_manager.kubectl"])
def test_interrupt_while_a_program_loads_prints_no_traceback(
    tmp_path: pathlib.Path, package: str
) -> None:
    interrupt = 'event == "import" and name == "mig_manager.cli" and signal.raise_signal(2)'
    code = f"""import signal, sys
sys.addaudithook(lambda event, args: [{interrupt} for name in args[:1]])
from {package}.__main__ import main
main()"""
    with program(sys.executable, "-c", code, folder=tmp_path) as child:
        assert child.communicate() == ("", "")
    assert child.returncode == 130


@pytest.mark.parametrize("count", [1, 2])
def test_signal_waits_for_a_change_and_a_second_one_does_not(count: int) -> None:
    notes: list[str] = []
    done: list[bool] = []

    def change() -> None:
        with signals.deferred(notes.append):
            for _ in range(count):
                signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        change()
    assert bool(done) is (count == 1)
    assert notes[1:] == ["the change has finished"] * (count == 1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    notes: list[str] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.deferred(notes.append):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not notes
