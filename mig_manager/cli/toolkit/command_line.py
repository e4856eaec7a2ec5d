"""A program and its commands, as rows of a registry.

Parser, help, completion, manual pages, documentation and dispatch follow from the rows. A row
names a module, which is loaded only for its command. ``ABOUT`` is the rest of its help,
``Settings`` declares its options, and ``run`` runs it and returns the exit status.
"""

import dataclasses
import functools
import importlib
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import mig_manager
from mig_manager import errors, reasons
from mig_manager.core import messages
from mig_manager.core.settings import options

HELP = options.Option(name="help", short="h", help="show this help and exit", has_variable=False)
VERSION = options.Option(
    name="version", short="v", help="show the version and exit", has_variable=False
)
_TOPIC = options.Option(
    name="topic",
    help="the command (default: the program)",
    metavar="COMMAND",
    is_operand=True,
    has_variable=False,
)
_FIRST_GROUPS = (
    *(options.OPTIONS, options.EVICTIONS, options.LAYOUTS, options.CHANGE),
    *(options.DRIFT, options.MANY_NODES, options.METRICS, options.HOST, options.GPUS),
)
"""The first headings in help, with what people set first; the output's heading comes last."""

_OTHER_VARIABLES = frozenset({"MIG_MANAGER_CALLED"})
_OF_A_SERVICE = re.compile(
    r"_SERVICE_(HOST|PORT\w*)=|_PORT_[0-9]+_(TCP|UDP|SCTP)\w*=|_PORT=(tcp|udp|sctp)://"
)
"""Variables that kubelet sets in a container for every Service, in the style of Docker links
(https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables)."""

Parsed = Mapping[str, object]
"""The values of a command line by option name, still text; None if missing."""

Respell = Callable[[str, Sequence[str]], tuple[list[str], dict[str, object]]]
"""Takes a command and its words; returns the words for the parser, and parsed values."""


class Example(NamedTuple):
    """A command line and its meaning."""

    line: str
    meaning: str


class Text(NamedTuple):
    """The help text about a command."""

    paragraphs: tuple[str, ...]  # the first is the summary
    examples: tuple[Example, ...]
    own_statuses: Mapping[str, str]  # exit statuses with a meaning of their own here

    @property
    def summary(self) -> str:
        """The first paragraph for a list: without capital and full stop."""
        first = self.paragraphs[0].rstrip(".")
        return first[0].lower() + first[1:]


@functools.cache
def parse_text(text: str) -> Text:
    """Parse the help text about a command.

    A block that begins with ``$`` is an example. A block that begins with ``exit N:`` overrides
    the meaning of an exit status. Other blocks are paragraphs; the first is the summary.
    """
    paragraphs = []
    examples = []
    statuses = {}
    for block in textwrap.dedent(text).strip().split("\n\n"):
        words = " ".join(block.split("\n"))
        if block.startswith("$ "):
            line, _, meaning = block.removeprefix("$ ").partition("\n")
            examples.append(Example(line=line, meaning=meaning))
        elif block.startswith("exit "):
            status, _, meaning = words.removeprefix("exit ").partition(": ")
            statuses[status] = meaning
        else:
            paragraphs.append(words)
    return Text(paragraphs=tuple(paragraphs), examples=tuple(examples), own_statuses=statuses)


