"""Tables and lists that fit the terminal."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.core import messages
from mig_manager.core.display import styles

Row = Sequence[str | tuple[str, styles.Tone]]  # cells of a table: a text, or a text and its tone
_GAP = "  "
_MIN_LAST = 40  # columns to wrap the last cell beside others; with fewer, it gets its own line


def columns(
    head: Sequence[str], rows: Iterable[Row], *, style: styles.Style, margin: str = ""
) -> list[str]:
    """Return the lines of a table beside a margin; a head without a text has no line.

    If the table is wider than the terminal, every row continues on further lines, indented: the
    columns stay aligned, and words whole.
    """
    table = [
        [_cell(*((each,) if isinstance(each, str) else each)) for each in row]
        for row in (head, *rows)
    ]
    widths = [max(len(text) for text, _ in column) for column in zip(*table, strict=True)]
    room = style.table_width or sum(widths) + len(_GAP) * len(widths) + len(margin)
    folds = _fold(widths, room - len(margin))
    lines = []
    for row in table:
        indent = margin
        for fold in folds:
            cells = [_lines(row[at][0], width) for at, width in fold.items()]
            for texts in filter(any, itertools.zip_longest(*cells, fillvalue="")):
                padded = [
                    style.paint(style.plain(text), row[at][1]) + " " * (width - len(text))
                    for text, (at, width) in zip(texts, fold.items(), strict=True)
                ]
                lines.append(f"{indent}{_GAP.join(padded)}".rstrip())
            indent = margin + _GAP
    return lines


def _cell(text: str, tone: styles.Tone = styles.Tone.PLAIN) -> tuple[str, styles.Tone]:
    return messages.printable(text, " "), tone


def _lines(text: str, width: int) -> list[str]:
    # Most cells fit, of thousands of nodes, too; wrapping takes longer than the rest.
    return [text] if len(text) <= width else styles.wrap_text(text, width).split("\n")


def _fold(widths: Sequence[int], room: int) -> Sequence[Mapping[int, int]]:
    """Return the columns of every line of a row, with their widths."""
    folds: list[dict[int, int]] = [{}]
    remaining = room
    for at, width in enumerate(widths):
        least = min(width, _MIN_LAST) if at == len(widths) - 1 else width
        if folds[-1] and least > remaining:
            folds.append({})
            remaining = room - len(_GAP)
        folds[-1][at] = min(width, remaining)
        remaining -= width + len(_GAP)
    return folds


def listing(title: str, names: Sequence[str], style: styles.Style) -> str:
    """Return a title and names; a long list ends with a count."""
    return style.wrap(f"{title}: {messages.list_names(names, limit=messages.MAX_AT_A_TERMINAL)}")
