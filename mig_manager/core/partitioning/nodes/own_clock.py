"""Times of nodes by the partitioner's own clock."""

import dataclasses
import datetime as dt
from collections.abc import Iterable

from mig_manager.core.partitioning.nodes import node_requests, partitioned_nodes


class OwnClock:
    """Replaces times that agents report by the partitioner's own clock.

    Clocks of nodes and of the API server can be hours off, or not set yet. A reported time only
    distinguishes requests and runs; its age counts from when this process first saw it.
    """

    def __init__(self) -> None:
        self._before: dict[
            str, tuple[partitioned_nodes.PartitionedNode, partitioned_nodes.PartitionedNode]
        ] = {}
        """By node: as reported, and with times by our clock."""

    def with_own_times(
        self,
        nodes: Iterable[partitioned_nodes.PartitionedNode],
        requests: node_requests.Requests,
        *,
        now: dt.datetime,
    ) -> tuple[partitioned_nodes.PartitionedNode, ...]:
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
        for name, (reported, dated) in self._before.items():
            times = dated.times
            later = dataclasses.replace(
                times,
                requested_at=times.requested_at and times.requested_at + lost,
                started_at=times.started_at and times.started_at + lost,
                unready_at=times.unready_at and times.unready_at + lost,
            )
            self._before[name] = reported, dataclasses.replace(dated, times=later)

    def _with_own_times(
        self,
        node: partitioned_nodes.PartitionedNode,
        pods: partitioned_nodes.PodFacts,
        now: dt.datetime,
    ) -> partitioned_nodes.PartitionedNode:
        reported, dated = self._before.get(node.name, (node, None))
        if dated and reported is node and dated.pods == pods:
            return dated
        kept = dated.times if dated else partitioned_nodes.Times()
        before = reported.times if dated else partitioned_nodes.Times()
        times = node.times
        is_ready = node.is_ready and not pods.has_lost_agent
        # When a run ended before this process knew the node, only the agent's clock shows. At
        # worst a cooldown is too short or starts now.
        finished_at = times.finished_at and min(times.finished_at, now)
        if dated:
            finished_at = _own_time(times.finished_at, before.finished_at, kept.finished_at, now)
        return dataclasses.replace(
            node,
            pods=pods,
            times=partitioned_nodes.Times(
                # Another request does not restart a silent agent's time.
                requested_at=times.requested_at and (kept.requested_at or now),
                started_at=_own_time(times.started_at, before.started_at, kept.started_at, now),
                finished_at=finished_at,
                unready_at=None if is_ready else kept.unready_at or now,
            ),
        )


def _own_time(
    reported: dt.datetime | None,
    before: dt.datetime | None,
    kept: dt.datetime | None,
    now: dt.datetime,
) -> dt.datetime | None:
    """Return when this process first saw a reported time."""
    return reported and (kept if reported == before else now)
