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
import datetime as dt
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from mig_manager.core import messages, model
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.batch import batches, feasible_nodes
from mig_manager.core.partitioning.decision import (
    changes,
    decisions,
    desired_states,
    holds,
    offers,
    past_decisions,
    schedulable_pods,
    waiting,
)
from mig_manager.core.partitioning.nodes import node_index, node_sets

_PREPARING = "devices for likely pods"


def decide(  # noqa: PLR0913 - what a decision depends on
    index: node_index.NodeIndex,
    pending: Iterable[demand.Pending],
    limits: decisions.PartitionerLimits,
    *,
    now: dt.datetime,
    history: past_decisions.History,
    base: Mapping[str, Mapping[str, model.DesiredGpu]] | None = None,
    expected: Iterable[demand.Pending] = (),
) -> decisions.PartitioningDecision:
    """Decide which nodes to repartition for these pods.

    Args:
        index: The nodes, with times by the clock of ``now``.
        pending: In any order.
        limits: The limits of the partitioner.
        now: The present time.
        history: Of the last decision.
        base: By node and UUID, the state to which idle instances are merged back.
        expected: Pods that likely come soon, in order. Nodes are changed so that devices for them
            are ready. Another node may then still change, unless no pod waits that a node could
            serve.
    """
    batch = batches.Batch(index, pending, limits.reserved)
    decider = _Decider(index, batch, limits, now, history)
    holding = decider.gpu_holds()
    decider.make_room(holding)
    decider.withdraw()
    decider.merge_back(base or {}, holding)
    decision = decider.decision(holding)
    likely = past_decisions.unprepared_pods(history, index.nodes, expected, now=now)
    is_calm = not (decision.waiting or decision.changes)
    max_changes = decider.changes.spare or int(is_calm)
    if likely and max_changes:
        soon = batches.Batch(index, batch.pods, limits.reserved, expected=likely)
        preparing = _Decider(index, soon, limits, now, history, decider.changes)
        preparing.prepare(holding, max_changes)
        decision = dataclasses.replace(decision, changes=preparing.changes.requested)
    return decision