class Command(NamedTuple):
    """A row of the registry."""

    name: str
    summary: str  # the first of its help: a sentence, and all of it without a module
    module: str = ""  # its name in the program's folder; empty: ``parser`` answers the command
    operands: str = ""  # for the usage line, if the operands' names are not clear enough
    notes_variables: bool = True  # whether it warns of variables that no option has

    @property
    def purpose(self) -> str:
        """The summary for a list; it loads nothing."""
        return parse_text(self.summary).summary


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program, with its registry."""

    name: str  # as people type it
    title: str  # in the version and before remarks
    about: str  # for ``parse_text``
    rows: tuple[Command, ...]
    folder: str  # the package of the rows' modules
    leading: tuple[options.Option, ...] = (VERSION,)  # allowed only before the command
    anywhere: tuple[options.Option, ...] = ()  # options of commands, also allowed before it
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)  # names of commands
    elsewhere: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Hints, such as '; run ...', by another program's command or flag."""
    statuses: Mapping[str, str]
    other_statuses: str = ""
    environment: str = ""  # a paragraph about variables; empty without any
    values: str = ""  # a paragraph about values, for the manual
    refuses_empty: bool = True  # whether the value of an option must not be empty
    respell: Respell | None = None

    @property
    def version(self) -> str:
        """The output of ``--version``."""
        return f"{self.title} {mig_manager.__version__}"

    @property
    def commands(self) -> Mapping[str, Command]:
        """The rows by name."""
        return {row.name: row for row in self.rows}

    def command(self, name: str) -> Command:
        """Return a command; UnknownCommandError if the name is unknown."""
        commands = self.commands
        if name not in commands:
            hint = self.elsewhere.get(name) or messages.did_you_mean(name, commands, limit=1)
            raise errors.UnknownCommandError(f"unknown command {name!r}{hint}")
        return commands[name]

    def module(self, command: str) -> ModuleType:
        """Load the module of a command."""
        return importlib.import_module(f"{self.folder}.{self.commands[command].module}")

    def settings(self, parsed: Parsed, environ: Mapping[str, str]) -> Any:
        """Read the settings of a parsed command line's command."""
        return self.module(str(parsed["command"])).Settings.read(parsed, environ)

    def text(self, command: str = "") -> Text:
        """Return the help text about a command, or about the program without a command."""
        if not command:
            return parse_text(self.about)
        row = self.commands[command]
        about = getattr(self.module(command), "ABOUT", "") if row.module else ""
        return parse_text(f"{row.summary}\n\n{about.strip()}")

    def options_of(self, command: str = "") -> tuple[options.Option, ...]:
        """Return the options and operands of a command, or those allowed before a command."""
        leading = (*self.leading, *self.anywhere)
        declared = self._command_options(command) if command else leading
        last = len(_FIRST_GROUPS)
        rank = {name: number for number, name in enumerate(_FIRST_GROUPS)} | {"output": last + 1}
        return tuple(sorted((HELP, *declared), key=lambda each: rank.get(each.group, last)))

    def _command_options(self, command: str) -> tuple[options.Option, ...]:
        if self.commands[command].module:
            return options.of(self.module(command).Settings)
        topic = dataclasses.replace(_TOPIC, words=tuple(self.commands))
        return (topic,) if command == HELP.name else ()

    def operands_of(self, command: str) -> tuple[options.Option, ...]:
        """Return the operands of a command."""
        return tuple(each for each in self.options_of(command) if each.is_operand)

    def flag_options_of(self, command: str = "") -> tuple[options.Option, ...]:
        """Return the options of a command that have a flag."""
        return tuple(each for each in self.options_of(command) if each.flags)

    def has_settings(self, command: str) -> bool:
        """Return whether a command has options of its own; True for the program."""
        shared = {HELP, *self.leading}
        return not command or any(each not in shared for each in self.flag_options_of(command))

    def usage_remedy(self, error: errors.MigManagerError, argv: Sequence[str]) -> str:
        """Return where the help is after wrong usage, and an example; empty for other errors."""
        if error.reason is not reasons.Reason.USAGE:
            return ""
        is_known = not isinstance(error, errors.UnknownCommandError)
        command = next((word for word in argv if is_known and word in self.commands), "")
        see = f"See '{' '.join(filter(None, (self.name, command, '--help')))}'"
        examples = (*self.text(command).examples, *self.text().examples) if command else ()
        full = (line for line, _ in examples if line.startswith(f"{self.name} {command} "))
        example = next(full, "")
        return f"{see} (example: {example})." if example else f"{see}."

    def unknown_variables(self, environ: Mapping[str, str], command: str) -> Mapping[str, str]:
        """Return variables with our prefix that no option has, with the most similar known one.

        Ignores variables that Kubernetes sets for a Service with such a name. Loads the modules of
        other commands only if ``command`` does not know a variable.
        """
        prefixed = {
            name
            for name, value in environ.items()
            if name.startswith(options.PREFIX) and not _OF_A_SERVICE.search(f"{name}={value}")
        }
        variables = set(_OTHER_VARIABLES)
        for name in (command, "", *self.commands):
            if prefixed <= variables:
                return {}
            variables.update(each for option in self.options_of(name) for each in option.variables)
        return {
            name: "".join(messages.similar(name, sorted(variables), limit=1))
            for name in sorted(prefixed - variables)
        }
