"""Phases and the moves between them as a picture."""

import dataclasses
import html
from collections.abc import Iterable, Iterator

from docs.generator import phases
from mig_manager.core.records import run_status

_WIDTH, _ROW, _TOP = 860, 74, 44
_BOX_W, _BOX_H = 196, 46
_MAIN_X, _SIDE_X = 180, 640
_END_X, _END_W = 20, 88
_BULGE_FIRST, _BULGE_MORE = 16, 22

_BESIDE = {run_status.Phase.ROLL_BACK: 0.0, run_status.Phase.REBOOT: -1.4}
"""Phases off the main line, and how many rows below ``Execute`` they stand."""
_MAIN_LINE = tuple(phase for phase in run_status.Phase if phase not in _BESIDE)
_CAPTIONS = {
    run_status.Phase.RESOLVE: "read, observe, plan; touch nothing",
    run_status.Phase.WAIT: "until a slot for nodes is free",
    run_status.Phase.TAINT: "taint the node: no new pods",
    run_status.Phase.DRAIN: "evict the affected pods",
    run_status.Phase.PAUSE: "stop device plugin and monitors",
    run_status.Phase.EXECUTE: "change the GPUs, verify",
    run_status.Phase.ROLL_BACK: "the instances from before",
    run_status.Phase.REBOOT: "then a new run, from Resolve",
    run_status.Phase.RESUME: "start the daemons again",
    run_status.Phase.VERIFY: "kubelet allocates the new devices",
    run_status.Phase.DONE: "success; the node is open",
}
_STYLE = """\
text{font:13px system-ui,sans-serif;fill:#1f2430}
.n{font-weight:600;font-size:14px}.c{font-size:11px;fill:#59606e}
.b{fill:#eef3fb;stroke:#5b7fb5;stroke-width:1.3}.g{fill:#e8f5ea;stroke:#4d9257}
.r{fill:#fbeceb;stroke:#b95750}.w{fill:none;stroke:#5b7fb5;stroke-width:1.3;stroke-dasharray:3 3}
.m{fill:none;stroke:#48505f;stroke-width:1.4;marker-end:url(#a)}
.f{fill:none;stroke:#b95750;stroke-width:1.2;marker-end:url(#f)}"""
_MARKERS = (
    '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto"><path d="M0 0L8 4L0 8z" fill="#48505f"/></marker>'
    '<marker id="f" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto"><path d="M0 0L8 4L0 8z" fill="#b95750"/></marker></defs>'
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    x: float
    y: float

    @property
    def right(self) -> float:
        return self.x + _BOX_W

    @property
    def middle(self) -> float:
        return self.x + _BOX_W / 2

    @property
    def centre(self) -> float:
        return self.y + _BOX_H / 2

    @property
    def bottom(self) -> float:
        return self.y + _BOX_H


def _box(phase: run_status.Phase) -> _Box:
    if phase in _BESIDE:
        row = _MAIN_LINE.index(run_status.Phase.EXECUTE) + _BESIDE[phase]
        return _Box(x=_SIDE_X, y=_TOP + row * _ROW)
    return _Box(x=_MAIN_X, y=_TOP + _MAIN_LINE.index(phase) * _ROW)


def draw(story: phases.Story, *, title: str) -> str:
    """Return the picture of a story as SVG.

    Args:
        story: What was seen.
        title: What the picture shows, for readers who cannot see it.
    """
    height = _TOP + len(_MAIN_LINE) * _ROW + 4
    moves = "; ".join(f"{a.value} to {b.value}" for a, b in _in_order(story.moves))
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{html.escape(title)}</title><desc>{moves}</desc>",
        f"<style>{_STYLE}</style>{_MARKERS}",
        f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        *_failures(story),
        *(_move(move) for move in _in_order(story.moves)),
        *(_node(phase, story) for phase in run_status.Phase if phase in _phases_of(story)),
        *_legend(story),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _phases_of(story: phases.Story) -> set[run_status.Phase]:
    return {phase for move in story.moves for phase in move}


def _legend(story: phases.Story) -> Iterator[str]:
    if story.superseded_in:
        yield _text(_MAIN_X, 24, "dashed border: a newer request may still end the run here", "c")


def _in_order(moves: Iterable[phases.Move]) -> list[phases.Move]:
    order = list(run_status.Phase)
    return sorted(moves, key=lambda move: (order.index(move[0]), order.index(move[1])))


def _text(x: float, y: float, text: str, kind: str, *, anchor: str = "start") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">'
        f"{html.escape(text)}</text>"
    )