class _Decider:
    """Makes one decision."""

    def __init__(
        self,
        index: node_index.NodeIndex,
        batch: batches.Batch,
        limits: decisions.PartitionerLimits,
        now: dt.datetime,
        history: past_decisions.History,
        earlier: changes.Changes | None = None,
    ) -> None:
        self._index = index
        self._batch = batch
        self._limits = limits
        self._now = now
        self._history = history
        self._states = desired_states.DesiredStates(index, limits.reserved)
        self._schedulable = schedulable_pods.find(index, batch, now=now, history=history)
        self._remaining: Sequence[int] = self._schedulable.others
        self._feasible = feasible_nodes.FeasibleNodes(
            index, batch, limits.reserved, self._schedulable.assumed
        )
        nominated = self._schedulable.nominated
        self.changes = earlier or changes.Changes(index, limits, now, history, nominated)

    def decision(self, holding: holds.GpuHolds) -> decisions.PartitioningDecision:
        """Return the decision, with the reasons why the remaining pods are not served."""
        unmet: list[decisions.Unmet] = []
        waits = [*self._schedulable.waiting]
        causes = waiting.Causes(
            self._index,
            self._feasible,
            self.changes.why_not_now,
            is_full=self.changes.is_full,
            on_hold=holding.nodes,
        )
        # Pods with equal needs share their cause.
        why = functools.cache(causes.why)
        for rank in self._remaining:
            pod = self._batch.pods[rank]
            match self._why(rank, why):
                case waiting.Impossible(message):
                    unmet.append(decisions.Unmet(pod=pod, message=message))
                case waiting.Cause(reason, message):
                    waits.append(decisions.WaitingPod(pod=pod, reason=reason, message=message))
        return decisions.PartitioningDecision(
            changes=self.changes.requested,
            unmet=tuple(unmet),
            waiting=tuple(waits),
            room_since=self._schedulable.room_since,
            gpu_holds=holding.records,
            ignored=self._schedulable.ignored,
        )

    def _why(
        self,
        rank: int,
        why: Callable[[batches.Group, node_sets.NodeSet], waiting.Cause | waiting.Impossible],
    ) -> waiting.Cause | waiting.Impossible:
        if rank in self._schedulable.backed_off:
            message = "it did not use room on several nodes, and gets none for a while"
            return waiting.Cause(waiting.WaitReason.NOT_SCHEDULED, message)
        unplaced = self._schedulable.unplaced.get(rank, node_sets.EMPTY)
        return why(self._batch.group[rank], unplaced)

    def gpu_holds(self) -> holds.GpuHolds:
        """Return the GPUs to hold for pods that have waited without room."""
        return holds.select(
            self._index,
            self._batch,
            self._feasible,
            self._eligible(),
            before=self._history.gpu_holds,
            now=self._now,
        )

    def make_room(self, holding: holds.GpuHolds) -> None:
        """Choose nodes one by one as long as a change serves a pod, then empty GPUs on hold."""
        candidates = self._serve(self._eligible(), holding)
        for position in dict.fromkeys(hold.position for hold in holding.holds):
            change = self._feasible.trial(position)
            is_free = not self.changes.is_full and position in candidates
            if is_free and change.drain(holding.early_gpus(position)):
                desired = self._states.with_change(position, change)
                self.changes.request(position, desired, "on hold for a waiting pod")

    def prepare(self, holding: holds.GpuHolds, max_changes: int) -> None:
        """Choose nodes for the expected pods."""
        expected = [rank for rank in self._eligible() if rank >= self._batch.first_expected]
        self._serve(expected, holding, max_changes=max_changes)

    def _eligible(self) -> list[int]:
        return [
            rank
            for rank in self._remaining
            if not (self._batch.pods[rank].needs.unknown or rank in self._schedulable.backed_off)
        ]

    def _serve(
        self, ranks: list[int], holding: holds.GpuHolds, *, max_changes: int | None = None
    ) -> node_sets.NodeSet:
        """Request changes that serve pods, at most so many; return the other candidates."""
        search = offers.Offers(self._index, self._batch, self._feasible)
        skipped = dict(self._schedulable.unplaced)
        opted_in = self._index.opted_in
        candidates = node_sets.of(i for i in opted_in if not self.changes.why_not_now(i))
        remaining = len(opted_in) if max_changes is None else max_changes
        first_expected = self._batch.first_expected
        while ranks and candidates and remaining and not self.changes.is_full:
            best = search.best(candidates, ranks, skipped=skipped, holding=holding.holds)
            if best is None:
                break
            position = best.position
            selected = node_sets.of([position])
            search.forget(best.pods)
            best.change.drain(holding.early_gpus(position))
            desired = self._states.with_change(position, best.change)
            pods = tuple(self._batch.pods[rank] for rank in best.pods if rank < first_expected)
            likely = tuple(
                self._batch.pods[rank].needs for rank in best.pods if rank >= first_expected
            )
            why = f"room for {messages.count(len(pods), 'pod')}" if pods else _PREPARING
            if self.changes.request(position, desired, why, pods=pods, likely=likely):
                with_room = {*best.pods}
                self._remaining = [rank for rank in self._remaining if rank not in with_room]
                ranks = [rank for rank in ranks if rank not in with_room]
                remaining -= 1
            elif self.changes.is_too_early(position):
                # The node may still serve the pods that need less.
                largest = min(best.pods, key=lambda rank: self._batch.pods[rank].needs.devices)
                skipped[largest] = skipped.get(largest, node_sets.EMPTY) | selected
                continue
            candidates -= selected
        return candidates

    def withdraw(self) -> None:
        """Replace failed requests of a partitioner that no pod needs.

        Otherwise the node counts as failed, until a later agent serves an obsolete request.
        """
        for position in self._index.opted_in:
            is_failed = self._index.nodes[position].agent.is_own_failure
            if is_failed and self.changes.can_change(position):
                why = "no pod needs the request that its agent failed"
                present = self._states.present(position)
                self.changes.request(position, present, why, is_withdrawal=True)

    def merge_back(
        self, base: Mapping[str, Mapping[str, model.DesiredGpu]], holding: holds.GpuHolds
    ) -> None:
        """Return idle instances to the base layout on nodes without demand for long."""
        after_s, on_hold = self._limits.merge_back_after_s, holding.nodes
        for position in self._index.opted_in if after_s else ():
            name = self._index.nodes[position].name
            since = self._history.demand_at.get(name)
            is_due = since and (self._now - since).total_seconds() >= after_s
            # A hold has just destroyed the idle instances of its GPUs.
            is_needed = position in on_hold or self._feasible.has_assumed(position)
            if not is_due or is_needed or not self.changes.can_change(position):
                continue
            desired = self._states.with_base(position, base.get(name, {}))
            if self._states.keeps_reserved(position, desired):
                why = "no pod has requested its idle instances"
                self.changes.request(position, desired, why)
