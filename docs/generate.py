"""Write the manual from the program's own definitions: docs/commands.md and docs/man.

python docs/generate.py [FOLDER]      FOLDER: where to write (default: the one of this file)
"""

import pathlib
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping

import mig_manager
from mig_manager.cli import commandline, helppages, helptexts

HERE = pathlib.Path(__file__).parent
PROGRAM = "mig-manager"
WIDTH = 125
MADE_BY = "Made by docs/generate.py from the program's own definitions; change those."


def pages() -> Mapping[str, str]:
    """Return the text of every page by its path below this folder."""
    program, commands = commandline.program(), commandline.commands()
    manual = {f"man/{_title(each)}.1": _man(each, commands) for each in (program, *commands)}
    return {"commands.md": _markdown(program, commands), **manual}


def write(folder: pathlib.Path) -> None:
    """Write every page below a folder, and remove pages of commands that are no more."""
    (folder / "man").mkdir(parents=True, exist_ok=True)
    for stale in (folder / "man").glob("*.1"):
        stale.unlink()
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


def _title(command: commandline.Command) -> str:
    return f"{PROGRAM}-{command.name}" if command.name else PROGRAM


def _called(command: commandline.Command) -> str:
    return f"{PROGRAM} {command.name}".strip()


def _synopsis(command: commandline.Command) -> str:
    return helppages.usage(command.name).replace("%(prog)s", _called(command))


def _spelled(option: commandline.Option) -> str:
    """Return the flags with the value: ``-f, --config-file FILE``."""
    value = f" {option.placeholder}" if option.placeholder else ""
    return ", ".join(option.flags) + (f" [{value.strip()}]" if option.is_value_optional else value)


def _groups(command: commandline.Command) -> Mapping[str, list[commandline.Option]]:
    found: dict[str, list[commandline.Option]] = {}
    for option in command.options:
        if command.name and option.long == "--help":
            continue
        found.setdefault(option.group, []).append(option)
    return found


# -- Markdown ------------------------------------------------------------------------------------


def _markdown(program: commandline.Command, commands: Iterable[commandline.Command]) -> str:
    blocks = [
        f"<!-- {MADE_BY} -->",
        "# Commands",
        *map(_wrapped, helptexts.PROGRAM.paragraphs),
        "| command | what it does |\n|---|---|\n"
        + "\n".join(f"| [`{each.name}`](#{each.name}) | {each.summary} |" for each in commands),
        *_examples(helptexts.PROGRAM),
        "## Options and variables",
        _wrapped(helptexts.ENVIRONMENT),
        "These stand before a command:",
        _table(program.options),
        "## Exit status",
        _statuses(helptexts.STATUSES),
        _wrapped(helptexts.OTHER_STATUSES),
        *(block for each in commands for block in _section(each)),
    ]
    return "\n\n".join(blocks) + "\n"


def _section(command: commandline.Command) -> Iterator[str]:
    text = helptexts.text(command.name)
    yield f"## {command.name}"
    yield f"```\n{_synopsis(command)}\n```"
    yield from map(_wrapped, text.paragraphs)
    yield from _examples(text)
    if command.operands:
        yield "\n".join(f"- `{each.placeholder}`: {_cell(each.told)}" for each in command.operands)
    for group, options in _groups(command).items():
        if group != "options":
            yield f"{group[0].upper()}{group[1:]}:"
        yield _table(options)
    if text.statuses:
        yield "Exit status:"
        yield _statuses(text.statuses)


def _examples(text: helptexts.Text) -> Iterator[str]:
    lines = [f"# {each.told}\n{each.line}" for each in text.examples]
    yield "```sh\n" + "\n\n".join(lines) + "\n```"


def _table(options: Iterable[commandline.Option]) -> str:
    rows = [
        f"| `{_cell(_spelled(each))}` | {_cell(each.told)} "
        f"| {', '.join(f'`{name}`' for name in each.variables)} |"
        for each in options
    ]
    return "| option | meaning | variables |\n|---|---|---|\n" + "\n".join(rows)


def _statuses(statuses: Mapping[str, str]) -> str:
    rows = (f"| {status} | {meaning} |" for status, meaning in statuses.items())
    return "| status | meaning |\n|---|---|\n" + "\n".join(rows)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- man(7) --------------------------------------------------------------------------------------


def _man(command: commandline.Command, commands: Iterable[commandline.Command]) -> str:
    text = helptexts.text(command.name)
    first, *rest = text.paragraphs
    summary = command.summary or first.rstrip(".")
    blocks = [
        f'.\\" {MADE_BY}',
        f'.TH "{_title(command).upper()}" 1 "" "{PROGRAM} {mig_manager.__version__}"',
        f".SH NAME\n{_title(command)} \\- {_roff(summary)}",
        f".SH SYNOPSIS\n.B {_roff(_synopsis(command))}",
        ".SH DESCRIPTION\n" + "\n.PP\n".join(_roff(each) for each in (first, *rest)),
        *_man_operands(command),
        *_man_options(command),
        *([] if command.name else _man_commands(commands)),
        ".SH EXAMPLES\n" + "\n.PP\n".join(_man_example(each) for each in text.examples),
        ".SH ENVIRONMENT\n" + _roff(helptexts.ENVIRONMENT),
        ".SH EXIT STATUS\n" + "\n".join(_man_statuses(command)),
        ".SH SEE ALSO\n" + ",\n".join(_man_others(command, commands)),
    ]
    return "\n".join(blocks) + "\n"


def _man_operands(command: commandline.Command) -> Iterator[str]:
    if command.operands:
        yield ".SH ARGUMENTS"
    for each in command.operands:
        yield f".TP\n.I {_roff(each.placeholder)}\n{_roff(each.told)}"


def _man_options(command: commandline.Command) -> Iterator[str]:
    groups = _groups(command)
    if groups:
        yield ".SH OPTIONS"
    for group, options in groups.items():
        if group != "options":
            yield f".SS {_roff(group[0].upper() + group[1:])}"
        for each in options:
            variables = f"\nVariables: {', '.join(each.variables)}." if each.variables else ""
            yield f".TP\n.B {_roff(_spelled(each))}\n{_roff(each.told)}.{_roff(variables)}"


def _man_commands(commands: Iterable[commandline.Command]) -> Iterator[str]:
    yield ".SH COMMANDS"
    for each in commands:
        yield f".TP\n.BR {_title(each)} (1)\n{_roff(each.summary)}"


def _man_example(example: helptexts.Example) -> str:
    return f"{_roff(example.told)}\n.PP\n.RS 4\n.nf\n{_roff(example.line)}\n.fi\n.RE"


def _man_statuses(command: commandline.Command) -> Iterator[str]:
    for status, meaning in helppages.statuses(command.name).items():
        yield f".TP\n.B {status}\n{_roff(meaning)}"
    yield f".PP\n{_roff(helptexts.OTHER_STATUSES)}"


def _man_others(
    command: commandline.Command, commands: Iterable[commandline.Command]
) -> Iterator[str]:
    others = [each for each in commands if each.name != command.name]
    titles = [_title(each) for each in others] if not command.name else [PROGRAM]
    return (f".BR {title} (1)" for title in titles)


def _roff(text: str) -> str:
    """Return a text in which nothing is a request or an escape."""
    plain = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return "\n".join(f"\\&{line}" if line.startswith(".") else line for line in plain.split("\n"))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
