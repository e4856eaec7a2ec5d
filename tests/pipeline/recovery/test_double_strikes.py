"""Two strikes in a row: the second one meets what the first left to the next agent."""

import functools
import logging
from collections.abc import Callable

import pytest
import structlog

from tests.kit import matrix_rows
from tests.pipeline.recovery import double_strikes
from tests.pipeline.swept_changes import STRUCK_TWICE, Change

_MATRIX = "double strikes"
_SAMPLE = f"{_MATRIX}, a sample"


def play(
    note: matrix_rows.Note,
    name: str,
    section: str,
    explore: Callable[[Change], double_strikes.Exploration],
) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    explored = explore(STRUCK_TWICE[name])
    note(section, {"change": name, **explored.row})
    assert explored.problems == []
    assert explored.struck == explored.tried
    assert explored.converged == explored.checked
    assert explored.kills > 0
    assert explored.writes > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", STRUCK_TWICE)
def test_every_pair_of_strikes_ends_in_an_allowed_state(
    name: str, record_property: matrix_rows.Note, pytestconfig: pytest.Config
) -> None:
    step = pytestconfig.getoption("every")
    play_all = functools.partial(double_strikes.play_all, step=step)
    play(record_property, name, _MATRIX if step == 1 else _SAMPLE, play_all)


@pytest.mark.parametrize(
    "name",
    [
        "first layout, profiles hidden",
        "one slice, services and hooks",
        "rollback",
        "on demand",
        "monitors",
    ],
)
def test_a_strike_at_any_moment_ends_in_an_allowed_state(
    name: str, record_property: matrix_rows.Note
) -> None:
    sample = functools.partial(double_strikes.play_sample, step=4, every=23)
    play(record_property, name, _SAMPLE, sample)


def test_the_published_counts_are_of_present_changes() -> None:
    for counts in matrix_rows.require_rows(_MATRIX, [{"change": name} for name in STRUCK_TWICE]):
        assert counts["struck"] == counts["tried"] == counts["kills"] + counts["writes"]
        assert counts["converged"] == counts["checked"]


@pytest.mark.parametrize("name", [each["change"] for each in matrix_rows.published_rows(_MATRIX)])
def test_a_published_change_keeps_its_moments(name: str) -> None:
    least = matrix_rows.least(_MATRIX, of="moments", change=name)
    assert double_strikes.moments(STRUCK_TWICE[name]) >= least
