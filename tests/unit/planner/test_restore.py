"""Plans back to a snapshot: what they restore, what they remove, what they leave alone."""

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager import errors, reasons
from mig_manager.core import model, steps
from mig_manager.core.planner import planner
from mig_manager.core.records import snapshot_codec
from tests.rigs.node import driver_rules, samples
from tests.rigs.planner import oracle
from tests.unit import drawn_gpus

OFF, ON = model.MigMode.DISABLED, model.MigMode.ENABLED


def a100(*instances: str, mode: model.MigMode = ON, index: int = 0) -> model.Gpu:
    return samples.gpu(samples.A100, *instances, mode=mode, index=index)


@pytest.mark.parametrize("product", samples.PRODUCTS)
@hypothesis.given(data=st.data())
def test_restoring_recreates_every_placement_with_the_fewest_calls(
    product: str, data: st.DataObject
) -> None:
    before, now = data.draw(drawn_gpus.gpus(product)), data.draw(drawn_gpus.gpus(product))
    plan = planner.restore([now], [before.snapshot])
    after = driver_rules.execute(now, plan.steps)
    assert oracle.state_of(after) == oracle.state_of(before)
    assert planner.restore([after], [before.snapshot]).is_empty
    assert len(plan.steps) == oracle.price(now, oracle.state_of(before), {})[1]


@pytest.mark.parametrize("mode", [ON, OFF])
def test_restoring_resets_the_mig_mode(mode: model.MigMode) -> None:
    on, off = a100("3g.20gb@4[1c@1]", "1g.5gb@2[]"), a100(mode=OFF)
    before, now = (on, off) if mode is ON else (off, on)
    after = driver_rules.execute(now, planner.restore([now], [before.snapshot]).steps)
    assert after.current_mode is mode
    assert oracle.state_of(after) == oracle.state_of(before)


PENDING_OFF = dataclasses.replace(a100("7g.40gb@0"), pending_mode=OFF)


@pytest.mark.parametrize(
    ("now", "before", "lines"),
    [
        pytest.param(
            samples.gpu(None, mode=OFF),
            a100("3g.20gb@4"),
            ["mode enabled", "+gi 3g.20gb 4:4", "+ci 3g.20gb 0:3 in 4:4"],
            id="profiles that the driver does not list",
        ),
        pytest.param(PENDING_OFF, PENDING_OFF, [], id="a mode that was pending"),
        pytest.param(PENDING_OFF, a100("7g.40gb@0"), ["mode enabled"], id="a pending mode"),
        pytest.param(a100("1g.5gb@0", index=1), a100(), [], id="a missing GPU and a new one"),
    ],
)
def test_restoring_takes_only_the_necessary_steps(
    now: model.Gpu, before: model.Gpu, lines: list[str]
) -> None:
    assert samples.step_lines(planner.restore([now], [before.snapshot])) == lines


@pytest.mark.parametrize(
    ("now", "before", "count"),
    [
        ("3g.20gb@0[1c 1c]", "3g.20gb@0[1c@0 1c@2]", 0),
        ("3g.20gb@0[1c@0 1c@2]", "3g.20gb@0[1c 1c]", 0),
        ("3g.20gb@0[1c@0]", "3g.20gb@0[2c 1c]", 3),
        ("3g.20gb@4[1c@0]", "3g.20gb@0[2c 1c]", 5),
    ],
)
def test_restoring_packs_compute_instances_with_unknown_spans_again(
    now: str, before: str, count: int
) -> None:
    gpu = a100(now)
    plan = planner.restore([gpu], [a100(before).snapshot])
    assert len(plan.steps) == count
    driver_rules.execute(gpu, plan.steps)


def test_restoring_refuses_a_gpu_without_mig_and_an_impossible_snapshot() -> None:
    gone = samples.gpu(None, mode=None)
    assert planner.restore([gone], [gone.snapshot]).is_empty
    with pytest.raises(errors.LayoutError, match="no MIG"):
        planner.restore([gone], [a100().snapshot])
    with pytest.raises(errors.LayoutError) as caught:
        planner.restore([a100()], [a100("3g.20gb@0[2c 2c]").snapshot])
    assert caught.value.reason is reasons.Reason.DOES_NOT_FIT


