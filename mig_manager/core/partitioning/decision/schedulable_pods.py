"""Find the pods for which nodes have room or are being changed, and keep it until they are bound.

A pod that the scheduler does not place within ``ROOM_TIMEOUT_S`` gets no room on that node for as
long, nor waits for the idle devices of others. Pod affinity, volumes and so on can keep it off.
"""

import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping

from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.batch import assumed_pods, batches
from mig_manager.core.partitioning.decision import decisions, situations, waiting
from mig_manager.core.partitioning.nodes import node_sets

_MAX_IGNORED = 2
"""Rooms that a pod does not use before the partitioner waits longer and longer between them."""
_MAX_DOUBLINGS = 8
_NEVER = dt.datetime.min.replace(tzinfo=dt.UTC)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulablePods:
    """The pods of a batch that the scheduler can place without a further change."""

    waiting: tuple[decisions.WaitingPod, ...]
    others: tuple[int, ...]  # ranks of the other pods
    backed_off: frozenset[int]
    """Ranks of pods that get no new room for now, because they did not use several rooms."""
    unplaced: Mapping[int, node_sets.NodeSet]
    """By rank of a pod: nodes where the scheduler did not place it."""
    assumed: assumed_pods.AssumedPods
    nominated: node_sets.NodeSet  # nodes on which the scheduler preempts pods
    room_since: Mapping[str, Mapping[str, dt.datetime]]  # by UID of a pending pod, by node
    ignored: Mapping[str, decisions.IgnoredRooms]  # by UID of a pending pod


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """A node on which the scheduler can place a pod, now or soon."""

    position: int
    message: str
    is_idle: bool = False  # whether the devices are there, so that the pod is assumed
    is_nominated: bool = False


def find(situation: situations.Situation, batch: batches.Batch) -> SchedulablePods:
    """Find the schedulable pods; the history dates their rooms."""
    index, history = situation.index, situation.history
    finder = _Finder(situation)
    unused = {
        rank: since for rank, pod in enumerate(batch.pods) if (since := finder.unused_rooms(pod))
    }
    unplaced = {rank: node_sets.of(since) for rank, since in unused.items()}
    uids = (pod.uid for pod in batch.pods)
    ignored = {uid: history.ignored[uid] for uid in uids if uid in history.ignored}
    room_since: dict[str, dict[str, dt.datetime]] = {}
    for rank, since in unused.items():
        uid = batch.pods[rank].uid
        room_since[uid] = {index.nodes[position].name: when for position, when in since.items()}
        ignored[uid] = _with_rooms(ignored.get(uid), since.values())
    assumed = assumed_pods.AssumedPods(index)
    rooms: dict[int, _Room] = {}
    for rank, pod in enumerate(batch.pods):
        group = batch.group[rank]
        room = finder.room(pod, group, unplaced.get(rank, node_sets.EMPTY), assumed)
        if room is None:
            continue
        rooms[rank] = room
        name = index.nodes[room.position].name
        room_since.setdefault(pod.uid, {})[name] = finder.kept_since(pod, name)
        if room.is_idle:
            assumed.assume(group, room.position)
    return SchedulablePods(
        waiting=tuple(
            decisions.WaitingPod(
                pod=batch.pods[rank], reason=waiting.WaitReason.SCHEDULER, message=room.message
            )
            for rank, room in rooms.items()
        ),
        others=tuple(rank for rank in range(len(batch.pods)) if rank not in rooms),
        backed_off=frozenset(
            rank
            for rank, pod in enumerate(batch.pods)
            if pod.uid in ignored and _is_backed_off(ignored[pod.uid], situation.now)
        ),
        unplaced=unplaced,
        assumed=assumed,
        nominated=finder.nominated_nodes()
        | node_sets.of(room.position for room in rooms.values() if room.is_nominated),
        room_since=room_since,
        ignored=ignored,
    )


def _with_rooms(
    before: decisions.IgnoredRooms | None, since: Iterable[dt.datetime]
) -> decisions.IgnoredRooms:
    """Return the ignored rooms of a pod with these, as far as they are new."""
    rooms = before or decisions.IgnoredRooms(count=0, since=_NEVER)
    for when in since:
        if when > rooms.since:
            rooms = decisions.IgnoredRooms(count=rooms.count + 1, since=when)
    return rooms


def _is_backed_off(rooms: decisions.IgnoredRooms, now: dt.datetime) -> bool:
    pause_s = decisions.ROOM_TIMEOUT_S * (2 ** min(rooms.count, _MAX_DOUBLINGS))
    return rooms.count >= _MAX_IGNORED and now - rooms.since < dt.timedelta(seconds=pause_s)


class _Finder:
    """Finds the room of a pod by what the last decisions remember."""

    def __init__(self, situation: situations.Situation) -> None:
        self._situation = situation
        self._index = situation.index
        self._history = situation.history

    def nominated_nodes(self) -> node_sets.NodeSet:
        """Return the nodes on which the scheduler preempts pods for a pod outside the batch."""
        dates = self._history.nominated_at
        return node_sets.of(
            position
            for position, node in enumerate(self._index.nodes)
            if node.pods.is_nominated
            and self._situation.is_recent(dates.get(node.name, self._situation.now))
        )

    def unused_rooms(self, pod: demand.PendingPod) -> Mapping[int, dt.datetime]:
        """Return the nodes where the scheduler did not place a pod, and since when they had room.

        A node that is being changed has had no room that a pod could use.
        """
        timeout_s = decisions.ROOM_TIMEOUT_S
        return {
            position: since
            for position, since in self._since(pod).items()
            if not self._index.nodes[position].is_changing
            and timeout_s < self._situation.age_s(since) <= 2 * timeout_s
        }

    def room(
        self,
        pod: demand.PendingPod,
        group: batches.Group,
        unplaced: node_sets.NodeSet,
        assumed: assumed_pods.AssumedPods,
    ) -> _Room | None:
        """Return the room of a pod beside the assumed pods; None if it has none."""
        nodes = self._index.nodes
        nominated = self._index.position.get(pod.nominated)
        if nominated is not None and nominated not in unplaced:
            message = f"the scheduler preempts pods on node {pod.nominated} for it"
            return _Room(position=nominated, message=message, is_nominated=True)
        since = self._since(pod)
        for position, when in since.items():
            node = nodes[position]
            if node.is_program_change and self._situation.is_recent(when):
                message = f"node {node.name} is being changed for it"
                return _Room(position=position, message=message)
        for position in assumed.hosts(group, node_sets.of(since)):
            if position in unplaced:
                continue
            if unplaced and position not in since:
                # What keeps the pod off one node may keep it off other idle devices too, each for
                # as long as the first one is avoided.
                break
            message = f"node {nodes[position].name} has room: the scheduler will place the pod"
            return _Room(position=position, message=message, is_idle=True)
        return None

    def kept_since(self, pod: demand.PendingPod, name: str) -> dt.datetime:
        """Return since when a node's room is kept for a pod: from now on, or a known time."""
        now = self._situation.now
        since = self._history.room_since.get(pod.uid, {}).get(name, now)
        return since if self._situation.is_recent(since) else now

    def _since(self, pod: demand.PendingPod) -> Mapping[int, dt.datetime]:
        """Return since when nodes have room for a pod."""
        positions = self._index.position
        since = self._history.room_since.get(pod.uid, {})
        return {positions[name]: when for name, when in since.items() if name in positions}
