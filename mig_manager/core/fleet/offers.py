"""Find the node whose change serves the pending pods best."""

import dataclasses
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager.core import model
from mig_manager.core.fleet import batch, node_room, node_sets, partitioned

Queue = Mapping[int, Sequence[int]]
"""Ranks of pods by group, ascending."""
Refused = Mapping[int, int]
"""By rank of a pod: the nodes to skip."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """GPUs on which only pods up to a rank get new room, so that a large pod is served."""

    rank: int
    node: str
    indices: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The pods for which a change of a node would make room."""

    node: partitioned.PartitionedNode
    pods: tuple[int, ...]  # ranks, ascending
    room: node_room.NodeRoom

    @property
    def rank(self) -> tuple[object, ...]:
        """Lower is better: the first pod in order, then most pods, then least destruction."""
        return self.pods[0], -len(self.pods), self.room.destroyed, self.node.name


class Offers:
    """The offers of nodes to the pods of a batch."""

    def __init__(self, pods: batch.Batch) -> None:
        """Build it after the batch's claims."""
        self._batch = pods
        self._known: dict[object, Offer | None] = {}
        """By what decides an offer: the valid offers of nodes."""

    def best(
        self, nodes: int, ranks: Iterable[int], *, refused: Refused, hold: Hold | None
    ) -> Offer | None:
        """Return the best offer of a set of nodes to these pods, ascending; None if none serves.

        Only nodes that can serve the first served pod are compared, and of these only nodes whose
        free slices allow as many pods as the best offer.
        """
        queue, best = self._batch.queue(ranks), None
        reserved = self._batch.index.position[hold.node] if hold else 0
        if hold and nodes >> reserved & 1:
            nodes &= ~(1 << reserved)
            best = self.offer(reserved, queue, refused=refused, hold=hold)
        for rank, group in _firsts(queue, refused):
            serving = self._batch.serving(group, nodes & ~refused.get(rank, 0))
            if serving:
                for most, position in self._bounds(serving, group, queue):
                    if best and (best.pods[0], -len(best.pods)) < (rank, -most):
                        break
                    offer = self._shared(position, queue, refused)
                    if offer and (best is None or offer.rank < best.rank):
                        best = offer
                break
        return best

    def forget(self, pods: Iterable[int]) -> None:
        """Forget the offers to these pods."""
        gone = {*pods}
        self._known = {
            key: offer
            for key, offer in self._known.items()
            if offer is None or gone.isdisjoint(offer.pods)
        }

    def offer(
        self, position: int, queue: Queue, *, refused: Refused, hold: Hold | None = None
    ) -> Offer | None:
        """Return the pods that a change of a node can serve; None if it serves none."""
        pods = self._batch
        node, available = pods.nodes[position], dict(pods.available(position))
        room, without, served = pods.room(node), frozenset[int](), []
        full: set[int] = set()  # kinds
        heads = [
            (ranks[0], group, 0)
            for group, ranks in queue.items()
            if ranks and pods.is_servable(group, position)
        ]
        heapq.heapify(heads)
        while heads:
            rank, group, at = heads[0]
            others = pods.others[group]
            is_skipped = bool(refused.get(rank, 0) >> position & 1)
            if hold and hold.node == node.name and rank > hold.rank:
                without = hold.indices
            if not is_skipped:
                is_short = any(available.get(name, 0) < count for name, count in others)
                if pods.kind[group] in full or is_short:
                    heapq.heappop(heads)
                    continue
                if not room.add(pods.profiles[group], without=without):
                    full.add(pods.kind[group])
                    heapq.heappop(heads)
                    continue
                served.append(rank)
                for name, count in others:
                    available[name] -= count
            ranks = queue[group]
            if at + 1 < len(ranks):
                heapq.heapreplace(heads, (ranks[at + 1], group, at + 1))
            else:
                heapq.heappop(heads)
        return Offer(node=node, pods=tuple(served), room=room) if served else None

    def _shared(self, position: int, queue: Queue, refused: Refused) -> Offer | None:
        """Return a node's offer, which equal nodes share."""
        key = self._batch.likeness(position)
        if any(nodes >> position & 1 for nodes in refused.values()):
            key = position
        if key not in self._known:
            self._known[key] = self.offer(position, queue, refused=refused)
        offer = self._known[key]
        return offer and dataclasses.replace(offer, node=self._batch.nodes[position])

    def _bounds(self, nodes: int, group: int, queue: Queue) -> list[tuple[int, int]]:
        """List nodes with a bound of the pods that they serve after the group's first pod.

        No pod has less than one device, and no device less slices than the smallest.
        """
        pods = self._batch
        profiles = {profile for group in queue for profile in pods.profiles[group]}
        bounds, known = [], dict[object, dict[model.Profile, int]]()
        for position in node_sets.each(nodes):
            facts = pods.index.facts[position]
            states = facts.states.values()
            if facts.empty not in known:
                known[facts.empty] = pods.search.sizes(facts.empty, profiles)
            sizes = known[facts.empty]
            slices = sum(map(pods.search.free_slices, states))
            for profile, count in pods.profiles[group].items():
                slices -= sizes.get(profile, 0) * max(0, count - pods.free(position, profile))
            idle = sum(pods.free(position, profile) for profile in profiles)
            most = 1 + idle + max(0, slices) // min(sizes.values(), default=1)
            bounds.append((-most, position))
        return [(-most, position) for most, position in sorted(bounds)]


def _firsts(queue: Queue, refused: Refused) -> Iterator[tuple[int, int]]:
    """Yield the pods, with their groups, that can be the first served of any node; ascending."""
    firsts = []
    for group, ranks in queue.items():
        for rank in ranks:
            firsts.append((rank, group))
            if rank not in refused:
                break
    yield from sorted(firsts)


def hold_for(pods: batch.Batch, rank: int, nodes: int) -> Hold | None:
    """Return the least used GPUs that can serve a pod when they are idle."""
    profiles = pods.profiles[pods.group[rank]]
    if not profiles:
        return None
    largest = min(profiles)
    options = []
    for position in node_sets.each(nodes):
        indices, in_use, missing = [], 0, profiles[largest]
        for used, index, most in sorted(
            (state.fill, index, most)
            for index, state in pods.index.facts[position].states.items()
            if (most := pods.search.most(state, largest))
        ):
            if missing > 0:
                indices.append(index)
                in_use, missing = in_use + used, missing - most
        if indices and missing <= 0:
            options.append((in_use, position, frozenset(indices)))
    if not options:
        return None
    _, position, indices_to_hold = min(options, key=lambda each: each[:2])
    return Hold(rank=rank, node=pods.nodes[position].name, indices=indices_to_hold)
