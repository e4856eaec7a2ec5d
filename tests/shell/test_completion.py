"""Completion as the shells themselves do it, at a terminal."""

import contextlib
import os
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterator

import pytest

from mig_manager.catalogue import hardware
from mig_manager.cli import registry
from mig_manager.sandbox import scenarios
from tests.rigs import programs
from tests.rigs.shell.commandline import Shell
from tests.shell import terminal

LAYOUTS = """
version: v1
mig-configs:
  night: [{devices: all, mig-enabled: false}]
  noon: [{devices: all, mig-enabled: false}]
  $(touch /tmp/harm): [{devices: all, mig-enabled: false}]
  n a: [{devices: all, mig-enabled: false}]
"""
LINES = {
    # What is typed, and what the shell adds.
    "mig-manager vali": "date",
    "mig-manager --debug stat": "us",
    "mig-manager help doc": "tor",
    "mig-manager completion fi": "sh",
    "mig-manager apply --sel": "ected-config",
    "mig-manager apply all-bal": "anced",
    "mig-manager assert -c all-bal": "anced",
    "mig-manager apply -f layouts.yaml ni": "ght",
    "mig-manager apply --config-file=layouts.yaml noo": "n",
    "mig-manager apply -f ~/layouts.yaml ni": "ght",
    "mig-manager plan -f lay": "outs.yaml",
    "mig-manager status -o wi": "de",
    "mig-manager status --output-format=js": "on",
    "mig-manager validate --gpu H100-NV": "L",
    "mig-manager status --simulate 8xH100-NV": "L",
    "mig-manager status --simulate 4xA30+2xH100-NV": "L",
    "mig-manager agent --drain-policy aff": "ected",
}
IN_LOWER_CASE = {
    # Products in any case: what is typed, and what becomes of it.
    "mig-manager validate --gpu h100-nv": "mig-manager validate --gpu H100-NVL",
    "mig-manager status --simulate 8Xh100-nv": "mig-manager status --simulate 8XH100-NVL",
    "mig-manager status --simulate 4xa30+2xh100-nv": (
        "mig-manager status --simulate 4xa30+2xH100-NVL"
    ),
}
# What makes a shell complete like at a new account, and one key report the line so far.
SET_UP = {
    "bash": """\
bind 'set bell-style none'; bind 'set enable-bracketed-paste off'
eval "$(mig-manager completion bash)"
report() { printf '<<%s%s>>>' '<' "$READLINE_LINE"; }
bind -x '"\\C-t": report'
""",
    "zsh": """\
unsetopt zle_bracketed_paste beep
autoload -Uz compinit; compinit -u -D
eval "$(mig-manager completion zsh)"
report() { print -rn -- '<<''<'$BUFFER'>>>' }
zle -N report; bindkey -e; bindkey '^T' report
""",
}
SET_UP["zsh, as a file"] = (
    SET_UP["zsh"]
    .replace(
        "autoload",
        "mkdir functions; mig-manager completion zsh > functions/_mig-manager\n"
        "fpath=($PWD/functions $fpath)\nautoload",
    )
    .replace('eval "$(mig-manager completion zsh)"', "")
)
AS_NEW = {"bash": ("--norc", "--noprofile", "-i"), "zsh": ("-f", "-i")}


@pytest.fixture
def home(tmp_path: pathlib.Path) -> pathlib.Path:
    """The home of a user who has the program, and layouts of their own."""
    (tmp_path / "layouts.yaml").write_text(LAYOUTS)
    line = f'exec {shlex.quote(sys.executable)} -m mig_manager "$@"'
    programs.write_script(tmp_path / "bin" / "mig-manager", line)
    return tmp_path


def environ(home: pathlib.Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(pathlib.Path(__file__).parents[2]),
        "TERM": "xterm",
        "PS1": "$ ",
        "LC_ALL": "C.UTF-8",
    }


