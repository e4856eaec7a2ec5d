"""Decide which nodes of a rollout start next, within a limit of unavailable nodes.

All state is on the nodes: a rollout can be interrupted and continued by any user, and concurrent
rollouts see each other's nodes. A node counts as unavailable if it is not ready, cordoned or
tainted. It also counts from the request, even before the drain, until its agent has finished and
will not retry.
"""

import collections
import dataclasses
import enum
import math
import re
from collections.abc import Sequence

from mig_manager.core import model
from mig_manager.core.fleet import goals
from mig_manager.core.fleet import nodes as fleet_nodes

_AMOUNT = re.compile(r"([1-9][0-9]{0,5})|(100|[1-9]?[0-9])%")


class NodeProgressState(enum.Enum):
    """The progress of a node; the values are a public contract."""

    APPLIED = "applied"
    TO_DO = "to-do"
    IN_PROGRESS = "in-progress"
    FAILED = "failed"  # as its agent reports; it retries only if ``NodeProgress.is_retried``
    TIMED_OUT = "timed-out"  # not applied within ``node_timeout_s``
    NO_RESPONSE = "no-response"  # its agent does not respond; the previous request is restored
    SKIPPED = "skipped"  # without a request: it is not ready, or no agent has ever reported
    SUPERSEDED = "superseded"  # another layout was requested meanwhile


BAD = frozenset(
    {
        NodeProgressState.FAILED,
        NodeProgressState.TIMED_OUT,
        NodeProgressState.NO_RESPONSE,
        NodeProgressState.SUPERSEDED,
    }
)
"""Failures, for ``RolloutLimits.pauses``."""


