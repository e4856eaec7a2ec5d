"""What a program writes to a terminal, as a picture.

Only what our own programs write: the attributes of ``core.display.styles.Tone``, and box-drawing
characters, which become lines, because fonts leave gaps between them.
"""

import html
import re
import unicodedata
from collections.abc import Iterator, Sequence

_COLUMN, _LINE, _FONT, _MARGIN = 7.8, 17.0, 13, 14.0
_STYLE = (
    f"text{{font:{_FONT}px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
    "white-space:pre}path{fill:none;stroke-width:1.1}"
)
_COLOURS = {
    "": "#d8dee9",
    "1": "#ffffff",
    "2": "#8b95a7",
    "31": "#ff7b72",
    "32": "#7ee787",
    "33": "#e3b341",
    "34": "#79c0ff",
    "35": "#d2a8ff",
    "36": "#76e3ea",
    "94": "#9cb8ff",
    "95": "#ffb3e6",
}
"""By ANSI attribute."""
_ARMS = {
    # to_left, to_right, up, down
    "─": (1, 1, 0, 0),
    "│": (0, 0, 1, 1),
    "┌": (0, 1, 0, 1),
    "┐": (1, 0, 0, 1),
    "└": (0, 1, 1, 0),
    "┘": (1, 0, 1, 0),
    "├": (0, 1, 1, 1),
    "┤": (1, 0, 1, 1),
    "┬": (1, 1, 0, 1),
    "┴": (1, 1, 1, 0),
    "┼": (1, 1, 1, 1),
}
_ATTRIBUTE = re.compile(r"\x1b\[(\d*)m")


def plain(text: str) -> str:
    """Return a text without its attributes."""
    return _ATTRIBUTE.sub("", text)


def draw(lines: Sequence[str], *, title: str) -> str:
    """Return the picture of a terminal as SVG; its description is the text.

    Args:
        lines: With ANSI attributes, without line ends.
        title: What the picture shows, for those who cannot see it.
    """
    columns = max(len(plain(line)) for line in lines)
    width, height = 2 * _MARGIN + columns * _COLUMN, 2 * _MARGIN + len(lines) * _LINE
    text = html.escape("\n".join(plain(line) for line in lines), quote=False)
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{html.escape(title)}</title>",
        f"<desc>{text}</desc>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#171b24"/>',
    ]
    for number, line in enumerate(lines):
        parts += _line(line, y=_MARGIN + number * _LINE)
    return "\n".join([*parts, "</svg>", ""])


def _line(line: str, *, y: float) -> Iterator[str]:
    column = 0
    for attribute, stretch in _stretches(line):
        colour = _COLOURS[attribute]
        for piece in re.findall(r"[─│┌┐└┘├┤┬┴┼]+|[^─│┌┐└┘├┤┬┴┼]+", stretch):
            x = _MARGIN + column * _COLUMN
            if piece[0] in _ARMS:
                yield f'<path stroke="{colour}" d="{_rules(piece, x=x, y=y)}"/>'
            elif piece.strip():
                yield _text(piece, x=x, y=y, colour=colour, is_strong=attribute == "1")
            column += len(piece)


def _stretches(line: str) -> Iterator[tuple[str, str]]:
    """Split a line where its attribute changes."""
    attribute, pieces = "", _ATTRIBUTE.split(line)
    for number, piece in enumerate(pieces):
        if number % 2:
            attribute = piece if piece != "0" else ""
        elif piece:
            yield attribute, piece


def _text(piece: str, *, x: float, y: float, colour: str, is_strong: bool) -> str:
    ahead = len(piece) - len(piece.lstrip())
    words = piece.strip()
    if any(unicodedata.east_asian_width(letter) in "WF" for letter in words):
        raise ValueError(f"a letter of {words!r} takes two columns")
    weight = ' font-weight="700"' if is_strong else ""
    # Whatever font there is: what lies in one column of the terminal does so in the picture.
    return (
        f'<text x="{x + ahead * _COLUMN:.1f}" y="{y + 12.5:.1f}" fill="{colour}"{weight} '
        f'textLength="{len(words) * _COLUMN:.1f}">{html.escape(words, quote=False)}</text>'
    )


def _rules(piece: str, *, x: float, y: float) -> str:
    middle = y + _LINE / 2
    runs: list[str] = []
    for number, letter in enumerate(piece):
        to_left, to_right, up, down = _ARMS[letter]
        at = x + (number + 0.5) * _COLUMN
        begin, end = at - to_left * _COLUMN / 2, at + to_right * _COLUMN / 2
        if to_left or to_right:
            runs.append(f"M{begin:.1f} {middle:g}H{end:.1f}")
        if up or down:
            runs.append(f"M{at:.1f} {middle - up * _LINE / 2:g}V{middle + down * _LINE / 2:g}")
    return _join(runs)


def _join(runs: Sequence[str]) -> str:
    """Write rules that go on where another ends as one."""
    return re.sub(r"H([\d.]+)(?:M\1 [\d.]+H([\d.]+))+", _last, "".join(runs))


def _last(match: re.Match[str]) -> str:
    return f"H{match[2]}"
