"""Parse and run command lines by the rows of a program.

Parsed values stay text; ``core.settings.options`` converts them: environment variables need the
same checks. Abbreviations are refused, so that a new option never breaks an old script.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from mig_manager import errors
from mig_manager.cli.toolkit import command_line, console, help_pages
from mig_manager.core import messages
from mig_manager.core.settings import options

_UNRECOGNIZED = "unrecognized arguments: "  # how argparse begins
_MISSING = "the following arguments are required: "
EMPTY = "the value is empty; leave it out for the default"


def run(program: command_line.Program, argv: Sequence[str], terminal: console.Console) -> int:
    """Run a command line, without the program's name; return its exit status.

    Raises:
        MigManagerError: The command line is invalid, or the command failed.
    """
    parsed = terminal.parse_command_line(lambda: parse(program, argv))
    if parsed is None:
        return console.DONE
    if parsed["command"] is None:
        return show_help(program, "", terminal)
    command = program.command(str(parsed["command"]))
    if program.environment and command.notes_variables:
        for name, closest in program.unknown_variables(terminal.environ, command.name).items():
            hint = f"; did you mean {closest}?" if closest else ""
            terminal.note(f"warning: {name} is ignored: no option has this variable{hint}")
    if command.name == command_line.HELP.name:
        return show_help(program, str(parsed["topic"] or ""), terminal)
    if command.name == command_line.VERSION.name:
        terminal.say(program.version)
        return console.DONE
    settings = program.settings(parsed, terminal.environ)
    status: int = program.module(command.name).run(settings, terminal)
    return status


def parse(program: command_line.Program, argv: Sequence[str]) -> dict[str, object]:
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
    if program.anywhere:
        values, argv = Parser(program, "", program.anywhere).parse_known_args(argv)
        anywhere = vars(values)
    leading, words = split(argv)
    word = "".join(words[:1])
    name = program.aliases.get(word, word)
    _refuse_early(program, leading)
    if words:
        program.command(name)
    before = _parse_words(program, "", leading)
    after = _parse_words(program, name, words[1:]) if name else {}
    present = {key: value for key, value in after.items() if value is not None}
    return {**after, **before, **present, **anywhere, "command": name or None}


def split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the options before the command, and the rest, which begins with the command."""
    at = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    return argv[:at], argv[at:]


def _refuse_early(program: command_line.Program, before: Sequence[str]) -> None:
    """Raise UsageError for an option of a command that stands before the command."""
    leading = {flag for each in program.options_of() for flag in each.flags}
    for flag in (word.partition("=")[0] for word in before):
        if hint := _elsewhere(program, flag):
            raise errors.UsageError(f"unknown option {flag}{hint}")
        if flag not in leading and any(
            flag in each.flags for row in program.rows for each in program.options_of(row.name)
        ):
            raise errors.UsageError(
                f"{flag} belongs after the command: {program.name} COMMAND {flag}"
            )


def _elsewhere(program: command_line.Program, flag: str) -> str:
    """Return the hint for an option of another program; a letter may have its value behind it."""
    return program.elsewhere.get(flag) or program.elsewhere.get(flag[:2], "")


def _parse_words(
    program: command_line.Program, command: str, argv: Sequence[str]
) -> dict[str, object]:
    words, values = program.respell(command, argv) if program.respell else (argv, {})
    # Options may stand between operands.
    return vars(build(program, command).parse_intermixed_args(words)) | values


def is_surplus_operand(error: errors.MigManagerError) -> bool:
    """Return whether a command line has an operand too many."""
    _, separator, words = error.message.partition(_UNRECOGNIZED)
    return bool(separator) and not words.startswith("-")


class Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting, so that all errors look the same."""

    def __init__(
        self, program: command_line.Program, command: str, declared: Sequence[options.Option]
    ) -> None:
        super().__init__(
            prog=f"{program.name} {command}".strip(),
            usage=argparse.SUPPRESS,  # argparse would build one for every command line
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=False,
        )
        self._program = program
        self._command = command
        if program.refuses_empty:
            # The default type, which all options and operands use.
            self.register("type", None, _not_empty)
        groups: dict[str, Any] = {options.OPTIONS: self}
        for each in declared:
            if each.is_operand or each.flags:
                if each.group not in groups:
                    groups[each.group] = self.add_argument_group(each.group)
                is_hidden = bool(command) and each in program.anywhere
                _add(groups[each.group], each, program.version, is_hidden=is_hidden)

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


def show_help(program: command_line.Program, command: str, terminal: console.Console) -> int:
    """Show the help of a command, or of the program; UnknownCommandError if it is unknown."""
    if command:
        program.command(command)
    terminal.say(build(program, command).format_help())
    return console.DONE


def build(program: command_line.Program, command: str = "") -> Parser:
    """Return the parser of a command, or of the words before the command."""
    return Parser(program, command, program.options_of(command))


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
    if option is command_line.HELP:
        details = {"action": "help"}
    elif option is command_line.VERSION:
        details = {"action": "version", "version": version}
    elif option.is_repeatable:
        details |= {"action": "append"}
    elif option.is_value_optional:
        details |= {"nargs": "?", "const": "true"}
    elif not option.metavar:
        details = {"action": "store_const", "const": option.const}
    group.add_argument(*option.flags, dest=option.key, help=help_text, **details)
