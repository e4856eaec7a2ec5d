"""Bars drawn to scale: rows of cells in one box, as text with or without colour.

A bar knows slices and titles, nothing of GPUs. Rows that lie on each other share a border, so
that a boundary which stays is one unbroken line and one that moves shows as a step.
"""

import dataclasses
import enum
from collections.abc import Iterable, Sequence

INNER_WIDTH = 88
"""Columns for the slices of one bar: 8, 4 and 12 slices give 11, 22 and 7 columns each."""


class Tone(enum.Enum):
    """What a stretch of text wants to say; the value is its ANSI attribute."""

    PLAIN = ""
    STRONG = "1"
    FAINT = "2"
    BAD = "31"
    GOOD = "32"
    WARN = "33"
    BLUE = "34"
    MAGENTA = "35"
    CYAN = "36"
    LIGHT_GREEN = "92"
    LIGHT_YELLOW = "93"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What the reader's terminal can show."""

    colour: bool = False  # whether ANSI colours are wanted; nothing is said by colour alone
    unicode: bool = True  # whether box-drawing characters can be encoded

    def paint(self, text: str, tone: Tone) -> str:
        """Return the text in the colour of the tone, or as it is."""
        if not self.colour or tone is Tone.PLAIN or not text:
            return text
        return f"\x1b[{tone.value}m{text}\x1b[0m"

    def plain(self, text: str) -> str:
        """Return the text with typographic characters replaced when they cannot be encoded."""
        return text if self.unicode else text.translate(_ASCII)


_ASCII = str.maketrans(
    {
        "·": ".",
        "→": ">",
        "…": "~",
        "✓": "y",
        "✗": "N",
        "░": ":",
        "─": "-",
        "│": "|",
    }
    | dict.fromkeys("┌┐└┘├┤┬┴┼", "+")
)

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
    tone: Tone = Tone.PLAIN


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A span of slices with its title in the middle."""

    start: int
    size: int
    title: str
    tone: Tone = Tone.PLAIN
    fill: str = " "  # character that stands for the room around the title
    mark: str = ""  # A word for the outer border next to the cell
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


def draw(rows: Sequence[Row], *, slices: int, style: Style) -> list[str]:
    """Draw the rows on each other in one box, with the slices numbered below, as lines.

    Marks appear above the first and below the last row.
    """
    pitch = INNER_WIDTH // slices
    indent = max(len(row.label) for row in rows) + 2
    width = slices * pitch + 1
    lines: list[str] = []
    above: frozenset[int] = frozenset()
    for number, row in enumerate(rows):
        below = _edges(row.cells, pitch)
        border = _border(above, below, width)
        if number == 0:
            _put_marks(border, row.cells, pitch)
        lines.append(" " * indent + _render(border, style))
        lines += _body(row, pitch=pitch, width=width, indent=indent, style=style)
        above = below | _part_edges(row.cells, pitch)
    border = _border(above, frozenset(), width)
    if len(rows) > 1:
        _put_marks(border, rows[-1].cells, pitch)
    lines.append(" " * indent + _render(border, style))
    ruler = "".join(str(slice_).ljust(pitch) for slice_ in range(slices)).rstrip()
    lines.append(" " * (indent + 1) + style.paint(ruler, Tone.FAINT))
    return lines


_Line = list[tuple[str, Tone]]


def _blank(width: int) -> _Line:
    return [(" ", Tone.PLAIN)] * width


def _put(line: _Line, column: int, text: str, tone: Tone) -> None:
    line[column : column + len(text)] = [(character, tone) for character in text]


def _render(line: _Line, style: Style) -> str:
    """Join the characters, one colour change per stretch and not per character."""
    pieces: list[str] = []
    stretch, tone = "", Tone.PLAIN
    for character, its_tone in line:
        if its_tone is not tone:
            pieces.append(style.paint(style.plain(stretch), tone))
            stretch, tone = "", its_tone
        stretch += character
    pieces.append(style.paint(style.plain(stretch), tone))
    return "".join(pieces)


def _edges(cells: Iterable[Cell], pitch: int) -> frozenset[int]:
    return frozenset(edge * pitch for cell in cells for edge in (cell.start, cell.end))


def _part_edges(cells: Iterable[Cell], pitch: int) -> frozenset[int]:
    return frozenset(
        column
        for cell in cells
        for part in cell.parts
        for column in _part_columns(cell, part, pitch)
    )


def _part_columns(cell: Cell, part: Part, pitch: int) -> tuple[int, int]:
    column, width = cell.start * pitch, cell.size * pitch
    return column + round(part.begin * width), column + round(part.end * width)


def _border(above: frozenset[int], below: frozenset[int], width: int) -> _Line:
    return [
        (
            _JUNCTIONS[column in above, column in below, column > 0, column < width - 1],
            Tone.FAINT,
        )
        for column in range(width)
    ]


def _put_marks(border: _Line, cells: Iterable[Cell], pitch: int) -> None:
    for cell in cells:
        word = f" {cell.mark} "
        room = cell.size * pitch - 1
        if cell.mark and len(word) <= room:
            _put(border, cell.start * pitch + 1 + (room - len(word)) // 2, word, cell.tone)


def _body(row: Row, *, pitch: int, width: int, indent: int, style: Style) -> list[str]:
    titles = _blank(width)
    for cell in row.cells:
        _put_cell(titles, cell.start * pitch, cell.size * pitch, cell)
    _put_verticals(titles, _edges(row.cells, pitch))
    lines = [row.label.rjust(indent - 1) + " " + _render(titles, style)]
    if any(cell.parts for cell in row.cells):
        divisions = _blank(width)
        for cell in row.cells:
            _put_divisions(divisions, cell, pitch)
        _put_verticals(divisions, _edges(row.cells, pitch) | _part_edges(row.cells, pitch))
        lines.append(" " * indent + _render(divisions, style))
    return lines


def _put_cell(line: _Line, column: int, width: int, cell: Cell | Part) -> None:
    room = width - 1
    fill = cell.fill if isinstance(cell, Cell) else " "
    title = cell.title if len(cell.title) <= room else cell.title[: max(room - 1, 0)] + "…"
    if title and fill != " " and len(title) + 2 <= room:
        title = f" {title} "
    _put(line, column + 1, title.center(room, fill)[:room], cell.tone)


def _put_divisions(line: _Line, cell: Cell, pitch: int) -> None:
    if not cell.parts:
        filler = dataclasses.replace(cell, title="")
        _put_cell(line, cell.start * pitch, cell.size * pitch, filler)
    for part in cell.parts:
        column, right = _part_columns(cell, part, pitch)
        _put_cell(line, column, right - column, part)


def _put_verticals(line: _Line, edges: Iterable[int]) -> None:
    for column in edges:
        _put(line, column, "│", Tone.FAINT)
