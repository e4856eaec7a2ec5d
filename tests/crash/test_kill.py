"""The agent process is killed after each of its port calls, and its successor copes.

Every case has a node of its own with a real API server, a real kubelet socket and simulated GPUs.
What must hold in the end is in ``matrix`` and, as data, in ``scenarios``: a terminal state that is
true, the GPUs as the layout has them or exactly as they were, nothing left paused or cordoned, no
pod disturbed without need.

A case counts only if the matrix's own signal ended the agent at the point of the case. Every point
must be struck, and every phase that a scenario lists.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from mig_manager.core import model
from tests.crash import matrix, scenarios
from tests.kit import matrices

Strike = Callable[..., None]
KNOWN = {"none", *(phase.value for phase in model.Phase)}
STRUCK = [matrix.Verdict("Drain")] * 80
_MATRIX = "kill matrix"
_MAX_STEP = 4
"""How many points the phases of every scenario have at least, but one."""
_SHORTEST = "Resume"
"""The phase that may have three points or fewer."""


def play_all(
    note: matrices.Note,
    play: scenarios.PlayedScenario,
    points: Sequence[str],
    strike: Callable[[str], matrix.Verdict | None],
    *,
    phases: Collection[str],
    step: int = 1,
) -> None:
    """Play a scenario once for each of its points, or for a sample of them, and judge all."""
    row = matrices.Row(_MATRIX, scenario=play.scenario.name, what=play.what)
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for point in matrices.sample(points, step):
        if verdict := row.play(point, functools.partial(strike, point)):
            counts[verdict.phase]["struck"] += 1
            counts[verdict.phase]["converged"] += not verdict.problems
            row.problems += (f"{point}: {problem}" for problem in verdict.problems)
    numbers = {
        "converged": sum(each["converged"] for each in counts.values()),
        "played again": row.played_again,
        "phases": {name: dict(each) for name, each in counts.items()},
    }
    row.judge(note, numbers, of=len(points))
    assert_phases(counts, phases)


def assert_phases(counts: Collection[str], phases: Collection[str]) -> None:
    """Check that each of some phases was struck at least once."""
    assert set(phases) - set(counts) == set()
    assert set(counts) - KNOWN == set()


@pytest.fixture
def strike(recorded: matrix.Recorder, record_property: matrices.Note) -> Strike:
    """Play a scenario on nodes of its own."""

    def strike(play: scenarios.PlayedScenario, **how: Any) -> None:
        recording = recorded(play.scenario)
        struck = functools.partial(matrix.play, play, recording)
        play_all(record_property, play, recording.points, struck, **how)

    return strike


@pytest.mark.slow
@pytest.mark.parametrize("play", scenarios.PLAYS, ids=str)
def test_an_agent_struck_after_any_port_call_has_a_successor_that_copes(
    play: scenarios.PlayedScenario, strike: Strike, pytestconfig: pytest.Config
) -> None:
    every = pytestconfig.getoption("every")
    assert every <= _MAX_STEP
    strike(play, step=every, phases=play.scenario.phases - ({_SHORTEST} if every > 1 else set()))


def test_a_sample_of_the_matrix_converges(strike: Strike) -> None:
    failing = scenarios.PlayedScenario(scenarios.FAILING)
    strike(failing, step=14, phases={"Drain", "Execute", "RollBack"})


def test_the_published_results_are_those_of_the_present_matrix() -> None:
    rows = {(each["scenario"], each["what"]): each for each in matrices.published(_MATRIX)}
    plays = {(play.scenario.name, play.what): play for play in scenarios.PLAYS}

    assert rows.keys() == plays.keys()
    for key, row in rows.items():
        counts = row["phases"]
        assert_phases(counts, plays[key].scenario.phases)
        for what in ("struck", "converged"):
            assert row[what] == row["tried"] == sum(each[what] for each in counts.values())


@pytest.mark.parametrize(
    ("verdicts", "phase"),
    [
        ([], "Drain"),
        (STRUCK[:1], "Drain"),
        ([*STRUCK, None], "Drain"),
        ([*STRUCK, matrix.Verdict("Drain", ("a pod was disturbed",))], "Drain"),
        ([*STRUCK, matrix.Verdict("unknown")], "Drain"),
        (STRUCK, "Execute"),
    ],
    ids=["no-case", "fewer", "missed", "problem", "unknown-phase", "missed-phase"],
)
def test_a_matrix_that_missed_a_case_or_a_phase_fails(
    verdicts: Sequence[matrix.Verdict | None], phase: str
) -> None:
    def play_all_of(verdicts: Sequence[matrix.Verdict | None], phase: str) -> None:
        play = scenarios.PlayedScenario(scenarios.ONE_SLICE)
        strike = dict(zip(map(str, itertools.count()), verdicts, strict=False))
        play_all(lambda *_: None, play, [*strike], strike.__getitem__, phases={phase})

    play_all_of(STRUCK, "Drain")
    with pytest.raises(AssertionError):
        play_all_of(verdicts, phase)
