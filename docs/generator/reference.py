"""Facts as tables and sections."""

import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping

from docs.generator import blocks, facts, phases, results, schemas
from mig_manager import reasons
from mig_manager.cli import registry
from mig_manager.cli.doctor import examination
from mig_manager.cli.toolkit import command_line, help_pages
from mig_manager.core.records import run_status
from mig_manager.core.settings import options
from mig_manager.kubectl import plugin_registry

README = pathlib.Path(__file__).parents[2] / "README.md"


def _yes(is_so: bool) -> str:  # noqa: FBT001 - one word
    return "yes" if is_so else "no"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def settings_tables(_body: str, *, command: str = "agent") -> str:
    """Return the settings of a command, a table for each heading of its help."""
    groups: dict[str, list[options.Option]] = {}
    for option in registry.PROGRAM.options_of(command):
        if option is not command_line.HELP and not option.is_operand:
            group = option.group if option.flags else "variables without an option"
            groups.setdefault(group, []).append(option)
    sections = []
    for title, members in sorted(groups.items(), key=lambda each: not each[1][0].flags):
        if members[0].flags:
            head = ("Option", "Others' variable", "Default", "Meaning")
            table = blocks.table(head, map(_setting, members))
        else:
            rows = ((_code(each.variables), each.help) for each in members)
            table = blocks.table(("Variable", "Meaning"), rows)
        sections.append(f"### {title[:1].upper()}{title[1:]}\n\n{table}")
    return "\n\n".join(sections)


def _setting(option: options.Option) -> tuple[str, ...]:
    default = option.shown_default
    default = f"`{default}`" if re.fullmatch(r"[/\d]\S*", default) else default
    meaning = re.sub(r"(?<![`\w-])(--[a-z-]+)", r"`\1`", option.help).replace("|", r"\|")
    return _code(option.flags), _code(filter(None, [option.variable])), default, meaning


def metrics_table(body: str, *, of: Callable[[], list[facts.Metric]]) -> str:
    """Return all metrics of a program."""
    texts = blocks.kept(body)
    rows = (
        (f"`{each.name}`", each.kind, _code(each.labels), blocks.words(texts, f"`{each.name}`"))
        for each in of()
    )
    return blocks.table(("Name", "Type", "Labels", "Meaning"), rows)


def reasons_in_full(body: str) -> str:
    """Return a section for each reason; what follows its first paragraph is kept."""
    texts = {
        name: prose.partition("\n\n")[2].strip()
        for name, prose in re.findall(
            r"^### (\w+)\n\n(.*?)(?=^### |\Z)", body + "\n", re.DOTALL | re.MULTILINE
        )
    }
    return "\n\n".join(
        f"### {each.value}\n\n{_first_paragraph(each)}\n\n{blocks.words(texts, each.value)}"
        for each in reasons.Reason
    )


def _first_paragraph(reason: reasons.Reason) -> str:
    again = "Retried automatically. " if reason.is_transient else ""
    return f"*{again}{reason.remedy or 'No action needed.'}*"


def events_table(body: str) -> str:
    """Return the Events that are no end of a run."""
    texts = blocks.kept(body)
    types = facts.events()
    order = [name.strip("`") for name in texts if name.strip("`") in types]
    return blocks.table(
        ("Reason", "Type", "When"),
        (
            (f"`{name}`", types[name], blocks.words(texts, f"`{name}`"))
            for name in dict.fromkeys([*order, *types])
        ),
    )


def log_table(body: str) -> str:
    """Return the names of log lines with their fields."""
    texts = blocks.kept(body)
    return blocks.table(
        ("Event", "Fields", "Meaning"),
        (
            (f"`{name}`", _code(fields), blocks.words(texts, f"`{name}`"))
            for name, fields in facts.log_lines().items()
        ),
    )


def keys_table(body: str) -> str:
    """Return the keys on nodes and pods."""
    texts = blocks.kept(body)
    kinds = facts.node_keys()
    return blocks.table(
        ("Key", "Kind", "Who writes it, and what it means"),
        ((f"`{key}`", kind, blocks.words(texts, f"`{key}`")) for key, kind in kinds.items()),
    )


def phases_table(body: str) -> str:
    """Return what a node shows in each phase, as it was seen."""
    texts = blocks.kept(body)
    story, after = phases.story_without_kills(), phases.story_after_kills()
    rows = []
    for phase in run_status.Phase:
        shown = {
            marks
            for story in (story, after)
            for marks in story.marks.get(phase, ())
            if marks.state != run_status.State.FAILED.value
        }
        rows.append(
            (
                f"`{phase.value}`",
                _code(sorted({marks.state for marks in shown})) or "as before",
                _some(shown, lambda marks: marks.is_tainted),
                _some(shown, lambda marks: marks.is_paused),
                _some(shown, lambda marks: marks.has_snapshot),
                _some(shown, lambda marks: marks.names_layout),
                blocks.words(texts, f"`{phase.value}`"),
            )
        )
    head = (
        "Phase",
        "State label",
        "Tainted",
        "Clients paused",
        "Snapshot in the journal",
        "Layout named as applied",
        "What happens",
    )
    return blocks.table(head, rows)


def readme(_body: str) -> str:
    """Return the README's introduction, with links from here and MkDocs' admonitions."""
    text = README.read_text(encoding="utf-8").partition("\n\n")[2]
    introduction = text.partition("\n## ")[0].replace("](docs/", "](")
    return re.sub(r"^> \[!(\w+)\]\n((?:> .*\n)+)", _admonition, introduction, flags=re.MULTILINE)


def _admonition(alert: re.Match[str]) -> str:
    body = re.sub(r"^> ", "    ", alert[2], flags=re.MULTILINE)
    return f'!!! {alert[1].lower()} ""\n\n{body}'


def checks_table(_body: str) -> str:
    """Return the checks of ``doctor``."""
    rows = ((f"`{each.name}`", each.meaning, each.remedy) for each in examination.CHECKS)
    return blocks.table(("Check", "OK when", "Remedy"), rows)


def plugin_commands(_body: str) -> str:
    """Return the commands of the kubectl plugin."""
    of = plugin_registry.PROGRAM
    rows = ((f"`{help_pages.usage(of, row.name)}`", row.summary) for row in of.rows)
    return blocks.table(("Command", "What it does"), rows)


def schemas_table(_body: str) -> str:
    """Return the schemas, and what each is of."""
    return blocks.table(
        ("Schema", "What it describes"),
        (
            (f"`{name}`", re.sub(r"'([^']+)'", r"`\1`", schema["description"]))
            for name, schema in schemas.schemas().items()
        ),
    )


def _some(shown: Iterable[phases.Marks], question: Callable[[phases.Marks], bool]) -> str:
    answers = {question(marks) for marks in shown}
    if not answers:
        return "as before"
    return "may be" if len(answers) > 1 else _yes(answers.pop())


RENDERERS: Mapping[str, blocks.Renderer] = {
    "doctor-checks": checks_table,
    "events": events_table,
    "log-lines": log_table,
    "metrics": functools.partial(metrics_table, of=facts.agent_metrics),
    "node-keys": keys_table,
    "partitioner-metrics": functools.partial(metrics_table, of=facts.partitioner_metrics),
    "partitioner-settings": functools.partial(settings_tables, command="partitioner"),
    "phases": phases_table,
    "plugin-commands": plugin_commands,
    "readme": readme,
    "reasons-in-full": reasons_in_full,
    "schemas": schemas_table,
    "settings": settings_tables,
    **results.RENDERERS,
}
"""By the name that a block has in its page."""
