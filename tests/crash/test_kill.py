"""The agent process is killed after each of its port calls, and its successor copes.

Every case has a node of its own with a real API server, a real kubelet socket and simulated GPUs.
What must hold in the end is in ``matrix``: a terminal state that is true, the GPUs as the layout
has them or exactly as they were, nothing left paused or cordoned, no pod disturbed without need.

A case counts only if the matrix's own signal ended the agent at the point of the case. Every point
must be struck.
"""

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from tests.crash import forkserver, matrix, scenarios

Aftermath = scenarios.Aftermath
Recorded = matrix.Recorder
Note = Callable[[str, object], None]


def name_of(value: object) -> str | None:
    match value:
        case scenarios.Scenario():
            return value.name.replace(" ", "-")
        case Aftermath():
            return value.name.lower()
        case _:
            return None


def judge(
    note: Note,
    scenario: scenarios.Scenario,
    what: str,
    verdicts: Sequence[matrix.Verdict],
    *,
    section: str = "kill matrix",
) -> None:
    counts = matrix.summary(verdicts)
    note(section, {"scenario": scenario.name, "what": what} | counts)
    assert not [str(verdict) for verdict in verdicts if verdict.problems]
    assert [verdict.point for verdict in verdicts if not verdict.is_struck] == []
    assert verdicts
    assert counts["converged"] == counts["struck"] == counts["tried"] == len(verdicts)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", scenarios.ALL, ids=name_of)
def test_an_agent_killed_after_any_port_call_is_resumed_by_the_next(
    scenario: scenarios.Scenario,
    forks: forkserver.ForkServer,
    recorded: Recorded,
    record_property: Note,
) -> None:
    recording = recorded(scenario)
    verdicts = [matrix.play(scenario, recording, forks, point=point) for point in recording.points]

    judge(record_property, scenario, "SIGKILL, restart", verdicts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.FIRST,
        scenarios.FIRST_HOPPER,
        scenarios.ONE_SLICE,
        scenarios.MODE_OFF,
        scenarios.FAILING,
        scenarios.DRAIN_TIMEOUT,
    ],
    ids=name_of,
)
def test_a_node_that_reboots_after_any_port_call_gets_its_layout(
    scenario: scenarios.Scenario,
    forks: forkserver.ForkServer,
    recorded: Recorded,
    record_property: Note,
) -> None:
    recording = recorded(scenario)
    verdicts = [
        matrix.play(scenario, recording, forks, point=point, aftermath=Aftermath.REBOOT)
        for point in recording.points
    ]

    judge(record_property, scenario, "SIGKILL, reboot", verdicts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "aftermath",
    [
        Aftermath.OTHER_LAYOUT,
        Aftermath.NO_LAYOUT,
        Aftermath.OLD_LAYOUT,
        Aftermath.CORRUPT_JOURNAL,
    ],
    ids=name_of,
)
def test_what_changes_while_no_agent_runs_is_taken_into_account_by_the_next(
    aftermath: Aftermath,
    forks: forkserver.ForkServer,
    recorded: Recorded,
    record_property: Note,
) -> None:
    scenario = scenarios.ONE_SLICE
    recording = recorded(scenario)
    verdicts = [
        matrix.play(scenario, recording, forks, point=point, aftermath=aftermath)
        for point in recording.points
    ]

    judge(record_property, scenario, f"SIGKILL, {aftermath.value}", verdicts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.FIRST,
        scenarios.ONE_SLICE,
        scenarios.FAILING,
        scenarios.DRAIN_TIMEOUT,
        scenarios.HOOKED,
    ],
    ids=name_of,
)
def test_an_agent_stopped_after_any_port_call_leaves_nothing_taken(
    scenario: scenarios.Scenario,
    forks: forkserver.ForkServer,
    recorded: Recorded,
    record_property: Note,
) -> None:
    recording = recorded(scenario)
    verdicts = [
        matrix.play_stop(scenario, recording, forks, point=point) for point in recording.points
    ]

    judge(record_property, scenario, "SIGTERM", verdicts)


@pytest.mark.parametrize(
    ("scenario", "aftermath", "step"),
    [
        (scenarios.ONE_SLICE, Aftermath.RESTART, 25),
        (scenarios.ONE_SLICE, Aftermath.NO_LAYOUT, 20),
        (scenarios.FIRST_HOPPER, Aftermath.REBOOT, 15),
        (scenarios.FAILING, Aftermath.RESTART, 40),
        (scenarios.HOOKED, Aftermath.RESTART, 50),
    ],
    ids=name_of,
)
def test_a_sample_of_the_matrix_converges(
    scenario: scenarios.Scenario,
    aftermath: Aftermath,
    step: int,
    forks: forkserver.ForkServer,
    recorded: Recorded,
    record_property: Note,
) -> None:
    recording = recorded(scenario)
    verdicts = [
        matrix.play(scenario, recording, forks, point=point, aftermath=aftermath)
        for point in recording.points[step // 2 :: step]
    ]

    judge(
        record_property,
        scenario,
        f"SIGKILL, {aftermath.value}",
        verdicts,
        section="kill matrix, a sample",
    )


def test_a_matrix_with_a_case_that_was_not_struck_fails() -> None:
    struck = matrix.Verdict(
        point="after a #1", plays=1, is_struck=True, phase="Drain", problems=()
    )
    missed = dataclasses.replace(struck, point="after b #1", is_struck=False)
    notes: list[object] = []

    def note(_name: str, value: object) -> None:
        notes.append(value)

    judge(note, scenarios.FIRST, "SIGKILL", [struck])
    for verdicts in ([], [missed], [struck] * 50 + [missed]):
        with pytest.raises(AssertionError):
            judge(note, scenarios.FIRST, "SIGKILL", verdicts)
