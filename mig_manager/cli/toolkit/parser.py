"""The command line: the commands, and a parser made of the options that each of them declares.

Everything parsed stays text; ``core.options`` gives it types, because variables of the environment
need the same checks. Abbreviations are refused, so that a new option never changes an old script.
"""

import argparse
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import mig_manager
from mig_manager import errors
from mig_manager.core import options

PROGRAM = "mig-manager"
COMMANDS = (
    "status",
    "plan",
    "apply",
    "boot",
    "assert",
    "export",
    "generate-config",
    "checkpoint",
    "restore",
    "validate",
    "doctor",
    "support-bundle",
    "agent",
    "rollout",
    "partitioner",
    "demo",
    "schema",
    "completion",
    "help",
    "version",
)
HELP = options.Option(name="help", short="h", help="show this help and exit", has_variable=False)
VERSION = options.Option(
    name="version", short="v", help="show the version and exit", has_variable=False
)
_SHELL = options.Option(
    name="shell",
    help="bash, zsh or fish",
    metavar="SHELL",
    words=("bash", "zsh", "fish"),
    has_variable=False,
    is_operand=True,
)
SCHEMA = options.Option(
    name="schema",
    help="the kind of an answer, an annotation, or LayoutFile (default: list them)",
    metavar="KIND",
    words=(
        *("AutoscalerTags", "Boot", "CapacityAnnotation", "Change"),
        *("ClusterCapacity", "ClusterPlan"),
        *("ClusterStatus", "Doctor", "GpusAnnotation", "JournalAnnotation", "LayoutFile"),
        *("LayoutsAnnotation", "NodeHistory", "NodeLayouts", "Plan", "RequestAnnotation"),
        *("Rollout", "RolloutPreview"),
        *("Simulation", "Status", "StatusAnnotation", "Validation", "Validations"),
    ),
    has_variable=False,
    is_operand=True,
)
_LAYOUTS = options.Option(
    name="layouts",
    help="list the document's layouts instead, one a line, as the scripts do",
    has_variable=False,
)
_TOPIC = options.Option(
    name="topic",
    help="the command (default: the program)",
    metavar="COMMAND",
    words=COMMANDS,
    has_variable=False,
    is_operand=True,
)
SAFE_WORD = re.compile(r"[A-Za-z0-9._-]+")
"""Names that no shell takes for anything else, and Kubernetes takes as label values."""
_GROUPS = (options.OPTIONS, "the change", "GPUs")
"""The headings that come first in help; that of the output comes last."""
_GO_PREFIX = "MIG_PARTED_"
_UNRECOGNIZED = "unrecognized arguments: "  # how argparse begins
_EMPTY = "the value is empty; leave it out for the default"
_OTHER_VARIABLES = frozenset({"MIG_MANAGER_CALLED"})
_OF_A_SERVICE = re.compile(
    r"_SERVICE_(HOST|PORT\w*)=|_PORT_[0-9]+_(TCP|UDP|SCTP)\w*=|_PORT=(tcp|udp|sctp)://"
)
"""What kubelet sets in a container for each Service of its namespace, in the style of Docker links
(https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables)."""


class UnknownCommandError(errors.UsageError):
    """A command that does not exist; its exit status differs from other wrong usage."""


class Page(NamedTuple):
    """What help shows around the options."""

    usage: str | None  # None: as argparse makes it
    description: str
    epilog: str


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Breaks no path, label or option at its hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap  # noqa: PLC0415 - only for help

        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting, so that all errors have one form."""

    def __init__(
        self,
        program: str,
        command: str,
        declared: Sequence[options.Option],
        page: Callable[[], Page],
        *,
        version: str = "",
    ) -> None:
        """Take the options; ``page`` loads what help shows, which most never ask for."""
        super().__init__(
            prog=f"{program} {command}".strip(),
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=False,
        )
        self._command = command
        self._page = page
        groups: dict[str, Any] = {options.OPTIONS: self}
        for each in declared:
            if each.is_operand or each.flags:
                if each.group not in groups:
                    groups[each.group] = self.add_argument_group(each.group)
                _add(groups[each.group], each, version)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse has to say.

        Raises:
            UsageError: Always.
        """
        # The flag may have a value behind it or after it: --sort=x, --sort x.
        flag = message.removeprefix(_UNRECOGNIZED).split()[0].partition("=")[0]
        if message.startswith(_UNRECOGNIZED) and flag.startswith("--"):
            names = [each[2:] for each in self._option_string_actions if each.startswith("--")]
            # Without the dashes, which would make any two short flags similar.
            message += _did_you_mean(flag[2:], names, prefix="--")
        raise errors.UsageError(f"{self._command}: {message}" if self._command else message)

    def format_help(self) -> str:
        """Return the help, with its text around the options."""
        self.usage, self.description, self.epilog = self._page()
        return super().format_help()


