"""Keep the room that nodes have, or are being changed for, until the scheduler binds pods there.

A pod that the scheduler does not place within ``ROOM_TIMEOUT_S`` gets no room on that node for as
long, nor waits for the idle devices of others. Pod affinity, volumes and so on can keep it off.
"""

import datetime as dt

from mig_manager.core.partitioning import (
    batches,
    decisions,
    node_sets,
    partitioned,
    past_decisions,
    waiting,
)

_MAX_IGNORED = 2
"""Rooms that a pod does not use before the partitioner waits longer and longer between them."""
_MAX_DOUBLINGS = 8


class KeptRoom:
    """The pods of a batch that need no change."""

    def __init__(
        self, batch: batches.Batch, now: dt.datetime, history: past_decisions.History
    ) -> None:
        self._batch = batch
        self._now = now
        self._history = history
        self._nodes = {node.name: node for node in batch.nodes}
        self.waiting: list[decisions.WaitingPod] = []
        self.room_since: dict[str, dict[str, dt.datetime]] = {}
        """By UID of a pending pod, by node."""
        self.nominated = {
            node.name
            for node in batch.nodes
            if node.pods.is_nominated
            and decisions.is_recent(history.nominated_at.get(node.name, now), now=now)
        }
        """Nodes on which the scheduler preempts pods."""
        self.ignored = dict(history.ignored)
        self.unplaced = self._find_unplaced()
        """By rank of a pod: nodes where the scheduler did not place it."""

    def keep(self) -> list[int]:
        """Claim room for the pods that have it; return the ranks of the others."""
        rest = [rank for rank in range(len(self._batch.pods)) if not self._keep(rank)]
        self._batch.end_claims()
        return rest

    def is_backed_off(self, rank: int) -> bool:
        """Return whether a pod gets no new room for now, because it did not use several rooms."""
        rooms = self.ignored.get(self._batch.pods[rank].uid)
        if rooms is None or rooms.count < _MAX_IGNORED:
            return False
        pause_s = decisions.ROOM_TIMEOUT_S * (2 ** min(rooms.count, _MAX_DOUBLINGS))
        return self._now - rooms.since < dt.timedelta(seconds=pause_s)

    def _keep(self, rank: int) -> bool:
        pod, group = self._batch.pods[rank], self._batch.group[rank]
        since = self._history.room_since.get(pod.uid, {})
        nominated = self._nodes.get(pod.nominated)
        if nominated and not self._is_unplaced(rank, nominated):
            self.nominated.add(nominated.name)
            self._wait(
                rank, nominated, f"the scheduler preempts pods on node {pod.nominated} for it"
            )
            return True
        for name, when in since.items():
            node = self._nodes.get(name)
            if node and node.is_program_change and decisions.is_recent(when, now=self._now):
                self._wait(rank, node, f"node {name} is being changed for it")
                return True
        for node in self._batch.hosts(group, since):
            if self._is_unplaced(rank, node):
                continue
            if rank in self.unplaced and node.name not in since:
                # What keeps the pod off one node may keep it off other idle devices too, each for
                # as long as the first one is avoided.
                break
            self._batch.claim(group, node)
            self._wait(rank, node, f"node {node.name} has room: the scheduler will place the pod")
            return True
        return False

    def _wait(self, rank: int, node: partitioned.PartitionedNode, message: str) -> None:
        """Let a pod wait for the scheduler, on a node with room since now or a known time."""
        pod, reason = self._batch.pods[rank], waiting.WaitReason.SCHEDULER
        since = self._history.room_since.get(pod.uid, {}).get(node.name, self._now)
        if not decisions.is_recent(since, now=self._now):
            since = self._now
        self.room_since.setdefault(pod.uid, {})[node.name] = since
        self.waiting.append(decisions.WaitingPod(pod=pod, reason=reason, message=message))

    def _is_unplaced(self, rank: int, node: partitioned.PartitionedNode) -> bool:
        return self._batch.index.position[node.name] in self.unplaced.get(rank, node_sets.EMPTY)

    def _find_unplaced(self) -> dict[int, node_sets.NodeSet]:
        """Return the nodes where the scheduler did not place pods; remember these."""
        unplaced: dict[int, node_sets.NodeSet] = {}
        for rank, pod in enumerate(self._batch.pods):
            for name, since in self._history.room_since.get(pod.uid, {}).items():
                if name not in self._nodes or self._nodes[name].is_changing:
                    continue  # it has had no room that a pod could use
                age_s = (self._now - since).total_seconds()
                if decisions.ROOM_TIMEOUT_S < age_s <= 2 * decisions.ROOM_TIMEOUT_S:
                    before = self.ignored.get(pod.uid)
                    if before is None or since > before.since:
                        count = before.count + 1 if before else 1
                        self.ignored[pod.uid] = decisions.IgnoredRooms(count=count, since=since)
                    self.room_since.setdefault(pod.uid, {})[name] = since
                    nodes = node_sets.of([self._batch.index.position[name]])
                    unplaced[rank] = unplaced.get(rank, node_sets.EMPTY) | nodes
        return unplaced