# -- the baseline of a change: what it had, and what it creates -------------------------------


def plan_to(gpu: model.Gpu, devices: dict[str, int]) -> steps.Plan:
    return planner.plan([gpu], {gpu.uuid: samples.desired_gpu(devices)})


def restore(gpu: model.Gpu, before: tuple[model.GpuSnapshot, ...]) -> model.Gpu:
    after = driver_rules.execute(gpu, planner.restore([gpu], before).steps)
    assert planner.restore([after], before).is_empty
    return after


def placements(gpu: model.Gpu | model.GpuSnapshot) -> set[str]:
    return {f"{gi.profile}@{gi.placement.start}" for gi in gpu.gpu_instances}


@pytest.mark.parametrize("has_creations", [True, False])
def test_a_rollback_removes_created_and_restores_destroyed_instances(
    *, has_creations: bool
) -> None:
    gpu = a100("2g.10gb@0", "3g.20gb@4")
    plan = plan_to(gpu, {"1g.5gb": 4})
    after = driver_rules.execute(gpu, plan.steps)
    before = planner.baseline(plan, [gpu]) if has_creations else (gpu.snapshot,)

    assert planner.unowned_instances([after], before) == ()
    assert placements(restore(after, before)) == placements(gpu)


def test_unowned_instance_stays_and_is_named() -> None:
    gpu, after, crowded = (
        a100("2g.10gb@0"),
        a100("2g.10gb@0", "2g.10gb@2"),
        a100("2g.10gb@0", "2g.10gb@2", "1g.5gb@6"),
    )
    before = planner.baseline(plan_to(gpu, {"2g.10gb": 2}), [gpu])
    assert planner.unowned_instances([after], before) == ()
    assert planner.unowned_instances([crowded], before) == ("1g.5gb at 6:1 on GPU 0",)
    assert placements(restore(crowded, before)) == {"2g.10gb@0", "1g.5gb@6"}
    (following,) = planner.baseline(plan_to(crowded, {"3g.20gb": 1}), [crowded], before)
    assert placements(following) == {"2g.10gb@0", "1g.5gb@6"}


def test_an_instance_that_overlaps_an_unowned_one_is_not_restored() -> None:
    gpu = a100("2g.10gb@0", "3g.20gb@4")
    before = planner.baseline(plan_to(gpu, {"1g.5gb": 4}), [gpu])
    assert placements(restore(a100("2g.10gb@4"), before)) == {"2g.10gb@0", "2g.10gb@4"}


def test_unowned_compute_instance_stays_and_is_named() -> None:
    gpu, both = a100("3g.20gb@4[1c@0]"), a100("3g.20gb@4[1c@0 1c@1 1c@2]")
    plan = plan_to(gpu, {"1c.3g.20gb": 2})
    (step,) = plan.steps
    assert isinstance(step, steps.CreateComputeInstance)
    before = planner.baseline(plan, [gpu])

    (back,) = restore(both, before).gpu_instances

    own_place, unowned_place = step.placement, model.Placement(3 - step.placement.start, 1)
    assert {ci.placement for ci in back.compute_instances} == {
        model.Placement(0, 1),
        unowned_place,
    }
    assert own_place != unowned_place
    named = planner.unowned_instances([both], before)
    assert named == ("1c.3g.20gb in 3g.20gb at 4:4 on GPU 0",)


def test_a_compute_instance_that_overlaps_an_unowned_one_is_not_restored() -> None:
    gpu, unowned = a100("3g.20gb@4[1c@0 1c@2]"), a100("3g.20gb@4[2c@0 1c@2]")
    before = planner.baseline(plan_to(gpu, {"3g.20gb": 1}), [gpu])

    assert oracle.state_of(restore(unowned, before)) == oracle.state_of(unowned)
    (following,) = planner.baseline(plan_to(unowned, {}), [unowned], before)
    (kept,) = following.gpu_instances
    assert {ci.placement.size for ci in kept.compute_instances if ci.placement} == {1, 2}


