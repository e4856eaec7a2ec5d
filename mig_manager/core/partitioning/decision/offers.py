"""Find the node whose change serves the pending pods best."""

import dataclasses
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager.core import model
from mig_manager.core.partitioning.batch import batches, feasible_nodes
from mig_manager.core.partitioning.decision import holds
from mig_manager.core.partitioning.nodes import node_index, node_sets
from mig_manager.core.partitioning.search import trial_change

_MAX_SEARCHED = 100  # nodes in different states that are compared for one change

Queue = Mapping[batches.Group, Sequence[int]]  # ranks of pods, ascending
Skipped = Mapping[int, node_sets.NodeSet]  # by rank of a pod: the nodes to skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The pods for which a change of a node would make room."""

    position: int  # of the node
    pods: tuple[int, ...]  # ranks, ascending
    change: trial_change.TrialChange

    @property
    def order(self) -> tuple[object, ...]:
        """Lower is better: the first pod, most pods, fewest idle GPUs begun, least destruction."""
        begun, destroyed = self.change.begun, self.change.destroyed
        return self.pods[0], -len(self.pods), begun, destroyed, self.position


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodLimit:
    """What limits the number of pods that a change of a node can serve."""

    slices: int  # memory slices for new devices, and of idle devices that pods can get
    idle: int  # devices that the scheduler can give to pods
    sizes: Mapping[batches.Group, int]  # slices that a pod uses at least
    smallest: int  # smallest of the devices of all pods

    def max_pods_after(self, first: batches.Group) -> int:
        """Return how many pods can be served after one of a group.

        No pod has less than one device, and no device less slices than the smallest.
        """
        return self.idle + max(0, self.slices - self.sizes[first]) // self.smallest


class Offers:
    """The offers of nodes to the pods of a batch."""

    def __init__(
        self,
        index: node_index.NodeIndex,
        batch: batches.Batch,
        feasible: feasible_nodes.FeasibleNodes,
    ) -> None:
        self._index = index
        self._search = index.search
        self._batch = batch
        self._feasible = feasible
        self._available = feasible.available
        self._closed = {group: group.excluded | feasible.lacking(group) for group in batch.groups}
        """By group: the nodes that serve none of its pods, by quick comparisons."""
        self._sizes: dict[object, tuple[dict[model.Profile, int], dict[batches.Group, int]]] = {}
        """By the GPUs of a node: slices of the requested profiles, and of pods by group."""

    def best(
        self,
        nodes: node_sets.NodeSet,
        ranks: Iterable[int],
        *,
        skipped: Skipped,
        holding: Sequence[holds.Hold] = (),
    ) -> Offer | None:
        """Return the best offer of a set of nodes to these pods, ascending; None if none serves.

        Only nodes that can serve the first served pod are compared. In a large cluster, the nodes
        whose free slices allow most pods are compared.
        """
        queue = self._batch.queue(ranks)
        on_hold = node_sets.of(hold.position for hold in holding)
        of_holds = (
            self.offer(i, queue, skipped=skipped, holding=holding) for i in nodes & on_hold
        )
        best = min(filter(None, of_holds), key=lambda offer: offer.order, default=None)
        for rank, group in _firsts(queue, skipped):
            others = nodes - on_hold - skipped.get(rank, node_sets.EMPTY)
            serving = self._feasible.serving(group, others)
            if serving:
                return self._best_of(serving, rank, queue, skipped=skipped, best=best)
        return best

    def _best_of(
        self,
        serving: node_sets.NodeSet,
        rank: int,
        queue: Queue,
        *,
        skipped: Skipped,
        best: Offer | None,
    ) -> Offer | None:
        """Return the best offer of nodes that can serve a pod first, or the known best."""
        if best and best.pods[0] < rank:
            return best
        group = self._batch.group[rank]
        most_first = sorted(serving, key=lambda i: -self.limit(i).max_pods_after(group))
        searched: set[object] = set()
        for position in most_first:
            key = self._feasible.likeness(position)
            if any(position in nodes for nodes in skipped.values()):
                key = position
            if key in searched:
                continue  # an equal node before it in order has the same offer
            if len(searched) >= _MAX_SEARCHED:
                break
            searched.add(key)
            offer = self.offer(position, queue, skipped=skipped)
            if offer:
                best = offer if best is None else min(best, offer, key=lambda each: each.order)
        return best

    def offer(
        self,
        position: int,
        queue: Queue,
        *,
        skipped: Skipped,
        holding: Sequence[holds.Hold] = (),
    ) -> Offer | None:
        """Return the pods that a change of a node can serve; None if it serves none."""
        limit = self.limit(position)
        available = dict(self._available.of(position))
        change = self._feasible.trial(position)
        node_holds = [hold for hold in holding if hold.position == position]
        served: list[int] = []
        used = 0
        full: set[int] = set()  # kinds
        # The first ranks of groups ascend, as in a heap.
        heads = [
            (ranks[0], group, 0)
            for group, ranks in queue.items()
            if position not in self._closed[group]
        ]
        while heads:
            rank, group, at = heapq.heappop(heads)
            others = group.needs.others
            if rank not in skipped or position not in skipped[rank]:
                size = limit.sizes[group]
                if (
                    group.kind in full
                    or used + size > limit.slices
                    or any(available.get(name, 0) < count for name, count in others)
                ):
                    continue
                without = {i for hold in node_holds if rank > hold.rank for i in hold.indices}
                if not change.add(group.needs.devices, without=without):
                    full.add(group.kind)
                    continue
                served.append(rank)
                used += size
                for name, count in others:
                    available[name] -= count
            ranks = queue[group]
            if at + 1 < len(ranks):
                heapq.heappush(heads, (ranks[at + 1], group, at + 1))
        return Offer(position=position, pods=tuple(served), change=change) if served else None

    def limit(self, position: int) -> PodLimit:
        """Return what limits the pods that a node can serve."""
        facts = self._index.facts[position]
        if facts.empty not in self._sizes:
            sizes = self._search.sizes(facts.empty, self._batch.profiles)
            self._sizes[facts.empty] = (
                sizes,
                {
                    group: sum(sizes.get(profile, 0) * n for profile, n in group.needs.devices)
                    for group in self._batch.groups
                },
            )
        sizes, by_group = self._sizes[facts.empty]
        free = self._feasible.free[position]
        idle = {profile: count for profile, count in free.items() if profile in sizes}
        free_slices = sum(state.free_slices for state in self._index.states(position).values())
        return PodLimit(
            slices=free_slices + sum(sizes[profile] * count for profile, count in idle.items()),
            idle=sum(idle.values()),
            sizes=by_group,
            smallest=min(sizes.values(), default=1),
        )


def _firsts(queue: Queue, skipped: Skipped) -> Iterator[tuple[int, batches.Group]]:
    """Yield the pods, with their groups, that can be the first served of any node; ascending."""
    firsts = []
    for group, ranks in queue.items():
        for rank in ranks:
            firsts.append((rank, group))
            if rank not in skipped:
                break
    yield from sorted(firsts)
