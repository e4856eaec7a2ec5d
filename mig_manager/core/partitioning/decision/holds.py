"""Choose GPUs to hold for pods that no change of a node can serve now.

Pods behind get no new instances on a GPU on hold. Small pods that start and end on all GPUs would
otherwise keep a large pod waiting for ever, because no GPU is ever idle.

While much of the cluster is free, a hold costs the other pods little. Then it begins soon, on
several GPUs until one is idle, and their idle instances are destroyed, so that
the scheduler binds no pod there. In a busy cluster that costs more than it gives: a hold begins
late, on the GPUs of one node, and destroys nothing.
"""

import dataclasses
import functools
import heapq
from collections.abc import Container, Iterable, Iterator, Mapping

from mig_manager.core.partitioning.batch import batches, feasible_nodes
from mig_manager.core.partitioning.decision import decisions, situations
from mig_manager.core.partitioning.nodes import node_sets
from mig_manager.core.partitioning.search import fit_search

_EARLY_S = 20.0
"""How long a pod waits without room before GPUs are on hold for it while much is free."""
_LATE_S = 600.0  # how long it waits in a busy cluster
_TIMEOUT_S = 1800.0  # how long GPUs are on hold for one pod, and how long it then gets none
_FREE_SHARE = 0.15  # free memory slices of all GPUs outside the holds, for holds that begin early
_MAX_CHOICES = 4  # sets of GPUs that one pod holds early
_MAX_HOLDS = 16  # every node with a hold is compared by itself


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """GPUs on which only pods up to a rank get new room, so that a large pod is served."""

    rank: int
    position: int  # of the node
    indices: frozenset[int]  # of GPUs
    is_early: bool  # whether idle instances on them are destroyed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuHolds:
    """The GPUs on hold in one decision, and what the next decision must know of them."""

    holds: tuple[Hold, ...]
    records: Mapping[str, decisions.HoldRecord]
    """By UID of a pod. It may have no hold now."""

    @property
    def nodes(self) -> node_sets.NodeSet:
        """The nodes with GPUs on hold."""
        return node_sets.of(hold.position for hold in self.holds)

    def early_gpus(self, position: int) -> set[int]:
        """Return the GPUs of a node whose idle instances a change destroys."""
        early = (hold for hold in self.holds if hold.is_early and hold.position == position)
        return {gpu_index for hold in early for gpu_index in hold.indices}


def select(
    situation: situations.Situation,
    batch: batches.Batch,
    feasible: feasible_nodes.FeasibleNodes,
    ranks: Iterable[int],
) -> GpuHolds:
    """Select the GPUs to hold for pods that have waited without room.

    Args:
        situation: The nodes, the time, and the holds of the last decision.
        batch: The pods.
        feasible: Where pods are served, with a change or without.
        ranks: Of the pods that may get a hold, by priority and age.
    """
    index = situation.index
    ready = node_sets.of(i for i in index.opted_in if not index.nodes[i].unusable)
    # Nodes under change cannot serve a pod now, but soon.
    changing = node_sets.of(i for i in index.opted_in if index.nodes[i].is_changing)
    selection = _Selection(situation, batch, ready | changing)
    return selection.choose(selection.without_room(ranks, feasible, ready))


