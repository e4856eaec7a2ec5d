"""``mig-manager rollout``: request a layout of many nodes, a few at a time.

All state is on the nodes: after an interruption, the same command continues.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from mig_manager import errors
from mig_manager.adapters import host
from mig_manager.adapters.host import files
from mig_manager.adapters.kubernetes import api, fleet
from mig_manager.cli import command_settings, console, rollout_report, rollout_settings
from mig_manager.core import bar, timing
from mig_manager.core.fleet import nodes as fleet_nodes
from mig_manager.core.fleet import rollout
from mig_manager.core.layout import config

_DONE, _FAILED = 0, 1
_POLL_S = 0.5
_DRAW_S = 0.2


class Nodes(Protocol):
    """The nodes of a rollout; see ``fleet.Fleet``."""

    @property
    def trouble(self) -> str:
        """Why the nodes may be out of date; empty: they are not."""

    def nodes(self) -> tuple[fleet_nodes.Node, ...]:
        """Return the nodes as they are now."""

    def wait(self, seconds: float) -> None:
        """Sleep, and wake when a node has changed since ``nodes``."""

    def request(
        self, seen: fleet_nodes.Node, layout: str | None, mark: fleet_nodes.Mark | None
    ) -> bool:
        """Write a node's label, if the node has not changed since it was read."""


Show = Callable[[rollout.Decision], None]


def run(chosen: rollout_settings.RolloutSettings, terminal: console.Console) -> int:
    """Roll out a layout, or preview it.

    Returns:
        The exit status: 0 if every node has the layout, or can have it.

    Raises:
        MigManagerError: It cannot start or continue.
    """
    with contextlib.closing(api.KubeApi.connect(kubeconfig=str(chosen.kubeconfig))) as kube:
        selected = fleet.Fleet(kube, selector=chosen.selector)
        selected.start()
        with contextlib.closing(selected):
            if not any(map(chosen.goal.includes, selected.nodes())):
                raise errors.UsageError(_no_node(chosen))
            if chosen.is_dry_run:
                return _preview(chosen, terminal, kube, selected.nodes())
            _check_layout(chosen, kube)
            return _roll_out(chosen, terminal, selected)


def roll_out(
    selected: Nodes,
    goal: fleet_nodes.Goal,
    limits: rollout.Limits,
    *,
    clock: timing.Clock,
    show: Show,
    note: Callable[[str], None] = lambda _text: None,
) -> rollout.Decision:
    """Request the layout of one node after another; return the last decision.

    ``show`` is called with every decision, and an error that it raises ends the rollout; ``note``
    is called with the message of a request that failed and is retried.

    Raises:
        ClusterError: The API refused a request.
    """
    decider = rollout.Rollout(goal, limits)
    noted = ""
    while True:
        seen = {node.name: node for node in selected.nodes()}
        trouble = selected.trouble
        decision = decider.decide(tuple(seen.values()), clock.monotonic())
        show(decision)
        # An outdated list shows neither which nodes may start nor which have finished.
        if not trouble:
            if decision.phase.is_over and not decision.withdraw:
                return decision
            trouble = _act(selected, goal, decider, decision, seen)
        if trouble and trouble != noted:
            note(trouble)
        noted = trouble or noted
        selected.wait(_POLL_S)


def _act(
    selected: Nodes,
    goal: fleet_nodes.Goal,
    decider: rollout.Rollout,
    decision: rollout.Decision,
    seen: Mapping[str, fleet_nodes.Node],
) -> str:
    """Carry out a decision; return an error that can pass."""
    try:
        for name in decision.withdraw:
            mark = seen[name].mark
            if selected.request(seen[name], mark.before if mark else None, None):
                decider.withdrawn(name)
        for name in decision.start:
            node = seen[name]
            if selected.request(node, goal.target(node), goal.mark(node)):
                decider.requested(name)
    except errors.ClusterError as error:
        if error.reason is not errors.Reason.API_UNAVAILABLE:
            raise
        return error.message
    return ""


def _roll_out(
    chosen: rollout_settings.RolloutSettings, terminal: console.Console, selected: fleet.Fleet
) -> int:
    title = rollout_report.goal(chosen.goal)
    last: list[rollout.Decision] = []
    status = _FAILED
    with _display(chosen, terminal, title) as show:

        def keep(decision: rollout.Decision) -> None:
            last[:] = [decision]
            show(decision)

        try:
            decision = roll_out(
                selected,
                chosen.goal,
                chosen.limits,
                clock=host.SystemClock(),
                show=keep,
                note=terminal.note,
            )
            status = _DONE if decision.phase is rollout.Phase.DONE else _FAILED
        except KeyboardInterrupt:
            if not last:
                raise
            status = console.INTERRUPTED
    terminal.answer(
        chosen.output_format.value,
        lambda: rollout_report.data(last[0], chosen.goal),
        lambda: rollout_report.ended(last[0], title),
    )
    return status


