"""What the command line accepts: the commands, their options and their help.

Everything stays text here; ``settings`` gives it types, because environment variables need the
same checks. Abbreviations are refused, so that a new option never changes an old script.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import NoReturn

import mig_manager
from mig_manager import errors
from mig_manager.cli import peersyntax, shellarguments

COMMANDS: Mapping[str, str] = {
    "status": "show the GPUs and their MIG instances",
    "plan": "show what 'apply' would change, and change nothing",
    "apply": "bring a layout into force",
    "boot": "bring back the layout last proven in force, after a reboot",
    "assert": "tell by the exit status whether a layout is in force",
    "export": "write the GPUs' state as a config document",
    "generate-config": "write a config document with the layouts that GPUs can have",
    "checkpoint": "write what the GPUs have to a file, for 'restore'",
    "restore": "bring the GPUs back to a checkpoint",
    "validate": "check that layouts fit GPUs, here or by product name",
    "doctor": "check this node and say what to fix",
    "agent": "serve this Kubernetes node",
    "rollout": "bring many nodes to a layout, a few at a time, or back",
    "demo": "show the whole story on a simulated node",
    "completion": "write a script that completes command lines in a shell",
    "help": "show the help of the program or of a command",
    "version": "print the version",
}
PROGRAM = "mig-manager"
_EMPTY = "the value is empty; leave it out for the default"

_ANOTHERS_SWITCHES = frozenset({"agent"})
"""Commands whose ``-d``, ``-m`` and ``-s`` are those of another program of NVIDIA's."""


class UnknownCommandError(errors.UsageError):
    """A command that does not exist; its exit status differs from other wrong usage."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting, so that all errors look alike.

    Its texts are loaded when somebody asks for help, which is seldom.
    """

    @property
    def command(self) -> str:
        """The command, or nothing for the program as a whole."""
        return self.prog.removeprefix(PROGRAM).strip()

    def error(self, message: str) -> NoReturn:
        """Raise what argparse has to say.

        Raises:
            UsageError: Always.
        """
        raise errors.UsageError(f"{self.command}: {message}" if self.command else message)

    def format_help(self) -> str:
        """Return the help, with what it says beside the options."""
        from mig_manager.cli import helppages  # noqa: PLC0415 - see the class

        self.usage = helppages.usage(self.command)
        self.description = helppages.description(self.command)
        self.epilog = helppages.epilog(self.command)
        return super().format_help()


def _given_text(text: str) -> str:
    """Return a value of the command line as it is, unless it is empty.

    Scripts write ``--simulate "$GPUS"``: the default that an empty value would stand for, such as
    the real GPUs, is not what their author meant.
    """
    if not text:
        raise argparse.ArgumentTypeError(_EMPTY)
    return text


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
    # The peer has the letter, too.
    argv = ["help" if argument == "h" else argument for argument in argv[:1]] + list(argv[1:])
    words = [argument for argument in argv if not argument.startswith("-")]
    if words:
        check_command(words[0])
    if words[:1] == ["help"] and {"-h", "--help"}.isdisjoint(argv):
        for topic in words[1:2]:
            check_command(topic)
        argv = [*words[1:2], "--help"]
    told: dict[str, str] = {}
    if _ANOTHERS_SWITCHES.isdisjoint(words[:1]):
        argv, told = peersyntax.normal(argv)
    for switch, value in told.items():
        if not value:
            raise errors.UsageError(f"--{switch.replace('_', '-')}: {_EMPTY}")
    return vars(build().parse_args(argv)) | told


def check_command(name: str) -> None:
    """Take a command that there is.

    Raises:
        UnknownCommandError: There is none of that name.
    """
    if name not in COMMANDS:
        import difflib  # noqa: PLC0415 - for mistakes alone

        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UnknownCommandError(f"there is no command {name!r}{hint}")


def build() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog=PROGRAM, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "-v", "--version", action="version", version=f"{PROGRAM} {mig_manager.__version__}"
    )
    parser.add_argument("-d", "--debug", action="store_true", help="log everything")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        # The type of options and operands that name none, which is all of them.
        command.register("type", None, _given_text)
        shellarguments.DEFINITIONS[name](command)
    return parser
