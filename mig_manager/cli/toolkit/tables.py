"""Tables and lists that fit the terminal."""

import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence

from mig_manager.core import bar, messages

_GAP, _NARROW_GAP = "   ", "  "
_LEAST_LAST = 20  # columns of the last column, even if one of its words is longer
_FIRST_HALF, _JOINT = re.compile(r"\b([0-9]+x|[0-9-]{10}) "), "\N{NO-BREAK SPACE}"
"""The count of a profile, as in ``16x 3g.20gb``, or a date; the joint keeps both on one line."""


def columns(
    head: Sequence[str], rows: Iterable[Sequence[str | tuple[str, bar.Tone]]], *, style: bar.Style
) -> list[str]:
    """Return the lines of a table; a cell is a text, or a text and its tone.

    If the table is wider than the terminal, its widest columns are wrapped between words; if
    whole words do not fit either, each row becomes a block with a line for each cell.
    """
    table = [
        [(_FIRST_HALF.sub(rf"\1{_JOINT}", text), tone) for text, tone in cells]
        for cells in (
            [(cell, bar.Tone.PLAIN) if isinstance(cell, str) else cell for cell in row]
            for row in (head, *rows)
        )
    ]
    widths = [max(len(text) for text, _ in column) for column in zip(*table, strict=True)]
    gap, room = _GAP, style.table_width
    if room is not None and sum(widths) + len(gap) * (len(widths) - 1) > room:
        gap = _NARROW_GAP
        room -= len(gap) * (len(widths) - 1)
        widths = _narrowed(table, room)
        if sum(widths) > room:
            return _blocks(table, style)
    padded = [*widths[:-1], 0]  # lines end with their text
    lines = []
    for row in table:
        cells = [_cell_lines(text, width) for (text, _), width in zip(row, widths, strict=True)]
        for texts in itertools.zip_longest(*cells, fillvalue=""):
            painted = [
                style.paint(style.plain(text.ljust(width)), tone)
                for text, width, (_, tone) in zip(texts, padded, row, strict=True)
            ]
            lines.append(gap.join(painted).rstrip().replace(_JOINT, " "))
    return lines


def _blocks(table: Sequence[Sequence[tuple[str, bar.Tone]]], style: bar.Style) -> list[str]:
    head, *rows = table
    wide = max(len(title) for title, _ in head) + len(_GAP)
    lines: list[str] = []
    for row in rows:
        lines += [""] if lines else []
        for (title, _), (text, tone) in zip(head, row, strict=True):
            for at, part in enumerate(_cell_lines(text, style.width - wide)):
                start = "" if at else title
                lines.append(f"{start:<{wide}}{style.paint(style.plain(part), tone)}".rstrip())
    return [line.replace(_JOINT, " ") for line in lines]


def _narrowed(table: Sequence[Sequence[tuple[str, bar.Tone]]], room: int) -> list[int]:
    """Return column widths that fit the room as far as no word is broken.

    Paths, labels and commands are copied, so a longer one stands out of the last column.
    """
    texts = [[text for text, _ in column] for column in zip(*table, strict=True)]
    widths = [max(map(len, column)) for column in texts]
    words = [
        max(len(word) for text in column for word in _cell_lines(text, 1)) for column in texts
    ]
    words[-1] = min(words[-1], _LEAST_LAST)
    while sum(widths) > room:
        spare = [width if width > word else 0 for width, word in zip(widths, words, strict=True)]
        if not any(spare):
            break
        widths[spare.index(max(spare))] -= 1
    return widths


def _cell_lines(text: str, width: int) -> list[str]:
    if len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def listing(title: str, names: Sequence[str], style: bar.Style) -> str:
    """Return a title and names; a long list ends with a count."""
    return style.wrapped(f"{title}: {messages.listed(names, most=messages.MOST_AT_A_TERMINAL)}")


def count(number: int, noun: str) -> str:
    """Return a number with its noun, singular or plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