@contextlib.contextmanager
def typing(shell: str, home: pathlib.Path) -> Iterator[Callable[[str], str]]:
    """Start a shell at a terminal; yield what types a line and a tabulator, and reads the line."""
    name = shell.partition(",")[0]
    command = [programs.path_or_skip(name), *AS_NEW[name]]
    with terminal.open_session(
        (), columns=250, environ=environ(home), command=command, cwd=home
    ) as session:
        session.type(f"{SET_UP[shell]}echo ready$((1 + 1))\n")
        session.read_until("ready2")

        def complete(line: str) -> str:
            """Return what the line is after the tabulator; then clear it."""
            session.type(f"{line}\t\x14")
            match = session.read_until(r"<<<(.*?)>>>")
            session.type("\x15")
            return match[1]

        yield complete


@pytest.mark.parametrize(
    ("shell", "step"),
    [
        ("bash", 4),
        *(
            pytest.param(shell, 1, id=shell, marks=pytest.mark.slow)
            for shell in ("bash", "zsh", "zsh, as a file")
        ),
    ],
)
def test_a_shell_completes_words_as_they_are_begun(
    shell: str, step: int, home: pathlib.Path
) -> None:
    whole = {line: line + rest for line, rest in LINES.items()} | IN_LOWER_CASE
    lines = [*whole][::step]
    with typing(shell, home) as complete:
        completed = {line: complete(line).rstrip(" =") for line in lines}

    assert completed == {line: whole[line] for line in lines}


@pytest.mark.slow
def test_fish_completes_words_as_they_are_begun(home: pathlib.Path) -> None:
    code = """
        mig-manager completion fish | source
        for line in $argv
            echo (string join -- , (complete -C $line | string replace --regex '\t.*' ''))
        end
    """

    command = (programs.path_or_skip("fish"), "--no-config", "-c", code, *LINES, *IN_LOWER_CASE)
    answer = programs.run(*command, cwd=home, **environ(home))

    lines = [*(line + rest for line, rest in LINES.items()), *IN_LOWER_CASE.values()]
    last_words = [line.rpartition(" ")[2] for line in lines]
    assert answer.stdout.splitlines() == last_words
    assert (answer.returncode, answer.stderr) == (0, "")


def test_completion_lists_every_option_of_a_command(shell: Shell) -> None:
    for command in registry.PROGRAM.commands:
        candidates = shell("__complete", command, "-").out.splitlines()
        flags = [flag for option in registry.PROGRAM.options_of(command) for flag in option.flags]
        assert [line.partition("\t")[0] for line in candidates] == [*flags, ":4"]


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_a_script_is_one_that_its_shell_can_read(shell: Shell, name: str) -> None:
    script = shell("completion", name)

    assert (script.status, script.err) == (0, "")
    checked = programs.run(programs.path_or_skip(name), "-n", stdin=script.out)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_completion_lists_only_layouts_that_can_be_read_and_typed(shell: Shell) -> None:
    file = shell.file(LAYOUTS)
    for argv, variable in ((("-f", file), {}), ((), {"MIG_PARTED_CONFIG_FILE": file})):
        listed = shell("__complete", "plan", *argv, "", **variable)
        assert (listed.status, listed.out) == (0, "night\nnoon\n:4\n")
    for no_file in ((), ("-f", "-")):
        assert "all-1g.5gb\n" in shell("__complete", "plan", *no_file, "").out
    homeless = shell("__complete", "plan", "-f", "~no-such-user/layouts.yaml", "")
    assert (homeless.status, homeless.out) == (0, ":4\n")


def test_validate_accepts_every_product_of_the_completion(shell: Shell) -> None:
    gpus = [word for name in hardware.product_names() for word in ("--gpu", name)]

    assert shell("validate", "all-disabled", *gpus).status == 0


def test_the_words_of_an_option_are_those_of_its_command() -> None:
    words = {
        (command, option.name): option.words
        for command in registry.PROGRAM.commands
        for option in registry.PROGRAM.options_of(command)
    }

    assert words["export", "output-format"] == ("yaml", "json")
    assert words["status", "output-format"] == ("text", "wide", "json", "yaml")
    assert words["apply", "output-format"] == ("text", "json", "yaml")
    assert words["demo", "scenario"] == tuple(scenarios.BY_NAME)
