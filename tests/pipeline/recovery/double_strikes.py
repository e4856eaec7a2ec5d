"""Strike an agent on the node in memory, strike its successor, and check where that ends.

A strike is a kill, or a write of another program, just before a call of a port or a step of the
driver. Strikes that meet the same node with the same journal in the same phase count once.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from mig_manager.agent import outcomes
from tests import layout_table
from tests.node import agents
from tests.pipeline.recovery.played_changes import PlayedChange
from tests.pipeline.recovery.writes import WRITES, Write
from tests.pipeline.swept_changes import Change, NodeEnd

_NEXT = NodeEnd("success", "all-disabled", layout_table.gpus_with("all-disabled"))
"""How the request after a change ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exploration:
    """What was counted while a change was struck, and what is wrong with its ends."""

    tried: int
    struck: int
    moments: int | None = None  # where an agent that nothing disturbs can be struck
    nodes_after_a_kill: int
    nodes_after_two_kills: int | None = None
    checked: int
    converged: int
    kills: int
    writes: int
    problems: Sequence[str]

    @property
    def row(self) -> Mapping[str, int]:
        """The counts, as they are published."""
        return {
            name.replace("_", " "): count
            for name, count in dataclasses.asdict(self).items()
            if isinstance(count, int)
        }


def play_all(change: Change, *, step: int = 1) -> Exploration:
    """Kill the agent at each moment, and kill or disturb its successor at each of its moments.

    Args:
        change: What is requested.
        step: Strike at every n-th moment only: the same sample every time.
    """
    explorer = _Explorer(change, step)
    start = PlayedChange.of(change)
    once = explorer.kill_everywhere([start])
    twice = explorer.kill_everywhere(once)
    for play in (start, *once, *twice):
        explorer.rest(play.fork(), (change.end,))
    for play in (start, *once):
        for write in WRITES:
            explorer.disturb(play, write, itertools.count(step // 2, step))
    return dataclasses.replace(
        explorer.result(once), moments=moments(change), nodes_after_two_kills=len(twice)
    )


def moments(change: Change) -> int:
    """Return at how many moments an agent that nothing disturbs can be struck."""
    play = PlayedChange.of(change)
    play.serve(_nothing_happens)
    return play.moment


def play_sample(change: Change, *, step: int, every: int) -> Exploration:
    """Kill the agent at every n-th moment, and let it rest or be disturbed before the next one.

    Args:
        change: What is requested.
        step: Kill at every n-th moment.
        every: Write at every n-th moment of an agent, and to every n-th node after a kill, or to
            every third if that requests something else; the writes alternate.
    """
    explorer = _Explorer(change, step)
    start = PlayedChange.of(change)
    once = explorer.kill_everywhere([start])
    for play in (start, *once):
        explorer.rest(play.fork(), (change.end,))
    for number, write in enumerate(WRITES):
        explorer.disturb(start, write, itertools.count(1 + number % every, every))
        nth = 3 if write.is_request else every
        for play in once[number % nth :: nth]:
            explorer.disturb(play, write, (0,))
    return explorer.result(once)


class _Explorer:
    """Plays a change over and over, and counts."""

    def __init__(self, change: Change, step: int) -> None:
        self._change = change
        self._step = step
        self._visited: set[Hashable] = set()
        self._checked_keys: set[Hashable] = set()
        self._tried = self._struck = self._kills = self._writes = 0
        self._checked = self._converged = 0
        self._problems: list[str] = []

    def kill_everywhere(self, plays: Sequence[PlayedChange]) -> Sequence[PlayedChange]:
        """Kill an agent of each play at each moment; return one play for each different node."""
        nodes = []
        for play in plays:
            for number in itertools.count(max(1, self._step // 2), self._step):
                forked = play.fork()
                outcome = forked.serve(_Strike(number, PlayedChange.kill))
                if not forked.is_dead:
                    break
                self._tried += 1
                self._struck += outcome is None
                self._kills += 1
                self._problems += forked.misnaming_problems()
                if forked.key not in self._visited:
                    self._visited.add(forked.key)
                    forked.path = (*play.path, f"killed at {number}")
                    nodes.append(forked)
        return nodes

    def disturb(self, play: PlayedChange, write: Write, numbers: Iterable[int]) -> None:
        """Have another program write at moments of an agent, and check how each run ends."""
        for number in numbers:
            forked, strike = play.fork(), _Strike(number, functools.partial(self._write, write))
            forked.path = (*play.path, f"{write.name} at {number}")
            outcome = forked.serve(strike)
            if not strike.has_come:
                return
            if strike.has_struck and not forked.is_dead:
                self._tried += 1
                self._struck += 1
                self._writes += 1
                # The journal is read when the agent starts, and again under the lock.
                unread = None if number > 2 else layout_table.layout_of(play.rig.gpus)
                self._check_end(forked, outcome, write.ends(self._change, unread))

    def result(self, once: Sequence[PlayedChange]) -> Exploration:
        """Return all counts and problems; ``once`` are the nodes after a kill."""
        return Exploration(
            tried=self._tried,
            struck=self._struck,
            nodes_after_a_kill=len(once),
            checked=self._checked,
            converged=self._converged,
            kills=self._kills,
            writes=self._writes,
            problems=self._problems,
        )

    def _write(self, write: Write, play: PlayedChange) -> None:
        """Write, and go on only where no other strike has met the same node at the same call."""
        write.act(play)
        key = write.name, "".join(play.rig.log[-1:]), play.key, play.request_key
        play.is_dead = key in self._visited
        self._visited.add(key)

    def rest(self, play: PlayedChange, allowed: Sequence[NodeEnd]) -> int:
        """Let an agent serve undisturbed, and check its end; return how many moments it had."""
        self._check_end(play, play.serve(_nothing_happens), allowed)
        return play.moment

    def _check_end(
        self, play: PlayedChange, outcome: outcomes.Outcome | None, allowed: Sequence[NodeEnd]
    ) -> None:
        problems = play.problems_at_rest(outcome, allowed)
        self._problems += (f"{', '.join(play.path)}: {problem}" for problem in problems)
        self._checked += 1
        self._converged += not problems
        if problems or play.key in self._checked_keys:
            return
        self._checked_keys.add(play.key)
        # The next request works, despite what was written before.
        following = play.fork()
        following.config.text = agents.CONFIG
        following.request(_NEXT.applied or "")
        following.let_pods_go()
        outcome = following.serve(_nothing_happens)
        self._problems += (
            f"{', '.join(play.path)}, then the next request: {problem}"
            for problem in following.problems_at_rest(outcome, (_NEXT,))
        )


class _Strike:
    """Strikes an agent at one of its moments."""

    def __init__(self, moment: int, what: Callable[[PlayedChange], object]) -> None:
        self._moment = moment
        self._what = what
        self.has_come = False
        self.has_struck = False
        """Whether it made a difference."""

    def __call__(self, play: PlayedChange) -> None:
        if play.moment != self._moment or self.has_come:
            return
        self.has_come = True
        before = play.key, play.request_key
        self._what(play)
        self.has_struck = (play.key, play.request_key) != before
        # A run without a strike was checked before.
        play.is_dead |= not self.has_struck


def _nothing_happens(_play: PlayedChange) -> None: ...
