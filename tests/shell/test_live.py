"""``status --watch`` in a terminal and in a pipe."""

import contextlib
import os
import pathlib
import re
import signal
import termios
from typing import Any

import pytest

from tests.rigs import waiting
from tests.rigs.shell.shell_node import ShellNode
from tests.shell import terminal

_SCREEN = "\x1b[?1049h"
_CUT_LINES, _WRAP_LINES = "\x1b[?7l", "\x1b[?7h"
# The workers of pytest set COLUMNS, which stands for the terminal's width.
ENVIRON = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
_BACK = "\x1b[?25h\x1b[?1049l"


def open_view(
    node: ShellNode, *, columns: int = 100, **options: Any
) -> contextlib.AbstractContextManager[terminal.Session]:
    argv = node.arguments("status", "--watch")
    return terminal.open_session(argv, columns=columns, environ=ENVIRON, **options)


@pytest.mark.slow
def test_a_change_of_the_gpus_is_drawn_and_q_quits(pair: ShellNode) -> None:
    with open_view(pair, columns=100) as session:
        before = termios.tcgetattr(session.fd)
        session.read_until("q quits")
        assert pair.run("apply", "off").status == 0

        session.read_until(r"MIG off[\s\S]*q quits")
        session.type("q")

        assert session.end() == 0
        assert termios.tcgetattr(session.fd) == before
        assert session.shown.count(_SCREEN) == 1
        assert session.shown.rstrip().endswith(_BACK)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, -signal.SIGHUP, marks=pytest.mark.slow),
        (signal.SIGQUIT, -signal.SIGQUIT),
        (signal.SIGINT, 130),
    ],
)
def test_a_signal_ends_the_view_and_restores_the_terminal(
    pair: ShellNode, number: int, status: int
) -> None:
    with open_view(pair, columns=80) as session:
        before = termios.tcgetattr(session.fd)
        session.read_until("q quits")

        session.process.send_signal(number)

        assert session.end() == status
        assert termios.tcgetattr(session.fd) == before
        assert session.shown.rstrip().endswith(_BACK)


@pytest.mark.slow
def test_stopped_view_restores_the_terminal_and_is_drawn_again(pair: ShellNode) -> None:
    with open_view(pair, columns=80) as session:
        before = termios.tcgetattr(session.fd)
        session.read_until("q quits")

        session.process.send_signal(signal.SIGTSTP)
        session.read_until(re.escape(_BACK))
        stat = pathlib.Path(f"/proc/{session.process.pid}/stat")
        waiting.until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the stop")
        assert termios.tcgetattr(session.fd) == before

        session.process.send_signal(signal.SIGCONT)
        session.read_until(re.escape(_SCREEN) + r"[\s\S]*q quits")
        session.type("q")

        assert session.end() == 0
        assert termios.tcgetattr(session.fd) == before
        assert session.shown.rstrip().endswith(_BACK)


def test_a_low_and_narrow_terminal_gets_as_many_lines_as_it_has(pair: ShellNode) -> None:
    with open_view(pair, columns=60, rows=8) as session:
        session.read_until("q quits +[0-9]+ more lines")
        session.type("q")

        assert session.end() == 0
        frame = session.shown.partition("\x1b[H")[2].partition(_BACK)[0]
        lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", frame.partition("\x1b[H")[0]).split("\r\n")
        assert len(lines) < 8
        assert max(map(len, lines)) <= 60


@pytest.mark.slow
def test_on_a_terminal_too_narrow_for_pictures_lines_are_cut_until_the_end(
    pair: ShellNode,
) -> None:
    with open_view(pair, columns=30, rows=8) as session:
        session.read_until("q quits")
        session.type("q")

        assert session.end() == 0
        before, _, view = session.shown.partition(_CUT_LINES)
        assert before.endswith("\x1b[?25l")
        assert view.endswith(f"{_WRAP_LINES}{_BACK}")
        # Behind a line that is cut the cursor is on its last character.
        assert "\n\x1b[K" in view
        assert not re.search(r"(?<!\n)(?<!\x1b\[H)\x1b\[[JK]", view)


def test_without_a_keyboard_the_view_stays_until_a_signal(pair: ShellNode) -> None:
    with open_view(pair, has_keyboard=False) as session:
        session.read_until("Ctrl-C quits")
        session.process.send_signal(signal.SIGINT)

        assert session.end() == 130


@pytest.mark.slow
def test_a_pipe_gets_a_line_for_every_change_until_its_reader_ends(pair: ShellNode) -> None:
    with pair.start("status", "--watch") as process:
        assert process.stdout is not None
        first = [process.stdout.readline() for _ in range(3)]
        assert pair.run("apply", "off").status == 0

        unseen = {"GPU 0: 1x whole GPU, idle\n", "GPU 1: 1x whole GPU, idle\n"}
        while unseen:
            line = process.stdout.readline()
            assert line, unseen
            unseen.discard(line.split(" ", 1)[1])
        process.stdout.close()
        waiting.until(lambda: process.poll() is not None, "the end of the view")

        assert first[0].endswith(" no change is under way\n")
        assert process.returncode == 141
