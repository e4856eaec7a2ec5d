"""Tables and lists that fit the terminal."""

import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence

from mig_manager.core import bar, messages

_MOST_NAMED = 8  # names in a list before it counts the rest
_GAP, _NARROW_GAP = "   ", "  "
_FIRST_HALF, _JOINT = re.compile(r"\b([0-9]+x|[0-9-]{10}) "), "\N{NO-BREAK SPACE}"
"""The count of a profile, as in ``16x 3g.20gb``, or a date; the joint keeps both on one line."""


def columns(
    head: Sequence[str], rows: Iterable[Sequence[str | tuple[str, bar.Tone]]], *, style: bar.Style
) -> list[str]:
    """Return the lines of a table; a cell is a text, or a text and its tone.

    If the table is wider than the terminal, its widest columns are wrapped.
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
        widths = _narrowed(table, room - len(gap) * (len(widths) - 1))
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


def _narrowed(table: Sequence[Sequence[tuple[str, bar.Tone]]], room: int) -> list[int]:
    """Return column widths that fit the room; words are broken only as a last resort."""
    texts = [[text for text, _ in column] for column in zip(*table, strict=True)]
    widths = [max(map(len, column)) for column in texts]
    words = [
        max(len(word) for text in column for word in _cell_lines(text, 1, breaks_words=False))
        for column in texts
    ]
    while sum(widths) > room:
        spare = [width if width > word else 0 for width, word in zip(widths, words, strict=True)]
        best = spare if any(spare) else widths
        widths[best.index(max(best))] -= 1
    return widths


def _cell_lines(text: str, width: int, *, breaks_words: bool = True) -> list[str]:
    if len(text) <= width:
        return [text]
    whole = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
    if breaks_words and max(map(len, whole), default=0) <= width:
        return whole
    return textwrap.wrap(text, width, break_long_words=breaks_words)


def listing(title: str, names: Sequence[str], style: bar.Style) -> str:
    """Return a title and names; a long list ends with a count."""
    return style.wrapped(f"{title}: {messages.listed(names, most=_MOST_NAMED)}")


def count(number: int, noun: str) -> str:
    """Return a number with its noun, singular or plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
