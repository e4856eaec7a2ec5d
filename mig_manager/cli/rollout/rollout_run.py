"""Roll out a layout: request it of many nodes, a few at a time.

All state is on the nodes: after an interruption, the same command continues. The output is a live
table or a line for each change, then the outcome.
"""

import contextlib
import dataclasses
import datetime as dt
import shutil
from collections.abc import Iterator, Mapping, Sequence

from mig_manager import errors, reasons
from mig_manager.adapters import cluster_reader, host
from mig_manager.adapters.kubernetes import api, fleet
from mig_manager.cli.rollout import rollout_report, rollout_settings
from mig_manager.cli.toolkit import console, documents, plan_table
from mig_manager.core import messages
from mig_manager.core.display import styles
from mig_manager.core.fleet import (
    cluster_plan,
    fleet_nodes,
    goals,
    listed_layouts,
    node_progress,
    preview,
    rollout,
)
from mig_manager.core.layout import layout_documents
from mig_manager.core.settings import node_settings

_POLL_S = 0.5
_DRAW_S = 0.2
_MAX_MISFITS = 3


def run(settings: rollout_settings.RolloutSettings, terminal: console.Console) -> int:
    """Roll out a layout, or preview it.

    Returns:
        The exit status: 0 if every node has the layout, or can have it.

    Raises:
        MigManagerError: The rollout cannot start or continue.
    """
    terminal.configure_log(node_settings.LogLevel.ERROR, is_debug=settings.is_debug)
    kubeconfig = str(settings.kubeconfig)
    with contextlib.closing(
        api.KubeApi.connect(kubeconfig=kubeconfig, context=settings.context)
    ) as kube:
        selected = fleet.Fleet(kube, selector=settings.selector)
        selected.start()
        with contextlib.closing(selected):
            goal = settings.goal.of_rollout(selected.nodes(), dt.datetime.now(tz=dt.UTC))
            if not any(map(goal.includes, selected.nodes())):
                if goal.layout is None:
                    raise errors.UsageError(
                        f"no node selected by {settings.selector!r} was labelled by a rollout",
                        remedy="Nothing to undo here: check the selector.",
                    )
                raise errors.UsageError(
                    f"{settings.selector!r} selects no node",
                    remedy="See all labels with 'kubectl get nodes --show-labels'.",
                )
            if others := sorted(n.name for n in selected.nodes() if goal.is_of_another(n)):
                names = messages.list_names(others, limit=messages.MAX_AT_A_TERMINAL)
                terminal.note(f"labelled by an earlier rollout, not undone: {names}")
            reader = cluster_reader.ClusterReader(kube.get)
            nodes = selected.nodes()
            if goal.layout is not None or settings.is_dry_run:
                document = _document(settings, terminal, reader)
                goal = dataclasses.replace(goal, document=document)
            # The agents may use another document than the presumed one.
            is_known = not goal.document.is_presumed or all(n.listed.is_complete for n in nodes)
            if is_known and goal.layout is not None:
                listed_layouts.require_layout(nodes, goal.document, goal.layout)
            if settings.is_dry_run:
                return _preview(settings, goal, terminal, reader, nodes)
            return _roll_out(settings, goal, terminal, selected)


def _preview(
    settings: rollout_settings.RolloutSettings,
    goal: goals.RolloutGoal,
    terminal: console.Console,
    reader: cluster_reader.ClusterReader,
    nodes: Sequence[fleet_nodes.FleetNode],
) -> int:
    nodes = sorted(filter(goal.includes, nodes), key=lambda node: node.order)
    pods = reader.pods([node.name for node in nodes])
    plan = cluster_plan.ClusterPlan(
        layout=goal.layout,
        source=preview.source_of(goal.document, goal.layout or "", nodes),
        nodes=tuple(preview.of_rollout(goal, node, pods.of(node.name)) for node in nodes),
        pods_not_known=pods.why_not,
    )

    def text() -> str:
        table = plan_table.table(plan, style=terminal.style(settings.colour))
        return f"{table}\nNothing was changed."

    return terminal.answer(settings.output_format, plan.to_data, text, is_good=plan.is_good)


def _document(
    settings: rollout_settings.RolloutSettings,
    terminal: console.Console,
    reader: cluster_reader.ClusterReader,
) -> layout_documents.Document:
    try:
        return documents.document(
            terminal,
            reader,
            file=str(settings.config_file) if settings.config_file else None,
            config_map=settings.config_map,
            default=listed_layouts.NO_FILE,
            is_lenient=settings.is_lenient,
        )
    except errors.ClusterError as error:
        # A rollout needs no right to read the agents' layout file.
        if settings.config_map:
            raise
        if settings.is_dry_run:
            terminal.note(f"the agents' layout file is not read: {error.message}")
        return listed_layouts.NO_FILE


def _title(settings: rollout_settings.RolloutSettings) -> str:
    layout = settings.goal.layout
    return "undo of the rollout" if layout is None else f"layout {layout}"


