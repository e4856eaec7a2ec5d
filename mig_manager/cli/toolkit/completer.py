"""Complete command lines for every shell and for kubectl, with cobra's protocol.

A shell passes the words so far; the last one is incomplete or empty. The program answers with one
candidate per line, a tab and its meaning. The last line says whether the shell may add files or
folders (cobra's ``ShellCompDirective``).
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from mig_manager.catalogue import hardware
from mig_manager.cli.toolkit import command_line
from mig_manager.core.settings import options

_SAFE_WORD = re.compile(r"[A-Za-z0-9._-]+")
"""Names without special characters of any shell; all are valid label values."""
_NOTHING, _FILES, _FOLDERS = 4, 0, 16
_BEFORE_PRODUCT = re.compile(r"(.*\+)?([0-9]+[xX])?")
"""The optional prefix of a product: other products with a plus, and a count."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A command line so far."""

    command: str  # empty: none yet
    operands: tuple[str, ...]
    values: Mapping[str, object]  # the values of options, by their names
    option: options.Option | None  # whose value the last word is
    by_flag: Mapping[str, options.Option]


Values = Callable[[options.Option, Line], Iterable[str]]
"""Returns the values of an option or operand that only a file or a cluster knows."""


def answer(program: command_line.Program, words: Sequence[str], values: Values) -> str:
    """Return the answer to a shell."""
    *before, word = words or ("",)
    # Bash splits --config-file=FILE into three words.
    line = _line(program, [each for each in before if each != "="])
    word = "" if word == "=" else word
    lead = ""
    option = line.option
    if option is None and word.startswith("--") and "=" in word:
        flag, _, word = word.partition("=")
        option, lead = line.by_flag.get(flag), f"{flag}="
    elif option is None and line.command and not word.startswith("-"):
        option = _operand(program, line)
    directive = _NOTHING
    candidates: Iterable[tuple[str, str]] = ()
    if option is not None:
        directive = {options.FILE: _FILES, options.FOLDER: _FOLDERS}.get(option.metavar, _NOTHING)
        candidates = _of_option(option, word, line, values)
    elif word.startswith("-"):
        flags = line.by_flag.items()
        candidates = ((flag, each.help) for flag, each in flags if flag.startswith(word))
    elif not line.command:
        rows = (row for row in program.rows if row.name.startswith(word))
        candidates = ((row.name, row.purpose) for row in rows)
    lines = [f"{lead}{name}\t{meaning}".rstrip("\t") for name, meaning in candidates]
    return "\n".join([*lines, f":{directive}"])


def _line(program: command_line.Program, before: Sequence[str]) -> Line:
    by_flag = {flag: each for each in program.flag_options_of() for flag in each.flags}
    command = ""
    operands = []
    values = dict[str, object]()
    option = None
    for word in before:
        if option is not None:
            values[option.key] = word
            option = None
        elif word.startswith("-"):
            flag, equals, value = word.partition("=")
            declared = by_flag.get(flag)
            if declared and equals:
                values[declared.key] = value
            elif declared and declared.metavar and not declared.is_value_optional:
                option = declared
        elif command:
            operands.append(word)
        elif word in program.commands:
            command = word
            by_flag = {flag: each for each in program.flag_options_of(word) for flag in each.flags}
    return Line(
        command=command, operands=tuple(operands), values=values, option=option, by_flag=by_flag
    )


def _operand(program: command_line.Program, line: Line) -> options.Option | None:
    declared = program.operands_of(line.command)
    last = declared[-1:] if declared and declared[-1].is_repeatable else ()
    return next(iter((*declared[len(line.operands) :], *last)), None)


def _of_option(
    option: options.Option, word: str, line: Line, values: Values
) -> Iterator[tuple[str, str]]:
    if option.metavar in (options.PRODUCT, options.SPEC):
        is_spec = option.metavar == options.SPEC
        prefix = _BEFORE_PRODUCT.match(word) if is_spec else None
        lead = prefix[0] if prefix else ""
        # Products match in any case, and complete to the spelling in the help.
        start = word[len(lead) :].casefold()
        names = (each for each in hardware.product_names() if each.casefold().startswith(start))
        yield from ((f"{lead}{name}", "") for name in names)
        return
    candidates = option.words or values(option, line)
    # A document's text must control neither the terminal nor the shell.
    safe = filter(_SAFE_WORD.fullmatch, candidates)
    yield from ((each, "") for each in safe if each.startswith(word) and each not in line.operands)
