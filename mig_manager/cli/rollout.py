"""``mig-manager rollout``: bring many nodes to a layout, a few at a time, from a person's shell.

Nothing of a rollout lives here but the time that is waited: cut off at any moment, the same
command goes on from what the nodes say.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from mig_manager import errors
from mig_manager.adapters.host import clock, files
from mig_manager.adapters.kubernetes import api, fleet
from mig_manager.cli import console, rolloutsettings
from mig_manager.cli.render import rollout_report
from mig_manager.core import bar, timing, yaml_tree
from mig_manager.core.fleet import nodes as fleet_nodes
from mig_manager.core.fleet import preview, rollout
from mig_manager.core.layout import config

_DONE, _FAILED = 0, 1
_INTERRUPTED = 128 + 2
"""As a shell reports a program that SIGINT ended."""
_LOOK_S = 0.5
_DRAW_S = 0.2


class Nodes(Protocol):
    """What the loop needs of ``fleet.Fleet``."""

    @property
    def trouble(self) -> str:
        """See ``fleet.Fleet.trouble``."""

    def nodes(self) -> tuple[fleet_nodes.Node, ...]:
        """See ``fleet.Fleet.nodes``."""

    def wait(self, seconds: float) -> None:
        """See ``fleet.Fleet.wait``."""

    def ask(
        self, seen: fleet_nodes.Node, layout: str | None, mark: fleet_nodes.Mark | None
    ) -> bool:
        """See ``fleet.Fleet.ask``."""


Show = Callable[[rollout.Turn], None]


def run(given: rolloutsettings.RolloutSettings, terminal: console.Console) -> int:
    """Roll out, or tell what that would cost.

    Returns:
        The exit status: 0 if every node has what it shall, or can have it.

    Raises:
        MigManagerError: It cannot be begun or gone on with.
    """
    with contextlib.closing(api.KubeApi.connect(kubeconfig=str(given.kubeconfig))) as kube:
        selected = fleet.Fleet(kube, selector=given.selector)
        selected.start()
        with contextlib.closing(selected):
            if not any(map(given.goal.concerns, selected.nodes())):
                raise errors.UsageError(_nobody(given))
            if given.is_dry_run:
                return _preview(given, terminal, kube, selected.nodes())
            _check_layout(given, kube)
            return _roll(given, terminal, selected)


def roll(
    selected: Nodes,
    goal: fleet_nodes.Goal,
    limits: rollout.Limits,
    *,
    clock: timing.Clock,
    show: Show,
    note: Callable[[str], None] = lambda _text: None,
) -> rollout.Turn:
    """Ask one node after the other until there is nothing more to do.

    Args:
        selected: The nodes.
        goal: What they shall have.
        limits: What may be done.
        clock: Measures how long nodes take.
        show: Told at every turn how all stand; what it raises ends the rollout.
        note: Told of requests that failed and are made again.

    Returns:
        How all stand at the end.

    Raises:
        ClusterError: The API refused to have a node asked.
    """
    mind = rollout.Rollout(goal, limits)
    noted = ""
    while True:
        seen = {node.name: node for node in selected.nodes()}
        trouble = selected.trouble
        turn = mind.judge(tuple(seen.values()), clock.monotonic())
        show(turn)
        # What is not current tells neither who may begin nor who has ended.
        if not trouble:
            if turn.phase.is_over and not turn.retract:
                return turn
            trouble = _act(selected, goal, mind, turn, seen)
        if trouble and trouble != noted:
            note(trouble)
        noted = trouble or noted
        selected.wait(_LOOK_S)


def _act(
    selected: Nodes,
    goal: fleet_nodes.Goal,
    mind: rollout.Rollout,
    turn: rollout.Turn,
    seen: Mapping[str, fleet_nodes.Node],
) -> str:
    """Ask what is due; return what kept us from it, if that can pass."""
    try:
        for name in turn.retract:
            mark = seen[name].mark
            if selected.ask(seen[name], mark.before if mark else None, None):
                mind.retracted(name)
        for name in turn.start:
            node = seen[name]
            if selected.ask(node, goal.target(node), goal.mark(node)):
                mind.asked(name)
    except errors.ClusterError as error:
        if error.reason is not errors.Reason.API_UNAVAILABLE:
            raise
        return error.message
    return ""


def _roll(
    given: rolloutsettings.RolloutSettings, terminal: console.Console, selected: fleet.Fleet
) -> int:
    title = rollout_report.goal(given.goal)
    last: list[rollout.Turn] = []
    is_text = given.output_format is rolloutsettings.OutputFormat.TEXT
    status = _FAILED
    with _board(given, terminal, title) if is_text else contextlib.nullcontext(_silent) as show:

        def keep(turn: rollout.Turn) -> None:
            last[:] = [turn]
            show(turn)

        try:
            turn = roll(
                selected,
                given.goal,
                given.limits,
                clock=clock.SystemClock(),
                show=keep,
                note=terminal.note,
            )
            status = _DONE if turn.phase is rollout.Phase.DONE else _FAILED
        except KeyboardInterrupt:
            if not last:
                raise
            status = _INTERRUPTED
    _answer(
        given,
        terminal,
        rollout_report.data(last[0], given.goal),
        rollout_report.ended(last[0], title),
    )
    return status


def _silent(_turn: rollout.Turn) -> None:
    """Show nothing."""


@contextlib.contextmanager
def _board(
    given: rolloutsettings.RolloutSettings, terminal: console.Console, title: str
) -> Iterator[Show]:
    """Give what shows how all stand: a table that lives, or a line for each event."""
    is_live = terminal.stdout.isatty() and terminal.environ.get("TERM") != "dumb"
    if not is_live:
        yield _Lines(terminal).show
        return
    drawn = _Table(terminal, title, terminal.style(given.colour))
    yield drawn.show
    drawn.clear()


class _Lines:
    """Writes a line whenever a node stands otherwise than before."""

    def __init__(self, terminal: console.Console) -> None:
        self._terminal = terminal
        self._before: dict[str, rollout.Standing] = {}

    def show(self, turn: rollout.Turn) -> None:
        for node in turn.nodes:
            was = self._before.get(node.name, rollout.Standing.TO_DO)
            self._before[node.name] = node.standing
            if node.standing is not was:
                self._terminal.say(rollout_report.event(node))


class _Table:
    """Draws over what it has drawn before."""

    def __init__(self, terminal: console.Console, title: str, style: bar.Style) -> None:
        self._terminal = terminal
        self._title = title
        self._style = style
        self._lines = 0
        self._drawn_s = float("-inf")
        self._clock = clock.SystemClock()

    def show(self, turn: rollout.Turn) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._drawn_s < _DRAW_S:
            return
        self._drawn_s = now_s
        size = shutil.get_terminal_size()
        text = rollout_report.table(
            turn, self._title, style=self._style, size=(size.columns, size.lines)
        )
        self.clear()
        self._terminal.say(text)
        self._lines = text.count("\n") + 1

    def clear(self) -> None:
        if self._lines:
            self._terminal.stdout.write(f"\x1b[{self._lines}A\x1b[J")
        self._lines = 0


def _preview(
    given: rolloutsettings.RolloutSettings,
    terminal: console.Console,
    kube: api.KubeApi,
    nodes: Sequence[fleet_nodes.Node],
) -> int:
    layout = _layout(given, kube)
    pods = fleet.pods_by_node(kube)
    found = [
        preview.preview(node, layout, pods.get(node.name, ()))
        for node in sorted(nodes, key=lambda node: node.name)
    ]
    title = rollout_report.goal(given.goal)
    style = terminal.style(given.colour)
    data = {"layout": layout.name, "nodes": [node.to_data() for node in found]}
    _answer(given, terminal, data, rollout_report.previewed(found, title, style=style))
    good = (preview.Verdict.IN_FORCE, preview.Verdict.FITS)
    return _DONE if all(node.verdict in good for node in found) else _FAILED


def _check_layout(given: rolloutsettings.RolloutSettings, kube: api.KubeApi) -> None:
    """Ask no node for what the agents' config does not have, as far as that can be read.

    Raises:
        LayoutError: It has not.
    """
    if not isinstance(given.goal, fleet_nodes.Forward):
        return
    try:
        found = _document(given, kube)
    except errors.ClusterError:
        # A person may lack the right to read it, and need not have it for a rollout.
        return
    if found is not None:
        found.layout(given.goal.layout)


def _layout(given: rolloutsettings.RolloutSettings, kube: api.KubeApi) -> config.Layout:
    found = _document(given, kube)
    if found is None or not isinstance(given.goal, fleet_nodes.Forward):
        where = "/".join(given.config_map)
        raise errors.UsageError(
            f"there is no ConfigMap {where}; name the agents' one (--config-map), or a file (-f)"
        )
    return found.layout(given.goal.layout)


def _document(given: rolloutsettings.RolloutSettings, kube: api.KubeApi) -> config.Document | None:
    """Return the agents' config; None where there is none at the usual place."""
    if given.config_file is not None:
        source = files.ConfigFile(given.config_file)
        return config.parse(source.read(), source=source.name, is_lenient=given.is_lenient)
    namespace, name = given.config_map
    text = fleet.config_text(kube, namespace=namespace, name=name)
    if text is None:
        return None
    where = f"ConfigMap {namespace}/{name}"
    return config.parse(text, source=where, is_lenient=given.is_lenient)


def _answer(
    given: rolloutsettings.RolloutSettings,
    terminal: console.Console,
    data: Mapping[str, object],
    text: str,
) -> None:
    match given.output_format:
        case rolloutsettings.OutputFormat.JSON:
            terminal.say(json.dumps(data, indent=2))
        case rolloutsettings.OutputFormat.YAML:
            terminal.say(yaml_tree.dump(data))
        case rolloutsettings.OutputFormat.TEXT:
            terminal.say(text)


def _nobody(given: rolloutsettings.RolloutSettings) -> str:
    if isinstance(given.goal, fleet_nodes.Back):
        return f"no rollout has left its mark on a node that {given.selector!r} selects"
    return f"{given.selector!r} selects no node"
