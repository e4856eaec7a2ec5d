"""The command line as data, read off the definitions: for completion and for the manual."""

import argparse
import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping

from mig_manager.cli import parser, placeholders

_PEERS_VARIABLE = re.compile(r" \[([A-Z_]+)\]$")
_PREFIX = "MIG_MANAGER_"
_OTHER_VARIABLES = frozenset({"MIG_MANAGER_CALLED", "MIG_MANAGER_LAYOUT", "MIG_MANAGER_POD_UID"})
"""Variables that are read and stand for no option."""
_OF_A_SERVICE = re.compile(
    r"_SERVICE_(HOST|PORT\w*)=|_PORT_[0-9]+_(TCP|UDP|SCTP)\w*=|_PORT=(tcp|udp|sctp)://"
)
"""What kubelet sets in a container for each Service of its namespace, in the style of Docker links
(https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables)."""
_WITHOUT_VARIABLE = frozenset({"--gpu", "--help", "--version", "--layouts"})
"""Options that no variable of the environment can stand for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """What is given by its place."""

    placeholder: str
    told: str
    words: tuple[str, ...]
    """What there is to choose from, if that is fixed."""
    is_repeatable: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What is given by its name."""

    flags: tuple[str, ...]
    """Short ones first."""
    placeholder: str
    """What stands for the value; empty for a switch."""
    told: str
    """What it does, without the variable."""
    words: tuple[str, ...]
    """What there is to choose from, if that is fixed."""
    is_value_optional: bool
    is_repeatable: bool
    group: str
    """The heading under which help has it."""
    variables: tuple[str, ...]
    """Variables of the environment that stand for it, the stronger first."""

    @property
    def long(self) -> str:
        """The long name."""
        return self.flags[-1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command, or with an empty name the program itself."""

    name: str
    summary: str
    operands: tuple[Operand, ...]
    options: tuple[Option, ...]


def unknown_variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables with our prefix that no option of any command reads.

    Args:
        environ: The environment. Variables that Kubernetes sets for a Service whose name begins
            like the program are not counted.

    Returns:
        For each unknown variable the most similar known one, or an empty text.
    """
    ours = {
        name
        for name, value in environ.items()
        if name.startswith(_PREFIX) and not _OF_A_SERVICE.search(f"{name}={value}")
    }
    if ours <= _OTHER_VARIABLES:
        return {}
    known = {name for each in commands() for option in each.options for name in option.variables}
    known |= _OTHER_VARIABLES
    return {name: _closest(name, known) for name in sorted(ours - known)}


def _closest(name: str, known: Collection[str]) -> str:
    import difflib  # noqa: PLC0415 - for mistakes alone

    return next(iter(difflib.get_close_matches(name, sorted(known), n=1)), "")


def program() -> Command:
    """Return the program: what may stand before a command."""
    return _command("", "", parser.build())


def commands() -> tuple[Command, ...]:
    """Return all commands in the order of the help."""
    built = parser.build()
    (choices,) = (
        action.choices
        for action in built._actions  # noqa: SLF001 - argparse has no other way to ask
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001 - as above
    )
    return tuple(
        _command(name, summary, choices[name]) for name, summary in parser.COMMANDS.items()
    )


def _command(name: str, summary: str, built: argparse.ArgumentParser) -> Command:
    found = tuple(_actions(built))
    return Command(
        name=name,
        summary=summary,
        operands=tuple(
            _operand(action)
            for _, action in found
            if not (action.option_strings or isinstance(action, argparse._SubParsersAction))  # noqa: SLF001 - as above
        ),
        options=tuple(_option(action, group) for group, action in found if action.option_strings),
    )


def _actions(built: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for group in built._action_groups:  # noqa: SLF001 - as above
        for action in group._group_actions:  # noqa: SLF001 - as above
            yield group.title or "", action


def _operand(action: argparse.Action) -> Operand:
    return Operand(
        placeholder=str(action.metavar),
        told=action.help or "",
        words=_words(action),
        is_repeatable=action.nargs == "*",
    )


def _option(action: argparse.Action, group: str) -> Option:
    text = action.help or ""
    named = _PEERS_VARIABLE.search(text)
    flags = tuple(sorted(action.option_strings, key=len))
    own = _PREFIX + action.dest.upper()
    variables = (named[1], own) if named else (own,)
    return Option(
        flags=flags,
        placeholder="" if action.nargs == 0 else str(action.metavar),
        told=_PEERS_VARIABLE.sub("", text),
        words=_words(action),
        is_value_optional=action.nargs == "?",
        is_repeatable=isinstance(action, argparse._AppendAction),  # noqa: SLF001 - as above
        group=group,
        variables=() if flags[-1] in _WITHOUT_VARIABLE else variables,
    )


def _words(action: argparse.Action) -> tuple[str, ...]:
    if isinstance(action.metavar, placeholders.OneOf):
        return action.metavar.words
    if action.metavar == "COMMAND":
        return tuple(parser.COMMANDS)
    return ()
