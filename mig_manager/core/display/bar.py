"""Bars drawn to scale: rows of cells in one box, as text with or without colour.

A bar knows slices and titles, but no GPUs. Adjacent rows share a border: a boundary that stays is
an unbroken line, and a boundary that moves is a step.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from mig_manager.core.display import styles

_OUTSIDE = 12  # columns of a picture beside its slices: labels and borders

_JUNCTIONS = {
    # (a line comes from above, from below, from the left, from the right)
    (False, False, True, True): "─",
    (True, True, True, True): "┼",
    (True, False, True, True): "┴",
    (False, True, True, True): "┬",
    (False, True, False, True): "┌",
    (False, True, True, False): "┐",
    (True, False, False, True): "└",
    (True, False, True, False): "┘",
    (True, True, False, True): "├",
    (True, True, True, False): "┤",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A division of a cell, in fractions of its width."""

    begin: float
    end: float
    title: str
    tone: styles.Tone = styles.Tone.PLAIN


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A span of slices with its title in the middle."""

    start: int
    size: int
    title: str
    short: str = ""  # title where the room is too narrow
    tone: styles.Tone = styles.Tone.PLAIN
    fill: str = " "  # character that stands for the room around the title
    mark: str = ""  # a word for the outer border next to the cell
    parts: tuple[Part, ...] = ()

    @property
    def end(self) -> int:
        """First slice after the span."""
        return self.start + self.size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of cells that together cover every slice."""

    cells: tuple[Cell, ...]
    label: str = ""


_Line = list[tuple[str, styles.Tone]]


def draw(rows: Sequence[Row], *, slices: int, style: styles.Style) -> list[str]:
    """Draw the rows on each other in one box, with the slices numbered below, as lines.

    Marks appear above the first and below the last row.
    """
    pitch = (style.width - _OUTSIDE) // slices
    width = slices * pitch + 1
    indent = max(len(row.label) for row in rows) + 2
    margin = " " * indent
    lines: list[str] = []
    above: frozenset[int] = frozenset()
    for number, row in enumerate(rows):
        edges = frozenset(edge * pitch for cell in row.cells for edge in (cell.start, cell.end))
        border = _border(above, edges, width)
        if number == 0:
            _put_marks(border, row.cells, pitch)
        titles = _blank(width)
        for cell in row.cells:
            _put_title(titles, cell, cell.start * pitch, cell.size * pitch, fill=cell.fill)
        _put_verticals(titles, edges)
        label = row.label.rjust(indent - 1) + " "
        lines += [margin + _render(border, style), label + _render(titles, style)]
        above = edges
        if any(cell.parts for cell in row.cells):
            divisions, parts = _divisions(row.cells, pitch, width)
            above |= parts
            _put_verticals(divisions, above)
            lines.append(margin + _render(divisions, style))
    border = _border(above, frozenset(), width)
    if len(rows) > 1:
        _put_marks(border, rows[-1].cells, pitch)
    ruler = "".join(str(slice_).ljust(pitch) for slice_ in range(slices)).rstrip()
    return [
        *lines,
        margin + _render(border, style),
        f"{margin} {style.paint(ruler, styles.Tone.FAINT)}",
    ]


def _divisions(cells: Sequence[Cell], pitch: int, width: int) -> tuple[_Line, frozenset[int]]:
    """Return the line with the parts of the cells, and the columns where parts begin and end."""
    line = _blank(width)
    edges: set[int] = set()
    for cell in cells:
        column, size = cell.start * pitch, cell.size * pitch
        if not cell.parts:
            blank = Part(begin=0, end=1, title="", tone=cell.tone)
            _put_title(line, blank, column, size, fill=cell.fill)
        for part in cell.parts:
            begin, end = column + round(part.begin * size), column + round(part.end * size)
            _put_title(line, part, begin, end - begin)
            edges |= {begin, end}
    return line, frozenset(edges)


def _blank(width: int) -> _Line:
    return [(" ", styles.Tone.PLAIN)] * width


def _put(line: _Line, column: int, text: str, tone: styles.Tone) -> None:
    line[column : column + len(text)] = [(character, tone) for character in text]


def _put_title(
    line: _Line, cell: Cell | Part, column: int, width: int, *, fill: str = " "
) -> None:
    room = width - 1
    title = cell.title
    if len(title) > room and isinstance(cell, Cell):
        title = cell.short or title
    title = styles.shorten(title, room)
    if title and fill != " " and len(title) + 2 <= room:
        title = f" {title} "
    _put(line, column + 1, title.center(room, fill)[:room], cell.tone)


def _put_marks(border: _Line, cells: Iterable[Cell], pitch: int) -> None:
    for cell in cells:
        room = cell.size * pitch - 1
        word = f" {cell.mark} " if len(cell.mark) + 2 <= room else cell.mark
        word = styles.shorten(word, room)
        if cell.mark:
            _put(border, cell.start * pitch + 1 + (room - len(word)) // 2, word, cell.tone)


def _put_verticals(line: _Line, edges: Iterable[int]) -> None:
    for column in edges:
        _put(line, column, "│", styles.Tone.FAINT)


def _border(above: frozenset[int], below: frozenset[int], width: int) -> _Line:
    return [
        (
            _JUNCTIONS[column in above, column in below, column > 0, column < width - 1],
            styles.Tone.FAINT,
        )
        for column in range(width)
    ]


def _render(line: _Line, style: styles.Style) -> str:
    """Join the characters, one colour change per stretch and not per character."""
    stretches = itertools.groupby(line, key=lambda each: each[1])
    return "".join(
        style.paint(style.plain("".join(character for character, _ in stretch)), tone)
        for tone, stretch in stretches
    )
