"""The agent process is killed after each of its port calls, and its successor copes.

Every case has a node of its own with a real API server, a real kubelet socket and simulated GPUs.
What must hold in the end is in ``matrix`` and, as data, in ``scenarios``: a terminal state that is
true, the GPUs as the layout has them or exactly as they were, nothing left paused or cordoned, no
pod disturbed without need.

A case counts only if the matrix's own signal ended the agent at the point of the case. Every point
must be struck, and every phase that a scenario lists.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

from mig_manager.core import model
from tests.crash import matrix, scenarios
from tests.kit import published

Note = Callable[[str, object], None]
Strike = Callable[..., None]
KNOWN = {"none", *(phase.value for phase in model.Phase)}
STRUCK = matrix.Verdict("after a #1", is_struck=True, phase="Drain")
MISSED = matrix.Verdict("after b #1", is_struck=False)
_MATRIX = "kill matrix"
_MAX_STEP = 4
"""How many points the phases of every scenario have at least, but one."""
_SHORTEST = "Resume"
"""The phase that may have three points or fewer."""


def judge(
    note: Note,
    play: scenarios.PlayedScenario,
    verdicts: Sequence[matrix.Verdict],
    *,
    section: str,
    phases: Collection[str],
) -> None:
    counts = matrix.summary(verdicts)
    note(section, {"scenario": play.scenario.name, "what": play.what} | counts)
    assert not [str(verdict) for verdict in verdicts if verdict.problems]
    assert [verdict.point for verdict in verdicts if not verdict.is_struck] == []
    assert_adds_up(counts, phases)


def assert_adds_up(counts: Mapping[str, Any], phases: Collection[str]) -> None:
    """Check that all was struck that was tried, and each of the phases at least once."""
    by_phase = counts["phases"]
    for what in ("struck", "converged"):
        assert counts[what] == counts["tried"] == sum(each[what] for each in by_phase.values())
    assert set(phases) - by_phase.keys() == set()
    assert by_phase.keys() - KNOWN == set()


@pytest.fixture
def strike(recorded: matrix.Recorder, record_property: Note) -> Strike:
    """Play a scenario once for each of its points, or for a sample of them, and judge all."""

    def strike(
        play: scenarios.PlayedScenario,
        *,
        phases: Collection[str],
        step: int = 1,
        section: str = _MATRIX,
    ) -> None:
        recording = recorded(play.scenario)
        row = {"scenario": play.scenario.name, "what": play.what}
        chosen = recording.points[step // 2 :: step]
        verdicts = [matrix.play(play, recording, point=point) for point in chosen]
        judge(record_property, play, verdicts, section=section, phases=phases)
        assert len(recording.points) >= published.least("kill-matrix", **row)

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
    strike(
        scenarios.PlayedScenario(scenarios.FAILING),
        step=14,
        phases={"Drain", "Execute", "RollBack"},
        section=f"{_MATRIX}, a sample",
    )


def test_the_published_results_are_those_of_the_present_matrix() -> None:
    rows = {(each["scenario"], each["what"]): each for each in published.rows("kill-matrix")}
    plays = {(play.scenario.name, play.what): play for play in scenarios.PLAYS}

    assert rows.keys() == plays.keys()
    for key, counts in rows.items():
        assert_adds_up(counts, plays[key].scenario.phases)


@pytest.mark.parametrize("verdicts", [[], [MISSED], [STRUCK] * 50 + [MISSED], [STRUCK]], ids=len)
def test_a_matrix_that_missed_a_case_or_a_phase_fails(verdicts: list[matrix.Verdict]) -> None:
    play = scenarios.PlayedScenario(scenarios.ONE_SLICE)
    judge(lambda *_: None, play, [STRUCK], section="", phases={"Drain"})
    with pytest.raises(AssertionError):
        judge(lambda *_: None, play, verdicts, section="", phases={"Drain", "Execute"})
