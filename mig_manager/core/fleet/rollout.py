"""Decide which nodes of a rollout start next, within a limit of unavailable nodes.

All state is on the nodes: a rollout can be interrupted and continued by any user, and concurrent
rollouts see each other's nodes.
"""

import collections
import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

from mig_manager.core.fleet import (
    fleet_nodes,
    goals,
    node_amounts,
    node_progress,
    progress_tracker,
)


class RolloutPhase(enum.Enum):
    """The progress of the whole rollout."""

    ROLLING = "rolling"
    PAUSING = "pausing"  # a node failed: no further node starts, nodes in progress finish
    DONE = "done"
    FAILED = "failed"  # no further node can start, and not every node has the layout
    PAUSED = "paused"
    STALLED = "stalled"
    """No node can start, because too many are unavailable for reasons outside the rollout, or
    agents have other content of the layout."""

    @property
    def is_over(self) -> bool:
        """Whether no node is in progress or about to start."""
        return self not in (RolloutPhase.ROLLING, RolloutPhase.PAUSING)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDecision:
    """The state of all nodes, and the next actions."""

    phase: RolloutPhase
    nodes: tuple[node_progress.NodeProgress, ...]  # in their order
    max_unavailable: int  # how many nodes may be unavailable
    start: tuple[str, ...] = ()  # nodes on which to request the layout now
    failures: tuple[node_progress.NodeProgress, ...] = ()
    """Last failures of nodes that are not ``SUCCESS``, including nodes that retry now."""
    withdraw: tuple[str, ...] = ()
    """Nodes on which to restore the previous request, because their agent does not respond."""
    others: tuple[str, ...] = ()
    """Selected nodes that an undo omits, and that count as unavailable now."""

    @property
    def unavailable(self) -> tuple[str, ...]:
        """Nodes that count as unavailable now."""
        return (*(node.name for node in self.nodes if node.is_unavailable), *self.others)

    def of(
        self, *states: node_progress.NodeProgressState
    ) -> tuple[node_progress.NodeProgress, ...]:
        """Return the nodes in these states."""
        return tuple(node for node in self.nodes if node.state in states)

    @property
    def incomplete(self) -> tuple[node_progress.NodeProgress, ...]:
        """Nodes with unreachable GPUs on which the layout is not active."""
        return tuple(node for node in self.nodes if node.unreachable)

    @property
    def counts(self) -> dict[str, int]:
        """How many nodes are in each state."""
        counted = collections.Counter(node.state for node in self.nodes)
        return {state.value: counted[state] for state in node_progress.NodeProgressState}


class _Rest(NamedTuple):
    """How long no node's state has changed."""

    states: tuple[node_progress.NodeProgressState | None, ...] = ()
    """None: a failure, of any kind; no states while a node is moving or awaited."""
    since_s: float = 0.0