def _add(group: Any, option: options.Option, version: str) -> None:
    help_text = option.full_help.replace("%", "%%")
    if option.is_operand:
        nargs = "*" if option.is_repeatable else None if option.is_required else "?"
        group.add_argument(option.key, nargs=nargs, metavar=option.metavar, help=help_text)
        return
    details: dict[str, object] = {"metavar": option.metavar}
    if option.name == HELP.name:
        details = {"action": "help"}
    elif option.name == VERSION.name:
        details = {"action": "version", "version": version}
    elif option.is_repeatable:
        details |= {"action": "append"}
    elif option.is_value_optional:
        details |= {"nargs": "?", "const": "true"}
    elif not option.metavar:
        details = {"action": "store_const", "const": option.const}
    group.add_argument(*option.flags, dest=option.key, help=help_text, **details)


def parse(argv: Sequence[str]) -> dict[str, object]:
    """Parse a command line, without the program's name.

    Returns:
        The options by name with ``_`` for ``-``; those not given are None. ``command`` is None
        when there was none.

    Raises:
        UnknownCommandError: There is no such command.
        UsageError: The arguments make no sense.
        SystemExit: Help or version was asked for and printed.
    """
    # nvidia-mig-parted has the letter, too.
    argv = ["help" if argument == "h" else argument for argument in argv[:1]] + list(argv[1:])
    at = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    before, after = argv[:at], argv[at + 1 :]
    command = argv[at] if at < len(argv) else ""
    if command:
        check_command(command)
    if command == "help" and {"-h", "--help"}.isdisjoint(argv):
        command = next((word for word in after if not word.startswith("-")), "")
        if command:
            check_command(command)
        after, before = ["--help"], [] if command else ["--help"]
    parsed = _parsed("", before) if before else {"debug": None}
    if not command:
        return {**parsed, "command": None}
    own = _parsed(command, after)
    return {**own, "debug": own.get("debug") or parsed["debug"], "command": command}


def _parsed(command: str, argv: Sequence[str]) -> dict[str, object]:
    # The -d, -m and -s of nvidia-mig-manager, which 'agent' has, mean something else.
    words, values = (list(argv), {}) if command == "agent" else _without_go_spellings(argv)
    for switch, value in values.items():
        if not value:
            raise errors.UsageError(f"--{switch.replace('_', '-')}: {_EMPTY}")
    return vars(build(command).parse_args(words)) | values


def check_command(name: str, known: Collection[str] = COMMANDS) -> None:
    """Check that a command exists.

    Raises:
        UnknownCommandError: It does not.
    """
    if name not in known:
        raise UnknownCommandError(f"there is no command {name!r}{_did_you_mean(name, known)}")


def _did_you_mean(word: str, known: Collection[str], *, prefix: str = "") -> str:
    import difflib  # noqa: PLC0415 - only for mistakes

    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{prefix}{close[0]}'?" if close else ""


def usage_remedy(
    error: errors.MigManagerError, program: str, argv: Sequence[str], commands: Collection[str]
) -> str:
    """Return where the help on wrong usage is: the command's own; empty for other errors."""
    if error.reason is not errors.Reason.USAGE:
        return ""
    is_known = not isinstance(error, UnknownCommandError)
    command = next((word for word in argv if is_known and word in commands), "")
    return f"See '{' '.join(filter(None, (program, command, '--help')))}'."


def build(command: str = "") -> Parser:
    """Return the parser of a command; of what may stand before a command without one."""

    def page() -> Page:
        from mig_manager.cli.toolkit import help_pages  # noqa: PLC0415 - only for help

        return help_pages.page(command)

    def not_empty(text: str) -> str:
        # Scripts write --simulate "$GPUS": the default that an empty value would stand for, such
        # as the real GPUs, is not what their author meant.
        if not text:
            raise argparse.ArgumentTypeError(_EMPTY)
        return text

    version = f"{PROGRAM} {mig_manager.__version__}"
    parser = Parser(PROGRAM, command, options_of(command), page, version=version)
    # The type of options and operands that name none, which is all of them.
    parser.register("type", None, not_empty)
    return parser


