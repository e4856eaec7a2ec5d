"""Text for a terminal: its tones, its width, and the characters that it can show.

Names come from files, nodes and processes, and must not control a terminal.
"""

import dataclasses
import enum
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
        line = messages.printable(line, " ")
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
    text = messages.printable(text, " ")
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
    """Replace characters that control terminals, other than our colours and newlines."""
    parts = _PAINTED.split(text)
    parts[::2] = ["\n".join(map(messages.printable, part.split("\n"))) for part in parts[::2]]
    return "".join(parts)


def redraw(lines: Sequence[str], *, height: int) -> str:
    """Return the text that replaces the last ``height`` lines on a terminal with these."""
    # Start at the first column: a terminal prints ^C at the cursor.
    erase = f"\r\x1b[{height}A\x1b[J" if height else ""
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
