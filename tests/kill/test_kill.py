"""The agent process is killed before and after each of its port calls, and its successor copes.

Every case has a node of its own with a real API server, a real kubelet socket and simulated GPUs.
What must hold in the end is in ``matrix``: a terminal state that is true, the GPUs as the layout
has them or exactly as they were, nothing taken, nobody hurt who need not be.
"""

from collections.abc import Callable, Iterable, Sequence

import pytest

from tests.kill import forkserver, matrix, scenarios

Aftermath = scenarios.Aftermath
Recorded = matrix.Recorder
Note = Callable[[str, object], None]

_MOST_UNREACHED = 0.05
"""Of all cases: waits poll more often in one run than in another."""
_MOST_UNREACHED_IN_TIME = 0.4
"""The same where it is a deadline that ends the wait: a slow machine polls less often in it."""
_AFTER_ALONE = (
    scenarios.FIRST_HOPPER,
    scenarios.FAILING_TWICE,
    scenarios.IN_FORCE,
    scenarios.CORDONED,
    scenarios.HOOKED,
)
"""What differs from another scenario in some calls only: after one and before the next nothing
differs outside of the agent."""
_CASES = [
    (scenario, side)
    for scenario in scenarios.ALL
    for side in ("before", "after")
    if side == "after" or scenario not in _AFTER_ALONE
]


def name_of(value: object) -> str | None:
    match value:
        case scenarios.Scenario():
            return value.name.replace(" ", "-")
        case Aftermath():
            return value.name.lower()
        case _:
            return None


def on_side(points: Iterable[str], side: str) -> list[str]:
    return [point for point in points if point.startswith(f"{side} ")]


def judge(
    note: Note,
    scenario: scenarios.Scenario,
    what: str,
    verdicts: Sequence[matrix.Verdict],
) -> None:
    counts = matrix.summary(verdicts)
    is_timed = scenario is scenarios.DRAIN_TIMEOUT
    most = _MOST_UNREACHED_IN_TIME if is_timed else _MOST_UNREACHED
    note(
        "kill matrix",
        f"{what}, {scenario.name}: {counts['runs']} runs, {counts['struck']} struck, "
        f"{counts['converged']} converged",
    )
    assert not [str(verdict) for verdict in verdicts if verdict.problems]
    assert verdicts
    assert counts["runs"] - counts["struck"] <= max(1, counts["runs"] * most)


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "side"), _CASES, ids=name_of)
def test_an_agent_killed_around_any_port_call_is_made_good_by_the_next(
    scenario: scenarios.Scenario,
    side: str,
    forks: forkserver.ForkServer,
    recorded: Recorded,
    record_property: Note,
) -> None:
    recording = recorded(scenario)
    points = on_side(recording.points, side)
    verdicts = [matrix.play(scenario, recording, forks, point=point) for point in points]

    judge(record_property, scenario, f"SIGKILL {side} a call, restart", verdicts)


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
    # Between two calls nothing changes outside: after one and before the next is the same node.
    recording = recorded(scenario)
    verdicts = [
        matrix.play(scenario, recording, forks, point=point, aftermath=Aftermath.REBOOT)
        for point in on_side(recording.points, "after")
    ]

    judge(record_property, scenario, "SIGKILL after a call, reboot", verdicts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "aftermath",
    [
        Aftermath.OTHER_WISH,
        Aftermath.NO_WISH,
        Aftermath.OLD_WISH,
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
        for point in on_side(recording.points, "after")
    ]

    judge(record_property, scenario, f"SIGKILL after a call, {aftermath.value}", verdicts)


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
def test_an_agent_that_is_told_to_stop_around_any_port_call_leaves_nothing_taken(
    scenario: scenarios.Scenario,
    forks: forkserver.ForkServer,
    recorded: Recorded,
    record_property: Note,
) -> None:
    recording = recorded(scenario)
    verdicts = [
        matrix.play_stop(scenario, recording, forks, point=point)
        for point in on_side(recording.points, "after")
    ]

    judge(record_property, scenario, "SIGTERM after a call", verdicts)


@pytest.mark.parametrize(
    ("scenario", "aftermath", "step"),
    [
        (scenarios.ONE_SLICE, Aftermath.RESTART, 60),
        (scenarios.ONE_SLICE, Aftermath.NO_WISH, 40),
        (scenarios.FIRST_HOPPER, Aftermath.REBOOT, 30),
        (scenarios.FAILING, Aftermath.RESTART, 90),
        (scenarios.HOOKED, Aftermath.RESTART, 100),
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

    judge(record_property, scenario, f"sample, {aftermath.value}", verdicts)