def options_of(command: str) -> tuple[options.Option, ...]:
    """Return the options and operands of a command, or without one of the program."""
    last = len(_GROUPS)
    rank = {name: number for number, name in enumerate(_GROUPS)} | {"output": last + 1}
    found = (HELP, *_declared(command))
    return tuple(sorted(found, key=lambda each: rank.get(each.group, last)))


def operands_of(command: str) -> tuple[options.Option, ...]:
    """Return the operands of a command."""
    return tuple(each for each in options_of(command) if each.is_operand)


def flagged(command: str) -> tuple[options.Option, ...]:
    """Return the options of a command that have a flag."""
    return tuple(each for each in options_of(command) if each.flags)


def _declared(command: str) -> tuple[options.Option, ...]:
    from mig_manager.agent import settings  # noqa: PLC0415 - each command loads its own
    from mig_manager.core import node_settings  # noqa: PLC0415 - each command loads its own

    if command in {"", "agent", "help", "schema", "version"}:
        own = {
            "": (VERSION, node_settings.DEBUG),
            "help": (_TOPIC,),
            "schema": (SCHEMA, node_settings.DEBUG),
            "version": (node_settings.DEBUG,),
        }
        return own.get(command) or options.of(settings.AgentSettings, command)
    if command == "rollout":
        from mig_manager.cli.commands import rollout_settings  # noqa: PLC0415 - as above

        return options.of(rollout_settings.RolloutSettings, command)
    if command == "partitioner":
        from mig_manager.partitioner import settings as partitioner  # noqa: PLC0415 - as above

        return options.of(partitioner.PartitionerSettings, command)
    from mig_manager.cli.commands import settings as command_settings  # noqa: PLC0415 - as above

    if command == "completion":
        found = options.of(command_settings.CommandSettings, command)
        return (_SHELL, _LAYOUTS, *(each for each in found if each.commands), node_settings.DEBUG)
    classes: dict[str, type] = {
        "doctor": command_settings.DoctorSettings,
        "demo": command_settings.DemoSettings,
        "support-bundle": command_settings.BundleSettings,
    }
    return options.of(classes.get(command, command_settings.CommandSettings), command)


# -- spellings of nvidia-mig-parted --------------------------------------------------------------


def _without_go_spellings(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return a command line as argparse reads it, and the values of its switches.

    Go's flags may have one dash, ``-config-file F``, which argparse would take for ``-c``; and a
    switch may have a value, ``--skip-reset=false``. The switch stays in the command line without
    its value, so that a command that does not have it still refuses it.
    """
    from mig_manager.cli.commands import settings as command_settings  # noqa: PLC0415 - not for the agent

    declared = options.of(command_settings.CommandSettings)
    shared = [each for each in declared if each.variable.startswith(_GO_PREFIX)]
    long = {each.name for each in (HELP, VERSION, *shared)}
    switches = {flag: each.key for each in shared if not each.metavar for flag in each.flags}
    words: list[str] = []
    values: dict[str, str] = {}
    for position, word in enumerate(argv):
        if word == "--":
            words += argv[position:]
            break
        name = word.partition("=")[0].removeprefix("-")
        dashed = f"-{word}" if word.startswith("-") and name in long else word
        flag, equals, value = dashed.partition("=")
        words.append(flag if flag in switches else dashed)
        if flag in switches:
            # Of a switch that is given twice the last one decides.
            values.pop(switches[flag], None)
            if equals:
                values[switches[flag]] = value
    return words, values


# -- mistakes in variables -----------------------------------------------------------------------


def unknown_variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return each variable with our prefix that no option reads, and the most similar known one.

    Variables that Kubernetes sets for a Service whose name begins like the program do not count.
    """
    ours = {
        name
        for name, value in environ.items()
        if name.startswith(options.PREFIX) and not _OF_A_SERVICE.search(f"{name}={value}")
    }
    if ours <= _OTHER_VARIABLES:
        return {}
    import difflib  # noqa: PLC0415 - only for mistakes

    known = set(_OTHER_VARIABLES)
    for command in COMMANDS:
        known.update(name for each in options_of(command) for name in each.variables)
    closest = {name: difflib.get_close_matches(name, sorted(known), n=1) for name in ours - known}
    return {name: next(iter(found), "") for name, found in sorted(closest.items())}
