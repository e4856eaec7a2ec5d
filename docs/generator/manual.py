"""Write the manual from the program's own declarations: the command reference and man pages."""

import collections
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import mig_manager
from mig_manager.cli import registry
from mig_manager.cli.toolkit import command_line, help_pages
from mig_manager.core.settings import options
from mig_manager.kubectl import plugin_registry

PROGRAM = registry.PROGRAM.name
REFERENCE = "command-reference.md"
COMMON = "Options of several commands"
LEAST_COMMON = 3  # commands
SERVICES = {"agent": "settings of the agent", "partitioner": "settings of the partitioner"}
"""Commands whose options docs/settings.md lists, under a heading with these words."""
_MANUAL = (
    "The manual page of a command, and `mig-manager help COMMAND`, have the same text.\n"
    "After `uv tool install`, name the tool's folder: "
    "`MANPATH=$(uv tool dir)/mig-manager/share/man: man mig-manager-apply`."
)
_MADE_BY = "Made by docs/generator/manual.py from the program's own declarations; change those."


def reference_pages() -> Mapping[str, str]:
    """Return the page of the manual among these docs, by name."""
    return {REFERENCE: _reference()}


def man_pages() -> Mapping[str, str]:
    """Return the man pages of programs and commands by name."""
    return {
        f"{_title(of, each)}.1": _man(of, each)
        for of in (registry.PROGRAM, plugin_registry.PROGRAM)
        for each in ("", *of.commands)
    }


def _title(of: command_line.Program, command: str) -> str:
    return "-".join(filter(None, (*of.name.split(), command)))


def _flags(option: options.Option) -> str:
    """Return the flags with the value: ``-f, --config-file FILE``."""
    value = f"[{option.metavar}]" if option.is_value_optional else option.metavar
    return f"{', '.join(option.flags)} {value}".strip()


def _meaning(option: options.Option) -> str:
    default = f" (default: {option.shown_default})" if option.shown_default else ""
    return f"{option.help}{default}"


def _options_of(command: str, of: command_line.Program = registry.PROGRAM) -> list[options.Option]:
    """Return the options with a flag that a page about a command lists."""
    return [
        each for each in of.flag_options_of(command) if not (command and each is command_line.HELP)
    ]


def _by_group(listed: Iterable[options.Option]) -> Mapping[str, list[options.Option]]:
    groups: dict[str, list[options.Option]] = {}
    for option in listed:
        groups.setdefault(option.group, []).append(option)
    return groups


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


# -- Markdown ------------------------------------------------------------------------------------


def _reference() -> str:
    text, common = registry.PROGRAM.text(""), _common()
    blocks = [
        f"<!-- {_MADE_BY} -->",
        "# Command reference",
        *map(_sentences, text.paragraphs),
        _table(
            ("command", "what it does"),
            (
                (f"[`{each}`](#{each})", registry.PROGRAM.text(each).summary)
                for each in registry.PROGRAM.commands
            ),
        ),
        _examples(text),
        _MANUAL,
        "## Options and variables",
        _sentences(f"{registry.PROGRAM.environment} {registry.PROGRAM.values}"),
        "These options stand before a command:",
        _option_table(_options_of("")),
        "## Exit status",
        _status_table(registry.PROGRAM.statuses),
        _sentences(registry.PROGRAM.other_statuses),
        f"## {COMMON}",
        *_group_tables(_by_group(common)),
        *(block for each in registry.PROGRAM.commands for block in _section(each, common)),
    ]
    return "\n\n".join(blocks) + "\n"


def _common() -> list[options.Option]:
    """Return the options that at least three commands declare alike, of each name one."""
    count = collections.Counter(
        option
        for command in registry.PROGRAM.commands
        if command not in SERVICES
        for option in _options_of(command)
    )
    by_name = {o.name: o for o, n in reversed(count.most_common()) if n >= LEAST_COMMON}
    common = [option for option in count if by_name.get(option.name) is option]
    return sorted(common, key=lambda option: option.group != options.OPTIONS)