@contextlib.contextmanager
def _display(
    chosen: rollout_settings.RolloutSettings, terminal: console.Console, title: str
) -> Iterator[Show]:
    """Yield a function that shows decisions: a live table, a line for each change, or nothing."""
    if chosen.output_format is not command_settings.OutputFormat.TEXT:
        yield lambda _decision: None
        return
    is_live = terminal.stdout.isatty() and terminal.environ.get("TERM") != "dumb"
    if not is_live:
        yield _Lines(terminal).show
        return
    table = _Table(terminal, title, terminal.style(chosen.colour))
    yield table.show
    table.clear()


class _Lines:
    """Writes a line whenever the state of a node changes."""

    def __init__(self, terminal: console.Console) -> None:
        self._terminal = terminal
        self._before: dict[str, rollout.NodeState] = {}

    def show(self, decision: rollout.Decision) -> None:
        for node in decision.nodes:
            before = self._before.get(node.name, rollout.NodeState.TO_DO)
            self._before[node.name] = node.state
            if node.state is not before:
                self._terminal.say(rollout_report.event(node))


class _Table:
    """Draws a table over the one drawn before."""

    def __init__(self, terminal: console.Console, title: str, style: bar.Style) -> None:
        self._terminal = terminal
        self._title = title
        self._style = style
        self._lines = 0
        self._drawn_s = float("-inf")
        self._clock = host.SystemClock()

    def show(self, decision: rollout.Decision) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._drawn_s < _DRAW_S:
            return
        self._drawn_s = now_s
        size = shutil.get_terminal_size()
        text = rollout_report.table(
            decision, self._title, style=self._style, size=(size.columns, size.lines)
        )
        self.clear()
        self._terminal.say(text)
        self._lines = text.count("\n") + 1

    def clear(self) -> None:
        if self._lines:
            self._terminal.stdout.write(f"\x1b[{self._lines}A\x1b[J")
        self._lines = 0


def _preview(
    chosen: rollout_settings.RolloutSettings,
    terminal: console.Console,
    kube: api.KubeApi,
    nodes: Sequence[fleet_nodes.Node],
) -> int:
    layout = _layout(chosen, kube)
    pods = fleet.pods_by_node(kube)
    previews = [
        rollout.preview(node, layout, pods.get(node.name, ()))
        for node in sorted(nodes, key=lambda node: node.name)
    ]
    title = rollout_report.goal(chosen.goal)
    style = terminal.style(chosen.colour)
    terminal.answer(
        chosen.output_format.value,
        lambda: {"layout": layout.name, "nodes": [each.to_data() for each in previews]},
        lambda: rollout_report.previewed(previews, title, style=style),
    )
    return _DONE if all(each.verdict.is_good for each in previews) else _FAILED


def _check_layout(chosen: rollout_settings.RolloutSettings, kube: api.KubeApi) -> None:
    """Check that the agents' layout file has the layout, if it can be read.

    Raises:
        LayoutError: It does not have it.
    """
    if not isinstance(chosen.goal, fleet_nodes.Forward):
        return
    try:
        document = _document(chosen, kube)
    except errors.ClusterError:
        # A rollout needs no right to read it.
        return
    if document is not None:
        document.layout(chosen.goal.layout)


def _layout(chosen: rollout_settings.RolloutSettings, kube: api.KubeApi) -> config.Layout:
    document = _document(chosen, kube)
    if document is None or not isinstance(chosen.goal, fleet_nodes.Forward):
        where = "/".join(chosen.config_map)
        raise errors.UsageError(
            f"ConfigMap {where} not found; name the agents' one (--config-map), or a file (-f)"
        )
    return document.layout(chosen.goal.layout)


def _document(
    chosen: rollout_settings.RolloutSettings, kube: api.KubeApi
) -> config.Document | None:
    """Return the agents' layout file; None if there is no such ConfigMap."""
    if chosen.config_file is not None:
        file = files.ConfigFile(chosen.config_file)
        return config.parse(file.read(), source=file.name, is_lenient=chosen.is_lenient)
    namespace, name = chosen.config_map
    text = fleet.config_text(kube, namespace=namespace, name=name)
    if text is None:
        return None
    source = f"ConfigMap {namespace}/{name}"
    return config.parse(text, source=source, is_lenient=chosen.is_lenient)


def _no_node(chosen: rollout_settings.RolloutSettings) -> str:
    if isinstance(chosen.goal, fleet_nodes.Back):
        return f"no node that {chosen.selector!r} selects has the mark of a rollout"
    return f"{chosen.selector!r} selects no node"
