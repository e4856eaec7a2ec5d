"""What the command line writes to a terminal, and where it cannot write."""

import io
import json
import pathlib
from typing import TextIO

import pytest

from mig_manager.cli import main
from mig_manager.cli.toolkit import console
from tests.rigs.shell.commandline import SPEC, Shell

NASTY = "a\x1b]0;owned\x07\x1b[2J\x1b[8m\u202eb\x1b[31mc\nd"
"""Control sequences that name a terminal's window, clear it, hide, reverse and colour the text
after, and a further line."""


@pytest.mark.parametrize(
    "words",
    [("plan", NASTY), ("apply", NASTY), ("assert", NASTY), ("plan", "none"), ("validate",)],
)
@pytest.mark.parametrize("mode", ["true", "false"])
def test_names_from_files_cannot_drive_the_terminal(
    shell: Shell, tmp_path: pathlib.Path, words: tuple[str, ...], mode: str
) -> None:
    file = shell.file(
        f"version: v1\nmig-configs:\n  {json.dumps(NASTY)}: "
        f"[{{devices: all, mig-enabled: {mode}, mig-devices: {{1g.5gb: 7}}}}]\n"
    )
    state = ("--simulate-state", str(tmp_path / "gpus"))

    answer = shell(*words, "-f", file, *SPEC, *state)

    assert all(letter.isprintable() or letter == "\n" for letter in answer.out + answer.err)
    assert not any(line.startswith("d") for line in answer.out.splitlines())


def test_colour_can_be_forced_and_is_off_in_a_pipe(shell: Shell) -> None:
    assert "\x1b[" not in shell("status", *SPEC).out
    assert "\x1b[" in shell("status", "--color=always", *SPEC).out


def run_at_terminal(shell: Shell, stdout: TextIO, *argv: str) -> tuple[int, str]:
    """Return status and standard error of a command line."""
    stderr = io.StringIO()
    terminal = console.Console(
        stdin=io.StringIO(), stdout=stdout, stderr=stderr, environ=shell.environ
    )
    return main.main(argv, terminal), stderr.getvalue()


@pytest.mark.parametrize(
    ("encoding", "variables"),
    [
        ("ascii", {}),
        ("utf-8", {"LC_ALL": "C", "LANG": "C.UTF-8"}),
        ("utf-8", {"LC_CTYPE": "C.UTF-8", "LANG": "C"}),
    ],
)
def test_a_terminal_without_box_drawing_gets_ascii(
    shell: Shell, encoding: str, variables: dict[str, str]
) -> None:
    written = io.BytesIO()
    stdout = io.TextIOWrapper(written, encoding=encoding)
    shell.environ.update(variables)

    assert run_at_terminal(shell, stdout, "status", *SPEC)[0] == 0
    assert "+-----" in written.getvalue().decode("ascii")


class Raising(io.StringIO):
    """A stream that raises at every write."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def write(self, _text: str) -> int:
        raise self._error


def test_a_bug_is_reported_with_its_traceback(shell: Shell) -> None:
    status, err = run_at_terminal(shell, Raising(LookupError("surprise")), "version")

    assert status == 1
    bug, remedy, *traceback = err.splitlines()
    assert bug == "mig-manager: internal error: LookupError: surprise"
    assert "please report it with these lines" in remedy
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "LookupError: surprise"


def test_an_unwritable_answer_or_an_interrupt_is_not_reported_as_a_bug(shell: Shell) -> None:
    for word in ("version", "--help"):
        with pathlib.Path("/dev/full").open("w") as full:
            assert run_at_terminal(shell, full, word) == (
                1,
                "mig-manager: cannot write the answer: No space left on device\n",
            )
    assert run_at_terminal(shell, Raising(KeyboardInterrupt()), "version")[0] == 130
