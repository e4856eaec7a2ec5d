"""Times of nodes by the partitioner's own clock."""

import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping
from typing import Any

from mig_manager.core.partitioning import node_requests, partitioned


class OwnClock:
    """Replaces times that agents report by the partitioner's own clock.

    Clocks of nodes and of the API server can be hours off, or not set yet. A reported time only
    distinguishes requests and runs; its age counts from when this process first saw it.
    """

    def __init__(self) -> None:
        self._before: dict[
            str, tuple[partitioned.PartitionedNode, partitioned.PartitionedNode]
        ] = {}
        """By node: as reported, and with times by our clock."""

    def with_own_times(
        self,
        nodes: Iterable[partitioned.PartitionedNode],
        requests: node_requests.Requests,
        *,
        now: dt.datetime,
    ) -> tuple[partitioned.PartitionedNode, ...]:
        """Return the nodes with their pods and times by our clock; forget nodes that are gone.

        A node that has not changed is the same object as before: others are copied once, which
        takes long in a large cluster.
        """
        self._before = {
            node.name: (
                node,
                self._with_own_times(node, node_requests.shown_by_pods(node, requests), now),
            )
            for node in nodes
        }
        return tuple(dated for _, dated in self._before.values())

    def leave_out(self, lost_s: float) -> None:
        """Leave out a time without a watch from the silence of nodes and agents."""
        lost = dt.timedelta(seconds=lost_s)
        self._before = {
            name: (
                reported,
                dataclasses.replace(
                    dated,
                    requested_at=dated.requested_at and dated.requested_at + lost,
                    started_at=dated.started_at and dated.started_at + lost,
                    unready_at=dated.unready_at and dated.unready_at + lost,
                ),
            )
            for name, (reported, dated) in self._before.items()
        }

    def _with_own_times(
        self, node: partitioned.PartitionedNode, shown: Mapping[str, Any], now: dt.datetime
    ) -> partitioned.PartitionedNode:
        reported, dated = self._before.get(node.name, (None, None))
        if dated and reported is node and all(getattr(dated, k) == v for k, v in shown.items()):
            return dated
        requested_at = started_at = finished_at = unready_at = None
        if shown["has_lost_agent"] or not node.is_ready:
            unready_at = (dated and dated.unready_at) or now
        if node.requested_at:
            # Another request does not restart a silent agent's time.
            requested_at = (dated and dated.requested_at) or now
        if node.started_at:
            is_known = reported and reported.started_at == node.started_at
            started_at = dated.started_at if dated and is_known else now
        if node.finished_at and reported and dated:
            is_known = reported.finished_at == node.finished_at
            finished_at = dated.finished_at if is_known else now
        elif node.finished_at:
            # The run ended before this process knew the node, so only the agent's clock shows
            # when. At worst a cooldown is too short or starts now.
            finished_at = min(node.finished_at, now)
        return dataclasses.replace(
            node,
            **shown,
            requested_at=requested_at,
            started_at=started_at,
            finished_at=finished_at,
            unready_at=unready_at,
        )
