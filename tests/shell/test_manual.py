"""The manual in the repository, and what help says, are those of the program as it is."""

import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

from docs import generate
from mig_manager.cli import help_pages, parser
from tests.shell.commandline import Shell

DOCS = pathlib.Path(__file__).parents[2] / "docs"
LINES = [
    pytest.param(example.line, id=example.line)
    for command in ("", *parser.COMMANDS)
    for example in help_pages.text(command).examples
]


def test_the_pages_in_the_repository_are_current() -> None:
    stale = [
        name for name, text in generate.pages().items() if (DOCS / name).read_text("utf-8") != text
    ]
    assert stale == [], "run: just generate"


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
@pytest.mark.parametrize("name", generate.manual())
def test_a_manual_page_is_well_formed(tmp_path: pathlib.Path, name: str) -> None:
    page = tmp_path / name
    page.write_text(generate.manual()[name], encoding="utf-8")

    lint = subprocess.run(  # noqa: S603 - our own pages
        ["mandoc", "-T", "lint", "-W", "warning", page],  # noqa: S607 - from the PATH
        capture_output=True,
        text=True,
        check=False,
    )

    # No date: the same version has the same page, whenever it is made.
    assert [line for line in lint.stdout.splitlines() if "missing date" not in line] == []


@pytest.mark.parametrize("command", parser.COMMANDS)
def test_help_has_every_option_its_meaning_examples_and_statuses(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = shell(command, "--help").out

    assert page.startswith(f"usage: mig-manager {command}")
    assert shell("help", command).out == page
    assert command in shell().out
    for option in parser.options_of(command):
        assert option.help
        if option.flags:
            assert all(text in page for text in (*option.flags, option.variable))
    assert re.search(r"\nexamples:\n  .*mig-manager", page)
    assert "exit status:\n  0  " in page
    assert "environment:\n" in page
    assert max(map(len, page.splitlines())) <= 100


def test_every_value_with_a_type_shows_its_default() -> None:
    typed = {"SECONDS", "NUMBER", "PORT", *("FORMAT", "WHEN", "LEVEL", "WHO", "HOW")}
    options = [each for name in parser.COMMANDS for each in parser.options_of(name)]

    assert [
        each.name for each in options if each.metavar in typed and not each.shown_default
    ] == []


@pytest.mark.parametrize("line", LINES)
def test_an_example_is_a_command_line_that_the_program_takes(line: str) -> None:
    ours = re.search(r"mig-manager(?: [^|>)]*)?", line)
    assert ours is not None
    words = shlex.split(ours[0].partition(" || ")[0])

    assert words[0] == "mig-manager"
    if words[1] == "help":
        parser.check_command(words[2])
    else:
        assert parser.parse(words[1:])["command"] == words[1]
