"""Roll out a layout: request it of many nodes, a few at a time.

All state is on the nodes: after an interruption, the same command continues. The output is a live
table or a line for each change, then the outcome.
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mig_manager import errors
from mig_manager.adapters import cluster_reader, host
from mig_manager.adapters.kubernetes import api, fleet
from mig_manager.cli.commands import rollout as command
from mig_manager.cli.toolkit import console, documents
from mig_manager.core import bar, messages, node_settings, tables
from mig_manager.core.fleet import listed_layouts, preview, rollout
from mig_manager.core.fleet import nodes as fleet_nodes
from mig_manager.core.layout import layouts

if TYPE_CHECKING:
    from mig_manager.core import answers

_POLL_S = 0.5
_DRAW_S = 0.2
_MOST_ROWS = 20  # nodes in a live table, even if the terminal has room for more

_TONES: Mapping[rollout.NodeProgressState, bar.Tone] = {
    rollout.NodeProgressState.APPLIED: bar.Tone.GOOD,
    rollout.NodeProgressState.IN_PROGRESS: bar.Tone.CYAN,
    rollout.NodeProgressState.TO_DO: bar.Tone.FAINT,
    rollout.NodeProgressState.FAILED: bar.Tone.BAD,
    rollout.NodeProgressState.TIMED_OUT: bar.Tone.BAD,
    rollout.NodeProgressState.NO_RESPONSE: bar.Tone.BAD,
    rollout.NodeProgressState.SKIPPED: bar.Tone.WARN,
    rollout.NodeProgressState.SUPERSEDED: bar.Tone.WARN,
}
_VERDICTS: Mapping[preview.NodeFit, bar.Tone] = {
    preview.NodeFit.APPLIED: bar.Tone.GOOD,
    preview.NodeFit.DOES_NOT_FIT: bar.Tone.BAD,
    preview.NodeFit.UNKNOWN: bar.Tone.WARN,
}
_COSTS = ("KEPT", "DESTROYED", "CREATED", "RESET", "EVICTED")
_LISTED = (
    rollout.NodeProgressState.FAILED,
    rollout.NodeProgressState.TIMED_OUT,
    rollout.NodeProgressState.NO_RESPONSE,
    rollout.NodeProgressState.SUPERSEDED,
    rollout.NodeProgressState.IN_PROGRESS,
    rollout.NodeProgressState.SKIPPED,
)
_OUTCOMES: Mapping[rollout.RolloutPhase, str] = {
    rollout.RolloutPhase.DONE: "is done",
    rollout.RolloutPhase.FAILED: "failed: not every node has the layout",
    rollout.RolloutPhase.PAUSED: "paused, because a node failed; the same command continues it",
    rollout.RolloutPhase.STALLED: "stalled: too many nodes are unavailable to start another one",
    **dict.fromkeys(
        (rollout.RolloutPhase.ROLLING, rollout.RolloutPhase.PAUSING),
        "was interrupted; agents finish nodes in progress, and the same command continues it",
    ),
}


def run(chosen: command.Settings, terminal: console.Console) -> int:
    """Roll out a layout, or preview it.

    Returns:
        The exit status: 0 if every node has the layout, or can have it.

    Raises:
        MigManagerError: The rollout cannot start or continue.
    """
    terminal.configure_log(node_settings.LogLevel.ERROR, is_debug=chosen.is_debug)
    with contextlib.closing(api.KubeApi.connect(kubeconfig=str(chosen.kubeconfig))) as kube:
        selected = fleet.Fleet(kube, selector=chosen.selector)
        selected.start()
        with contextlib.closing(selected):
            if not any(map(chosen.goal.includes, selected.nodes())):
                if chosen.goal.layout is None:
                    raise errors.UsageError(
                        f"no node selected by {chosen.selector!r} was labelled by a rollout",
                        remedy="Nothing to undo here: check the selector.",
                    )
                raise errors.UsageError(
                    f"{chosen.selector!r} selects no node",
                    remedy="See all labels with 'kubectl get nodes --show-labels'.",
                )
            reader = cluster_reader.ClusterReader(kube.get)
            if chosen.is_dry_run:
                return _preview(chosen, terminal, reader, selected.nodes())
            # A rollout needs no right to read the agents' layout file.
            with contextlib.suppress(errors.ClusterError):
                _refuse_unknown_layout(chosen, terminal, reader, selected.nodes())
            return _roll_out(chosen, terminal, selected)


def _refuse_unknown_layout(
    chosen: command.Settings,
    terminal: console.Console,
    reader: cluster_reader.ClusterReader,
    nodes: Sequence[fleet_nodes.Node],
) -> None:
    """Raise LayoutError (UNKNOWN_CONFIG) for a layout that no node can have."""
    if chosen.goal.layout is None:
        return
    document = _document(chosen, terminal, reader, listed_layouts.NO_FILE)
    # The agents may use another document than the presumed one.
    if not document.is_presumed or all(node.lists_every_layout for node in nodes):
        listed_layouts.require_layout(nodes, document, chosen.goal.layout)


def _preview(
    chosen: command.Settings,
    terminal: console.Console,
    reader: cluster_reader.ClusterReader,
    nodes: Sequence[fleet_nodes.Node],
) -> int:
    goal = chosen.goal
    nodes = sorted(filter(goal.includes, nodes), key=lambda node: node.name)
    targets = filter(None, map(goal.target, nodes))
    is_listed = all(listed_layouts.is_listed(nodes, target) for target in targets)
    document = _document(chosen, terminal, reader, listed_layouts.NO_FILE if is_listed else None)
    if goal.layout is not None:
        listed_layouts.require_layout(nodes, document, goal.layout)
    pods = reader.gpu_pods([node.name for node in nodes])
    previews = [
        preview.of_rollout(goal, node, document, pods.get(node.name, ())) for node in nodes
    ]
    return terminal.answer(
        chosen.output_format,
        lambda: {
            "kind": "RolloutPreview",
            "layout": goal.layout,
            "nodes": [each.to_data() for each in previews],
        },
        lambda: previewed(previews, _title(chosen), style=terminal.style(chosen.colour)),
        is_good=all(each.feasibility.fits for each in previews),
    )


def _document(
    chosen: command.Settings,
    terminal: console.Console,
    reader: cluster_reader.ClusterReader,
    default: layouts.Document | None,
) -> layouts.Document:
    return documents.document(
        terminal,
        reader,
        file=str(chosen.config_file) if chosen.config_file else None,
        config_map=chosen.config_map,
        default=default,
        is_lenient=chosen.is_lenient,
    )


def _title(chosen: command.Settings) -> str:
    layout = chosen.goal.layout
    return "undo of the rollout" if layout is None else f"layout {layout}"


def _roll_out(chosen: command.Settings, terminal: console.Console, selected: fleet.Fleet) -> int:
    display, decisions = _Display(chosen, terminal), _decisions(chosen, terminal, selected)
    decision = next(decisions)  # an interrupt before this has no outcome to show
    try:
        display.show(decision)
        for decision in decisions:
            display.show(decision)
        is_interrupted = False
    except KeyboardInterrupt:
        is_interrupted = True
    display.clear()
    status = terminal.answer(
        chosen.output_format,
        lambda: _data(decision, chosen.goal),
        lambda: _outcome(decision, _title(chosen), style=terminal.style(chosen.colour)),
        is_good=decision.phase is rollout.RolloutPhase.DONE,
    )
    return console.INTERRUPTED if is_interrupted else status


def _decisions(
    chosen: command.Settings, terminal: console.Console, selected: fleet.Fleet
) -> Iterator[rollout.RolloutDecision]:
    """Yield every decision, then execute it, until the rollout is over.

    Raises:
        ClusterError: The API refused a request.
    """
    goal = chosen.goal
    decider = rollout.Rollout(goal, chosen.limits)
    clock = host.SystemClock()
    noted = ""
    while True:
        nodes = {node.name: node for node in selected.nodes()}
        trouble, began_s = selected.trouble, clock.monotonic()
        decision = decider.decide(tuple(nodes.values()), began_s)
        yield decision
        took_s = clock.monotonic() - began_s
        # An outdated list shows neither which nodes may start nor which have finished.
        if not trouble:
            if decision.phase.is_over and not decision.withdraw:
                return
            try:
                _act(selected, goal, decider, decision, nodes)
            except errors.ClusterError as error:
                if error.reason is not errors.Reason.API_UNAVAILABLE:
                    raise
                trouble = error.message
        if trouble not in ("", noted):
            terminal.note(trouble)
            noted = trouble
        # Of thousands of nodes, one changes at any time.
        clock.wait(took_s)
        selected.wait(_POLL_S)


def _act(
    selected: fleet.Fleet,
    goal: rollout.Goal,
    decider: rollout.Rollout,
    decision: rollout.RolloutDecision,
    nodes: Mapping[str, fleet_nodes.Node],
) -> None:
    for name in decision.withdraw:
        former = goal.withdrawal(nodes[name])
        if former and selected.request(nodes[name], *former):
            decider.withdrawn(name)
    for name in decision.start:
        node = nodes[name]
        if selected.request(node, goal.target(node), goal.mark(node)):
            decider.requested(name)


class _Display:
    """Shows decisions: in a live table, as a line for every change of a node, or not at all."""

    def __init__(self, chosen: command.Settings, terminal: console.Console) -> None:
        self._terminal = terminal
        self._title = _title(chosen)
        self._style = terminal.style(chosen.colour)
        self._is_text = chosen.output_format is node_settings.OutputFormat.TEXT
        self._is_live = terminal.can_redraw
        self._before: dict[str, rollout.NodeProgressState] = {}
        self._clock = host.SystemClock()
        self._drawn_s = float("-inf")
        self._block = bar.Block()

    def show(self, decision: rollout.RolloutDecision) -> None:
        if not self._is_text:
            return
        if not self._is_live:
            for node in decision.nodes:
                before = self._before.get(node.name, rollout.NodeProgressState.TO_DO)
                self._before[node.name] = node.state
                if node.state is not before:
                    self._terminal.say(self._style.fitted(_event(node)))
            return
        now_s = self._clock.monotonic()
        if now_s - self._drawn_s < _DRAW_S:
            return
        self._drawn_s = now_s
        size = shutil.get_terminal_size()
        text = table(decision, self._title, style=self._style, size=(size.columns, size.lines))
        self._terminal.write(self._block.draw(text.split("\n")))

    def clear(self) -> None:
        """Erase the live table, to make room for the outcome."""
        self._terminal.write(self._block.draw(()))


# -- texts ---------------------------------------------------------------------------------------


def table(
    decision: rollout.RolloutDecision, title: str, *, style: bar.Style, size: tuple[int, int]
) -> str:
    """Return the live table for a terminal of this size (columns, lines)."""
    columns, rows = size
    room = max(1, min(_MOST_ROWS, rows - 4))
    listed = sorted(decision.of(*_LISTED), key=lambda node: _LISTED.index(node.state))
    listed += decision.incomplete
    lines = [bar.shortened(_counts(decision, title), columns - 1)]
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
    away = f"{len(decision.unavailable)} of at most {decision.most} unavailable"
    return f"{title}: {', '.join(parts)}; {away}"


def _event(node: rollout.NodeProgress) -> str:
    """Return one node in one line."""
    why = ": ".join(filter(None, (node.phase, node.reason, messages.printable(node.message, " "))))
    retried = ", will be retried" if node.is_retried else ""
    state = f"{node.state.value}{_without(node)}{retried}"
    return f"{node.name}: {state}" + (f": {why}" if why else "")


def _outcome(decision: rollout.RolloutDecision, title: str, *, style: bar.Style) -> str:
    """Return the outcome, and the nodes where the layout is not active on all GPUs."""
    lines = [
        style.wrapped(_event(node), indent="  ")
        for node in (
            *decision.failures,
            *decision.of(rollout.NodeProgressState.SKIPPED),
            *decision.incomplete,
        )
    ]
    if decision.phase is rollout.RolloutPhase.STALLED:
        lines.append(style.fitted(f"  unavailable: {_named(decision.unavailable)}"))
    head = (_counts(decision, title), f"The rollout {_OUTCOMES[decision.phase]}.")
    return "\n".join([*map(style.fitted, head), *lines])


def _data(decision: rollout.RolloutDecision, goal: rollout.Goal) -> "answers.Rollout":
    """Return the outcome for JSON and YAML."""
    return {
        "kind": "Rollout",
        "layout": goal.layout,
        "undo": goal.layout is None,
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


def previewed(previews: Sequence[preview.Preview], title: str, *, style: bar.Style) -> str:
    """Return the previews of a dry run, a line for every node, and explanations below."""
    # The title has the layout of a rollout; an undo has one for every node.
    is_undo = len({node.layout for node in previews}) > 1
    rows, notes = [], []
    for node in previews:
        data = node.to_data()
        evicted = [_named(node.evicted)] if node.evicted else []
        evicted += [f"possibly {_named(node.maybe_evicted)}"] if node.maybe_evicted else []
        rows.append(
            (
                node.name,
                *((node.layout or "-",) if is_undo else ()),
                (node.feasibility.value, _VERDICTS.get(node.feasibility, bar.Tone.PLAIN)),
                *(str(count) if node.planned else "-" for count in data["instances"].values()),
                ",".join(map(str, data["resets"])) or "-",
                "; ".join(evicted) or "-",
            )
        )
        if node.message:
            why = f"{node.reason}: {messages.printable(node.message, ' ')}"
            notes.append(style.wrapped(f"{node.name}: {why}"))
    head = ("NODE", *(("LAYOUT",) if is_undo else ()), "VERDICT", *_COSTS)
    lines = tables.columns(head, rows, style=style)
    totals = [
        f"{sum(node.feasibility is each for node in previews)} {each.value.replace('-', ' ')}"
        for each in preview.NodeFit
    ]
    total = style.fitted(f"{title}: {', '.join(totals)}. Nothing was changed.")
    return "\n".join([*lines, "", *notes, total])


def _row(node: rollout.NodeProgress, *, style: bar.Style, columns: int) -> str:
    state = f"{node.state.value:<11}"
    name = f"{bar.shortened(node.name, columns // 2):<20}"
    message = messages.printable(node.message, " ")
    why = " ".join(filter(None, (_without(node).strip(), node.phase, node.reason, message)))
    minutes, seconds = divmod(int(node.seconds), 60)
    time = f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"
    # Cut before painting: a line that the terminal wraps would break the table.
    room = columns - 1 - len(f"  {name}  {state}  ")
    rest = bar.shortened(f"{time:>6}  {why}", room)
    return f"  {name}  {style.paint(state, _TONES[node.state])}  {rest}"


def _without(node: rollout.NodeProgress) -> str:
    """Name the GPUs on which the layout is not active."""
    names = messages.printable(_named(node.unreachable), " ")
    return f" without unreachable {names}" if names else ""


def _named(names: Sequence[str]) -> str:
    return messages.listed(names, most=messages.MOST_AT_A_TERMINAL)
