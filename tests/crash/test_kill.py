"""The agent process is killed after each of its port calls, and the next agent recovers.

Every case has a node of its own with a real API server, a real kubelet socket and simulated GPUs.
What must hold in the end is in ``kill_case`` and, as data, in ``changes``: a true terminal
state, the GPUs as the layout has them or exactly as they were, nothing left paused or cordoned, no
pod disturbed without need.

A case counts only if the matrix's own signal ended the agent at the moment of the case. Every
moment must be struck, and every phase that a change lists.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from mig_manager.core.records import run_status
from tests.crash import changes, kill_case
from tests.rigs.matrices import matrix_rows

StrikeVariant = Callable[..., None]
PHASES = {"none", *(phase.value for phase in run_status.Phase)}
STRUCK = [kill_case.KillResult("Drain")] * 80
_MATRIX = "kill matrix"
_MAX_STEP = 4  # how many moments the phases of every change have at least, but one
_SHORTEST = "Resume"  # the phase that may have three moments or fewer


def strike_all(
    note: matrix_rows.Note,
    variant: changes.Variant,
    moments: Sequence[str],
    strike: Callable[[str], kill_case.KillResult | None],
    *,
    phases: Collection[str],
    step: int = 1,
) -> None:
    """Play a change once for each of its moments, or for a sample of them; check all ends."""
    row = matrix_rows.MatrixRow(_MATRIX, change=variant.change.name, what=variant.what)
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for moment in matrix_rows.sample(moments, step):
        if result := row.until_struck(moment, functools.partial(strike, moment)):
            counts[result.phase]["struck"] += 1
            counts[result.phase]["converged"] += not result.problems
            row.report(f"{moment}: {problem}" for problem in result.problems)
    numbers = {
        "converged": sum(each["converged"] for each in counts.values()),
        "played again": row.played_again,
        "phases": {name: dict(each) for name, each in counts.items()},
    }
    row.assert_complete(note, numbers, of=len(moments))
    assert_phases(counts, phases)


def assert_phases(counts: Collection[str], phases: Collection[str]) -> None:
    """Check that each of some phases was struck at least once."""
    assert set(phases) - set(counts) == set()
    assert set(counts) - PHASES == set()


@pytest.fixture
def strike_variant(
    recorder: kill_case.Recorder, record_property: matrix_rows.Note
) -> StrikeVariant:
    """Return what plays a change at its moments, on nodes of its own."""

    def strike_variant(variant: changes.Variant, **how: Any) -> None:
        recording = recorder(variant.change)
        strike = functools.partial(kill_case.strike_and_restart, variant, recording)
        strike_all(record_property, variant, recording.moments, strike, **how)

    return strike_variant


@pytest.mark.slow
@pytest.mark.parametrize("variant", changes.VARIANTS, ids=str)
def test_next_agent_recovers_from_a_strike_after_any_port_call(
    variant: changes.Variant, strike_variant: StrikeVariant, pytestconfig: pytest.Config
) -> None:
    every = pytestconfig.getoption("every")
    assert every <= _MAX_STEP
    left_out = {_SHORTEST} if every > 1 else set()
    strike_variant(variant, step=every, phases=variant.change.phases - left_out)


def test_a_sample_of_the_matrix_converges(strike_variant: StrikeVariant) -> None:
    failing = changes.Variant(changes.FAILING)
    strike_variant(failing, step=14, phases={"Drain", "Execute", "RollBack"})


def test_the_published_results_are_those_of_the_present_matrix() -> None:
    variants = {(each.change.name, each.what): each for each in changes.VARIANTS}
    keys = [{"change": name, "what": what} for name, what in variants]

    for row in matrix_rows.require_rows(_MATRIX, keys):
        counts = row["phases"]
        assert_phases(counts, variants[row["change"], row["what"]].change.phases)
        for what in ("struck", "converged"):
            assert row[what] == row["tried"] == sum(each[what] for each in counts.values())


@pytest.mark.parametrize(
    ("results", "phase"),
    [
        ([], "Drain"),
        (STRUCK[:1], "Drain"),
        ([*STRUCK, None], "Drain"),
        ([*STRUCK, kill_case.KillResult("Drain", ("a pod was disturbed",))], "Drain"),
        ([*STRUCK, kill_case.KillResult("unknown")], "Drain"),
        (STRUCK, "Execute"),
    ],
    ids=["no-case", "fewer", "missed", "problem", "unknown-phase", "missed-phase"],
)
def test_a_matrix_that_missed_a_case_or_a_phase_fails(
    results: Sequence[kill_case.KillResult | None], phase: str
) -> None:
    def strike_all_of(results: Sequence[kill_case.KillResult | None], phase: str) -> None:
        variant = changes.Variant(changes.ONE_SLICE)
        strike = dict(zip(map(str, itertools.count()), results, strict=False))
        strike_all(lambda *_: None, variant, [*strike], strike.__getitem__, phases={phase})

    strike_all_of(STRUCK, "Drain")
    with pytest.raises(AssertionError):
        strike_all_of(results, phase)
