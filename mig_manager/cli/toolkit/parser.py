"""Parse and run command lines by the rows of a program.

Parsed values stay text; ``core.settings.options`` converts them: environment variables need the
same checks. Abbreviations are refused, so that a new option never breaks an old script.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from mig_manager import errors
from mig_manager.cli.toolkit import console, help_pages, program
from mig_manager.core import messages
from mig_manager.core.settings import options

_UNRECOGNIZED = "unrecognized arguments: "  # how argparse begins
_MISSING = "the following arguments are required: "
EMPTY = "the value is empty; leave it out for the default"


def run(command_line: program.CommandLine, argv: Sequence[str], terminal: console.Console) -> int:
    """Run a command line, without the program's name; return its exit status.

    Raises:
        MigManagerError: The command line is invalid, or the command failed.
    """
    parsed = terminal.parse_command_line(lambda: parse(command_line, argv))
    if parsed is None:
        return console.DONE
    if parsed["command"] is None:
        return show_help(command_line, "", terminal)
    command = command_line.command(str(parsed["command"]))
    if command_line.environment and command.notes_variables:
        for name, closest in command_line.unknown_variables(
            terminal.environ, command.name
        ).items():
            hint = f"; did you mean {closest}?" if closest else ""
            terminal.note(f"warning: {name} is ignored: no option has this variable{hint}")
    if command.name == program.HELP.name:
        return show_help(command_line, str(parsed["topic"] or ""), terminal)
    if command.name == program.VERSION.name:
        terminal.say(command_line.version)
        return console.DONE
    settings = command_line.settings(parsed, terminal.environ)
    status: int = command_line.module(command.name).run(settings, terminal)
    return status


def parse(command_line: program.CommandLine, argv: Sequence[str]) -> dict[str, object]:
    """Parse a command line, without the program's name.

    Returns:
        The options by name with ``_`` for ``-``; missing ones are None. ``command`` is None if
        the command line has none.

    Raises:
        UnknownCommandError: The command is unknown.
        UsageError: The arguments are invalid.
        SystemExit: Help or version was requested and printed.
    """
    anywhere: dict[str, object] = {}
    if command_line.anywhere:
        values, argv = Parser(command_line, "", command_line.anywhere).parse_known_args(argv)
        anywhere = vars(values)
    leading, words = split(argv)
    word = "".join(words[:1])
    name = command_line.aliases.get(word, word)
    _refuse_early(command_line, leading)
    if words:
        command_line.command(name)
    before = _parse_words(command_line, "", leading)
    after = _parse_words(command_line, name, words[1:]) if name else {}
    present = {key: value for key, value in after.items() if value is not None}
    return {**after, **before, **present, **anywhere, "command": name or None}


def split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the options before the command, and the rest, which begins with the command."""
    at = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    return argv[:at], argv[at:]


def _refuse_early(command_line: program.CommandLine, before: Sequence[str]) -> None:
    """Raise UsageError for an option of a command that stands before the command."""
    leading = {flag for each in command_line.options_of() for flag in each.flags}
    for flag in (word.partition("=")[0] for word in before):
        if hint := _elsewhere(command_line, flag):
            raise errors.UsageError(f"unknown option {flag}{hint}")
        if flag not in leading and any(
            flag in each.flags
            for row in command_line.rows
            for each in command_line.options_of(row.name)
        ):
            raise errors.UsageError(
                f"{flag} belongs after the command: {command_line.name} COMMAND {flag}"
            )


def _elsewhere(command_line: program.CommandLine, flag: str) -> str:
    """Return the hint for an option of another program; a letter may have its value behind it."""
    return command_line.elsewhere.get(flag) or command_line.elsewhere.get(flag[:2], "")


def _parse_words(
    command_line: program.CommandLine, command: str, argv: Sequence[str]
) -> dict[str, object]:
    words, values = command_line.respell(command, argv) if command_line.respell else (argv, {})
    # Options may stand between operands.
    return vars(build(command_line, command).parse_intermixed_args(words)) | values


