"""Parts of pages that are written by programs, between two comments that name them.

A table may have a last column that people write: what stands there is kept, row by row, while the
other columns are rewritten.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

Renderer = Callable[[str], str]  # from the block as it stands to the block as it must be

_BLOCK = re.compile(
    r"^<!-- generated: (?P<name>[a-z-]+) -->\n(?P<body>.*?)^<!-- end of generated -->$",
    re.DOTALL | re.MULTILINE,
)


class MissingWordsError(Exception):
    """The code has something that no person has written about yet."""


def rewritten(page: str, renderers: Mapping[str, Renderer]) -> str:
    """Return a page with all of its blocks up to date.

    Raises:
        KeyError: There is no renderer of a block's name.
        MissingWordsError: A person has to write something.
    """

    def block(match: re.Match[str]) -> str:
        name, body = match["name"], match["body"]
        new = renderers[name](body.strip("\n")).strip("\n")
        return f"<!-- generated: {name} -->\n\n{new}\n\n<!-- end of generated -->"

    return _BLOCK.sub(block, page)


def names(page: str) -> list[str]:
    """Return the names of a page's blocks."""
    return [match["name"] for match in _BLOCK.finditer(page)]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(_row(row) for row in rows)])


def _row(cells: Sequence[str]) -> str:
    line = "|".join(f" {cell} " if cell else " " for cell in cells)
    return f"|{line}|"


def kept(body: str) -> dict[str, str]:
    """Return the last cell of each row of a table, by the first one."""
    rows = [_cells(line) for line in body.splitlines() if line.startswith("|")]
    return {row[0]: row[-1] for row in rows[2:]}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def words(texts: Mapping[str, str], key: str) -> str:
    """Return what a person has written about something.

    Raises:
        MissingWordsError: No person has.
    """
    if not texts.get(key):
        raise MissingWordsError(f"write what {key} means where it stands")
    return texts[key]