def test_a_compute_instance_of_an_interrupted_change_is_removed_later() -> None:
    gpu = a100("3g.20gb@4[1c@0]")
    first = plan_to(gpu, {"1c.3g.20gb": 2})
    between = driver_rules.execute(gpu, first.steps)
    second = plan_to(between, {"1c.3g.20gb": 3})
    before = planner.baseline(second, [between], planner.baseline(first, [gpu]))

    after = restore(driver_rules.execute(between, second.steps), before)

    assert oracle.state_of(after) == oracle.state_of(gpu)


def test_a_spanning_instance_counts_as_created_whatever_its_span() -> None:
    gpu = a100("7g.40gb@0[4c@0 3c@4]")
    plan = plan_to(gpu, {"7g.40gb": 1})
    between = driver_rules.execute(gpu, plan.steps)
    (gi,) = between.gpu_instances
    (ci,) = gi.compute_instances
    reported = dataclasses.replace(ci, placement=model.Placement(0, 8))
    gi = dataclasses.replace(gi, compute_instances=(reported,))
    between = dataclasses.replace(between, gpu_instances=(gi,))

    before = planner.baseline(plan_to(between, {}), [between], planner.baseline(plan, [gpu]))

    assert oracle.state_of(restore(between, before)) == oracle.state_of(gpu)


def test_mig_mode_stays_enabled_with_an_unowned_instance() -> None:
    before = (dataclasses.replace(a100(mode=OFF).snapshot, created=()),)
    now = a100("1g.5gb@0")
    assert planner.restore([now], before).is_empty
    assert planner.unowned_instances([now], before)


def test_an_older_snapshot_takes_precedence_and_no_gpu_is_lost() -> None:
    first, second = a100("2g.10gb@0", "3g.20gb@4"), a100("7g.40gb@0", index=1)
    plan = plan_to(first, {"1g.5gb": 3})
    older, between = planner.baseline(plan, [first]), driver_rules.execute(first, plan.steps)
    empty = samples.desired_gpu({})

    both = planner.plan([between, second], {each.uuid: empty for each in (between, second)})
    before = planner.baseline(both, [between, second], older)
    assert {each.uuid: placements(each) for each in before} == {
        first.uuid: placements(first),
        second.uuid: placements(second),
    }
    kept = planner.baseline(plan_to(second, {}), [between, second], older)
    assert {each.uuid for each in kept} == {first.uuid, second.uuid}


def test_a_gpu_that_is_gone_takes_no_other_from_the_baseline() -> None:
    gone, present = a100("2g.10gb@0"), a100("7g.40gb@0", index=1)
    both = planner.plan(
        [gone, present], dict.fromkeys((gone.uuid, present.uuid), samples.desired_gpu({}))
    )
    assert [each.uuid for each in planner.baseline(both, [present])] == [present.uuid]


def test_the_journal_stays_readable_over_many_interrupted_changes() -> None:
    gpu = a100()
    before: tuple[model.GpuSnapshot, ...] = ()
    parts = ("1c.2g.10gb", "1c.3g.20gb", "2c.3g.20gb", "1c.4g.20gb", "2c.4g.20gb", "1c.7g.40gb")
    for row in gpu.profiles or ():
        parts_of_row = [each for each in parts if each.endswith(str(row.profile))]
        for place in row.placements:
            for name in (str(row.profile), *parts_of_row):
                count = row.profile.gpu_slices // int(name[0])
                plan = plan_to(gpu, {f"{name}@{place.start}": count})
                before = planner.baseline(plan, [gpu], before)
                gpu = driver_rules.execute(gpu, plan.steps)
                (read,) = snapshot_codec.from_data(snapshot_codec.to_data(before))
                assert read.created == before[0].created
    assert placements(restore(gpu, before)) == set()