class Rollout:
    """Decides after every read of the nodes; measures their durations."""

    def __init__(self, goal: goals.RolloutGoal, limits: goals.RolloutLimits) -> None:
        self._goal = goal
        self._limits = limits
        self._memories: dict[str, progress_tracker.NodeMemory] = {}
        self._tracker = progress_tracker.ProgressTracker(goal, limits)
        self._has_begun = False
        self._rest = _Rest()

    def record_request(self, name: str) -> None:
        """Record that a node's label was written."""
        self._memories[name] = dataclasses.replace(self._memories[name], is_requested=True)

    def record_withdrawal(self, name: str) -> None:
        """Record that a node's previous request was restored."""
        self._memories[name] = dataclasses.replace(self._memories[name], is_withdrawn=True)

    def decide(self, nodes: Sequence[fleet_nodes.FleetNode], now_s: float) -> RolloutDecision:
        """Decide the next actions for the selected nodes; ``now_s`` is monotonic."""
        by_name = {node.name: node for node in sorted(nodes, key=lambda node: node.order)}
        advanced: list[progress_tracker.Advanced] = []
        omitted: list[progress_tracker.Advanced] = []
        for node in by_name.values():
            memory = self._tracker.follow(self._memories.get(node.name), node)
            if self._goal.includes(node) or memory.has_joined:
                advanced.append(
                    self._tracker.advance(memory, node, now_s, has_begun=self._has_begun)
                )
            else:
                omitted.append(self._tracker.omit(memory, node, now_s))
        progress = [each for _, each in advanced]
        self._memories.update((each.name, memory) for memory, each in (*advanced, *omitted))
        self._has_begun = True
        is_moving = any(map(self._is_moving, advanced))
        # A node that fails repeatedly changes often, but never lets another node start.
        is_awaiting = is_moving or any(
            self._is_awaiting(each, now_s) for each in (*advanced, *omitted)
        )
        states = (
            ()
            if is_awaiting
            else tuple(None if p.state in node_progress.BAD else p.state for p in progress)
        )
        if is_awaiting or states != self._rest.states:
            self._rest = _Rest(states, now_s)
        phase = self._phase(progress, is_moving=is_moving, rest_s=now_s - self._rest.since_s)
        if not nodes:
            # All were removed from the cluster, or from the selection.
            phase = RolloutPhase.FAILED
        decision = RolloutDecision(
            phase=phase,
            nodes=tuple(progress),
            max_unavailable=node_amounts.scale(
                self._limits.max_unavailable, sum(node.has_published for node in nodes)
            ),
            failures=tuple(memory.failure for memory, _ in advanced if memory.failure),
            withdraw=tuple(
                each.name
                for memory, each in advanced
                if each.state is node_progress.NodeProgressState.NO_RESPONSE
                and self._tracker.is_ours(memory, by_name[each.name])
            ),
            others=tuple(each.name for _, each in omitted if each.is_unavailable),
        )
        if phase not in (RolloutPhase.ROLLING, RolloutPhase.STALLED):
            return decision
        start = _startable(decision)
        # A node may have become available in this very decision.
        phase = RolloutPhase.ROLLING if start else phase
        return dataclasses.replace(decision, phase=phase, start=start)

    def _is_moving(self, pair: progress_tracker.Advanced) -> bool:
        memory, progress = pair
        if self._limits.pauses and memory.has_failed:
            return False
        return progress.state is node_progress.NodeProgressState.PENDING or (
            progress.is_retried and progress.seconds < self._limits.node_timeout_s
        )

    def _is_awaiting(self, pair: progress_tracker.Advanced, now_s: float) -> bool:
        """Return whether another request may finish in time, so that a node can start."""
        memory, progress = pair
        since_s = memory.unfinished.since_s if memory.unfinished else now_s
        return progress.is_reserved and now_s - since_s < self._limits.node_timeout_s

    def _phase(
        self, progress: Sequence[node_progress.NodeProgress], *, is_moving: bool, rest_s: float
    ) -> RolloutPhase:
        has_more = any(p.state is node_progress.NodeProgressState.TO_DO for p in progress)
        pauses = self._limits.pauses and any(
            memory.has_failed for memory in self._memories.values()
        )
        if pauses and (has_more or is_moving):
            return RolloutPhase.PAUSING if is_moving else RolloutPhase.PAUSED
        if is_moving:
            return RolloutPhase.ROLLING
        if not has_more:
            is_done = all(p.state is node_progress.NodeProgressState.SUCCESS for p in progress)
            return RolloutPhase.DONE if is_done else RolloutPhase.FAILED
        is_stalled = rest_s >= self._limits.silence_timeout_s
        return RolloutPhase.STALLED if is_stalled else RolloutPhase.ROLLING


def _startable(decision: RolloutDecision) -> tuple[str, ...]:
    """Return the nodes that may start now."""
    in_progress = sum(
        node.state in node_progress.MOVING or node.is_retried for node in decision.nodes
    )
    unavailable = len(decision.unavailable)
    startable: list[str] = []
    free = (
        node
        for node in decision.of(node_progress.NodeProgressState.TO_DO)
        if not (node.is_reserved or node.is_outdated)
    )
    # Nodes that are already unavailable do not add to the limit.
    for node in free:
        fits = node.is_unavailable or unavailable < decision.max_unavailable
        if fits and in_progress + len(startable) < decision.max_unavailable:
            unavailable += not node.is_unavailable
            startable.append(node.name)
    return tuple(startable)
