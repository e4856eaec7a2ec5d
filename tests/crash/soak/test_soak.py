"""Thousands of random acts against the real agent; the model is in ``machine``.

Each run has other acts, from a seed that it prints: ``MIG_SOAK_SEED=SEED`` plays them again, with
the same ``MIG_SOAK_EXAMPLES``.
``MIG_SOAK_EXAMPLES=5000 pytest -s -m slow tests/crash/soak`` runs for hours.
"""

import os
import secrets
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import stateful

from tests.crash.soak import machine, script

Note = Callable[[str, object], None]

EXAMPLES = int(os.environ.get("MIG_SOAK_EXAMPLES", "0"))
"""Stories to try instead of the usual number; 0: the usual number."""
SEED = int(os.environ.get("MIG_SOAK_SEED", "0")) or secrets.randbelow(2**31) + 1


def soak(note: Note, *, section: str, examples: int, steps: int, seed: int = SEED) -> None:
    """Try so many stories of up to so many acts, and note what they came to."""
    machine.COUNTS.clear()
    print(f"MIG_SOAK_SEED={seed}")  # noqa: T201 - how to play a failure again
    try:
        stateful.run_state_machine_as_test(
            hypothesis.seed(seed)(machine.Soak),
            settings=hypothesis.settings(
                max_examples=EXAMPLES or examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                # Shrinking takes minutes; the seed plays the same acts again.
                phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
                # The machine is the whole point; that it is slow is known.
                suppress_health_check=list(hypothesis.HealthCheck),
            ),
        )
    finally:
        note(section, {"seed": seed} | dict(sorted(machine.COUNTS.items())))


def test_whatever_happens_invariants_hold_and_the_layout_comes_at_last(
    record_property: Note,
) -> None:
    # So few acts of one seed may hold no kill.
    for seed in range(SEED, SEED + 5):
        soak(record_property, section="soak, a sample", examples=14, steps=20, seed=seed)
        assert machine.COUNTS["runs"] > 20
        if machine.COUNTS["kills"] > 1:
            return
    pytest.fail("of five samples none had two kills")


@pytest.mark.slow
def test_thousands_of_acts_keep_every_invariant(
    record_property: Note,
) -> None:
    soak(record_property, section="soak", examples=120, steps=50)

    assert machine.COUNTS["acts"] > 2000
    assert machine.COUNTS["kills"] > 50
    assert machine.COUNTS["driver faults struck"] > 20
    assert sum(machine.COUNTS[kind.value] for kind in script.Kind) > 100
