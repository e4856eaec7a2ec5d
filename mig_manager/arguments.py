"""What the command line accepts: the commands, their options and their help.

Everything stays text here; ``settings`` gives it types, because environment variables need the
same checks. Abbreviations are refused, so that a new option never changes an old script.
"""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from typing import NoReturn

import mig_manager
from mig_manager import errors, shellarguments

_DESCRIPTION = """\
Partition NVIDIA GPUs with MIG: change only what differs, and say why when it cannot be done.
"""
_EPILOG = """\
Try it without a GPU:  mig-manager apply all-balanced --simulate 8xA100-SXM4-40GB
                       mig-manager status --simulate 8xA100-SXM4-40GB

Exit status: 0 done, 1 not applied or failed, 2 unusable input, 3 unknown command.
"""

COMMANDS: Mapping[str, str] = {
    "status": "show the GPUs and their MIG instances",
    "plan": "show what 'apply' would change, and change nothing",
    "apply": "bring a layout into force",
    "boot": "bring back the layout last proven in force, after a reboot",
    "assert": "tell by the exit status whether a layout is in force",
    "export": "write the GPUs' state as a config document",
    "validate": "check that layouts fit GPUs, here or by product name",
    "doctor": "check this node and say what to fix",
    "agent": "serve this Kubernetes node",
    "demo": "show the whole story on a simulated node",
    "version": "print the version",
}


class UnknownCommandError(errors.UsageError):
    """A command that does not exist; its exit status differs from other wrong usage."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse has to say.

        Raises:
            UsageError: Always.
        """
        command = self.prog.removeprefix("mig-manager").strip()
        raise errors.UsageError(f"{command}: {message}" if command else message)


def parse(argv: Sequence[str]) -> dict[str, object]:
    """Parse a command line.

    Args:
        argv: The arguments without the program's name.

    Returns:
        The options by name with ``_`` for ``-``; those not given are None. ``command`` is None
        when there was none.

    Raises:
        UnknownCommandError: There is no such command.
        UsageError: The arguments make no sense.
        SystemExit: Help or version was asked for and printed.
    """
    name = next((argument for argument in argv if not argument.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UnknownCommandError(f"there is no command {name!r}{hint}")
    return vars(build().parse_args(argv))


def build() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="mig-manager",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-v", "--version", action="version", version=f"mig-manager {mig_manager.__version__}"
    )
    parser.add_argument("-d", "--debug", action="store_true", help="log everything")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            allow_abbrev=False,
        )
        shellarguments.DEFINITIONS[name](command)
    return parser
