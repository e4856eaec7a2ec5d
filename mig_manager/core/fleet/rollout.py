"""Bring many nodes to a layout without ever having too many of them away: what is due now.

All that a rollout knows stands on the nodes: the label that asks for a layout, what the agent
says of it, and in an annotation what was asked for before. So it can be cut off at any moment and
be gone on with by anybody, and two of them at once see each other's nodes.

A node counts as unavailable when it is not ready, cordoned by whomever, or on its way: its label
asks for what its agent has not settled yet, even before the cordon, because that will come. So
does a node that failed and that its agent will try again by itself.
"""

import collections
import dataclasses
import enum
import math
from collections.abc import Sequence

from mig_manager.core import model
from mig_manager.core.fleet import nodes


class Standing(enum.Enum):
    """Where a node is on its way."""

    IN_FORCE = "in-force"
    TO_DO = "to-do"
    UNDER_WAY = "under-way"
    FAILED = "failed"
    """Its agent says so, and tries again only where ``Progress.is_retried``."""
    LATE = "late"
    """It takes longer than a node may."""
    SILENT = "silent"
    """Nobody there reacts: the agent is dead or missing. What was asked is taken back."""
    LEFT_OUT = "left-out"
    """Nothing is asked of it: its kubelet does not answer, or no agent has ever spoken there."""
    OTHER_WISH = "other-wish"
    """Somebody has asked it for something else meanwhile."""


