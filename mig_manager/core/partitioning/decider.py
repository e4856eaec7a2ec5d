"""Decide which nodes to repartition so that pending pods get the MIG devices they request.

No change touches an instance in use or a GPU whose use is unknown. The agent checks again before
it acts (``disruption: none``).

Pods are served by priority, then by age. Idle instances that serve a pod stay for it. For the
other pods the decision chooses nodes one by one. It prefers the node that serves the first pod in
order, then the node that serves most pods, then the node that begins the fewest idle GPUs, so that
they stay for large pods, then the node that destroys the fewest instances.

For a large pod that no change can serve, the decision holds GPUs (``holds``): they get no new
instances for pods behind it.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.core import messages, model
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.batch import batches, feasible_nodes
from mig_manager.core.partitioning.decision import (
    changes,
    decisions,
    desired_states,
    holds,
    offers,
    schedulable_pods,
    situations,
    waiting,
)
from mig_manager.core.partitioning.nodes import node_sets

_PREPARING = "devices for likely pods"
_BACKED_OFF = waiting.Cause(
    waiting.WaitReason.NOT_SCHEDULED,
    "it did not use room on several nodes, and gets none for a while",
)


def decide(
    situation: situations.Situation,
    pending: Iterable[demand.PendingPod],
    *,
    base: Mapping[str, Mapping[str, model.DesiredGpu]] | None = None,
    expected: Iterable[demand.PendingPod] = (),
) -> decisions.PartitioningDecision:
    """Decide which nodes to repartition for these pods.

    Args:
        situation: The nodes, the limits, the time, and the past.
        pending: In any order.
        base: By node and UUID, the state to which idle instances are merged back.
        expected: Pods that likely come soon, in order. Nodes are changed so that devices for them
            are ready. Another node may then still change, unless no pod waits that a node could
            serve.
    """
    index, reserved = situation.index, situation.limits.reserved
    batch = batches.Batch(index, pending, reserved)
    decider = _Decider(situation, batch)
    decider.make_room()
    decider.replace_failed_requests()
    decider.merge_back(base or {})
    decision = decider.decision()
    likely = situation.unprepared_pods(expected)
    is_calm = not (decision.waiting or decision.changes)
    if not likely or not (is_calm or decider.changes.spare):
        return decision
    soon = batches.Batch(index, batch.pods, reserved, expected=likely)
    preparing = _Decider(situation, soon, decider)
    preparing.prepare(max_changes=decider.changes.spare or 1)
    return dataclasses.replace(decision, changes=preparing.changes.requested)


class _Decider:
    """Makes one decision."""

    def __init__(
        self,
        situation: situations.Situation,
        batch: batches.Batch,
        earlier: "_Decider | None" = None,
    ) -> None:
        """Build it; the changes of an earlier decider in the same situation count."""
        self._situation = situation
        self._index = index = situation.index
        self._batch = batch
        reserved = situation.limits.reserved
        self._states = desired_states.DesiredStates(index, reserved)
        self._schedulable = schedulable = schedulable_pods.find(situation, batch)
        self._remaining: Sequence[int] = schedulable.others
        self._feasible = feasible_nodes.FeasibleNodes(index, batch, reserved, schedulable.assumed)
        self.changes: changes.Changes = (
            earlier.changes if earlier else changes.Changes(situation, schedulable.nominated)
        )
        self._failed: dict[int, node_sets.NodeSet] = {}
        """By rank of a pod: the nodes whose agents have just failed the layout for it."""
        self._needed = node_sets.EMPTY
        """The nodes whose agents have just failed a layout that is to be requested again."""
        self.holding: holds.GpuHolds = (
            earlier.holding
            if earlier
            else holds.select(situation, batch, self._feasible, self._eligible())
        )

    def decision(self) -> decisions.PartitioningDecision:
        """Return the decision, with the reasons why the remaining pods are not served."""
        unmet: list[decisions.Unmet] = []
        waits = [*self._schedulable.waiting]
        causes = waiting.Causes(
            self._index,
            self._feasible,
            self.changes.why_not_now,
            is_full=self.changes.is_full,
            on_hold=self.holding.nodes,
        )
        # Pods with equal needs share their cause.
        why = functools.cache(causes.why)
        for rank in self._remaining:
            pod, group = self._batch.pods[rank], self._batch.group[rank]
            unplaced = self._schedulable.unplaced.get(rank, node_sets.EMPTY)
            failed = self._failed.get(rank, node_sets.EMPTY)
            is_backed_off = rank in self._schedulable.backed_off
            match _BACKED_OFF if is_backed_off else why(group, unplaced, failed):
                case waiting.Impossible(message):
                    unmet.append(decisions.Unmet(pod=pod, message=message))
                case waiting.Cause(reason, message):
                    waits.append(decisions.WaitingPod(pod=pod, reason=reason, message=message))
        return decisions.PartitioningDecision(
            changes=self.changes.requested,
            unmet=tuple(unmet),
            waiting=tuple(waits),
            room_since=self._schedulable.room_since,
            gpu_holds=self.holding.records,
            ignored=self._schedulable.ignored,
        )

    def make_room(self) -> None:
        """Choose nodes one by one as long as a change serves a pod, then empty GPUs on hold."""
        candidates = self._serve(self._eligible())
        for position in dict.fromkeys(hold.position for hold in self.holding.holds):
            change = self._feasible.trial(position)
            is_free = not self.changes.is_full and position in candidates
            if is_free and change.drain(self.holding.early_gpus(position)):
                desired = self._states.with_change(position, change)
                result = self.changes.request(position, desired, "on hold for a waiting pod")
                if result is changes.RequestResult.TOO_EARLY:
                    self._needed |= node_sets.of([position])

    def prepare(self, *, max_changes: int) -> None:
        """Choose nodes for the expected pods."""
        expected = [rank for rank in self._eligible() if rank >= self._batch.first_expected]
        self._serve(expected, max_changes=max_changes)

    def _eligible(self) -> list[int]:
        return [
            rank
            for rank in self._remaining
            if not (self._batch.pods[rank].needs.unknown or rank in self._schedulable.backed_off)
        ]

    def _serve(self, ranks: list[int], *, max_changes: int | None = None) -> node_sets.NodeSet:
        """Request changes that serve pods, at most so many; return the other candidates."""
        search = offers.Offers(self._index, self._batch, self._feasible)
        skipped = dict(self._schedulable.unplaced)
        opted_in = self._index.opted_in
        candidates = node_sets.of(i for i in opted_in if not self.changes.why_not_now(i))
        remaining = len(opted_in) if max_changes is None else max_changes
        first_expected = self._batch.first_expected
        while ranks and candidates and remaining and not self.changes.is_full:
            best = search.best(candidates, ranks, skipped=skipped, holding=self.holding.holds)
            if best is None:
                break
            position = best.position
            selected = node_sets.of([position])
            best.change.drain(self.holding.early_gpus(position))
            desired = self._states.with_change(position, best.change)
            pods = tuple(self._batch.pods[rank] for rank in best.pods if rank < first_expected)
            likely = tuple(
                self._batch.pods[rank].needs for rank in best.pods if rank >= first_expected
            )
            why = f"room for {messages.count(len(pods), 'pod')}" if pods else _PREPARING
            match self.changes.request(position, desired, why, pods=pods, likely=likely):
                case changes.RequestResult.REQUESTED:
                    with_room = {*best.pods}
                    self._remaining = [rank for rank in self._remaining if rank not in with_room]
                    ranks = [rank for rank in ranks if rank not in with_room]
                    remaining -= 1
                    candidates -= selected
                case changes.RequestResult.TOO_EARLY:
                    self._needed |= selected
                    # The node may still serve the pods that need less.
                    largest = min(best.pods, key=lambda rank: self._batch.pods[rank].needs.devices)
                    for nodes in (self._failed, skipped):
                        nodes[largest] = nodes.get(largest, node_sets.EMPTY) | selected
                case changes.RequestResult.DROPPED:
                    candidates -= selected
        return candidates

    def replace_failed_requests(self) -> None:
        """Replace failed requests of a partitioner that no pod needs.

        Otherwise the node counts as failed, until a later agent serves an obsolete request.
        """
        for position in self._index.opted_in:
            is_failed = self._index.nodes[position].agent.is_own_failure
            if is_failed and self._can_change(position):
                why = "no pod needs the request that its agent failed"
                present = self._states.present(position)
                self.changes.request(position, present, why, is_replacement=True)

    def merge_back(self, base: Mapping[str, Mapping[str, model.DesiredGpu]]) -> None:
        """Return idle instances to the base layout on nodes without demand for long."""
        after_s, on_hold = self._situation.limits.merge_back_after_s, self.holding.nodes
        for position in self._index.opted_in if after_s else ():
            name = self._index.nodes[position].name
            since = self._situation.history.demand_at.get(name)
            is_due = since and self._situation.age_s(since) >= after_s
            # A hold has just destroyed the idle instances of its GPUs.
            is_needed = position in on_hold or self._feasible.has_assumed(position)
            if not is_due or is_needed or not self._can_change(position):
                continue
            desired = self._states.with_base(position, base.get(name, {}))
            if self._states.keeps_reserved(position, desired):
                why = "no pod has requested its idle instances"
                self.changes.request(position, desired, why)

    def _can_change(self, position: int) -> bool:
        """Return whether a node can be changed now for no pod."""
        return position not in self._needed and self.changes.can_change(position)
