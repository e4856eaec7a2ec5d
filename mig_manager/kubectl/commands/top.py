"""``kubectl mig top``: the nodes of a cluster on one screen, and requests by keys.

The keys are as in k9s: move, open with Enter, back with Escape.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence

from mig_manager import errors
from mig_manager.adapters import cluster_reader
from mig_manager.cli.toolkit import console, live
from mig_manager.core.display import styles
from mig_manager.core.fleet import listed_layouts, node_reports, overview
from mig_manager.core.objects import pod_object
from mig_manager.kubectl import (
    cluster_command,
    layout_requests,
    node_plans,
    node_status,
    plugin_settings,
)

_UP, _DOWN = ("k", "\x1b[A"), ("j", "\x1b[B")
_OPEN, _BACK = ("\r", "\n"), ("\x1b", "\x7f")


ABOUT = """
Without a terminal it prints a line for every change until it is interrupted; 'kubectl mig
status' prints all nodes once.
"""


class Settings(
    plugin_settings.NodesSettings,
    takes=("node", "selector", "filename", "config-map", *plugin_settings.COMMON),
):
    """Settings of ``top``."""


def run(settings: Settings, terminal: console.Console) -> int:
    """Show the screen until q is pressed."""
    command = cluster_command.ClusterCommand(settings, terminal)
    view = Top(command, settings.nodes)
    return live.run(terminal, view.refresh, view.press)


class _Page(enum.Enum):
    """A screen; the value names its keys."""

    NODES = "j k move  Enter GPUs and pods  l layouts"
    NODE = "l layouts  Esc back"
    LAYOUTS = "j k move  Enter plan  Esc back"
    PLAN = "y request it  Esc back"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """The selection made by keys so far."""

    screen: _Page = _Page.NODES
    node: str = ""
    layout: str = ""
    text: str = ""  # the picture of the layout's plan
    message: str = ""  # the result of the last request


_ABOVE = {
    _Page.NODE: _Page.NODES,
    _Page.LAYOUTS: _Page.NODES,
    _Page.PLAN: _Page.LAYOUTS,
}


class Top:
    """The last state of nodes and pods, and the current selection; no names: all nodes."""

    def __init__(self, command: cluster_command.ClusterCommand, names: Sequence[str]) -> None:
        self._command = command
        self._names = names
        self._search = cluster_reader.NodeSearch(reports=(), missing=())
        self._pods: pod_object.Pods = ()
        self._choice = _Selection()

    def refresh(self) -> live.View:
        """Read nodes and pods, and draw the screen.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        self._search = self._command.find(self._names)
        self._pods = self._command.reader.every_gpu_pod()
        self._choice = self._present(self._choice)
        return self._view()

    def _present(self, choice: _Selection) -> _Selection:
        """Return the selection, or the first node if the selected one is not shown any more."""
        names = self._search.names
        is_present = choice.node in names
        return choice if is_present else _Selection(node=names[0], message=choice.message)

    def press(self, key: str) -> live.View | None:
        """Handle a key; None means quit."""
        if key in ("q", "Q"):
            return None
        try:
            self._choice = self._handle(self._choice, key)
        except errors.MigManagerError as error:
            self._choice = dataclasses.replace(self._choice, message=error.message)
        return self._view()

    def _handle(self, choice: _Selection, key: str) -> _Selection:
        """Return the selection after a key; keys without a meaning here change nothing."""
        choice = dataclasses.replace(choice, message="")
        screen = choice.screen
        if key in _BACK and screen in _ABOVE:
            return dataclasses.replace(choice, screen=_ABOVE[screen])
        if key in _UP or key in _DOWN:
            return self._move(choice, key)
        if key in _OPEN and screen is _Page.NODES:
            return dataclasses.replace(choice, screen=_Page.NODE)
        if key in _OPEN and screen is _Page.LAYOUTS:
            return self._plan(choice)
        if key == "l" and screen in (_Page.NODES, _Page.NODE):
            return self._list_layouts(choice)
        return self._request(choice) if key == "y" and screen is _Page.PLAN else choice

    def _move(self, choice: _Selection, key: str) -> _Selection:
        if choice.screen is _Page.NODES:
            names = self._search.names
            return dataclasses.replace(choice, node=_next(names, choice.node, key))
        if choice.screen is _Page.LAYOUTS:
            names = self._layouts()
            return dataclasses.replace(choice, layout=_next(names, choice.layout, key))
        return choice

    def _list_layouts(self, choice: _Selection) -> _Selection:
        names = self._layouts()
        if not names:
            message = f"the agent of {choice.node} lists no layouts"
            return dataclasses.replace(choice, message=message)
        layout = choice.layout if choice.layout in names else names[0]
        return dataclasses.replace(choice, screen=_Page.LAYOUTS, layout=layout)

    def _plan(self, choice: _Selection) -> _Selection:
        result = node_plans.plan(
            choice.layout,
            [self._report()],
            document=self._command.document(listed_layouts.NO_FILE),
            pods=self._command.reader.pods([choice.node]),
        )
        text = node_plans.pictures(result, style=self._command.style)
        return dataclasses.replace(choice, screen=_Page.PLAN, text=text)

    def _report(self) -> node_reports.NodeReport:
        return next(each for each in self._search.reports if each.node.name == self._choice.node)

    def _layouts(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self._report().node.listed.layouts)

    def _request(self, choice: _Selection) -> _Selection:
        """Request the layout as ``apply`` does, unless the plan on the screen is outdated."""
        self._search = self._command.find(self._names)
        current = self._present(choice)
        if current is choice:
            current = self._plan(choice)
        if current.text != choice.text:
            message = f"{choice.node} has changed since it was planned; nothing was requested"
            return dataclasses.replace(current, message=message)
        document = self._command.document(listed_layouts.NO_FILE)
        result = layout_requests.apply(
            self._command, self._report(), choice.layout, document, is_dry_run=False
        )
        screen = _Page.NODES if result.is_requested else choice.screen
        return dataclasses.replace(choice, screen=screen, message=result.outcome)

    def _view(self) -> live.View:
        style, choice = self._command.style, self._choice
        draw: Mapping[_Page, Callable[[styles.Style], str]] = {
            _Page.NODES: self._draw_nodes,
            _Page.NODE: self._draw_node,
            _Page.LAYOUTS: self._draw_layouts,
            _Page.PLAN: lambda _style: choice.text,
        }
        remarks = [style.wrap(each) for each in (choice.message, *self._search.missing) if each]
        keys = style.paint(style.plain(choice.screen.value), styles.Tone.FAINT)
        lines = {each.node.name: node_status.line(each) for each in self._search.reports}
        return live.View("\n".join([draw[choice.screen](style), "", *remarks, keys]), lines)

    def _draw_nodes(self, style: styles.Style) -> str:
        present = overview.Overview(reports=self._search.reports, pods=self._pods)
        return "\n".join(overview.draw(present, style=style, selected=self._choice.node))

    def _draw_node(self, style: styles.Style) -> str:
        pods = tuple(pod for pod in self._pods if pod.node_name == self._choice.node)
        one = node_status.ClusterStatus(
            reports=(self._report(),),
            pods=cluster_reader.Pods(by_node={self._choice.node: pods}),
            now=self._command.now,
        )
        return node_status.pictures(one, style=style)

    def _draw_layouts(self, style: styles.Style) -> str:
        report = self._report()
        lines = [style.paint(f"layouts of {report.node.name}", styles.Tone.STRONG), ""]
        for name in self._layouts():
            mark = ">" if name == self._choice.layout else " "
            note = "  applied" if name == report.node.applied else ""
            lines.append(f"{mark} {name}{note}")
        return "\n".join(lines)


def _next(names: Sequence[str], selected: str, key: str) -> str:
    """Return the name before or after the chosen one; stop at the ends, or without names."""
    if not names:
        return selected
    index = names.index(selected) if selected in names else 0
    index += 1 if key in _DOWN else -1
    return names[min(max(index, 0), len(names) - 1)]
