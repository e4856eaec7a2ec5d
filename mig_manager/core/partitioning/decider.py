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
from collections.abc import Iterable, Mapping, Sequence

from mig_manager.core import messages, model
from mig_manager.core.partitioning import (
    batches,
    changes,
    decisions,
    demand,
    desired_states,
    holds,
    kept_room,
    node_index,
    node_sets,
    offers,
    partitioned,
    past_decisions,
    waiting,
)


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
    decider = _Decider(batch, limits, now, history)
    decider.make_room()
    decider.withdraw()
    decider.merge_back(base or {})
    decision = decider.decision()
    likely = past_decisions.unprepared_pods(history, index.nodes, expected, now=now)
    is_calm = not (decision.waiting or decision.changes)
    most = decider.changes.spare or int(is_calm)
    if likely and most:
        soon = batches.Batch(index, batch.pods, limits.reserved, expected=likely)
        preparing = _Decider(soon, limits, now, history, decider.changes)
        preparing.prepare(first=len(batch.pods), most=most)
        ready = (
            dataclasses.replace(
                each,
                pods=(),
                likely=tuple(pod.needs for pod in each.pods),
                why="devices for likely pods",
            )
            for each in preparing.changes.requested[len(decision.changes) :]
        )
        decision = dataclasses.replace(decision, changes=(*decision.changes, *ready))
    return decision


