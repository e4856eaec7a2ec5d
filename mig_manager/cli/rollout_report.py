"""Answers of ``rollout``: a live table, a line for each change, and the outcome."""

import textwrap
from collections.abc import Mapping, Sequence

from mig_manager.core import bar, messages
from mig_manager.core.fleet import nodes as fleet_nodes
from mig_manager.core.fleet import rollout

_MOST_NAMED = 8
_MOST_ROWS = 20
"""Nodes in a live table, even if the terminal has room for more."""
_WIDTH = 100

_TONES: Mapping[rollout.NodeState, bar.Tone] = {
    rollout.NodeState.APPLIED: bar.Tone.GOOD,
    rollout.NodeState.IN_PROGRESS: bar.Tone.CYAN,
    rollout.NodeState.TO_DO: bar.Tone.FAINT,
    rollout.NodeState.FAILED: bar.Tone.BAD,
    rollout.NodeState.TIMED_OUT: bar.Tone.BAD,
    rollout.NodeState.NO_RESPONSE: bar.Tone.BAD,
    rollout.NodeState.SKIPPED: bar.Tone.WARN,
    rollout.NodeState.SUPERSEDED: bar.Tone.WARN,
}
_VERDICTS: Mapping[rollout.Verdict, bar.Tone] = {
    rollout.Verdict.APPLIED: bar.Tone.GOOD,
    rollout.Verdict.FITS: bar.Tone.PLAIN,
    rollout.Verdict.DOES_NOT_FIT: bar.Tone.BAD,
    rollout.Verdict.UNKNOWN: bar.Tone.WARN,
}
_SHOWN = (
    rollout.NodeState.FAILED,
    rollout.NodeState.TIMED_OUT,
    rollout.NodeState.NO_RESPONSE,
    rollout.NodeState.SUPERSEDED,
    rollout.NodeState.IN_PROGRESS,
    rollout.NodeState.SKIPPED,
)
"""Listed node by node; the others are counted."""
_ENDS: Mapping[rollout.Phase, str] = {
    rollout.Phase.DONE: "done",
    rollout.Phase.FAILED: "failed: not every node has the layout",
    rollout.Phase.PAUSED: "paused, because a node failed; the same command continues it",
    rollout.Phase.STALLED: "stalled: too many nodes are unavailable to start another one",
    rollout.Phase.ROLLING: "interrupted; agents finish nodes in progress, "
    "and the same command continues it",
    rollout.Phase.PAUSING: "interrupted; agents finish nodes in progress, "
    "and the same command continues it",
}


def goal(goal: fleet_nodes.Goal) -> str:
    """Return the title of a rollout."""
    match goal:
        case fleet_nodes.Forward():
            return f"layout {goal.layout}"
        case fleet_nodes.Back():
            return "undo of the rollout"


def table(
    decision: rollout.Decision, title: str, *, style: bar.Style, size: tuple[int, int]
) -> str:
    """Return the live table.

    Args:
        decision: The state of all nodes.
        title: Of the rollout.
        style: What the terminal can show.
        size: Columns and lines of the terminal.
    """
    columns, rows = size
    room = max(1, min(_MOST_ROWS, rows - 4))
    listed = sorted(decision.of(*_SHOWN), key=lambda node: _SHOWN.index(node.state))
    listed += decision.incomplete
    lines = [counts(decision, title)]
    lines += [_row(node, style=style, columns=columns) for node in listed[:room]]
    if len(listed) > room:
        lines.append(f"  and {len(listed) - room} more")
    lines[0] = lines[0][: columns - 1]
    return style.plain("\n".join(lines))


def counts(decision: rollout.Decision, title: str) -> str:
    """Return the number of nodes in each state, in one line."""
    parts = [
        f"{count} {state.replace('-', ' ')}" for state, count in decision.counts.items() if count
    ]
    if decision.incomplete:
        parts.append(f"{len(decision.incomplete)} with unreachable GPUs")
    away = f"{len(decision.unavailable)} of at most {decision.most} unavailable"
    return f"{title}: {', '.join(parts)}; {away}"