def _section(command: str, common: Sequence[options.Option]) -> Iterator[str]:
    text = registry.PROGRAM.text(command)
    yield f"## {command}"
    yield f"```\n{help_pages.usage(registry.PROGRAM, command)}\n```"
    yield from map(_sentences, text.paragraphs)
    yield _examples(text)
    operands = [
        f"- `{each.metavar}`: {_cell(each.help)}" for each in registry.PROGRAM.operands_of(command)
    ]
    if operands:
        yield "\n".join(operands)
    if command in SERVICES:
        yield f"Options: [{SERVICES[command]}](settings.md#{SERVICES[command].replace(' ', '-')})."
    else:
        yield from _group_tables(
            _by_group(each for each in _options_of(command) if each not in common)
        )
        shared = ", ".join(
            f"`{each.flags[-1]}`" for each in _options_of(command) if each in common
        )
        if shared:
            yield f"Also [these common options](#{COMMON.lower().replace(' ', '-')}): {shared}."
    if text.own_statuses:
        yield "Exit status:"
        yield _status_table(text.own_statuses)


def _group_tables(groups: Mapping[str, list[options.Option]]) -> Iterator[str]:
    for group, members in groups.items():
        if group != options.OPTIONS:
            yield f"{_sentence(group)}:"
        yield _option_table(members)


def _examples(text: command_line.Text) -> str:
    lines = (f"# {each.meaning}\n{each.line}" for each in text.examples)
    return "```sh\n" + "\n\n".join(lines) + "\n```"


def _option_table(members: Iterable[options.Option]) -> str:
    rows = (
        (f"`{_flags(each)}`", _meaning(each), ", ".join(f"`{name}`" for name in each.variables))
        for each in members
    )
    return _table(("option", "meaning", "variables"), rows)


def _status_table(statuses: Mapping[str, str]) -> str:
    return _table(("status", "meaning"), statuses.items())


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines])


def _sentences(text: str) -> str:
    """Return a text with one sentence a line."""
    return re.sub(r"(?<=[.?!:]) +(?=[A-Z])", "\n", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- man(7) --------------------------------------------------------------------------------------


def _man(of: command_line.Program, command: str) -> str:
    text, title = of.text(command), _title(of, command)
    blocks = [
        f'.\\" {_MADE_BY}',
        f'.TH "{title.upper()}" 1 "" "{PROGRAM} {mig_manager.__version__}"',
        f".SH NAME\n{title} \\- {_roff(text.summary)}",
        f".SH SYNOPSIS\n.B {_roff(help_pages.usage(of, command))}",
        ".SH DESCRIPTION\n" + "\n.PP\n".join(map(_roff, text.paragraphs)),
        *_man_options(of, command),
    ]
    if text.examples:
        blocks.append(".SH EXAMPLES\n" + "\n.PP\n".join(map(_man_example, text.examples)))
    if of.environment and of.has_settings(command):
        values = "" if command else of.values
        blocks.append(".SH ENVIRONMENT\n" + _roff(f"{of.environment} {values}".strip()))
    statuses = help_pages.statuses(of, command)
    blocks += [".SH EXIT STATUS"] if statuses else []
    for status, meaning in statuses.items():
        blocks.append(f".TP\n.B {status}\n{_roff(meaning)}")
    if statuses and of.other_statuses:
        blocks.append(f".PP\n{_roff(of.other_statuses)}")
    others = [""] if command else list(of.commands)
    blocks.append(".SH SEE ALSO\n" + ",\n".join(f".BR {_title(of, each)} (1)" for each in others))
    return "\n".join(blocks) + "\n"


def _man_options(of: command_line.Program, command: str) -> Iterator[str]:
    operands, groups = of.operands_of(command), _by_group(_options_of(command, of))
    if operands:
        yield ".SH ARGUMENTS"
    yield from (f".TP\n.I {_roff(each.metavar)}\n{_roff(each.help)}" for each in operands)
    if groups:
        yield ".SH OPTIONS"
    for group, members in groups.items():
        if group != options.OPTIONS:
            yield f".SS {_roff(_sentence(group))}"
        for each in members:
            variables = f"\nVariables: {', '.join(each.variables)}." if each.variables else ""
            yield f".TP\n.B {_roff(_flags(each))}\n{_roff(_meaning(each))}.{_roff(variables)}"
    if not command:
        yield ".SH COMMANDS"
        for name in of.commands:
            yield f".TP\n.BR {_title(of, name)} (1)\n{_roff(of.text(name).summary)}"


def _man_example(example: command_line.Example) -> str:
    return f"{_roff(example.meaning)}\n.PP\n.RS 4\n.nf\n{_roff(example.line)}\n.fi\n.RE"


def _roff(text: str) -> str:
    """Return a text in which nothing is a request or an escape."""
    plain = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    return "\n".join(f"\\&{line}" if line.startswith(".") else line for line in plain.split("\n"))