class _Decider:
    """Makes one decision."""

    def __init__(
        self,
        batch: batches.Batch,
        limits: decisions.PartitionerLimits,
        now: dt.datetime,
        history: past_decisions.History,
        earlier: changes.Changes | None = None,
    ) -> None:
        self._batch = batch
        self._limits = limits
        self._now = now
        self._history = history
        self._states = desired_states.DesiredStates(batch.index, limits.reserved)
        self._kept = kept_room.KeptRoom(batch, now, history)
        self._remaining = self._kept.keep()
        nominated = frozenset(self._kept.nominated)
        self.changes = earlier or changes.Changes(batch, limits, now, history, nominated)
        self._gpu_holds: Mapping[str, holds.HoldRecord] = {}

    def decision(self) -> decisions.PartitioningDecision:
        """Return the decision, with the reasons why the remaining pods are not served."""
        unmet: list[decisions.Unmet] = []
        waits = list(self._kept.waiting)
        causes = waiting.Causes(
            self._batch,
            self.changes.why_not_now,
            is_full=self.changes.is_full,
            on_hold=node_sets.of(map(self._batch.index.position.__getitem__, self._on_hold)),
        )
        for rank in self._remaining:
            pod = self._batch.pods[rank]
            reason, message = self._why(rank, causes)
            if reason is None:
                unmet.append(decisions.Unmet(pod=pod, message=message))
            else:
                waits.append(decisions.WaitingPod(pod=pod, reason=reason, message=message))
        return decisions.PartitioningDecision(
            changes=self.changes.requested,
            unmet=tuple(unmet),
            waiting=tuple(waits),
            room_since=self._kept.room_since,
            gpu_holds=self._gpu_holds,
            ignored=self._kept.ignored,
        )

    @property
    def _on_hold(self) -> set[str]:
        """The nodes with a hold."""
        return {name for record in self._gpu_holds.values() for name, _ in record.gpus}

    def _why(self, rank: int, causes: waiting.Causes) -> waiting.Cause:
        if self._kept.is_backed_off(rank):
            message = "it did not use room on several nodes, and gets none for a while"
            return waiting.WaitReason.NOT_SCHEDULED, message
        return causes.why(rank, self._kept.unplaced.get(rank, node_sets.EMPTY))

    def make_room(self) -> None:
        """Choose nodes one by one as long as a change serves a pod, then empty GPUs on hold."""
        ranks, index = self._eligible(), self._batch.index
        holding = self._holds(ranks)
        candidates = self._serve(ranks, holding)
        for name in dict.fromkeys(hold.node for hold in holding):
            position = index.position[name]
            node, room = index.nodes[position], self._batch.room(index.nodes[position])
            is_free = not self.changes.is_full and position in candidates
            if is_free and room.drain(_early(holding, node)):
                self.changes.request(
                    node, self._states.with_room(node, room), (), "on hold for a waiting pod"
                )

    def prepare(self, *, first: int, most: int) -> None:
        """Choose nodes for the pods of this rank and behind."""
        ranks = self._eligible()
        self._serve([rank for rank in ranks if rank >= first], self._holds(ranks), most=most)

    def _eligible(self) -> list[int]:
        return [
            rank
            for rank in self._remaining
            if not (self._batch.pods[rank].needs.unknown or self._kept.is_backed_off(rank))
        ]

    def _serve(
        self, ranks: list[int], holding: Sequence[holds.Hold], *, most: int | None = None
    ) -> node_sets.NodeSet:
        """Request changes that serve pods, at most so many; return the other candidates."""
        index, search = self._batch.index, offers.Offers(self._batch)
        skipped = dict(self._kept.unplaced)
        candidates = node_sets.of(
            index.position[node.name]
            for node in self.changes.own
            if not self.changes.why_not_now(node)[1]
        )
        most = len(self.changes.own) if most is None else most
        while ranks and candidates and most and not self.changes.is_full:
            best = search.best(candidates, ranks, skipped=skipped, holding=holding)
            if best is None:
                break
            node, selected = best.node, node_sets.of([index.position[best.node.name]])
            search.forget(best.pods)
            pods = tuple(self._batch.pods[rank] for rank in best.pods)
            best.room.drain(_early(holding, node))
            why = f"room for {messages.count(len(pods), 'pod')}"
            if self.changes.request(node, self._states.with_room(node, best.room), pods, why):
                served = {*best.pods}
                self._remaining = [rank for rank in self._remaining if rank not in served]
                ranks = [rank for rank in ranks if rank not in served]
                most -= 1
            elif self.changes.is_too_early(node):
                # The node may still serve the pods behind the first.
                skipped[best.pods[0]] = skipped.get(best.pods[0], node_sets.EMPTY) | selected
                continue
            candidates -= selected
        return candidates

    def _holds(self, ranks: Iterable[int]) -> tuple[holds.Hold, ...]:
        """Return the GPUs to hold for pods that have waited without room."""
        position, own_nodes = self._batch.index.position, self.changes.own
        ready = node_sets.of(position[node.name] for node in own_nodes if not node.unusable)
        changing = node_sets.of(position[node.name] for node in own_nodes if node.is_changing)
        selection = holds.Holds(self._batch, ready | changing, self._history.gpu_holds, self._now)
        result = selection.choose(ranks, ready)
        self._gpu_holds = selection.records
        return result

    def withdraw(self) -> None:
        """Replace failed requests of a partitioner that no pod needs.

        Otherwise the node counts as failed, until a later agent serves an obsolete request.
        """
        for node in self.changes.own:
            if node.is_own_failure and self.changes.can_change(node):
                why = "no pod needs the request that its agent failed"
                present = self._states.present(node)
                self.changes.request(node, present, (), why, is_withdrawal=True)

    def merge_back(self, base: Mapping[str, Mapping[str, model.DesiredGpu]]) -> None:
        """Return idle instances to the base layout on nodes without demand for long."""
        after_s, on_hold = self._limits.merge_back_after_s, self._on_hold
        for node in self.changes.own if after_s else ():
            since = self._history.demand_at.get(node.name)
            is_due = since and (self._now - since).total_seconds() >= after_s
            # A hold has just destroyed the idle instances of its GPUs.
            is_needed = node.name in on_hold or self._batch.is_claimed(node)
            if not is_due or is_needed or not self.changes.can_change(node):
                continue
            desired = self._states.with_base(node, base.get(node.name, {}))
            if self._states.keeps_reserved(node, desired):
                why = "no pod has requested its idle instances"
                self.changes.request(node, desired, (), why)


def _early(holding: Iterable[holds.Hold], node: partitioned.PartitionedNode) -> set[int]:
    """Return the GPUs of a node whose idle instances a change destroys."""
    early = (hold.indices for hold in holding if hold.is_early and hold.node == node.name)
    return {index for indices in early for index in indices}