def event(node: rollout.NodeProgress) -> str:
    """Return one node in one line."""
    why = ": ".join(filter(None, (node.phase, node.reason, messages.printable(node.message, " "))))
    retried = ", with a retry to come" if node.is_retried else ""
    state = f"{node.state.value}{_without(node)}{retried}"
    return f"{node.name}: {state}" + (f": {why}" if why else "")


def ended(decision: rollout.Decision, title: str) -> str:
    """Return the outcome: every node on which the layout is not active on all GPUs."""
    lines = [
        textwrap.fill(event(node), _WIDTH, initial_indent="  ", subsequent_indent="    ")
        for node in (
            *decision.failures,
            *decision.of(rollout.NodeState.SKIPPED),
            *decision.incomplete,
        )
    ]
    if decision.phase is rollout.Phase.STALLED:
        lines.append(f"  unavailable: {_named(decision.unavailable)}")
    head = [counts(decision, title), f"The rollout is {_ENDS[decision.phase]}."]
    return "\n".join([*head, *lines])


def data(decision: rollout.Decision, goal: fleet_nodes.Goal) -> dict[str, object]:
    """Return the outcome as plain data; the keys are a public contract."""
    return {
        "layout": goal.layout if isinstance(goal, fleet_nodes.Forward) else None,
        "undo": isinstance(goal, fleet_nodes.Back),
        "state": decision.phase.value if decision.phase.is_over else "interrupted",
        "max_unavailable": decision.most,
        "unavailable": list(decision.unavailable),
        "counts": decision.counts,
        "failures": [
            {"name": node.name, "reason": node.reason, "message": node.message}
            for node in decision.failures
        ],
        "nodes": [
            {
                "name": node.name,
                "status": node.state.value,
                "phase": node.phase,
                "reason": node.reason,
                "message": node.message,
                "is_retried": node.is_retried,
                "is_unavailable": node.is_unavailable,
                "before": node.before,
                "unreachable_gpus": list(node.unreachable),
            }
            for node in decision.nodes
        ],
    }


def previewed(previews: Sequence[rollout.Preview], title: str, *, style: bar.Style) -> str:
    """Return the previews of a dry run, node by node."""
    wide = max((len(node.name) for node in previews), default=4)
    lines = [f"{'NODE':<{wide}}  {'VERDICT':<12}  KEPT  GONE  NEW  RESET  EVICTED"]
    for node in previews:
        verdict = style.paint(f"{node.verdict.value:<12}", _VERDICTS[node.verdict])
        reset = ",".join(map(str, node.resets)) or "-"
        row = (
            f"{node.name:<{wide}}  {verdict}  {node.kept:>4}  {node.destroyed:>4}  "
            f"{node.created:>3}  {reset:>5}  {_evicted(node)}"
        )
        if node.message:
            why = messages.printable(node.message, " ")
            row = f"{node.name:<{wide}}  {verdict}  {node.reason}: {why}"
        lines.append(row.rstrip())
    totals = [
        f"{sum(node.verdict is verdict for node in previews)} {verdict.value.replace('-', ' ')}"
        for verdict in rollout.Verdict
    ]
    return "\n".join([*lines, "", f"{title}: {', '.join(totals)}. Nothing was changed."])


def _row(node: rollout.NodeProgress, *, style: bar.Style, columns: int) -> str:
    state = f"{node.state.value:<11}"
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
    room = max(0, columns - 1 - len(f"  {name}  {state}  "))
    return f"  {name}  {style.paint(state, _TONES[node.state])}  {rest[:room]}"


def _without(node: rollout.NodeProgress) -> str:
    """Say on which GPUs the layout is not active."""
    names = messages.printable(_named(node.unreachable), " ")
    return f" without unreachable {names}" if names else ""


def _time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def _evicted(node: rollout.Preview) -> str:
    parts = []
    if node.evicted:
        parts.append(_named(node.evicted))
    if node.maybe_evicted:
        parts.append(f"some of {_named(node.maybe_evicted)}")
    return "; ".join(parts) or "-"


def _named(names: Sequence[str]) -> str:
    return messages.listed(names, most=_MOST_NAMED)
