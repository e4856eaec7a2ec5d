"""Find the pods for which nodes have room or are being changed, and keep it until they are bound.

A pod that the scheduler does not place within ``ROOM_TIMEOUT_S`` gets no room on that node for as
long, nor waits for the idle devices of others. Pod affinity, volumes and so on can keep it off.
"""

import datetime as dt
from collections.abc import Mapping

from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.batch import assumed_pods, batches
from mig_manager.core.partitioning.decision import decisions, past_decisions, waiting
from mig_manager.core.partitioning.nodes import node_index, node_sets

_MAX_IGNORED = 2
"""Rooms that a pod does not use before the partitioner waits longer and longer between them."""
_MAX_DOUBLINGS = 8


class SchedulablePods:
    """The pods of a batch that the scheduler can place without a further change."""

    def __init__(
        self,
        index: node_index.NodeIndex,
        batch: batches.Batch,
        now: dt.datetime,
        history: past_decisions.History,
    ) -> None:
        self._index = index
        self._batch = batch
        self._now = now
        self._history = history
        self.assumed = assumed_pods.AssumedPods(index)
        self.waiting: list[decisions.WaitingPod] = []
        self.room_since: dict[str, dict[str, dt.datetime]] = {}
        """By UID of a pending pod, by node."""
        self.nominated = node_sets.of(
            position
            for position, node in enumerate(index.nodes)
            if node.pods.is_nominated
            and decisions.is_recent(history.nominated_at.get(node.name, now), now=now)
        )
        """Nodes on which the scheduler preempts pods."""
        self.ignored = dict(history.ignored)
        self.unplaced = self._find_unplaced()
        """By rank of a pod: nodes where the scheduler did not place it."""
        self.others = [rank for rank in range(len(batch.pods)) if not self._keep(rank)]
        """Ranks of the other pods."""

    def is_backed_off(self, rank: int) -> bool:
        """Return whether a pod gets no new room for now, because it did not use several rooms."""
        rooms = self.ignored.get(self._batch.pods[rank].uid)
        if rooms is None or rooms.count < _MAX_IGNORED:
            return False
        pause_s = decisions.ROOM_TIMEOUT_S * (2 ** min(rooms.count, _MAX_DOUBLINGS))
        return self._now - rooms.since < dt.timedelta(seconds=pause_s)

    def _keep(self, rank: int) -> bool:
        pod = self._batch.pods[rank]
        group = self._batch.group[rank]
        unplaced = self.unplaced.get(rank, node_sets.EMPTY)
        nominated = self._index.position.get(pod.nominated)
        if nominated is not None and nominated not in unplaced:
            self.nominated |= node_sets.of([nominated])
            message = f"the scheduler preempts pods on node {pod.nominated} for it"
            self._wait(pod, nominated, message)
            return True
        since = self._since(pod)
        for position, when in since.items():
            node = self._index.nodes[position]
            if node.is_program_change and decisions.is_recent(when, now=self._now):
                self._wait(pod, position, f"node {node.name} is being changed for it")
                return True
        for position in self.assumed.hosts(group, node_sets.of(since)):
            if position in unplaced:
                continue
            if unplaced and position not in since:
                # What keeps the pod off one node may keep it off other idle devices too, each for
                # as long as the first one is avoided.
                break
            self.assumed.assume(group, position)
            name = self._index.nodes[position].name
            self._wait(pod, position, f"node {name} has room: the scheduler will place the pod")
            return True
        return False

    def _since(self, pod: demand.Pending) -> Mapping[int, dt.datetime]:
        """Return since when nodes have room for a pod."""
        positions = self._index.position
        since = self._history.room_since.get(pod.uid, {})
        return {positions[name]: when for name, when in since.items() if name in positions}

    def _wait(self, pod: demand.Pending, position: int, message: str) -> None:
        """Let a pod wait for the scheduler, on a node with room since now or a known time."""
        name = self._index.nodes[position].name
        since = self._history.room_since.get(pod.uid, {}).get(name, self._now)
        if not decisions.is_recent(since, now=self._now):
            since = self._now
        self.room_since.setdefault(pod.uid, {})[name] = since
        reason = waiting.WaitReason.SCHEDULER
        self.waiting.append(decisions.WaitingPod(pod=pod, reason=reason, message=message))

    def _find_unplaced(self) -> dict[int, node_sets.NodeSet]:
        """Return the nodes where the scheduler did not place pods; remember these."""
        unplaced: dict[int, node_sets.NodeSet] = {}
        for rank, pod in enumerate(self._batch.pods):
            for position, since in self._since(pod).items():
                node = self._index.nodes[position]
                if node.is_changing:
                    continue  # it has had no room that a pod could use
                age_s = (self._now - since).total_seconds()
                if decisions.ROOM_TIMEOUT_S < age_s <= 2 * decisions.ROOM_TIMEOUT_S:
                    before = self.ignored.get(pod.uid)
                    if before is None or since > before.since:
                        count = before.count + 1 if before else 1
                        self.ignored[pod.uid] = decisions.IgnoredRooms(count=count, since=since)
                    self.room_since.setdefault(pod.uid, {})[node.name] = since
                    others = unplaced.get(rank, node_sets.EMPTY)
                    unplaced[rank] = others | node_sets.of([position])
        return unplaced
