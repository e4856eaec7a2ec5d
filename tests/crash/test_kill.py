"""The agent process is killed after each of its port calls, and its successor copes.

Every case has a node of its own with a real API server, a real kubelet socket and simulated GPUs.
What must hold in the end is in ``matrix``: a terminal state that is true, the GPUs as the layout
has them or exactly as they were, nothing left paused or cordoned, no pod disturbed without need.

A case counts only if the matrix's own signal ended the agent at the point of the case. Every point
must be struck.
"""

import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.crash import matrix, scenarios

Aftermath = scenarios.Aftermath
Note = Callable[[str, object], None]
Play = Callable[..., None]


def judge(
    note: Note, name: str, what: str, verdicts: Sequence[matrix.Verdict], *, section: str
) -> None:
    counts = matrix.summary(verdicts)
    note(section, {"scenario": name, "what": what} | counts)
    assert not [str(verdict) for verdict in verdicts if verdict.problems]
    assert [verdict.point for verdict in verdicts if not verdict.is_struck] == []
    assert verdicts
    assert counts["converged"] == counts["struck"] == counts["tried"] == len(verdicts)


@pytest.fixture
def play(recorded: matrix.Recorder, record_property: Note) -> Play:
    """Play a scenario once for each of its points, or for a sample of them, and judge all."""

    def play(
        scenario: scenarios.Scenario,
        what: str,
        *,
        step: int = 1,
        section: str = "kill matrix",
        **how: Any,
    ) -> None:
        recording = recorded(scenario)
        verdicts = [
            matrix.play(scenario, recording, point=point, **how)
            for point in recording.own.points[step // 2 :: step]
        ]
        judge(record_property, scenario.name, what, verdicts, section=section)

    return play


def each(*chosen: scenarios.Scenario) -> pytest.MarkDecorator:
    names = [scenario.name.replace(" ", "-") for scenario in chosen]
    return pytest.mark.parametrize("scenario", chosen, ids=names)


@pytest.mark.slow
@each(*scenarios.ALL)
def test_an_agent_killed_after_any_port_call_is_resumed_by_the_next(
    scenario: scenarios.Scenario, play: Play
) -> None:
    play(scenario, "SIGKILL, restart")


@pytest.mark.slow
@each(
    *(scenarios.FIRST, scenarios.FIRST_HOPPER, scenarios.ONE_SLICE, scenarios.MODE_OFF),
    *(scenarios.FAILING, scenarios.DRAIN_TIMEOUT),
)
def test_a_node_that_reboots_after_any_port_call_gets_its_layout(
    scenario: scenarios.Scenario, play: Play
) -> None:
    play(scenario, "SIGKILL, reboot", aftermath=Aftermath.REBOOT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "aftermath",
    [
        *(Aftermath.OTHER_LAYOUT, Aftermath.NO_LAYOUT),
        *(Aftermath.OLD_LAYOUT, Aftermath.CORRUPT_JOURNAL),
    ],
    ids=lambda aftermath: aftermath.name.lower(),
)
def test_what_changes_while_no_agent_runs_is_taken_into_account_by_the_next(
    aftermath: Aftermath, play: Play
) -> None:
    play(scenarios.ONE_SLICE, f"SIGKILL, {aftermath.value}", aftermath=aftermath)


@pytest.mark.slow
@each(scenarios.ONE_SLICE, scenarios.FAILING, scenarios.DRAIN_TIMEOUT, scenarios.HOOKED)
def test_an_agent_stopped_after_any_port_call_leaves_nothing_taken(
    scenario: scenarios.Scenario, play: Play
) -> None:
    play(scenario, "SIGTERM", strike_with=signal.SIGTERM)


def test_a_sample_of_the_matrix_converges(play: Play) -> None:
    what = f"SIGKILL, {Aftermath.RESTART.value}"
    play(scenarios.ONE_SLICE, what, step=25, section="kill matrix, a sample")


def test_a_matrix_with_a_case_that_was_not_struck_fails() -> None:
    struck = matrix.Verdict("after a #1", is_struck=True, phase="Drain")
    missed = matrix.Verdict("after b #1", is_struck=False)

    judge(lambda *_: None, "a", "SIGKILL", [struck], section="")
    for verdicts in ([], [missed], [struck] * 50 + [missed]):
        with pytest.raises(AssertionError):
            judge(lambda *_: None, "a", "SIGKILL", verdicts, section="")