class _Selection:
    """Selects the GPUs to hold in one decision."""

    def __init__(
        self,
        situation: situations.Situation,
        batch: batches.Batch,
        nodes: node_sets.NodeSet,
    ) -> None:
        self._situation = situation
        self._index = situation.index
        self._batch = batch
        self._nodes = nodes

    @functools.cached_property
    def _states(self) -> Mapping[tuple[int, int], fit_search.GpuState]:
        """The states by node and GPU."""
        return {
            (position, gpu_index): state
            for position in self._nodes
            for gpu_index, state in self._index.states(position).items()
        }

    @functools.cached_property
    def _max_cost(self) -> float:
        """How many free memory slices the GPUs on hold may have while much is free."""
        free = sum(state.free_slices for state in self._states.values())
        used = sum(state.fill for state in self._states.values())
        return free - _FREE_SHARE * (free + used)

    def without_room(
        self,
        ranks: Iterable[int],
        feasible: feasible_nodes.FeasibleNodes,
        ready: node_sets.NodeSet,
    ) -> Iterator[int]:
        """Yield the pods that have waited, and that no change of a ready node can serve."""
        is_served: dict[batches.Group, bool] = {}
        for rank in ranks:
            if self._waited_s(rank) < _EARLY_S:
                continue
            group = self._batch.group[rank]
            if group not in is_served:
                is_served[group] = bool(feasible.serving(group, ready - group.never))
            if not is_served[group]:
                yield rank

    def choose(self, ranks: Iterable[int]) -> GpuHolds:
        holds: list[Hold] = []
        records = self._earlier_records()
        without_choice: set[batches.Group] = set()  # no early hold is possible any more
        for rank in ranks:
            free_holds = _MAX_HOLDS - len(holds)
            if not free_holds:
                break
            uid, group = self._batch.pods[rank].uid, self._batch.group[rank]
            since = records[uid].since if uid in records else self._situation.now
            is_due = self._waited_s(rank) >= _LATE_S and all(hold.is_early for hold in holds)
            is_in_vain = group in without_choice and not is_due
            if self._situation.age_s(since) > _TIMEOUT_S or is_in_vain:
                continue
            added = self._for_pod(rank, holds, is_due=is_due)[:free_holds]
            if added:
                holds += added
                records[uid] = decisions.HoldRecord(since=since, gpus=self._uuids(added))
            else:
                without_choice.add(group)
        return GpuHolds(holds=tuple(holds), records=records)

    def _waited_s(self, rank: int) -> float:
        """Return how long a pod has been pending; 0 if that is unknown."""
        pod = self._batch.pods[rank]
        since = pod.pending_since or pod.created_at
        return self._situation.age_s(since) if since else 0.0

    def _earlier_records(self) -> dict[str, decisions.HoldRecord]:
        """Return the records of the last decision, without GPUs.

        A record stays while its pod has no hold: the times count from the first one. A pod whose
        hold took too long gets none for as long; then its record ends.
        """
        before = self._situation.history.gpu_holds
        return {
            pod.uid: dataclasses.replace(before[pod.uid], gpus=frozenset())
            for pod in self._batch.pods
            if pod.uid in before and self._situation.age_s(before[pod.uid].since) <= 2 * _TIMEOUT_S
        }

    def _for_pod(self, rank: int, holds: Iterable[Hold], *, is_due: bool) -> list[Hold]:
        """Return the holds for a pod, beside those for pods before it."""
        on_hold = {(hold.position, each) for hold in holds for each in hold.indices}
        cost = sum(self._states[each].free_slices for each in on_hold)
        added: list[Hold] = []
        record = self._situation.history.gpu_holds.get(self._batch.pods[rank].uid)
        earlier_gpus = record.gpus if record else frozenset()
        choices = self._choices(self._batch.group[rank], earlier_gpus, on_hold)
        for _, _, position, indices in heapq.nsmallest(_MAX_CHOICES, choices):
            cost += sum(self._states[position, each].free_slices for each in indices)
            is_early = cost <= self._max_cost
            if not is_early and (added or not is_due):
                break
            added.append(
                Hold(rank=rank, position=position, indices=frozenset(indices), is_early=is_early)
            )
        return added

    def _uuids(self, holds: Iterable[Hold]) -> frozenset[tuple[str, str]]:
        named = ((self._index.nodes[hold.position], hold.indices) for hold in holds)
        return frozenset(
            (node.name, gpu.uuid)
            for node, indices in named
            for gpu in node.gpus
            if gpu.index in indices
        )

    def _choices(
        self,
        group: batches.Group,
        earlier_gpus: frozenset[tuple[str, str]],
        on_hold: Container[tuple[int, int]],
    ) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
        """Yield sets of GPUs of a node that can serve a pod when they are idle.

        The least used come first, of these the ones that the pod holds already. Idle GPUs of a
        node that is short of other resources are left out: a hold would only keep others off.
        """
        profiles = group.needs.profiles
        if not profiles:
            return
        largest = min(profiles)
        short = self._index.available.short(group.needs.others)
        for position in self._nodes - group.never:
            node = self._index.nodes[position]
            uuids = {gpu.index: (node.name, gpu.uuid) for gpu in node.gpus}
            ordered = sorted(
                (state.fill, uuids[gpu_index] not in earlier_gpus, gpu_index, count)
                for gpu_index, state in self._index.states(position).items()
                if (position, gpu_index) not in on_hold
                and (count := state.capacity.maximum(largest))
            )
            fill = new = 0
            indices: list[int] = []
            missing = profiles[largest]
            for used, is_new, gpu_index, count in ordered:
                fill += used
                new += is_new
                indices.append(gpu_index)
                missing -= count
                if missing <= 0:
                    if fill or position not in short:
                        yield fill, new, position, tuple(indices)
                    fill = new = 0
                    indices = []
                    missing = profiles[largest]
