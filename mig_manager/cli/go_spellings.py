"""Spellings of ``nvidia-mig-parted``, a Go program, that argparse does not know."""

from collections.abc import Sequence

from mig_manager import errors
from mig_manager.cli.toolkit import parser

SWITCHES = {"debug": "d", "mode-only": "m", "skip-reset": "s", "valid-config": "a"}
"""The switches of mig-parted's commands, with their letters."""
OPTIONS = frozenset(
    {
        *("checkpoint-file", "config-file", "config-label", "hooks-file"),
        *("output-file", "output-format", "selected-config"),
    }
)
"""The other options of mig-parted's commands."""
_LONG = OPTIONS | SWITCHES.keys() | {"help", "version"}
_KEYS = {
    flag: name.replace("-", "_")
    for name, letter in SWITCHES.items()
    for flag in (f"-{letter}", f"--{name}")
}


def respell(command: str, argv: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """Return the words of a command in argparse's spelling, and the values of its switches.

    Go's flags may have one dash: argparse would parse ``-config-file F`` as ``-c``. A switch may
    have a value, ``--skip-reset=false``. The switch stays in the command line without its value,
    so that a command without this switch still refuses it.

    Raises:
        UsageError: The value of a switch is empty.
    """
    # The -d, -m and -s of nvidia-mig-manager, which 'agent' has, mean something else.
    if command == "agent" or not argv:
        return list(argv), {}
    words: list[str] = []
    values: dict[str, object] = {}
    for position, word in enumerate(argv):
        if word == "--":
            words += argv[position:]
            break
        name = word.partition("=")[0].removeprefix("-")
        dashed = f"-{word}" if word.startswith("-") and name in _LONG else word
        flag, equals, value = dashed.partition("=")
        words.append(flag if flag in _KEYS else dashed)
        if flag in _KEYS:
            # If a switch is repeated, the last one wins.
            values.pop(_KEYS[flag], None)
            if equals and not value:
                raise errors.UsageError(f"--{_KEYS[flag].replace('_', '-')}: {parser.EMPTY}")
            if equals:
                values[_KEYS[flag]] = value
    return words, values