def is_surplus_operand(error: errors.MigManagerError) -> bool:
    """Return whether a command line has an operand too many."""
    _, separator, words = error.message.partition(_UNRECOGNIZED)
    return bool(separator) and not words.startswith("-")


class Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting, so that all errors look the same."""

    def __init__(
        self, command_line: program.CommandLine, command: str, declared: Sequence[options.Option]
    ) -> None:
        super().__init__(
            prog=f"{command_line.name} {command}".strip(),
            usage=argparse.SUPPRESS,  # argparse would build one for every command line
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=False,
        )
        self._program = command_line
        self._command = command
        if command_line.refuses_empty:
            # The default type, which all options and operands use.
            self.register("type", None, _not_empty)
        groups: dict[str, Any] = {options.OPTIONS: self}
        for each in declared:
            if each.is_operand or each.flags:
                if each.group not in groups:
                    groups[each.group] = self.add_argument_group(each.group)
                is_hidden = bool(command) and each in command_line.anywhere
                _add(groups[each.group], each, command_line.version, is_hidden=is_hidden)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with argparse's message."""
        # The flag may have a value behind it or after it: --sort=x, --sort x.
        flag = message.removeprefix(_UNRECOGNIZED).split()[0].partition("=")[0]
        if message.startswith(_MISSING):
            message += f"; usage: {help_pages.usage(self._program, self._command)}"
        elif hint := _elsewhere(self._program, flag):
            message += hint
        elif message.startswith(_UNRECOGNIZED) and flag.startswith("--"):
            names = [each[2:] for each in self._option_string_actions if each.startswith("--")]
            # Compare without dashes: they would make any two short flags similar.
            for hint in messages.similar(flag[2:], names, limit=1):
                message += f"; did you mean '--{hint}'?"
        raise errors.UsageError(f"{self._command}: {message}" if self._command else message)

    def format_help(self) -> str:
        """Return the options with the help text around them."""
        self.usage, self.description, self.epilog = help_pages.page(self._program, self._command)
        return super().format_help()


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Does not break paths, labels and options at hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap  # noqa: PLC0415 - only for help

        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def show_help(command_line: program.CommandLine, command: str, terminal: console.Console) -> int:
    """Show the help of a command, or of the program; UnknownCommandError if it is unknown."""
    if command:
        command_line.command(command)
    terminal.say(build(command_line, command).format_help())
    return console.DONE


def build(command_line: program.CommandLine, command: str = "") -> Parser:
    """Return the parser of a command, or of the words before the command."""
    return Parser(command_line, command, command_line.options_of(command))


def _not_empty(text: str) -> str:
    # Scripts write --simulate "$GPUS". If the variable is empty, their author did not mean the
    # default, such as the real GPUs.
    if not text:
        raise argparse.ArgumentTypeError(EMPTY)
    return text


def _add(group: Any, option: options.Option, version: str, *, is_hidden: bool) -> None:
    help_text = argparse.SUPPRESS if is_hidden else option.full_help.replace("%", "%%")
    if option.is_operand:
        nargs = "*" if option.is_repeatable else None if option.is_required else "?"
        # Without a default, argparse's errors call an operand with "*" required.
        group.add_argument(
            option.key, nargs=nargs, default=None, metavar=option.metavar, help=help_text
        )
        return
    details: dict[str, object] = {"metavar": option.metavar}
    if option is program.HELP:
        details = {"action": "help"}
    elif option is program.VERSION:
        details = {"action": "version", "version": version}
    elif option.is_repeatable:
        details |= {"action": "append"}
    elif option.is_value_optional:
        details |= {"nargs": "?", "const": "true"}
    elif not option.metavar:
        details = {"action": "store_const", "const": option.const}
    group.add_argument(*option.flags, dest=option.key, help=help_text, **details)
