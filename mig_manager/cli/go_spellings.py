"""Spellings of ``nvidia-mig-parted``, a Go program, that argparse does not know."""

from collections.abc import Sequence

from mig_manager import errors
from mig_manager.cli.commands import settings
from mig_manager.cli.toolkit import parser, program
from mig_manager.core import options

_GO_PREFIX = "MIG_PARTED_"


def respelled(command: str, argv: Sequence[str]) -> tuple[list[str], dict[str, object]]:
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
    declared = options.of(settings.CommandSettings)
    shared = [each for each in declared if each.variable.startswith(_GO_PREFIX)]
    long = {each.name for each in (program.HELP, program.VERSION, *shared)}
    switches = {flag: each.key for each in shared if not each.metavar for flag in each.flags}
    words: list[str] = []
    values: dict[str, object] = {}
    for position, word in enumerate(argv):
        if word == "--":
            words += argv[position:]
            break
        name = word.partition("=")[0].removeprefix("-")
        dashed = f"-{word}" if word.startswith("-") and name in long else word
        flag, equals, value = dashed.partition("=")
        words.append(flag if flag in switches else dashed)
        if flag in switches:
            # If a switch is repeated, the last one wins.
            values.pop(switches[flag], None)
            if equals and not value:
                raise errors.UsageError(f"--{switches[flag].replace('_', '-')}: {parser.EMPTY}")
            if equals:
                values[switches[flag]] = value
    return words, values
