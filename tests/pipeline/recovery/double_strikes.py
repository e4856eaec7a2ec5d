"""Strike an agent on the node in memory, strike its successor, and check where that ends.

A strike is a kill, or a write of another program, just before a call of a port or a step of the
driver. Strikes that meet the same node with the same journal in the same phase count once.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from mig_manager.agent import outcomes
from tests.pipeline.recovery import node_checks, node_keys
from tests.pipeline.recovery.played_changes import PlayedChange
from tests.pipeline.recovery.writes import WRITES, Disturbed, Write
from tests.pipeline.swept_changes import NodeChange, NodeEnd
from tests.rigs import layout_table
from tests.rigs.matrices import matrix_rows
from tests.rigs.node import agents

Counts = Mapping[str, int]  # the numbers of a row, beside those that ``MatrixRow`` counts

_NEXT = NodeEnd("success", "all-disabled", layout_table.gpus_with("all-disabled"))
"""How the request after a change ends."""


def strike_all(row: matrix_rows.MatrixRow, change: NodeChange, *, step: int = 1) -> Counts:
    """Kill the agent at each moment, and kill or disturb its successor at each of its moments.

    Args:
        row: Counts the strikes.
        change: What is requested.
        step: Strike at every n-th moment only: the same sample every time.
    """
    explorer = _Explorer(row, change, step)
    start = PlayedChange.of(change)
    once = explorer.kill_everywhere([start])
    twice = explorer.kill_everywhere(once)
    for play in (start, *once, *twice):
        explorer.rest(play.fork(), (change.end,))
    for play in (start, *once):
        for write in WRITES:
            explorer.disturb(play, write, itertools.count(step // 2, step))
    return {
        "moments": count_moments(change),
        "nodes after a kill": len(once),
        "nodes after two kills": len(twice),
        **explorer.counts,
    }


def count_moments(change: NodeChange) -> int:
    """Return at how many moments an agent that nothing disturbs can be struck."""
    play = PlayedChange.of(change)
    play.serve(_nothing_happens)
    return play.moment


def strike_sample(
    row: matrix_rows.MatrixRow, change: NodeChange, *, step: int, every: int
) -> Counts:
    """Kill the agent at every n-th moment, and let it rest or be disturbed before the next one.

    Args:
        row: Counts the strikes.
        change: What is requested.
        step: Kill at every n-th moment.
        every: Write at every n-th moment of an agent, and to every n-th node after a kill, or to
            every third if that requests something else; the writes alternate.
    """
    explorer = _Explorer(row, change, step)
    start = PlayedChange.of(change)
    once = explorer.kill_everywhere([start])
    for play in (start, *once):
        explorer.rest(play.fork(), (change.end,))
    for number, write in enumerate(WRITES):
        explorer.disturb(start, write, itertools.count(1 + number % every, every))
        nth = 3 if write.is_request else every
        for play in once[number % nth :: nth]:
            explorer.disturb(play, write, (0,))
    return {"nodes after a kill": len(once), **explorer.counts}


class _Explorer:
    """Plays a change over and over, and counts."""

    def __init__(self, row: matrix_rows.MatrixRow, change: NodeChange, step: int) -> None:
        self._row = row
        self._change = change
        self._step = step
        self._visited: set[Hashable] = set()
        self._checked_keys: set[Hashable] = set()
        self._kills = self._writes = self._checked = self._converged = 0

    def kill_everywhere(self, plays: Sequence[PlayedChange]) -> Sequence[PlayedChange]:
        """Kill an agent of each play at each moment; return one play for each different node."""
        nodes = []
        for play in plays:
            for number in itertools.count(max(1, self._step // 2), self._step):
                forked = play.fork()
                outcome = forked.serve(_Strike(number, PlayedChange.kill))
                if not forked.is_dead:
                    break
                self._row.count(is_struck=outcome is None)
                self._kills += 1
                self._row.report(node_checks.misnaming_problems(forked))
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
            if not forked.is_abandoned:
                self._row.count(is_struck=True)
                self._writes += 1
                # The journal is read when the agent starts, and again under the lock.
                unread = None if number > 2 else layout_table.devices_in_words(play.rig.gpus)
                disturbed = Disturbed(self._change, gpus_if_journal_unread=unread)
                self._check_end(forked, outcome, write.ends(disturbed))

    @property
    def counts(self) -> Counts:
        """What was counted beside the strikes."""
        return {
            "checked": self._checked,
            "converged": self._converged,
            "kills": self._kills,
            "writes": self._writes,
        }

    def _write(self, write: Write, play: PlayedChange) -> None:
        """Write, and go on only where no other strike has met the same node at the same call."""
        write.act(play)
        key = write.name, "".join(play.rig.log[-1:]), play.key
        if key in self._visited:
            play.abandon()
        self._visited.add(key)

    def rest(self, play: PlayedChange, allowed: Sequence[NodeEnd]) -> None:
        """Let an agent serve undisturbed, and check its end."""
        self._check_end(play, play.serve(_nothing_happens), allowed)

    def _check_end(
        self, play: PlayedChange, outcome: outcomes.Outcome | None, allowed: Sequence[NodeEnd]
    ) -> None:
        problems = node_checks.problems_at_rest(play, outcome, allowed)
        self._row.report(f"{', '.join(play.path)}: {problem}" for problem in problems)
        self._checked += 1
        self._converged += not problems
        key = node_keys.key_of(play.rig)
        if problems or key in self._checked_keys:
            return
        self._checked_keys.add(key)
        # The next request works, despite what was written before.
        following = play.fork()
        following.config.text = agents.LAYOUTS_TEXT
        following.request(_NEXT.applied or "")
        following.let_pods_go()
        outcome = following.serve(_nothing_happens)
        self._row.report(
            f"{', '.join(play.path)}, then the next request: {problem}"
            for problem in node_checks.problems_at_rest(following, outcome, (_NEXT,))
        )


class _Strike:
    """Strikes an agent at one of its moments."""

    def __init__(self, moment: int, what: Callable[[PlayedChange], object]) -> None:
        self._moment = moment
        self._what = what
        self.has_come = False

    def __call__(self, play: PlayedChange) -> None:
        if play.moment != self._moment or self.has_come:
            return
        self.has_come = True
        before = play.key
        self._what(play)
        if not play.is_dead and play.key == before:
            # A run without a strike is checked elsewhere.
            play.abandon()


def _nothing_happens(_play: PlayedChange) -> None: ...
