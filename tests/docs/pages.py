"""Parse the pages: links, anchors, and the commands that they show."""

import dataclasses
import difflib
import pathlib
import re
import urllib.parse
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
SITE = sorted((ROOT / "docs").rglob("*.md"))
OTHERS = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md")
]
PAGES = [*SITE, *OTHERS]

_FENCE = re.compile(r"^```[^\n]*\n.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_STEPS = re.compile(
    r"^(?:<!-- run: (?P<how>[^\n]*) -->\n)?```console\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_HERE_DOCUMENT = re.compile(r"<<'(\w+)'$")


def prose(page: pathlib.Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: pathlib.Path) -> list[str]:
    """Return the targets of a page's links and pictures."""
    return _LINK.findall(prose(page))


def anchors(page: pathlib.Path) -> set[str]:
    """Return the anchors that GitHub and the site give to a page's headings."""
    return {slug(heading) for heading in _HEADING.findall(prose(page))}


def slug(heading: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")


def is_outside(link: str) -> bool:
    """Return whether a link leads to another site."""
    return bool(urllib.parse.urlparse(link).scheme)


def named_code(page: pathlib.Path) -> set[tuple[str, pathlib.Path]]:
    """Return the paths that a page names as code; the package's own without its name.

    Before a path comes the name that the page says is in it, as `RULES` in `tests/docs/pages.py`,
    or an empty one.
    """
    bases = {
        path.name: base
        for base in (ROOT / "mig_manager", ROOT)
        for path in base.iterdir()
        if path.is_dir() and path.name not in {".git", ".venv", "dist", "site"}
    }
    folders = "|".join(map(re.escape, bases))
    named = re.findall(rf"(?:`(\w+)` (?:in|of) )?`((?:{folders})/[\w./-]*)`", prose(page))
    return {(name, bases[path.partition("/")[0]] / path) for name, path in named}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command, and the output that the page shows."""

    how: str  # the page's remark about how to run the block; empty if it has none
    command: str
    shown: str  # the expected output


def steps(page: pathlib.Path) -> list[Step]:
    """Return the commands that a page shows in its console blocks, in order."""
    return [
        step
        for block in _STEPS.finditer(page.read_text(encoding="utf-8"))
        for step in _commands(block["text"], block["how"] or "")
    ]


def _commands(text: str, how: str) -> Iterator[Step]:
    lines = text.splitlines()
    while lines:
        command = [lines.pop(0).removeprefix("$ ")]
        match = _HERE_DOCUMENT.search(command[0])
        while match and command[-1] != match[1]:
            command.append(lines.pop(0))
        shown = []
        while lines and not lines[0].startswith("$ "):
            shown.append(lines.pop(0))
        yield Step(how=how, command="\n".join(command), shown="\n".join(shown))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What differs from one reader to the next, and what stands for it in a comparison."""

    name: str
    pattern: re.Pattern[str]
    instead: str


RULES = (
    Rule(
        name="kubectl's column AGE, as wide as its values",
        pattern=re.compile(r"(?<= {3})(?:AGE|(?:\d+[smhd])+)(?: +(?=\S)|$)", re.MULTILINE),
        instead="<age> ",
    ),
    Rule(
        name="the folder of the demonstration",
        pattern=re.compile(r"/tmp/mig-(?:…|[a-z0-9_]{8})(?=/)"),  # noqa: S108 - not used here
        instead="/tmp/mig-…",  # noqa: S108 - as above
    ),
    Rule(
        name="the times of a status",
        pattern=re.compile(
            r"(?<= since )\S+ \S+Z, \S+ ago(?: · next attempt in \S+)?$", re.MULTILINE
        ),
        instead="<time>",
    ),
    Rule(
        name="the reader's home",
        pattern=re.compile(r"(?<= )(?:~|/\S+)(?=/\.local/state/mig-manager/)"),
        instead="~",
    ),
    Rule(
        name="the namespace that newer versions of kubectl name",
        pattern=re.compile(r'(?<=" deleted) from \S+ namespace$', re.MULTILINE),
        instead="",
    ),
)
"""All that a page may show otherwise than the reader sees it."""


def differences(shown: str, output: str) -> list[str]:
    """Return how an output differs from what a page shows, to the character but for ``RULES``."""
    expected, actual = _comparable(shown), _comparable(output)
    return [] if expected == actual else list(difflib.ndiff(expected, actual))


def _comparable(text: str) -> list[str]:
    for rule in RULES:
        text = rule.pattern.sub(rule.instead, text)
    return text.splitlines()
