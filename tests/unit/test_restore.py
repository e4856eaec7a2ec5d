"""Plans back to a snapshot of GPUs."""

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.planner import planner
from tests.unit import layouts, machine, oracle, samples

OFF, ON = model.MigMode.DISABLED, model.MigMode.ENABLED


def test_restoring_what_is_there_takes_no_step() -> None:
    gpu = samples.gpu(samples.A100, "3g.20gb@4[1c@1]", "1g.5gb@2[]")
    assert planner.restore([gpu], [gpu.snapshot]).is_empty


@pytest.mark.parametrize("product", samples.PRODUCTS)
@hypothesis.given(data=st.data())
@hypothesis.settings(deadline=None, max_examples=40)
def test_restoring_recreates_every_placement_with_the_fewest_calls(
    product: str, data: st.DataObject
) -> None:
    before, now = data.draw(layouts.gpus(product)), data.draw(layouts.gpus(product))
    plan = planner.restore([now], [before.snapshot])
    after = machine.run(now, plan.steps)
    assert oracle.state_of(after) == oracle.state_of(before)
    assert planner.restore([after], [before.snapshot]).is_empty
    assert len(plan.steps) == oracle.price(now, oracle.state_of(before), frozenset())[1]


@pytest.mark.parametrize("mode", [ON, OFF])
def test_restoring_resets_the_mig_mode(mode: model.MigMode) -> None:
    on = samples.gpu(samples.A100, "3g.20gb@4[1c@1]", "1g.5gb@2[]")
    off = samples.gpu(samples.A100, mode=OFF)
    before, now = (on, off) if mode is ON else (off, on)
    after = machine.run(now, planner.restore([now], [before.snapshot]).steps)
    assert after.current_mode is mode
    assert oracle.state_of(after) == oracle.state_of(before)


def test_restoring_needs_no_profiles_from_the_driver() -> None:
    before = samples.gpu(samples.A100, "3g.20gb@4")
    plan = planner.restore([samples.gpu(None, mode=OFF)], [before.snapshot])
    assert samples.words(plan) == ["mode enabled", "+gi 3g.20gb 4:4", "+ci 3g.20gb 0:3 in 4:4"]


def test_restoring_leaves_a_mode_pending_that_was_pending_before() -> None:
    gpu = dataclasses.replace(samples.gpu(samples.A100, "7g.40gb@0"), pending_mode=OFF)
    assert planner.restore([gpu], [gpu.snapshot]).is_empty
    before = dataclasses.replace(gpu, pending_mode=ON)
    assert samples.words(planner.restore([gpu], [before.snapshot])) == ["mode enabled"]


def test_restoring_skips_missing_and_new_gpus() -> None:
    old, new = samples.gpu(samples.A100, index=0), samples.gpu(samples.A100, "1g.5gb@0", index=1)
    assert planner.restore([new], [old.snapshot]).is_empty


def test_restoring_fails_if_the_gpu_has_no_mig() -> None:
    gone = dataclasses.replace(samples.gpu(None), current_mode=None, pending_mode=None)
    assert planner.restore([gone], [gone.snapshot]).is_empty
    with pytest.raises(errors.LayoutError, match="no MIG"):
        planner.restore([gone], [samples.gpu(samples.A100).snapshot])


@pytest.mark.parametrize(
    ("now", "before", "steps"),
    [
        ("3g.20gb@0[1c 1c]", "3g.20gb@0[1c@0 1c@2]", 0),
        ("3g.20gb@0[1c@0 1c@2]", "3g.20gb@0[1c 1c]", 0),
        ("3g.20gb@0[1c@0]", "3g.20gb@0[2c 1c]", 3),
        ("3g.20gb@4[1c@0]", "3g.20gb@0[2c 1c]", 5),
    ],
)
def test_restoring_packs_compute_instances_with_unknown_spans_again(
    now: str, before: str, steps: int
) -> None:
    gpu = samples.gpu(samples.A100, now)
    plan = planner.restore([gpu], [samples.gpu(samples.A100, before).snapshot])
    assert len(plan.steps) == steps
    machine.run(gpu, plan.steps)


def test_restoring_refuses_a_snapshot_that_fits_no_gpu_instance() -> None:
    before = samples.gpu(samples.A100, "3g.20gb@0[2c 2c]")
    with pytest.raises(errors.LayoutError) as caught:
        planner.restore([samples.gpu(samples.A100)], [before.snapshot])
    assert caught.value.reason is errors.Reason.DOES_NOT_FIT
