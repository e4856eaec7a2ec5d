"""Choose GPUs to hold for pods that no change of a node can serve now.

Pods behind get no new instances on a GPU on hold. Small pods that start and end on all GPUs would
otherwise keep a large pod waiting for ever, because no GPU is ever idle.

While much of the cluster is free, a hold costs the other pods little. Then it begins soon, on
several GPUs until one is idle, and their idle instances are destroyed, so that
the scheduler binds no pod there. In a busy cluster that costs more than it gives: a hold begins
late, on the GPUs of one node, and destroys nothing.
"""

import dataclasses
import datetime as dt
import functools
import heapq
from collections.abc import Iterable, Iterator, Mapping

from mig_manager.core.partitioning import (
    batches,
    feasible_nodes,
    fit_search,
    node_index,
    node_sets,
)

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
    indices: frozenset[int]
    is_early: bool  # whether idle instances on them are destroyed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HoldRecord:
    """The GPUs on hold for a pod, between decisions."""

    since: dt.datetime
    gpus: frozenset[tuple[str, str]]  # node, UUID


class Holds:
    """Chooses the GPUs to hold in one decision."""

    def __init__(
        self,
        index: node_index.NodeIndex,
        batch: batches.Batch,
        nodes: node_sets.NodeSet,
        before: Mapping[str, HoldRecord],
        now: dt.datetime,
    ) -> None:
        """Build it; ``nodes`` can be changed now or soon, ``before`` is of the last decision."""
        self._index = index
        self._batch = batch
        self._nodes = nodes
        self._before = before
        self._now = now
        self._gpus_on_hold: set[tuple[int, int]] = set()
        self._cost = 0
        """Free memory slices of the GPUs on hold."""
        self._without_choice: set[batches.Group] = set()
        """Groups for which no early hold is possible any more."""
        self.records: dict[str, HoldRecord] = {}
        """By UID of a pending pod; for the next decision."""

    @functools.cached_property
    def _states(self) -> Mapping[tuple[int, int], fit_search.GpuFacts]:
        """The states by node and GPU."""
        return {
            (position, index): state
            for position in self._nodes
            for index, state in self._index.states(position).items()
        }

    @functools.cached_property
    def _max_cost(self) -> float:
        free = sum(state.free_slices for state in self._states.values())
        used = sum(state.fill for state in self._states.values())
        return free - _FREE_SHARE * (free + used)

    def choose(
        self,
        ranks: Iterable[int],
        feasible: feasible_nodes.FeasibleNodes,
        ready: node_sets.NodeSet,
    ) -> tuple[Hold, ...]:
        """Return the holds for pods, by priority and age.

        Nodes outside ``ready`` are under change, and cannot serve a pod now.
        """
        holds: list[Hold] = []
        is_served: dict[batches.Group, bool] = {}
        for rank in ranks:
            pod = self._batch.pods[rank]
            group = self._batch.group[rank]
            age_s = self._age_s(pod.pending_since or pod.created_at)
            if len(holds) >= _MAX_HOLDS or age_s < _EARLY_S:
                continue
            if group not in is_served:
                is_served[group] = bool(feasible.serving(group, ready - group.never))
            if not is_served[group] and not self._has_ended(pod.uid):
                is_first = not any(not hold.is_early for hold in holds)
                is_due = is_first and age_s >= _LATE_S
                if is_due or group not in self._without_choice:
                    holds += self._for_pod(rank, is_due=is_due)
        return tuple(holds)

    def _age_s(self, since: dt.datetime | None) -> float:
        """Return the time since then; 0 if it is unknown."""
        return (self._now - since).total_seconds() if since else 0.0

    def _has_ended(self, uid: str) -> bool:
        """Return whether the hold for a pod took too long; then it gets none for as long."""
        before = self._before.get(uid)
        hold_s = self._age_s(before.since) if before else 0.0
        if before and _TIMEOUT_S < hold_s <= 2 * _TIMEOUT_S:
            self.records[uid] = dataclasses.replace(before, gpus=frozenset())
            return True
        return False

    def _for_pod(self, rank: int, *, is_due: bool) -> Iterator[Hold]:
        pod = self._batch.pods[rank]
        group = self._batch.group[rank]
        mine: set[tuple[str, str]] = set()
        before = self._before.get(pod.uid)
        if before is None or self._age_s(before.since) > _TIMEOUT_S:
            before = HoldRecord(since=self._now, gpus=frozenset())
        choices = self._choices(group, before.gpus)
        for _, _, position, indices in heapq.nsmallest(_MAX_CHOICES, choices):
            cost = sum(self._states[position, index].free_slices for index in indices)
            is_early = self._cost + cost <= self._max_cost
            if not is_early and (mine or not is_due):
                break
            self._cost += cost
            node = self._index.nodes[position]
            self._gpus_on_hold |= {(position, index) for index in indices}
            mine |= {(node.name, gpu.uuid) for gpu in node.gpus if gpu.index in indices}
            yield Hold(rank=rank, position=position, indices=frozenset(indices), is_early=is_early)
        if not mine:
            self._without_choice.add(group)
        else:
            self.records[pod.uid] = dataclasses.replace(before, gpus=frozenset(mine))

    def _choices(
        self, group: batches.Group, earlier_gpus: frozenset[tuple[str, str]]
    ) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
        """Yield sets of GPUs of a node that can serve a pod when they are idle.

        The least used come first, of these the ones that the pod holds already.
        """
        profiles = group.needs.profiles
        if not profiles:
            return
        largest = min(profiles)
        for position in self._nodes - group.never:
            node = self._index.nodes[position]
            uuids = {gpu.index: (node.name, gpu.uuid) for gpu in node.gpus}
            ordered = sorted(
                (state.fill, uuids[index] not in earlier_gpus, index, count)
                for index, state in self._index.states(position).items()
                if (position, index) not in self._gpus_on_hold
                and (count := state.capacity.maximum(largest))
            )
            fill = new = 0
            indices: list[int] = []
            missing = profiles[largest]
            for used, is_new, index, count in ordered:
                fill += used
                new += is_new
                indices.append(index)
                missing -= count
                if missing <= 0:
                    yield fill, new, position, tuple(indices)
                    fill = new = 0
                    indices = []
                    missing = profiles[largest]
