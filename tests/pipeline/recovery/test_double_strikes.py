"""Two strikes in a row: the second one meets what the first left to the next agent."""

import logging

import pytest
import structlog

from tests.pipeline.recovery import double_strikes
from tests.pipeline.swept_changes import STRUCK_TWICE
from tests.rigs.matrices import matrix_rows

_MATRIX = "double strikes"


@pytest.fixture(autouse=True)
def without_logs() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def row_of(change: str) -> matrix_rows.MatrixRow:
    return matrix_rows.MatrixRow(_MATRIX, change=change)


def assert_complete(
    row: matrix_rows.MatrixRow,
    counts: double_strikes.Counts,
    note: matrix_rows.Note,
    *,
    is_sample: bool,
) -> None:
    row.assert_complete(note, counts, of=None if is_sample else row.tried)
    assert counts["converged"] == counts["checked"]
    assert counts["kills"] > 0
    assert counts["writes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", STRUCK_TWICE)
def test_every_pair_of_strikes_ends_in_an_allowed_state(
    name: str, record_property: matrix_rows.Note, pytestconfig: pytest.Config
) -> None:
    row, step = row_of(name), pytestconfig.getoption("every")
    counts = double_strikes.strike_all(row, STRUCK_TWICE[name], step=step)
    assert_complete(row, counts, record_property, is_sample=step > 1)


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
    row = row_of(name)
    counts = double_strikes.strike_sample(row, STRUCK_TWICE[name], step=4, every=23)
    assert_complete(row, counts, record_property, is_sample=True)


def test_the_published_counts_are_of_present_changes() -> None:
    for counts in matrix_rows.require_rows(_MATRIX, [{"change": name} for name in STRUCK_TWICE]):
        assert counts["struck"] == counts["tried"] == counts["kills"] + counts["writes"]
        assert counts["converged"] == counts["checked"]


@pytest.mark.parametrize("name", [each["change"] for each in matrix_rows.published_rows(_MATRIX)])
def test_a_published_change_keeps_its_moments(name: str) -> None:
    minimum = matrix_rows.minimum_count(_MATRIX, of="moments", change=name)
    assert double_strikes.count_moments(STRUCK_TWICE[name]) >= minimum
