"""How answers are laid out: columns for many nodes, lines that fit the page for one."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.core import bar, messages, picture
from mig_manager.core.node import resources

_GAP = "   "
_MOST_NAMED = 8
"""Pods that a sentence names before it counts the rest."""
WHO_KNOWS = "Which of the devices of a kind a pod has, the API does not tell: only kubelet knows."


def columns(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    tones: Mapping[tuple[int, int], bar.Tone],
    style: bar.Style,
) -> list[str]:
    """Return a table; its last column is not padded.

    Args:
        head: Titles of the columns.
        rows: The cells, as many in each row as there are titles.
        tones: Colours of cells by row, from 0, and column.
        style: What the terminal can show.
    """
    table = [tuple(head), *map(tuple, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    lines = []
    for number, row in enumerate(table):
        cells = [
            style.paint(
                style.plain(cell.ljust(width) if column < len(head) - 1 else cell),
                tones.get((number - 1, column), bar.Tone.PLAIN),
            )
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(_GAP.join(cells).rstrip())
    return lines


def wrapped(text: str, *, indent: str = "") -> str:
    """Return a sentence in lines that fit the page."""
    return textwrap.fill(
        text,
        picture.WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


_MADE_UP = frozenset({"id", "gpu_instance_id", "compute_instance_id"})


def without_ids(data: object) -> object:
    """Return plain data of GPUs without the driver's ids, which are not published."""
    if isinstance(data, list):
        return [without_ids(item) for item in data]
    if isinstance(data, Mapping):
        return {
            key: without_ids(value)
            for key, value in data.items()
            if key not in _MADE_UP and not (key == "uuid" and value is None)
        }
    return data


def kind_name(resource: str) -> str:
    """Return what people call a resource: its profile, or a whole GPU."""
    if resource == resources.GPU:
        return "gpu"
    return resource.partition("mig-")[2] or resource


def pods(asking: Mapping[str, int]) -> str:
    """Return pods with how many devices each asks for, where that is more than one."""
    named = [name if count == 1 else f"{name} ({count})" for name, count in asking.items()]
    return messages.listed(named, most=_MOST_NAMED)


def held(kind: resources.Kind) -> str:
    """Say who asks for devices of a kind, and whether that tells which are held."""
    if not kind.pods:
        return f"{kind.count} free"
    who = pods(kind.pods)
    if not kind.count:
        return f"there are none, and these ask for {kind.asked}: {who}"
    if kind.asked > kind.count:
        return f"{kind.asked} asked for and {kind.count} there, shared or waited for: {who}"
    if kind.asked == kind.count:
        return f"{'all ' if kind.count > 1 else ''}{kind.count} held by {who}"
    return f"{kind.asked} of {kind.count} held by {who}"


def loss(lost: resources.Loss) -> str:
    """Say what the end of devices of a kind means to those who ask for them."""
    kind, who = lost.kind, pods(lost.kind.pods)
    what = f"{lost.ending} of {kind.count} {kind_name(kind.resource)} go"
    if lost.is_total:
        return f"{what}: these pods must leave: {who}"
    if lost.least:
        return f"{what}: holders of {lost.least} must leave, some of {who}"
    return f"{what}: the agent spares those that are held, if it can, by {who}"
