"""What help says is what the program takes and does."""

import re
import shlex

import pytest

from mig_manager.agent import agent_settings
from mig_manager.cli import registry
from mig_manager.cli.toolkit import command_line, parser
from mig_manager.kubectl import plugin_registry
from tests.rigs.shell.commandline import Shell

LINES = [
    pytest.param(example.line, id=example.line)
    for command in ("", *registry.PROGRAM.commands)
    for example in registry.PROGRAM.text(command).examples
]


@pytest.mark.parametrize("command", registry.PROGRAM.commands)
def test_help_has_every_option_its_meaning_examples_and_statuses(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = shell(command, "--help").out

    assert page.startswith(f"usage: mig-manager {command}")
    assert shell("help", command).out == page
    assert command in shell().out
    for option in registry.PROGRAM.options_of(command):
        assert option.help
        if option.flags:
            assert all(text in page for text in (*option.flags, option.variable))
    assert re.search(r"\nexamples:\n  .*mig-manager", page)
    # What holds for every command is in the program's help.
    own_statuses = registry.PROGRAM.text(command).own_statuses
    assert ("exit status:\n  0  " in page) is bool(own_statuses)
    assert "environment:\n" in shell().out
    assert "environment:\n" not in page
    changes_gpus = command in {"agent", "apply", "boot", "restore", "acceptance"}
    assert ("\nthe change:\n" in page) is changes_gpus
    assert max(map(len, page.splitlines())) <= 100


@pytest.mark.parametrize("program", [registry.PROGRAM, plugin_registry.PROGRAM])
def test_help_of_a_program_lists_commands_before_options(program: command_line.Program) -> None:
    before, _, after = parser.build(program, "").format_help().partition("\noptions:\n")

    assert after
    assert all(f"\n  {command} " in before for command in program.commands)


def test_every_value_with_a_type_shows_its_default() -> None:
    typed = {"SECONDS", "NUMBER", "PORT", *("FORMAT", "WHEN", "LEVEL", "WHO", "HOW")}
    options = [
        each for name in registry.PROGRAM.commands for each in registry.PROGRAM.options_of(name)
    ]

    assert [
        each.name for each in options if each.metavar in typed and not each.shown_default
    ] == []


def test_a_default_in_words_is_the_one_that_is_used() -> None:
    defaults = agent_settings.AgentSettings.read({"node_name": "a"}, {})
    options = registry.PROGRAM.options_of("agent")
    in_words = {each.key: each.default_text for each in options if "/" in each.default_text[:1]}

    assert {"lock_file", "verified_layout_file", "pod_resources_socket"} < in_words.keys()
    for name in in_words.keys() - {"nvidia_driver_root", "host_root_mount"}:
        assert str(getattr(defaults, name)) == in_words[name]


@pytest.mark.parametrize("line", LINES)
def test_an_example_is_a_command_line_that_the_program_takes(line: str) -> None:
    command = re.search(r"mig-manager(?: [^|>)]*)?", line)
    assert command is not None
    words = shlex.split(command[0].partition(" || ")[0])

    assert words[0] == "mig-manager"
    if words[1] == "help":
        registry.PROGRAM.command(words[2])
    else:
        assert parser.parse(registry.PROGRAM, words[1:])["command"] == words[1]
