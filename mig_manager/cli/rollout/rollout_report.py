"""The texts of ``mig-manager rollout``: live table, events and outcome."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mig_manager.core import messages
from mig_manager.core.display import styles
from mig_manager.core.fleet import goals, node_progress, rollout

if TYPE_CHECKING:
    from mig_manager.core.answers import fleet_answers

_MAX_ROWS = 20  # nodes in a live table, even if the terminal has room for more

_TONES: Mapping[node_progress.NodeProgressState, styles.Tone] = {
    node_progress.NodeProgressState.SUCCESS: styles.Tone.GOOD,
    node_progress.NodeProgressState.PENDING: styles.Tone.CYAN,
    node_progress.NodeProgressState.TO_DO: styles.Tone.FAINT,
    node_progress.NodeProgressState.FAILED: styles.Tone.BAD,
    node_progress.NodeProgressState.TIMED_OUT: styles.Tone.BAD,
    node_progress.NodeProgressState.NO_RESPONSE: styles.Tone.BAD,
    node_progress.NodeProgressState.SKIPPED: styles.Tone.WARN,
    node_progress.NodeProgressState.SUPERSEDED: styles.Tone.WARN,
}
_LISTED = (
    node_progress.NodeProgressState.FAILED,
    node_progress.NodeProgressState.TIMED_OUT,
    node_progress.NodeProgressState.NO_RESPONSE,
    node_progress.NodeProgressState.SUPERSEDED,
    node_progress.NodeProgressState.PENDING,
    node_progress.NodeProgressState.SKIPPED,
)
_OUTCOMES: Mapping[rollout.RolloutPhase, str] = {
    rollout.RolloutPhase.DONE: "is done",
    rollout.RolloutPhase.FAILED: "failed: not every node has the layout",
    rollout.RolloutPhase.PAUSED: "paused, because a node failed; the same command continues it",
    rollout.RolloutPhase.STALLED: "stalled: no further node can start",
    **dict.fromkeys(
        (rollout.RolloutPhase.ROLLING, rollout.RolloutPhase.PAUSING),
        "was interrupted; agents finish nodes in progress, and the same command continues it",
    ),
}


def table(
    decision: rollout.RolloutDecision, title: str, *, style: styles.Style, size: tuple[int, int]
) -> str:
    """Return the live table for a terminal of this size (columns, lines)."""
    columns, rows = size
    room = max(1, min(_MAX_ROWS, rows - 4))
    listed = sorted(decision.of(*_LISTED), key=lambda node: _LISTED.index(node.state))
    listed += decision.incomplete
    lines = [styles.shorten(_counts(decision, title), columns - 1)]
    lines += [_row(node, style=style, columns=columns) for node in listed[:room]]
    if len(listed) > room:
        lines.append(f"  and {len(listed) - room} more")
    return style.plain("\n".join(lines))


def _counts(decision: rollout.RolloutDecision, title: str) -> str:
    """Return the number of nodes by state, in one line."""
    parts = [
        f"{count} {state.replace('-', ' ')}" for state, count in decision.counts.items() if count
    ]
    if decision.incomplete:
        parts.append(f"{len(decision.incomplete)} with unreachable GPUs")
    away = f"{len(decision.unavailable)} of at most {decision.max_unavailable} unavailable"
    return f"{title}: {', '.join(parts) or 'no node is selected any more'}; {away}"


def event(node: node_progress.NodeProgress, message: str = "") -> str:
    """Return one node in one line."""
    why = ": ".join(filter(None, (node.phase, node.reason, message)))
    retried = ", will be retried" if node.is_retried else ""
    state = f"{node.state.value}{_without(node)}{retried}"
    return f"{node.name}: {state}" + (f": {why}" if why else "")


def outcome(
    decision: rollout.RolloutDecision, title: str, *, style: styles.Style, undo: str
) -> str:
    """Return the outcome, and the nodes where the layout is not active on all GPUs.

    ``undo`` are the arguments of the command that undoes it; empty for an undo.
    """
    lines = [
        style.wrap(event(node, node.message), indent="  ")
        for node in (
            *decision.failures,
            *decision.of(node_progress.NodeProgressState.SKIPPED),
            *decision.incomplete,
            *(each for each in decision.nodes if each.is_outdated),
        )
    ]
    if decision.phase is rollout.RolloutPhase.STALLED and decision.unavailable:
        lines.append(style.fit(f"  unavailable: {_list_names(decision.unavailable)}"))
    if undo and decision.phase is not rollout.RolloutPhase.DONE:
        lines.append(f"Undo: mig-manager rollout {undo}")
    head = (_counts(decision, title), f"The rollout {_OUTCOMES[decision.phase]}.")
    return "\n".join([*map(style.fit, head), *lines])


def data(decision: rollout.RolloutDecision, goal: goals.RolloutGoal) -> "fleet_answers.Rollout":
    """Return the outcome for JSON and YAML."""
    return {
        "kind": "Rollout",
        "layout": goal.layout,
        "undo": goal.layout is None,
        "state": decision.phase.value if decision.phase.is_over else "interrupted",
        "max_unavailable": decision.max_unavailable,
        "unavailable": list(decision.unavailable),
        "counts": decision.counts,
        "failures": [
            {"name": node.name, "reason": node.reason, "message": node.message}
            for node in decision.failures
        ],
        "nodes": [
            {
                "name": node.name,
                "state": node.state.value,
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


def _row(node: node_progress.NodeProgress, *, style: styles.Style, columns: int) -> str:
    state = f"{node.state.value:<11}"
    name = f"{styles.shorten(node.name, columns // 2):<20}"
    why = " ".join(filter(None, (_without(node).strip(), node.phase, node.reason, node.message)))
    minutes, seconds = divmod(int(node.seconds), 60)
    time = f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"
    # Cut before painting: a line that the terminal wraps would break the table.
    room = columns - 1 - len(f"  {name}  {state}  ")
    rest = styles.shorten(messages.printable(f"{time:>6}  {why}", " "), room)
    return f"  {name}  {style.paint(state, _TONES[node.state])}  {rest}"


def _without(node: node_progress.NodeProgress) -> str:
    """Name the GPUs on which the layout is not active."""
    names = _list_names(node.unreachable)
    return f" without unreachable {names}" if names else ""


def _list_names(names: Sequence[str]) -> str:
    return messages.list_names(names, limit=messages.MAX_AT_A_TERMINAL)