def parse_amount(text: str) -> str:
    """Return an amount of nodes; ValueError: it is neither a number nor a percentage."""
    if not _AMOUNT.fullmatch(text):
        raise ValueError("is neither a number of nodes, at least 1, nor a percentage")
    return text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Limits of a rollout; seconds."""

    max_unavailable: str = "1"
    """A number of nodes, or a percentage of selected nodes, rounded down and at least one."""
    pauses: bool = False  # whether no further node starts after a failure
    node_timeout_s: float = 1800.0  # for one node, without its wait for a slot
    silence_timeout_s: float = 120.0  # for the response of an agent

    def most(self, count: int) -> int:
        """Return how many of ``count`` nodes may be unavailable."""
        if self.max_unavailable.endswith("%"):
            return max(1, math.floor(int(self.max_unavailable[:-1]) * count / 100))
        return int(self.max_unavailable)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgress:
    """One node of a rollout."""

    name: str
    state: NodeProgressState
    phase: str = ""
    reason: str = ""
    message: str = ""
    is_retried: bool = False
    seconds: float = 0.0  # since it was first seen in progress
    before: str | None = None  # the layout that ``undo`` requests
    is_unavailable: bool = False
    unreachable: tuple[str, ...] = ()
    """Unreachable GPUs of an ``APPLIED`` node: the layout is not active on them."""


class RolloutPhase(enum.Enum):
    """The progress of the whole rollout."""

    ROLLING = "rolling"
    PAUSING = "pausing"  # a node failed: no further node starts, nodes in progress finish
    DONE = "done"
    FAILED = "failed"  # no further node can start, and not every node has the layout
    PAUSED = "paused"
    STALLED = "stalled"
    """No node can start, because too many are unavailable for reasons outside the rollout."""

    @property
    def is_over(self) -> bool:
        """Whether no node is in progress or about to start."""
        return self not in (RolloutPhase.ROLLING, RolloutPhase.PAUSING)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDecision:
    """The state of all nodes, and the next actions."""

    phase: RolloutPhase
    nodes: tuple[NodeProgress, ...]  # ascending by name
    most: int  # how many nodes may be unavailable
    start: tuple[str, ...] = ()  # nodes on which to request the layout now
    failures: tuple[NodeProgress, ...] = ()
    """Last failures of nodes that are not ``APPLIED``, including nodes that retry now."""
    withdraw: tuple[str, ...] = ()
    """Nodes on which to restore the previous request, because their agent does not respond."""

    @property
    def unavailable(self) -> tuple[str, ...]:
        """Nodes that count as unavailable now."""
        return tuple(node.name for node in self.nodes if node.is_unavailable)

    def of(self, *states: NodeProgressState) -> tuple[NodeProgress, ...]:
        """Return the nodes in these states."""
        return tuple(node for node in self.nodes if node.state in states)

    @property
    def incomplete(self) -> tuple[NodeProgress, ...]:
        """Nodes with unreachable GPUs on which the layout is not active."""
        return tuple(node for node in self.nodes if node.unreachable)

    @property
    def counts(self) -> dict[str, int]:
        """How many nodes are in each state."""
        counted = collections.Counter(node.state for node in self.nodes)
        return {state.value: counted[state] for state in NodeProgressState}


@dataclasses.dataclass(slots=True)
class _Track:
    """What a rollout remembers of one node between decisions."""

    is_requested: bool = False
    """Whether its label was written and is not visible yet."""
    has_joined: bool = False  # whether it has shown the target label during this rollout
    target: str | None = None
    """The label's value when it joined: an undo's is unknown once the mark is gone."""
    is_withdrawn: bool = False  # whether its previous request was restored
    since_s: float | None = None
    """Since when it is in progress, without its wait for a slot."""
    unanswered_s: float | None = None
    """Since when its agent has not responded to its label."""
    failure: NodeProgress | None = None  # the last one; None if it is applied
    has_failed: bool | None = None
    """Whether it failed during the rollout, even if it was applied later; None: never failed.

    False: it had failed at the start, and does not pause the rollout."""


class Rollout:
    """Decides after every read of the nodes; measures their durations."""

    def __init__(self, goal: goals.Goal, limits: RolloutLimits) -> None:
        self._goal = goal
        self._limits = limits
        self._tracks: collections.defaultdict[str, _Track] = collections.defaultdict(_Track)
        self._has_begun = False
        self._before: tuple[object, float] = ((), 0.0)
        """The nodes' states at their last change, and its time."""

    def requested(self, name: str) -> None:
        """Record that a node's label was written."""
        self._tracks[name].is_requested = True

    def withdrawn(self, name: str) -> None:
        """Record that a node's previous request was restored."""
        self._tracks[name].is_withdrawn = True

    def decide(self, nodes: Sequence[fleet_nodes.FleetNode], now_s: float) -> RolloutDecision:
        """Decide the next actions for the selected nodes; ``now_s`` is monotonic."""
        included = (
            node
            for node in nodes
            if self._goal.includes(node) or self._tracks[node.name].has_joined
        )
        ordered = sorted(included, key=lambda node: node.name)
        progress = [self._progress(node, now_s) for node in ordered]
        phase = self._phase(progress, now_s)
        failures = (self._tracks[node.name].failure for node in ordered)
        decision = RolloutDecision(
            phase=phase,
            nodes=tuple(progress),
            most=self._limits.most(len(ordered)),
            failures=tuple(filter(None, failures)),
            withdraw=tuple(
                node.name
                for node, each in zip(ordered, progress, strict=True)
                if each.state is NodeProgressState.NO_RESPONSE and self._is_ours(node)
            ),
        )
        if phase is not RolloutPhase.ROLLING:
            return decision
        return dataclasses.replace(decision, start=_startable(decision))

    def _target(self, node: fleet_nodes.FleetNode) -> str | None:
        track = self._tracks[node.name]
        return track.target if track.has_joined else self._goal.target(node)

    def _is_ours(self, node: fleet_nodes.FleetNode) -> bool:
        """Return whether a rollout made the node's request, and it is not withdrawn."""
        is_withdrawn = self._tracks[node.name].is_withdrawn
        return not is_withdrawn and self._goal.withdrawal(node) is not None

    def _phase(self, progress: Sequence[NodeProgress], now_s: float) -> RolloutPhase:
        for each in progress:
            track = self._tracks[each.name]
            if each.state in BAD:
                track.failure = each
                if track.has_failed is None:
                    track.has_failed = self._has_begun
            elif each.state is NodeProgressState.APPLIED:
                track.failure = None
        self._has_begun = True
        is_moving = any(
            p.state is NodeProgressState.IN_PROGRESS
            or (p.is_retried and p.seconds < self._limits.node_timeout_s)
            for p in progress
            if not (self._limits.pauses and self._tracks[p.name].has_failed)
        )
        has_more = any(p.state is NodeProgressState.TO_DO for p in progress)
        pauses = self._limits.pauses and any(track.has_failed for track in self._tracks.values())
        if pauses and (has_more or is_moving):
            return RolloutPhase.PAUSING if is_moving else RolloutPhase.PAUSED
        if is_moving:
            self._before = (), now_s
            return RolloutPhase.ROLLING
        if not has_more:
            is_done = all(p.state is NodeProgressState.APPLIED for p in progress)
            return RolloutPhase.DONE if is_done else RolloutPhase.FAILED
        # A node that fails repeatedly changes often, but never lets another node start.
        states = tuple(p.state if p.state not in BAD else None for p in progress)
        if states != self._before[0]:
            self._before = states, now_s
        is_stalled = now_s - self._before[1] >= self._limits.silence_timeout_s
        return RolloutPhase.STALLED if is_stalled else RolloutPhase.ROLLING

    def _progress(self, node: fleet_nodes.FleetNode, now_s: float) -> NodeProgress:
        state, message = self._state(node, now_s)
        reported, track = node.answer, self._tracks[node.name]
        is_moving = state in (NodeProgressState.IN_PROGRESS, NodeProgressState.TIMED_OUT)
        is_silent = state is NodeProgressState.NO_RESPONSE
        if state in (NodeProgressState.APPLIED, NodeProgressState.TO_DO):
            track.since_s = None
        # An agent that returns acts on its request until the request is withdrawn.
        is_withdrawn = is_silent and not self._is_ours(node)
        return NodeProgress(
            name=node.name,
            state=state,
            phase=reported.phase if reported and is_moving else "",
            reason=reported.reason if reported else "",
            message=message or (reported.message if reported else ""),
            is_retried=state is NodeProgressState.FAILED
            and bool(reported and reported.is_retried),
            seconds=0.0 if track.since_s is None else now_s - track.since_s,
            before=node.mark.before if node.mark else None,
            unreachable=reported.unreachable
            if reported and state is NodeProgressState.APPLIED
            else (),
            is_unavailable=node.is_unavailable
            or is_moving
            or not (is_withdrawn or self._is_stable(node, now_s))
            or (is_silent and not is_withdrawn),
        )

    def _is_stable(self, node: fleet_nodes.FleetNode, now_s: float) -> bool:
        """Return whether a node will not change; a silent agent changes nothing."""
        track = self._tracks[node.name]
        if node.is_finished or node.has_responded:
            track.unanswered_s = None
            return node.is_finished
        if track.unanswered_s is None:
            track.unanswered_s = now_s
        return now_s - track.unanswered_s >= self._limits.silence_timeout_s

    def _state(self, node: fleet_nodes.FleetNode, now_s: float) -> tuple[NodeProgressState, str]:
        """Return a node's state, with a message if its agent reports none."""
        track = self._tracks[node.name]
        if track.is_withdrawn:
            why = "no agent responded; the previous request is restored"
            return NodeProgressState.NO_RESPONSE, why
        # NVIDIA's manager sets only the state.
        if node.status is None and not node.gpus:
            return (
                NodeProgressState.SKIPPED,
                "no agent has ever published its GPUs; is one running there?",
            )
        if node.requested == self._target(node):
            track.is_requested, track.has_joined, track.target = False, True, node.requested
            return self._state_of_requested(node, now_s)
        if track.is_requested:
            return self._state_in_time(node, now_s)
        if track.has_joined or self._goal.is_superseded(node):
            requested = node.requested and f"layout {node.requested} was requested"
            message = f"{requested or 'the label was removed'} meanwhile"
            return NodeProgressState.SUPERSEDED, message
        not_ready = NodeProgressState.SKIPPED, "the node is not ready"
        return (NodeProgressState.TO_DO, "") if node.is_ready else not_ready

    def _state_of_requested(
        self, node: fleet_nodes.FleetNode, now_s: float
    ) -> tuple[NodeProgressState, str]:
        if node.requested is None:
            why = "no layout is requested, as before the rollout; the GPUs stay unchanged"
            return NodeProgressState.APPLIED, why
        is_success = node.state == model.State.SUCCESS.value and node.applied == node.requested
        if is_success and (node.status is None or node.is_finished):
            return NodeProgressState.APPLIED, ""
        reported = node.answer
        if reported is None:
            return self._state_in_time(node, now_s)
        track = self._tracks[node.name]
        if reported.phase == model.Phase.WAIT.value or track.since_s is None:
            track.since_s = now_s
        if reported.state is model.State.FAILED:
            return NodeProgressState.FAILED, ""
        return self._state_in_time(node, now_s)

    def _state_in_time(
        self, node: fleet_nodes.FleetNode, now_s: float
    ) -> tuple[NodeProgressState, str]:
        track = self._tracks[node.name]
        if track.since_s is None:
            track.since_s = now_s
        elapsed_s = now_s - track.since_s
        is_requested = node.requested == self._target(node)
        silence_s = self._limits.silence_timeout_s
        if is_requested and not node.has_responded and elapsed_s >= silence_s:
            why = f"no agent has responded for {silence_s:g} s; is it running?"
            return NodeProgressState.NO_RESPONSE, why
        if elapsed_s >= self._limits.node_timeout_s:
            why = f"not applied {self._limits.node_timeout_s:g} s after the start"
            return NodeProgressState.TIMED_OUT, why
        return NodeProgressState.IN_PROGRESS, ""


def _startable(decision: RolloutDecision) -> tuple[str, ...]:
    """Return the nodes that may start now."""
    moving = (NodeProgressState.IN_PROGRESS, NodeProgressState.TIMED_OUT)
    in_progress = sum(node.state in moving or node.is_retried for node in decision.nodes)
    unavailable = len(decision.unavailable)
    chosen: list[str] = []
    # Nodes that are already unavailable do not add to the limit.
    for node in sorted(
        decision.of(NodeProgressState.TO_DO), key=lambda each: not each.is_unavailable
    ):
        fits = node.is_unavailable or unavailable < decision.most
        if fits and in_progress + len(chosen) < decision.most:
            unavailable += not node.is_unavailable
            chosen.append(node.name)
    return tuple(chosen)
