"""What ``rollout`` shows to people: a live table, one line for each event, and how it ended."""

import textwrap
from collections.abc import Mapping, Sequence

from mig_manager.core import bar, messages
from mig_manager.core.fleet import nodes, preview, rollout

_MOST_NAMED = 8
_MOST_ROWS = 20
"""Nodes that a live table shows at once, whatever room there is."""
_WIDTH = 100

_TONES: Mapping[rollout.Standing, bar.Tone] = {
    rollout.Standing.IN_FORCE: bar.Tone.GOOD,
    rollout.Standing.UNDER_WAY: bar.Tone.CYAN,
    rollout.Standing.TO_DO: bar.Tone.FAINT,
    rollout.Standing.FAILED: bar.Tone.BAD,
    rollout.Standing.LATE: bar.Tone.BAD,
    rollout.Standing.SILENT: bar.Tone.BAD,
    rollout.Standing.LEFT_OUT: bar.Tone.WARN,
    rollout.Standing.OTHER_WISH: bar.Tone.WARN,
}
_VERDICTS: Mapping[preview.Verdict, bar.Tone] = {
    preview.Verdict.IN_FORCE: bar.Tone.GOOD,
    preview.Verdict.FITS: bar.Tone.PLAIN,
    preview.Verdict.DOES_NOT_FIT: bar.Tone.BAD,
    preview.Verdict.UNKNOWN: bar.Tone.WARN,
}
_SHOWN = (
    rollout.Standing.FAILED,
    rollout.Standing.LATE,
    rollout.Standing.SILENT,
    rollout.Standing.OTHER_WISH,
    rollout.Standing.UNDER_WAY,
    rollout.Standing.LEFT_OUT,
)
"""What a table lists node by node; the others are counted."""
_ENDS: Mapping[rollout.Phase, str] = {
    rollout.Phase.DONE: "done",
    rollout.Phase.FAILED: "ended; not every node has what it shall",
    rollout.Phase.PAUSED: "paused, because a node failed; the same command goes on",
    rollout.Phase.STALLED: "stalled: too many nodes are unavailable for another one to begin",
    rollout.Phase.ROLLING: "interrupted; agents finish what is under way, "
    "and the same command goes on",
    rollout.Phase.PAUSING: "interrupted; agents finish what is under way, "
    "and the same command goes on",
}


def goal(wanted: nodes.Goal) -> str:
    """Return what a rollout is about."""
    match wanted:
        case nodes.Forward():
            return f"layout {wanted.layout}"
        case nodes.Back():
            return "back to the layouts from before"


def table(turn: rollout.Turn, title: str, *, style: bar.Style, size: tuple[int, int]) -> str:
    """Return the live table.

    Args:
        turn: How all stand.
        title: What the rollout is about.
        style: What the terminal can show.
        size: Columns and lines of the terminal.
    """
    columns, rows = size
    room = max(1, min(_MOST_ROWS, rows - 4))
    listed = sorted(turn.of(*_SHOWN), key=lambda node: _SHOWN.index(node.standing))
    listed += turn.incomplete
    lines = [counts(turn, title)]
    lines += [_row(node, style=style, columns=columns) for node in listed[:room]]
    if len(listed) > room:
        lines.append(f"  and {len(listed) - room} more")
    lines[0] = lines[0][: columns - 1]
    return style.plain("\n".join(lines))


def counts(turn: rollout.Turn, title: str) -> str:
    """Return how many nodes stand how, in one line."""
    parts = [
        f"{count} {standing.replace('-', ' ')}" for standing, count in turn.counts.items() if count
    ]
    if turn.incomplete:
        parts.append(f"{len(turn.incomplete)} with unreachable GPUs")
    away = f"{len(turn.unavailable)} of at most {turn.most} unavailable"
    return f"{title}: {', '.join(parts)}; {away}"


def event(node: rollout.Progress) -> str:
    """Return one node in one line."""
    why = ": ".join(filter(None, (node.phase, node.reason, messages.printable(node.message, " "))))
    retried = ", tried again by itself" if node.is_retried else ""
    standing = f"{node.standing.value}{_without(node)}{retried}"
    return f"{node.name}: {standing}" + (f": {why}" if why else "")


