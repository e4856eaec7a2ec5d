"""The help text around the options of a command; except for the wrapping, only help loads it."""

import shutil
import textwrap
from collections.abc import Mapping

from mig_manager.cli.toolkit import command_line

_WIDTH = 79
_INDENT = "  "


def page(program: command_line.Program, command: str) -> tuple[str, str, str]:
    """Return usage, description and epilog of a command's help, or of the program's."""
    help_text = program.text(command)
    examples = [
        f"{_INDENT}{each.line}\n{wrap(each.meaning, _INDENT * 3)}" for each in help_text.examples
    ]
    meanings = [
        wrap(f"{status}  {meaning}", _INDENT, further=_INDENT * 2 + " ")
        for status, meaning in statuses(program, command).items()
        if help_text.own_statuses or not command
    ]
    if not command and program.other_statuses:
        meanings.append(wrap(program.other_statuses, _INDENT))
    commands = [wrap(f"  {row.name:<17} {row.purpose}", further=" " * 20) for row in program.rows]
    environment = "" if command else program.environment
    blocks = {
        "commands": [] if command else commands,
        "examples": examples,
        "environment": [wrap(environment, _INDENT)] if environment else [],
        "exit status": meanings,
    }
    more = f"\n\n'{program.name} --help' has what holds for every command." if command else ""
    description = "\n\n".join(map(wrap, help_text.paragraphs))
    epilog = "\n\n".join(f"{title}:\n" + "\n".join(b) for title, b in blocks.items() if b)
    return usage(program, command), description, f"{epilog}{more}".strip()


def statuses(program: command_line.Program, command: str) -> Mapping[str, str]:
    """Return the exit statuses of a command, or of the program, with their meanings."""
    if not program.has_settings(command):
        return program.text(command).own_statuses
    common = {status: meaning for status, meaning in program.statuses.items() if status != "3"}
    return {
        **(common if command else program.statuses),
        **program.text(command).own_statuses,
    }


def usage(program: command_line.Program, command: str) -> str:
    """Return the usage line of a command, or of the program."""
    operands = "COMMAND"
    if command:
        operands = program.commands[command].operands or " ".join(
            operand.metavar
            if operand.is_required
            else f"[{operand.metavar}]{'...' if operand.is_repeatable else ''}"
            for operand in program.operands_of(command)
        )
    return " ".join(filter(None, (program.name, command, "[OPTION]...", operands)))


def wrap(paragraph: str, indent: str = "", *, further: str | None = None) -> str:
    """Wrap a paragraph to the terminal, at most 79 columns."""
    return textwrap.fill(
        paragraph,
        min(_WIDTH, shutil.get_terminal_size().columns),
        initial_indent=indent,
        subsequent_indent=indent if further is None else further,
        break_on_hyphens=False,
        break_long_words=False,
    )
