"""Bars drawn to scale: rows of cells in one box, as text with or without colour.

A bar knows slices and titles, but no GPUs. Adjacent rows share a border: a boundary that stays is
an unbroken line, and a boundary that moves is a step.
"""

import dataclasses
import enum
import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence

from mig_manager.core import messages

WIDTH = 100  # columns of pictures and sentences outside a terminal
_MIN_WIDTH, _MAX_WIDTH = 60, 120
"""Pictures break below the least; eyes lose the line above the most."""
_WHOLE = re.compile(r"(?<!\w)'[^']+'(?!\w)|\b[0-9]+x ")
_JOINT = "\N{NO-BREAK SPACE}"
"""Stands for a space that may not end a line: in a quoted command, after a count of a profile."""
_OUTSIDE = 12  # columns of a picture beside its slices: labels and borders


class Tone(enum.Enum):
    """The meaning of a piece of text; the value is its ANSI attribute.

    Light green and light yellow are unreadable on white.
    """

    PLAIN = ""
    STRONG = "1"
    FAINT = "2"
    BAD = "31"
    GOOD = "32"
    WARN = "33"
    BLUE = "34"
    MAGENTA = "35"
    CYAN = "36"
    LIGHT_BLUE = "94"
    LIGHT_MAGENTA = "95"


TONE_OF_SIZE = {
    1: Tone.CYAN,
    2: Tone.LIGHT_BLUE,
    3: Tone.MAGENTA,
    4: Tone.LIGHT_MAGENTA,
}
"""Tones of GPU instances, by their compute slices."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """The capabilities of the reader's terminal."""

    colour: bool = False  # whether to use ANSI colours, which only repeat the text
    unicode: bool = True  # whether box-drawing characters can be encoded
    columns: int | None = None  # width of the terminal; None: lines have no limit, as in a file

    @property
    def width(self) -> int:
        """Columns of pictures and sentences."""
        return WIDTH if self.columns is None else min(self.table_width or WIDTH, _MAX_WIDTH)

    @property
    def table_width(self) -> int | None:
        """Columns of tables; None without a limit."""
        return None if self.columns is None else max(self.columns, _MIN_WIDTH)

    def wrap(self, text: str, *, indent: str = "", further: str = "") -> str:
        """Return a sentence in lines that fit the page."""
        return wrap_text(text, self.width, indent, f"{indent}{further or '  '}")

    def notes(self, notes: Iterable[str]) -> list[str]:
        """Return notes about a node as marked lines below its headline."""
        return [self.wrap(note, indent="  ! ") for note in notes]

    def fit(self, line: str, *, further: str = "    ") -> str:
        """Return a line that programs may parse: wrapped at a terminal only."""
        if self.table_width is None or len(line) <= self.table_width:
            return line
        return wrap_text(line, self.table_width, "", further)

    def title(self, start: Sequence[tuple[str, Tone]], rest: Iterable[str]) -> str:
        """Return words in one line that fits the page, the first ones in the colour of a tone.

        They stay plain if the line breaks within them.
        """
        words = [word for word, _ in start]
        line = self.plain(self.fit(" · ".join([*words, *rest])))
        plain = self.plain(" · ".join(words))
        if not line.startswith(plain):
            return line
        # Painted last, because colours take no columns.
        painted = self.plain(" · ".join(self.paint(*each) for each in start))
        return painted + line.removeprefix(plain)

    def paint(self, text: str, tone: Tone) -> str:
        """Return the text in the colour of the tone, or as it is."""
        if not self.colour or tone is Tone.PLAIN or not text:
            return text
        return f"\x1b[{tone.value}m{text}\x1b[0m"

    def plain(self, text: str) -> str:
        """Return the text with typographic characters replaced when they cannot be encoded."""
        return text if self.unicode else text.translate(_ASCII)


def wrap_text(text: str, width: int, first: str = "", further: str = "") -> str:
    """Wrap a text; paths, labels and quoted commands stay whole, because people copy them."""
    joined = _WHOLE.sub(lambda match: match[0].replace(" ", _JOINT), text)
    return textwrap.fill(
        joined,
        width,
        initial_indent=first,
        subsequent_indent=further,
        break_on_hyphens=False,
        break_long_words=False,
    ).replace(_JOINT, " ")


def shorten(text: str, room: int) -> str:
    """Return a text, or its start if it does not fit so many columns."""
    return text if len(text) <= room else text[: max(room - 1, 0)] + "…"


_PAINTED = re.compile(rf"(\x1b\[(?:0|{'|'.join(tone.value for tone in Tone if tone.value)})m)")


def harmless(text: str) -> str:
    """Replace characters that control terminals, other than our colours and newlines.

    Names come from files, nodes and processes.
    """
    parts = _PAINTED.split(text)
    parts[::2] = ["\n".join(map(messages.printable, part.split("\n"))) for part in parts[::2]]
    return "".join(parts)


class Block:
    """Lines on a terminal that each drawing replaces."""

    def __init__(self) -> None:
        self._height = 0

    def draw(self, lines: Sequence[str]) -> str:
        """Return the text that replaces the last drawing with these lines."""
        # Start at the first column: a terminal prints ^C at the cursor.
        erase = f"\r\x1b[{self._height}A\x1b[J" if self._height else ""
        self._height = len(lines)
        return erase + "".join(f"{line}\n" for line in lines)


_ASCII = str.maketrans(
    {
        "·": ".",
        "→": ">",
        "…": "~",
        "✓": "y",
        "✗": "N",
        "░": ":",
        "█": "#",
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
    short: str = ""  # title where the room is too narrow
    tone: Tone = Tone.PLAIN
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


_Line = list[tuple[str, Tone]]


def draw(rows: Sequence[Row], *, slices: int, style: Style) -> list[str]:
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
    return [*lines, margin + _render(border, style), f"{margin} {style.paint(ruler, Tone.FAINT)}"]


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
    return [(" ", Tone.PLAIN)] * width


def _put(line: _Line, column: int, text: str, tone: Tone) -> None:
    line[column : column + len(text)] = [(character, tone) for character in text]


def _put_title(
    line: _Line, cell: Cell | Part, column: int, width: int, *, fill: str = " "
) -> None:
    room = width - 1
    title = cell.title
    if len(title) > room and isinstance(cell, Cell):
        title = cell.short or title
    title = shorten(title, room)
    if title and fill != " " and len(title) + 2 <= room:
        title = f" {title} "
    _put(line, column + 1, title.center(room, fill)[:room], cell.tone)


def _put_marks(border: _Line, cells: Iterable[Cell], pitch: int) -> None:
    for cell in cells:
        room = cell.size * pitch - 1
        word = f" {cell.mark} " if len(cell.mark) + 2 <= room else cell.mark
        word = shorten(word, room)
        if cell.mark:
            _put(border, cell.start * pitch + 1 + (room - len(word)) // 2, word, cell.tone)


def _put_verticals(line: _Line, edges: Iterable[int]) -> None:
    for column in edges:
        _put(line, column, "│", Tone.FAINT)


def _border(above: frozenset[int], below: frozenset[int], width: int) -> _Line:
    return [
        (_JUNCTIONS[column in above, column in below, column > 0, column < width - 1], Tone.FAINT)
        for column in range(width)
    ]


def _render(line: _Line, style: Style) -> str:
    """Join the characters, one colour change per stretch and not per character."""
    stretches = itertools.groupby(line, key=lambda each: each[1])
    return "".join(
        style.paint(style.plain("".join(character for character, _ in stretch)), tone)
        for tone, stretch in stretches
    )