BAD = frozenset({Standing.FAILED, Standing.LATE, Standing.SILENT, Standing.OTHER_WISH})
"""What pauses a rollout that shall pause on failure."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a rollout may do; seconds."""

    max_unavailable: str = "1"
    """A number of nodes, or a percentage of those selected, rounded down and at least one."""
    pauses: bool = False
    """Whether a failure lets no further node begin."""
    node_timeout_s: float = 1800.0
    """How long a node may take, waiting for a slot not counted."""
    silence_timeout_s: float = 120.0
    """How long an agent may take to react."""

    def most(self, count: int) -> int:
        """Return how many of so many nodes may be unavailable."""
        if self.max_unavailable.endswith("%"):
            return max(1, math.floor(int(self.max_unavailable[:-1]) * count / 100))
        return int(self.max_unavailable)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One node."""

    name: str
    standing: Standing
    phase: str = ""
    reason: str = ""
    message: str = ""
    is_retried: bool = False
    seconds: float = 0.0
    """Since it was first seen on its way."""
    before: str | None = None
    """What a way back leads to."""
    is_unavailable: bool = False
    unreachable: tuple[str, ...] = ()
    """Its unreachable GPUs, if it is ``IN_FORCE``: the layout is not active on them."""


class Phase(enum.Enum):
    """Where the whole rollout is."""

    ROLLING = "rolling"
    PAUSING = "pausing"
    """A node failed: no further one begins, those under way are waited for."""
    DONE = "done"
    FAILED = "failed"
    """Nothing is left to be begun, and not every node has what it shall."""
    PAUSED = "paused"
    STALLED = "stalled"
    """Nothing can be begun, because too many nodes are unavailable that are not ours to mend."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to wait for."""
        return self not in (Phase.ROLLING, Phase.PAUSING)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What is due now."""

    phase: Phase
    nodes: tuple[Progress, ...]
    """Ascending by name."""
    most: int
    """How many may be unavailable."""
    start: tuple[str, ...] = ()
    """Nodes to be asked now."""
    failures: tuple[Progress, ...] = ()
    """How nodes that are not in force have last failed, also those that try again just now."""
    retract: tuple[str, ...] = ()
    """Nodes to be asked for what they had before, for nobody there reacts."""

    @property
    def unavailable(self) -> tuple[str, ...]:
        """Nodes that count as unavailable now."""
        return tuple(node.name for node in self.nodes if node.is_unavailable)

    def of(self, *standings: Standing) -> tuple[Progress, ...]:
        """Return the nodes that stand so."""
        return tuple(node for node in self.nodes if node.standing in standings)

    @property
    def incomplete(self) -> tuple[Progress, ...]:
        """Nodes whose layout is not active on GPUs that cannot be reached."""
        return tuple(node for node in self.nodes if node.unreachable)

    @property
    def counts(self) -> dict[str, int]:
        """How many nodes stand how."""
        counted = collections.Counter(node.standing for node in self.nodes)
        return {standing.value: counted[standing] for standing in Standing}


class Rollout:
    """Judges what is seen of the nodes, turn by turn; remembers since when it has been so."""

    def __init__(self, goal: nodes.Goal, limits: Limits) -> None:
        self._goal = goal
        self._limits = limits
        self._asked: set[str] = set()
        """Nodes that were asked and do not show it yet."""
        self._on_course: set[str] = set()
        """Nodes that have shown the wanted label during this rollout."""
        self._retracted: set[str] = set()
        self._since_s: dict[str, float] = {}
        """Since when a node has been on its way, waiting for a slot not counted."""
        self._failed_before: frozenset[str] | None = None
        """Nodes that had failed when we came: they pause nothing."""
        self._failures: dict[str, Progress] = {}
        self._failed: set[str] = set()
        """Nodes that have failed since, also if they have come right meanwhile."""
        self._unsettled_s: dict[str, float] = {}
        """Since when a node asks for something that nobody there has reacted to."""
        self._before: tuple[object, float] = ((), 0.0)
        """Who was left or done when that last changed, and when that was."""

    def asked(self, name: str) -> None:
        """Remember that a node's label was written, whatever is seen of it until that shows."""
        self._asked.add(name)

    def retracted(self, name: str) -> None:
        """Remember that a node was asked for what it had before."""
        self._retracted.add(name)

    def judge(self, nodes: Sequence[nodes.Node], now_s: float) -> Turn:
        """Tell what is due.

        Args:
            nodes: All that are selected, as they are now.
            now_s: Seconds from some fixed point.
        """
        concerned = filter(self._goal.concerns, nodes)
        ordered = sorted(concerned, key=lambda node: node.name)
        seen = [self._progress(node, now_s) for node in ordered]
        most = self._limits.most(len(ordered))
        phase = self._phase(seen, now_s)
        there = {node.name for node in ordered}
        failures = tuple(p for name, p in sorted(self._failures.items()) if name in there)
        turn = Turn(phase=phase, nodes=tuple(seen), most=most, failures=failures)
        retract = tuple(
            node.name
            for node, progress in zip(ordered, seen, strict=True)
            if progress.standing is Standing.SILENT and self._is_ours(node)
        )
        if phase is not Phase.ROLLING:
            return dataclasses.replace(turn, retract=retract)
        return dataclasses.replace(turn, start=_due(turn), retract=retract)

    def _is_ours(self, node: nodes.Node) -> bool:
        """Tell whether a rollout has asked for what the node's label says."""
        is_wanted = node.wanted == self._goal.target(node)
        return node.mark is not None and is_wanted and node.name not in self._retracted

    def _phase(self, seen: Sequence[Progress], now_s: float) -> Phase:
        self._note_failures(seen)
        is_moving = any(map(self._is_awaited, seen))
        is_left = any(p.standing is Standing.TO_DO for p in seen)
        if self._limits.pauses and self._failed and (is_left or is_moving):
            return Phase.PAUSING if is_moving else Phase.PAUSED
        if is_moving:
            self._before = (), now_s
            return Phase.ROLLING
        if not is_left:
            is_done = all(p.standing is Standing.IN_FORCE for p in seen)
            return Phase.DONE if is_done else Phase.FAILED
        # A node that fails again and again changes all the time, and makes room for none.
        picture = tuple(p.standing if p.standing not in BAD else None for p in seen)
        if picture != self._before[0]:
            self._before = picture, now_s
        is_stalled = now_s - self._before[1] >= self._limits.silence_timeout_s
        return Phase.STALLED if is_stalled else Phase.ROLLING

    def _note_failures(self, seen: Sequence[Progress]) -> None:
        for progress in seen:
            if progress.standing in BAD:
                self._failures[progress.name] = progress
            elif progress.standing is Standing.IN_FORCE:
                self._failures.pop(progress.name, None)
        failed = {progress.name for progress in seen if progress.standing in BAD}
        if self._failed_before is None:
            self._failed_before = frozenset(failed)
        self._failed |= failed - self._failed_before

    def _is_awaited(self, node: Progress) -> bool:
        """Tell whether it is worth waiting for how a node ends."""
        if self._limits.pauses and node.name in self._failed:
            return False
        is_in_time = node.seconds < self._limits.node_timeout_s
        return node.standing is Standing.UNDER_WAY or (node.is_retried and is_in_time)

    def _progress(self, node: nodes.Node, now_s: float) -> Progress:
        standing, why = self._stand(node, now_s)
        is_told = node.told is not None and node.told.config == node.wanted
        told = node.told if is_told and node.told else nodes.Told()
        is_moving = standing in (Standing.UNDER_WAY, Standing.LATE)
        if standing in (Standing.IN_FORCE, Standing.TO_DO):
            self._since_s.pop(node.name, None)
        # Until what was asked is taken back, somebody may wake up there and begin.
        is_lost = standing is Standing.SILENT and not self._is_ours(node)
        return Progress(
            name=node.name,
            standing=standing,
            phase=told.phase if is_moving else "",
            reason=told.reason,
            message=why or told.message,
            is_retried=standing is Standing.FAILED and told.is_retried,
            seconds=now_s - self._since_s.get(node.name, now_s),
            before=node.mark.before if node.mark else None,
            unreachable=told.unreachable if standing is Standing.IN_FORCE else (),
            is_unavailable=node.is_away
            or is_moving
            or not (is_lost or self._is_settled(node, now_s))
            or (standing is Standing.SILENT and not is_lost),
        )

    def _is_settled(self, node: nodes.Node, now_s: float) -> bool:
        """Tell whether the node will stay as it is; an agent that never reacts does nothing."""
        if node.is_settled or node.has_reacted:
            self._unsettled_s.pop(node.name, None)
            return node.is_settled
        since_s = self._unsettled_s.setdefault(node.name, now_s)
        return now_s - since_s >= self._limits.silence_timeout_s

    def _stand(self, node: nodes.Node, now_s: float) -> tuple[Standing, str]:
        """Return where a node is, and why where its agent does not say."""
        if node.name in self._retracted:
            return Standing.SILENT, "no agent reacted; what was asked is taken back"
        if not node.has_agent:
            return Standing.LEFT_OUT, "no agent has ever told of its GPUs; is one running there?"
        if node.wanted == self._goal.target(node):
            self._asked.discard(node.name)
            self._on_course.add(node.name)
            return self._stand_on_course(node, now_s)
        if node.name in self._asked:
            return self._stand_in_time(node, now_s)
        return self._stand_off_course(node)

    def _stand_off_course(self, node: nodes.Node) -> tuple[Standing, str]:
        if node.name in self._on_course or self._goal.has_left(node):
            return Standing.OTHER_WISH, f"somebody has asked it for {node.wanted} meanwhile"
        if not node.is_ready:
            return Standing.LEFT_OUT, "its kubelet does not answer"
        return Standing.TO_DO, ""

    def _stand_on_course(self, node: nodes.Node, now_s: float) -> tuple[Standing, str]:
        if node.wanted is None:
            return (
                Standing.IN_FORCE,
                "no layout is asked for, as before; the GPUs stay as they are",
            )
        is_success = node.state == model.State.SUCCESS.value and node.applied == node.wanted
        told = node.told
        if is_success and (told is None or node.is_settled):
            return Standing.IN_FORCE, ""
        if told is None or told.config != node.wanted:
            return self._stand_in_time(node, now_s)
        if told.phase == model.Phase.WAIT.value:
            self._since_s[node.name] = now_s
        if told.state == model.State.FAILED.value:
            self._since_s.setdefault(node.name, now_s)
            return Standing.FAILED, ""
        return self._stand_in_time(node, now_s)

    def _stand_in_time(self, node: nodes.Node, now_s: float) -> tuple[Standing, str]:
        since_s = self._since_s.setdefault(node.name, now_s)
        is_asked = node.wanted == self._goal.target(node)
        silence_s = self._limits.silence_timeout_s
        if is_asked and not node.has_reacted and now_s - since_s >= silence_s:
            return Standing.SILENT, f"no agent has reacted for {silence_s:g} s; is it running?"
        if now_s - since_s >= self._limits.node_timeout_s:
            limit_s = self._limits.node_timeout_s
            return Standing.LATE, f"not in force {limit_s:g} s after it began"
        return Standing.UNDER_WAY, ""


def _due(turn: Turn) -> tuple[str, ...]:
    """Return the nodes that may begin now."""
    under_way = sum(_is_moving(progress) for progress in turn.nodes)
    unavailable = len(turn.unavailable)
    chosen: list[str] = []
    # Those that are away already cost nothing more.
    for node in sorted(turn.of(Standing.TO_DO), key=lambda progress: not progress.is_unavailable):
        fits = node.is_unavailable or unavailable < turn.most
        if fits and under_way + len(chosen) < turn.most:
            unavailable += not node.is_unavailable
            chosen.append(node.name)
    return tuple(chosen)


def _is_moving(node: Progress) -> bool:
    """Tell whether a node is on its way, or will be again by itself."""
    return node.standing in (Standing.UNDER_WAY, Standing.LATE) or node.is_retried
