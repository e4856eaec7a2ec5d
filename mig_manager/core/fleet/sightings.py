"""Date what agents report by the partitioner's own clock.

Clocks of nodes and of the API server may be hours off, or not set yet. A time that one of them
wrote only distinguishes one request or run from another. Its age counts from when this process
first saw it.
"""

import dataclasses
import datetime as dt
from collections.abc import Iterable

from mig_manager.core.fleet import partitioned


class Sightings:
    """When a process first saw what nodes report now; a new one has seen nothing."""

    def __init__(self) -> None:
        self._before: dict[
            str, tuple[partitioned.PartitionedNode, partitioned.PartitionedNode]
        ] = {}
        """By node: as reported, and on our clock."""

    def on_own_clock(
        self, nodes: Iterable[partitioned.PartitionedNode], *, now: dt.datetime
    ) -> tuple[partitioned.PartitionedNode, ...]:
        """Return the nodes with times by our own clock; nodes that are gone are forgotten."""
        self._before = {node.name: (node, self._dated(node, now)) for node in nodes}
        return tuple(dated for _, dated in self._before.values())

    def _dated(
        self, node: partitioned.PartitionedNode, now: dt.datetime
    ) -> partitioned.PartitionedNode:
        reported, dated = self._before.get(node.name, (None, None))
        asked_at = began_at = changed_at = None
        if node.asked_at:
            # Another request does not make an agent that is silent work again.
            asked_at = (dated and dated.asked_at) or now
        if node.began_at:
            is_known = reported and reported.began_at == node.began_at
            began_at = dated.began_at if dated and is_known else now
        if node.changed_at and reported and dated:
            is_known = reported.changed_at == node.changed_at
            changed_at = dated.changed_at if is_known else now
        elif node.changed_at:
            # It ended before this process knew the node. Only its agent's clock shows when, and at
            # the worst a cooldown is too short or begins now.
            changed_at = min(node.changed_at, now)
        return dataclasses.replace(
            node, asked_at=asked_at, began_at=began_at, changed_at=changed_at
        )
