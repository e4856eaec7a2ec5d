"""The help text around the options of a command; except for the wrapping, only help loads it."""

import shutil
import textwrap
from collections.abc import Mapping

from mig_manager.cli.toolkit import command_line

_WIDTH = 79
_INDENT = "  "


def page(program: command_line.Program, command: str) -> tuple[str, str, str]:
    """Return usage, description and epilog of a command's help, or of the program's.

    The options stand between the last two. The program's commands stand before them: 'kubectl mig'
    has a screen of options for the cluster.
    """
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
    environment = "" if command else program.environment
    blocks = {
        "examples": examples,
        "environment": [wrap(environment, _INDENT)] if environment else [],
        "exit status": meanings,
    }
    more = f"\n\n'{program.name} --help' has what holds for every command." if command else ""
    descriptions = [wrap(paragraph) for paragraph in help_text.paragraphs]
    if not command:
        rows = (f"  {row.name:<17} {row.purpose}" for row in program.rows)
        commands = (wrap(row, further=" " * 20) for row in rows)
        descriptions.append("\n".join(["commands:", *commands]))
    epilog = "\n\n".join(f"{title}:\n" + "\n".join(b) for title, b in blocks.items() if b)
    return usage(program, command), "\n\n".join(descriptions), f"{epilog}{more}".strip()


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
