"""Thousands of random acts against the real agent; the model is in ``machine``.

Each run has the same acts, so that a change is judged by those of the one before it.
``MIG_SOAK_SEED=$RANDOM`` has others, and ``MIG_SOAK_EXAMPLES=5000 pytest -s -m slow
tests/soak`` runs for hours.
"""

import os

import hypothesis
import pytest
from hypothesis import stateful

from tests.rigs.matrices import matrix_rows
from tests.soak import machine, script

EXAMPLES = int(os.environ.get("MIG_SOAK_EXAMPLES", "0"))
"""Stories to try instead of the usual number; 0: the usual number."""
SEED = int(os.environ.get("MIG_SOAK_SEED", "1"))


def soak(note: matrix_rows.Note, *, section: str, examples: int, steps: int) -> None:
    """Play random stories of acts, and note what happened in them."""
    machine.COUNTS.clear()
    try:
        stateful.run_state_machine_as_test(
            hypothesis.seed(SEED)(machine.Soak),
            settings=hypothesis.settings(
                max_examples=EXAMPLES or examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                # Shrinking takes minutes; another run has the same acts.
                phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
                # The machine is the whole point; that it is slow is known.
                suppress_health_check=list(hypothesis.HealthCheck),
            ),
        )
    finally:
        note(section, {"seed": SEED} | dict(sorted(machine.COUNTS.items())))


def test_invariants_hold_under_any_events_and_the_layout_is_reached(
    record_property: matrix_rows.Note,
) -> None:
    soak(record_property, section="soak, a sample", examples=7, steps=20)

    assert machine.COUNTS["runs"] > 20
    assert machine.COUNTS["kills"] > 1


@pytest.mark.slow
def test_thousands_of_acts_keep_every_invariant(record_property: matrix_rows.Note) -> None:
    soak(record_property, section="soak", examples=120, steps=50)

    assert machine.COUNTS["acts"] > 2000
    assert machine.COUNTS["kills"] > 50
    assert machine.COUNTS["driver faults struck"] > 20
    assert sum(machine.COUNTS[kind.value] for kind in script.StrikeKind) > 100