def _roll_out(
    settings: rollout_settings.RolloutSettings,
    goal: goals.RolloutGoal,
    terminal: console.Console,
    selected: fleet.Fleet,
) -> int:
    display = _Display(settings, terminal)
    decisions = _decisions(settings, goal, terminal, selected)
    decision = next(decisions)  # an interrupt before this has no outcome to show
    skipped = decision.of(node_progress.NodeProgressState.SKIPPED)
    misfits = [rollout_report.event(node, node.message) for node in skipped if node.reason]
    if len(misfits) == len(decision.nodes):
        why = messages.list_names(misfits, limit=_MAX_MISFITS)
        raise errors.UsageError(
            f"no selected node can have {_title(settings)}: {why}",
            remedy="Nothing was changed. 'kubectl mig layouts NODE' lists its layouts.",
        )
    try:
        display.show(decision)
        for decision in decisions:
            display.show(decision)
        is_interrupted = False
    except KeyboardInterrupt:
        is_interrupted = True
    display.clear()
    status = terminal.answer(
        settings.output_format,
        lambda: rollout_report.data(decision, goal),
        lambda: rollout_report.outcome(
            decision,
            _title(settings),
            style=terminal.style(settings.colour),
            undo="" if goal.layout is None else settings.undo,
        ),
        is_good=decision.phase is rollout.RolloutPhase.DONE,
    )
    return console.INTERRUPTED if is_interrupted else status


def _decisions(
    settings: rollout_settings.RolloutSettings,
    goal: goals.RolloutGoal,
    terminal: console.Console,
    selected: fleet.Fleet,
) -> Iterator[rollout.RolloutDecision]:
    """Yield every decision, then execute it, until the rollout is over.

    Raises:
        ClusterError: The API refused a request.
    """
    decider = rollout.Rollout(goal, settings.limits)
    clock = host.SystemClock()
    noted = ""
    lost_s = 0.0
    while True:
        trouble = selected.trouble
        began_s = clock.monotonic()
        # An outdated list shows neither which nodes may start nor which have finished.
        if not trouble:
            nodes = {node.name: node for node in selected.nodes()}
            decision = decider.decide(tuple(nodes.values()), began_s - lost_s)
            yield decision
            if decision.phase.is_over and not decision.withdraw:
                return
            try:
                _act(selected, goal, decider, decision, nodes)
            except errors.ClusterError as error:
                if error.reason is not reasons.Reason.API_UNAVAILABLE:
                    raise
                trouble = error.message
        if trouble not in ("", noted):
            terminal.note(trouble)
            noted = trouble
        # Some node of thousands always changes: wait as long as the decision took.
        clock.wait(clock.monotonic() - began_s)
        selected.wait(_POLL_S)
        if trouble:
            # Agents cannot respond during an outage, so it does not count for the time-outs.
            lost_s += clock.monotonic() - began_s


def _act(
    selected: fleet.Fleet,
    goal: goals.RolloutGoal,
    decider: rollout.Rollout,
    decision: rollout.RolloutDecision,
    nodes: Mapping[str, fleet_nodes.FleetNode],
) -> None:
    for name in decision.withdraw:
        former = goal.withdrawal(nodes[name])
        if former and selected.request(nodes[name], *former):
            decider.record_withdrawal(name)
    for name in decision.start:
        node = nodes[name]
        if selected.request(node, goal.target(node), goal.mark(node)):
            decider.record_request(name)


class _Display:
    """Shows decisions: in a live table, as a line for every change of a node, or not at all."""

    def __init__(
        self, settings: rollout_settings.RolloutSettings, terminal: console.Console
    ) -> None:
        self._terminal = terminal
        self._title = _title(settings)
        self._style = terminal.style(settings.colour)
        self._is_text = settings.output_format is node_settings.OutputFormat.TEXT
        self._is_live = terminal.can_redraw
        self._before: dict[str, node_progress.NodeProgressState] = {}
        self._clock = host.SystemClock()
        self._drawn_s = float("-inf")
        self._height = 0  # lines of the live table

    def show(self, decision: rollout.RolloutDecision) -> None:
        if not self._is_text:
            return
        if not self._is_live:
            for node in decision.nodes:
                before = self._before.get(node.name, node_progress.NodeProgressState.TO_DO)
                self._before[node.name] = node.state
                if node.state is not before:
                    # Other failures end the node, so the outcome has their messages.
                    why = node.message if node.is_retried else ""
                    self._terminal.say(self._style.fit(rollout_report.event(node, why)))
            return
        now_s = self._clock.monotonic()
        if now_s - self._drawn_s < _DRAW_S:
            return
        self._drawn_s = now_s
        size = shutil.get_terminal_size()
        text = rollout_report.table(
            decision, self._title, style=self._style, size=(size.columns, size.lines)
        )
        self._redraw(text.split("\n"))

    def clear(self) -> None:
        """Erase the live table, to make room for the outcome."""
        self._redraw(())

    def _redraw(self, lines: Sequence[str]) -> None:
        self._terminal.write(styles.redraw(lines, height=self._height))
        self._height = len(lines)
