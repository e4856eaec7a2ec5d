"""Shared parts of the plugin's commands on a cluster."""

import contextlib
import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence

from mig_manager import errors, reasons
from mig_manager.adapters import cluster_reader, kubectl
from mig_manager.cli.toolkit import console, documents
from mig_manager.core.display import styles
from mig_manager.core.fleet import node_reports
from mig_manager.core.layout import layout_documents
from mig_manager.core.settings import node_settings
from mig_manager.kubectl import plugin_settings


class ClusterCommand:
    """A command on a cluster, with its settings and its terminal."""

    def __init__(
        self, settings: plugin_settings.PluginSettings, terminal: console.Console
    ) -> None:
        self._settings = settings
        self._terminal = terminal
        program = kubectl.Kubectl(settings.kubectl, note=terminal.note)
        self.kubectl = terminal.replace_adapter(program)
        self.reader = cluster_reader.ClusterReader(self.kubectl.get)

    @property
    def style(self) -> styles.Style:
        """The terminal's present style."""
        return self._terminal.style(self._settings.colour)

    @property
    def now(self) -> dt.datetime:
        """The present time."""
        return dt.datetime.now(tz=dt.UTC)

    def answer(
        self, data: Callable[[], Mapping[str, object]], text: Callable[[], str], *, is_good: bool
    ) -> int:
        """Write the answer in the chosen format, and return the exit status."""
        return self._terminal.answer(self._settings.output_format, data, text, is_good=is_good)

    def nodes(self, names: Sequence[str] = ()) -> cluster_reader.NodeSearch:
        """Return the selected nodes, and name the missing ones on standard error."""
        search = self.find(names)
        for message in search.missing:
            self._terminal.note(message)
        return search

    def find(self, names: Sequence[str]) -> cluster_reader.NodeSearch:
        """Return the selected nodes; without names, all that the selector matches."""
        return self.reader.find(names, self._settings.selector, now=self.now)

    def node(self, name: str) -> node_reports.NodeReport:
        """Return one node."""
        (report,) = self.reader.find([name], None, now=self.now).reports
        return report

    @contextlib.contextmanager
    def layout_first(self, name: str, layout: str | None, nodes: Sequence[str]) -> Iterator[None]:
        """Explain the order of a command's operands if they are exchanged.

        Raises:
            UsageError: No named node exists, and the layout has the name of a node.
        """
        try:
            yield
        except errors.ClusterError as error:
            if not (nodes and layout) or error.reason is not reasons.Reason.API_ERROR:
                raise
            if not self._is_node(layout):
                raise
            problem = f"the layout comes first: kubectl mig {name} {nodes[0]} {layout}"
            raise errors.UsageError(problem) from error

    def _is_node(self, name: str) -> bool:
        try:
            self.node(name)
        except errors.ClusterError:
            return False
        return True

    def is_drawn(self, search: cluster_reader.NodeSearch) -> bool:
        """Return whether nodes are drawn, not listed."""
        return (
            len(search.reports) == 1
            or self._settings.output_format is node_settings.OutputFormat.WIDE
        )

    def document(
        self, default: layout_documents.Document | None = None
    ) -> layout_documents.Document:
        """Return the layouts of the chosen file or ConfigMap, or of the agents'."""
        return documents.document(
            self._terminal,
            self.reader,
            file=self._settings.filename,
            config_map=self._settings.config_map,
            default=default,
        )