def ended(turn: rollout.Turn, title: str) -> str:
    """Return how it ended: every node on which the layout is not active on all GPUs, and why."""
    lines = [
        textwrap.fill(event(node), _WIDTH, initial_indent="  ", subsequent_indent="    ")
        for node in (
            *turn.failures,
            *turn.of(rollout.Standing.LEFT_OUT),
            *turn.incomplete,
        )
    ]
    if turn.phase is rollout.Phase.STALLED:
        lines.append(f"  unavailable: {_named(turn.unavailable)}")
    head = [counts(turn, title), f"The rollout is {_ENDS[turn.phase]}."]
    return "\n".join([*head, *lines])


def data(turn: rollout.Turn, wanted: nodes.Goal) -> dict[str, object]:
    """Return how it ended as plain data; the keys are a public contract."""
    return {
        "layout": wanted.layout if isinstance(wanted, nodes.Forward) else None,
        "undo": isinstance(wanted, nodes.Back),
        "state": turn.phase.value if turn.phase.is_over else "interrupted",
        "max_unavailable": turn.most,
        "unavailable": list(turn.unavailable),
        "counts": turn.counts,
        "failures": [
            {"name": node.name, "reason": node.reason, "message": node.message}
            for node in turn.failures
        ],
        "nodes": [
            {
                "name": node.name,
                "standing": node.standing.value,
                "phase": node.phase,
                "reason": node.reason,
                "message": node.message,
                "is_retried": node.is_retried,
                "is_unavailable": node.is_unavailable,
                "before": node.before,
                "unreachable_gpus": list(node.unreachable),
            }
            for node in turn.nodes
        ],
    }


def previewed(found: Sequence[preview.Preview], title: str, *, style: bar.Style) -> str:
    """Return what a dry run found, node by node."""
    wide = max((len(node.name) for node in found), default=4)
    lines = [f"{'NODE':<{wide}}  {'VERDICT':<12}  KEPT  GONE  NEW  RESET  EVICTED"]
    for node in found:
        verdict = style.paint(f"{node.verdict.value:<12}", _VERDICTS[node.verdict])
        reset = ",".join(map(str, node.resets)) or "-"
        row = (
            f"{node.name:<{wide}}  {verdict}  {node.kept:>4}  {node.destroyed:>4}  "
            f"{node.created:>3}  {reset:>5}  {_victims(node)}"
        )
        if node.message:
            said = messages.printable(node.message, " ")
            row = f"{node.name:<{wide}}  {verdict}  {node.reason}: {said}"
        lines.append(row.rstrip())
    totals = [
        f"{sum(node.verdict is verdict for node in found)} {verdict.value.replace('-', ' ')}"
        for verdict in preview.Verdict
    ]
    return "\n".join([*lines, "", f"{title}: {', '.join(totals)}. Nothing was changed."])


def _row(node: rollout.Progress, *, style: bar.Style, columns: int) -> str:
    standing = f"{node.standing.value:<10}"
    name = f"{node.name[:40]:<20}"
    why = " ".join(
        filter(
            None,
            (
                _without(node).strip(),
                node.phase,
                node.reason,
                messages.printable(node.message, " "),
            ),
        )
    )
    rest = f"{_time(node.seconds):>6}  {why}"
    # Cut before it is painted: a line that the terminal wraps would spoil the drawing.
    room = max(0, columns - 1 - len(f"  {name}  {standing}  "))
    return f"  {name}  {style.paint(standing, _TONES[node.standing])}  {rest[:room]}"


def _without(node: rollout.Progress) -> str:
    """Say which GPUs a node has the layout without; empty where it has it on all."""
    names = messages.printable(_named(node.unreachable), " ")
    return f" without unreachable {names}" if names else ""


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def _victims(node: preview.Preview) -> str:
    parts = []
    if node.evicted:
        parts.append(_named(node.evicted))
    if node.maybe_evicted:
        parts.append(f"some of {_named(node.maybe_evicted)}")
    return "; ".join(parts) or "-"


def _named(names: Sequence[str]) -> str:
    return messages.listed(names, most=_MOST_NAMED)
