"""Thousands of random acts against the real pipeline; the model is in ``machine``.

``MIG_SOAK_EXAMPLES=5000 pytest -s -m slow tests/soak`` goes on for as long as one likes, with
other acts each time.
"""

import os
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import stateful

from tests.soak import machine

Note = Callable[[str, object], None]

EXAMPLES = int(os.environ.get("MIG_SOAK_EXAMPLES", "0"))
"""Stories to try instead of the usual number; 0: the usual ones, the same each time."""


def soak(note: Note, *, examples: int, steps: int) -> None:
    """Try so many stories of up to so many acts, and note what they came to."""
    machine.COUNTS.clear()
    stateful.run_state_machine_as_test(
        machine.Soak,
        settings=hypothesis.settings(
            max_examples=EXAMPLES or examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=not EXAMPLES,
            # The machine is the whole point; that it is slow is known.
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
    counts = ", ".join(f"{key}: {machine.COUNTS[key]}" for key in sorted(machine.COUNTS))
    note("soak", counts)


def test_whatever_happens_invariants_hold_and_the_layout_comes_at_last(
    record_property: Note,
) -> None:
    soak(record_property, examples=14, steps=20)

    assert machine.COUNTS["runs"] > 40
    assert machine.COUNTS["kills"] > 3


@pytest.mark.slow
def test_thousands_of_acts_leave_every_invariant_in_force(
    record_property: Note,
) -> None:
    soak(record_property, examples=120, steps=50)

    assert machine.COUNTS["acts"] > 3000
    assert machine.COUNTS["kills"] > 100
    assert machine.COUNTS["driver faults"] > 50
