"""Two strikes in a row: the second one meets what the first left to the next agent."""

import json
import logging
import pathlib
import time
from collections.abc import Callable

import pytest
import structlog

from tests.pipeline import double_strikes, played_changes

Note = Callable[[str, object], None]
_SECTION = "double strikes"
_PUBLISHED = pathlib.Path(__file__).parents[2] / "docs" / "results" / "double-strikes.json"


def play(note: Note, name: str, section: str, *, step: int = 1) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    begun_s = time.process_time()
    counts, problems = double_strikes.play_all(played_changes.CHANGES[name], step=step)
    note(section, {"change": name, **counts, "CPU seconds": round(time.process_time() - begun_s)})
    assert problems == []
    assert counts["struck"] == counts["tried"]
    assert counts["converged"] == counts["judged"]
    assert counts["kills"] > 0
    assert counts["writes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", played_changes.CHANGES)
def test_every_pair_of_strikes_has_an_end_that_is_true(
    name: str, record_property: Note, pytestconfig: pytest.Config
) -> None:
    play(record_property, name, _SECTION, step=pytestconfig.getoption("every"))


@pytest.mark.parametrize("name", ["mode change", "rollback"])
def test_a_sample_of_the_pairs_of_strikes_has_an_end_that_is_true(
    name: str, record_property: Note
) -> None:
    play(record_property, name, f"{_SECTION}, a sample", step=61)


def test_the_published_counts_are_of_present_changes() -> None:
    published = {each["change"]: each for each in json.loads(_PUBLISHED.read_text("utf-8"))}
    # A new change is published by the next count of all.
    assert published
    assert published.keys() <= played_changes.CHANGES.keys()
    for counts in published.values():
        assert counts["struck"] == counts["tried"] == counts["kills"] + counts["writes"]
        assert counts["converged"] == counts["judged"]