def _node(phase: run_status.Phase, story: phases.Story) -> str:
    box = _box(phase)
    kind = {run_status.Phase.DONE: "b g", run_status.Phase.ROLL_BACK: "b r"}.get(phase, "b")
    rect = f'x="{box.x:g}" y="{box.y:g}" width="{_BOX_W}" height="{_BOX_H}" rx="7"'
    lines = [f'<rect {rect} class="{kind}"/>']
    if phase in story.superseded_in:
        outer = f'x="{box.x - 4:g}" y="{box.y - 4:g}" width="{_BOX_W + 8}" height="{_BOX_H + 8}"'
        lines.append(f'<rect {outer} rx="10" class="w"/>')
    lines.append(_text(box.middle, box.y + 20, phase.value, "n", anchor="middle"))
    lines.append(_text(box.middle, box.y + 37, _CAPTIONS[phase], "c", anchor="middle"))
    return "".join(lines)


def _move(move: phases.Move) -> str:
    before, after = move
    return f'<path class="m" d="{_way(before, after)}"/>'


def _way(before: run_status.Phase, after: run_status.Phase) -> str:
    a, b = _box(before), _box(after)
    if before in _BESIDE and after in _BESIDE:
        down = b.y > a.y
        return f"M{a.middle:g} {a.bottom if down else a.y:g}V{b.y if down else b.bottom:g}"
    if after in _BESIDE:
        return (
            f"M{a.right:g} {a.centre:g}C{a.right + 90:g} {a.centre:g} "
            f"{b.x - 90:g} {b.centre:g} {b.x:g} {b.centre:g}"
        )
    if before in _BESIDE:
        from_y, to_y = a.bottom if b.y > a.y else a.y, b.centre + 10
        return (
            f"M{a.middle:g} {from_y:g}C{a.middle:g} {b.centre:g} "
            f"{b.right + 120:g} {to_y:g} {b.right:g} {to_y:g}"
        )
    rows = _MAIN_LINE.index(after) - _MAIN_LINE.index(before)
    if rows == 1:
        return f"M{a.middle:g} {a.bottom:g}V{b.y:g}"
    if rows == -1:
        return f"M{a.middle + 40:g} {a.y:g}V{b.bottom:g}"
    bulge = _BULGE_FIRST + _BULGE_MORE * abs(rows)
    return (
        f"M{a.right:g} {a.centre:g}C{a.right + bulge * 1.35:g} {a.centre:g} "
        f"{b.right + bulge * 1.35:g} {b.centre - 8:g} {b.right:g} {b.centre - 8:g}"
    )


def _failures(story: phases.Story) -> Iterator[str]:
    """Draw the failure as one tall box, with an arrow from each phase that can fail."""
    phases_with_failures = [phase for phase in run_status.Phase if story.failures.get(phase)]
    if not phases_with_failures:
        return
    top, height = _TOP, (len(_MAIN_LINE) - 1) * _ROW - (_ROW - _BOX_H)
    yield (f'<rect x="{_END_X}" y="{top}" width="{_END_W}" height="{height}" rx="7" class="b r"/>')
    middle, centre = _END_X + _END_W / 2, top + height / 2
    yield _text(middle, centre - 12, "failed", "n", anchor="middle")
    for line, text in enumerate(("with a reason;", "the clients", "run and the", "node is open")):
        yield _text(middle, centre + 8 + 15 * line, text, "c", anchor="middle")
    for phase in phases_with_failures:
        box = _box(phase)
        if phase in _BESIDE:
            x, above = box.middle + 60, box.y - 18
            yield f'<path class="f" d="M{x:g} {box.y:g}V{above:g}"/>'
            yield _text(x, above - 6, "failed", "c", anchor="middle")
        else:
            yield f'<path class="f" d="M{box.x:g} {box.centre:g}H{_END_X + _END_W}"/>'
