"""The goal of a rollout or of its undo, the layout to request of every node, and its limits."""

import dataclasses
import datetime as dt
from collections.abc import Iterable
from typing import Self

from mig_manager.core.fleet import fleet_nodes, listed_layouts, marks
from mig_manager.core.layout import layout_documents
from mig_manager.core.records import run_status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Limits of a rollout; seconds."""

    max_unavailable: str = "1"
    """A number of nodes, or a percentage of nodes with an agent, rounded down, at least one."""
    pauses: bool = False  # whether no further node starts after a failure
    node_timeout_s: float = 1800.0  # for one node, without its wait for a slot
    silence_timeout_s: float = 120.0  # for the response of an agent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGoal:
    """The request of a rollout: one layout, or, to undo, every node's former layout."""

    layout: str | None  # None: undo on the nodes with the rollout's mark
    started_at: dt.datetime | None = None  # the rollout by its start, as in ``marks.Mark``
    document: layout_documents.Document = listed_layouts.NO_FILE
    """Has the layout's content, unless the nodes have it."""

    @property
    def content_hash(self) -> str:
        """The layout's hash in a document that a person named; empty if unknown."""
        layout = self.document.layouts.get(self.layout or "")
        return layout.content_hash if layout and not self.document.is_presumed else ""

    def is_listed_on(self, node: fleet_nodes.FleetNode) -> bool | None:
        """Return whether a node lists the named document's content of the layout.

        None: unknown. False: its agent would evict pods for other content first.
        """
        content_hash = self.content_hash
        # Without content to compare, the lists of thousands of nodes need not be parsed.
        listed = node.listed.find(self.layout or "") if content_hash else None
        return None if listed is None else listed.content_hash == content_hash

    def of_rollout(self, nodes: Iterable[fleet_nodes.FleetNode], now: dt.datetime) -> Self:
        """Return the goal of the last rollout of the layout, or for a new one.

        An undo is for the last rollout, of any layout.
        """
        every = [node.mark for node in nodes if node.mark]
        last = max((mark.started_at for mark in every if mark.started_at), default=None)
        is_same = self.layout is None or any(
            (mark.layout, mark.started_at, mark.is_undone) == (self.layout, last, False)
            for mark in every
            if last
        )
        # Other machines' clocks may be ahead.
        newest = max(now, last + dt.timedelta(microseconds=1)) if last else now
        return dataclasses.replace(self, started_at=last if is_same else newest)

    def is_of_another(self, node: fleet_nodes.FleetNode) -> bool:
        """Return whether an undo omits a node because another rollout labelled it."""
        mark = node.mark
        return (
            self.layout is None
            and mark is not None
            and mark.started_at != self.started_at
            and mark.layout == node.requested
            and not mark.is_undone
        )

    def target(self, node: fleet_nodes.FleetNode) -> str | None:
        """Return the label's value; None to remove it."""
        if self.layout is not None:
            return self.layout
        return node.mark.before if node.mark else node.requested

    def mark(self, node: fleet_nodes.FleetNode) -> marks.Mark | None:
        """Return the mark to write with the request."""
        if self.layout is not None:
            failed_at = None
            last = node.status
            if last and last.layout == self.layout and last.state is run_status.State.FAILED:
                failed_at = last.started_at
            before = node.requested or node.applied or None
            return marks.Mark(
                layout=self.layout,
                before=before,
                failed_at=failed_at,
                started_at=self.started_at,
            )
        return dataclasses.replace(node.mark, is_undone=True) if node.mark else None

    def withdrawal(
        self, node: fleet_nodes.FleetNode
    ) -> tuple[str | None, marks.Mark | None] | None:
        """Return the request and the mark from before the rollout; None: not its request."""
        mark = node.mark
        if mark is None or node.requested != self.target(node):
            return None
        if self.layout is not None:
            return (mark.before, None) if mark.layout == self.layout else None
        return (
            (mark.layout, dataclasses.replace(mark, is_undone=False)) if mark.is_undone else None
        )

    def is_superseded(self, node: fleet_nodes.FleetNode) -> bool:
        """Return whether another layout was requested between a rollout and its undo."""
        if self.layout is not None or node.mark is None:
            return False
        return node.requested not in (node.mark.layout, node.mark.before)

    def includes(self, node: fleet_nodes.FleetNode) -> bool:
        """Return whether the rollout includes a node; an undo omits requests made since."""
        if self.layout is not None:
            return True
        mark = node.mark
        if mark is None or mark.started_at != self.started_at:
            return False
        return not (mark.is_undone and self.is_superseded(node))
