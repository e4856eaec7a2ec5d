"""What a rollout, or its undo, requests of every node."""

import dataclasses

from mig_manager.core import model
from mig_manager.core.fleet import marks
from mig_manager.core.fleet import nodes as fleet_nodes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The request of a rollout: one layout, or, to undo, every node's former layout."""

    layout: str | None  # None: undo on the nodes with a rollout's mark

    def target(self, node: fleet_nodes.FleetNode) -> str | None:
        """Return the label's value; None to remove it."""
        if self.layout is not None:
            return self.layout
        return node.mark.before if node.mark else node.requested

    def mark(self, node: fleet_nodes.FleetNode) -> marks.Mark | None:
        """Return the mark to write with the request."""
        if self.layout is not None:
            failed_at, last = None, node.status
            if last and last.config == self.layout and last.state is model.State.FAILED:
                failed_at = last.started_at
            before = node.requested or node.applied or None
            return marks.Mark(layout=self.layout, before=before, failed_at=failed_at)
        return dataclasses.replace(node.mark, is_undone=True) if node.mark else None

    def withdrawal(
        self, node: fleet_nodes.FleetNode
    ) -> tuple[str | None, marks.Mark | None] | None:
        """Return the request and the mark before the rollout's; None: the request is not its."""
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
        """Return whether the rollout includes a node; an undo omits one superseded after it."""
        if self.layout is not None:
            return True
        return node.mark is not None and not (node.mark.is_undone and self.is_superseded(node))
