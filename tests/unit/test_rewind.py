"""What a rollback restores, what it removes, and which instances it leaves alone."""

import dataclasses

import pytest

from mig_manager.catalogue import hardware
from mig_manager.core import model, steps
from mig_manager.core.planner import planner
from mig_manager.core.records import gpu_codec
from tests import gpu_values
from tests.unit import samples

ON = model.MigMode.ENABLED


def gpu_with(**counts: int) -> model.Gpu:
    """Return an A100 with so many instances of each profile, such as ``g1=2``."""
    empty = hardware.template(hardware.find("A100-SXM4-40GB"), 0)
    return gpu_values.brought_to((empty,), wanted(**counts))[0]


def wanted(**counts: int) -> model.DesiredGpu:
    names = {"g1": "1g.5gb", "g2": "2g.10gb", "g3": "3g.20gb", "c1": "1c.3g.20gb"}
    return samples.want({names[key]: count for key, count in counts.items()})


def replan(gpu: model.Gpu, **counts: int) -> tuple[steps.Plan, model.Gpu]:
    """Return the plan to other instances, and the GPU after it."""
    plan = planner.plan((gpu,), {gpu.uuid: wanted(**counts)})
    for step in plan.steps:
        gpu = gpu_values.apply_step(gpu, step)
    return plan, gpu


def restored(gpu: model.Gpu, before: tuple[model.GpuSnapshot, ...]) -> model.Gpu:
    for step in planner.restore((gpu,), before).steps:
        gpu = gpu_values.apply_step(gpu, step)
    return gpu


def placements(gpu: model.Gpu | model.GpuSnapshot) -> set[tuple[str, model.Placement]]:
    return {(str(gi.profile), gi.placement) for gi in gpu.gpu_instances}


def test_a_rollback_removes_created_and_restores_destroyed_instances() -> None:
    gpu = gpu_with(g2=1, g3=1)
    plan, after = replan(gpu, g1=4)
    before = planner.baseline(plan, (gpu,))

    assert planner.unowned_instances((after,), before) == ()
    assert placements(restored(after, before)) == placements(gpu)


def test_an_instance_in_neither_list_stays_and_is_named() -> None:
    gpu = gpu_with(g2=1)
    plan, after = replan(gpu, g2=2)
    before = planner.baseline(plan, (gpu,))
    _, crowded = replan(after, g2=2, g1=1)
    (foreign,) = placements(crowded) - placements(after)

    assert planner.unowned_instances((crowded,), before) == (f"1g.5gb at {foreign[1]} on GPU 0",)
    assert placements(restored(crowded, before)) == placements(gpu) | {foreign}


def test_an_instance_that_overlaps_a_foreign_one_is_not_restored() -> None:
    gpu = gpu_with(g2=1, g3=1)
    (lost,) = (gi.placement for gi in gpu.gpu_instances if str(gi.profile) == "3g.20gb")
    plan, _ = replan(gpu, g1=4)
    before = planner.baseline(plan, (gpu,))
    info = next(each for each in gpu.profiles or () if str(each.profile) == "2g.10gb")
    place = next(place for place in info.placements if place.overlaps(lost))
    foreign = steps.CreateGpuInstance(
        gpu_uuid=gpu.uuid,
        profile=info.profile,
        profile_id=info.profile_id,
        placement=place,
    )
    now = gpu_values.apply_step(dataclasses.replace(gpu, gpu_instances=()), foreign)

    back = restored(now, before)

    assert placements(back) == (placements(gpu) - {("3g.20gb", lost)}) | {("2g.10gb", place)}
    assert planner.restore((back,), before).is_empty


def test_a_foreign_compute_instance_in_a_gpu_instance_that_stays_is_kept_and_named() -> None:
    gpu = gpu_with(c1=1)
    (gi,) = gpu.gpu_instances
    (had,) = (ci.placement for ci in gi.compute_instances)
    assert had
    added, other = (model.Placement(start, 1) for start in range(3) if start != had.start)
    plan = steps.Plan(
        gpus=(
            steps.GpuPlan(
                gpu_uuid=gpu.uuid,
                gpu_index=0,
                steps=(
                    steps.CreateComputeInstance(
                        gpu_uuid=gpu.uuid,
                        gpu_instance_placement=gi.placement,
                        profile=gi.compute_instances[0].profile,
                        placement=added,
                    ),
                ),
                target=(),
            ),
        )
    )
    before = planner.baseline(plan, (gpu,))
    ours = gpu_values.apply_step(gpu, plan.steps[0])
    assert isinstance(plan.steps[0], steps.CreateComputeInstance)
    foreign = dataclasses.replace(plan.steps[0], placement=other)
    both = gpu_values.apply_step(ours, foreign)

    back = restored(both, before)

    assert {ci.placement for ci in back.gpu_instances[0].compute_instances} == {had, other}
    assert planner.unowned_instances((both,), before) == (
        f"1c.3g.20gb in 3g.20gb at {gi.placement} on GPU 0",
    )


def test_mig_mode_stays_enabled_with_a_foreign_instance() -> None:
    off = hardware.template(hardware.find("A100-SXM4-40GB"), 0)
    before = (dataclasses.replace(off.snapshot, created=()),)
    now = gpu_with(g1=1)

    assert planner.restore((now,), before).is_empty
    assert planner.unowned_instances((now,), before)


def test_a_rollback_without_recorded_creations_removes_every_new_instance() -> None:
    gpu = gpu_with(g2=1)
    _, after = replan(gpu, g2=1, g1=2)

    assert planner.unowned_instances((after,), (gpu.snapshot,)) == ()
    assert placements(restored(after, (gpu.snapshot,))) == placements(gpu)


def test_an_older_snapshot_takes_precedence_and_no_gpu_is_lost() -> None:
    first = gpu_with(g2=1, g3=1)
    second = dataclasses.replace(first, index=1, uuid="GPU-second")
    plan, between = replan(first, g1=3)
    older = planner.baseline(plan, (first,))
    both = planner.plan(
        (between, second),
        {gpu.uuid: model.DesiredGpu(mode=ON) for gpu in (between, second)},
    )

    before = {gpu.uuid: gpu for gpu in planner.baseline(both, (between, second), older)}

    assert placements(before[first.uuid]) == placements(first)
    assert placements(before[second.uuid]) == placements(second)
    only_second = planner.plan((second,), {second.uuid: model.DesiredGpu(mode=ON)})
    kept = planner.baseline(only_second, (between, second), older)
    assert {gpu.uuid for gpu in kept} == {first.uuid, second.uuid}


def test_the_next_change_restores_a_foreign_instance_too() -> None:
    gpu = gpu_with(g2=1)
    plan, after = replan(gpu, g2=2)
    older = planner.baseline(plan, (gpu,))
    _, crowded = replan(after, g2=2, g1=1)
    (foreign,) = placements(crowded) - placements(after)
    again, _ = replan(crowded, g3=1)

    (before,) = planner.baseline(again, (crowded,), older)

    assert placements(before) == placements(gpu) | {foreign}


def test_the_journal_keeps_what_a_change_creates() -> None:
    gpu = gpu_with(g2=1)
    plan, _ = replan(gpu, c1=2)
    (before,) = planner.baseline(plan, (gpu,))

    (read,) = gpu_codec.from_data(gpu_codec.to_data([before]))

    assert before.created
    assert read.created == before.created


@pytest.mark.parametrize("row", [[], ["1g.5gb"], ["1g.5gb", 0, 1, 0], ["x", 0, 1], 3])
def test_an_invalid_creation_is_refused(row: object) -> None:
    gpu = gpu_with(g2=1)
    data = gpu_codec.to_data([gpu.snapshot])
    data[0]["created"] = [row]

    with pytest.raises(ValueError, match=r"."):
        gpu_codec.from_data(data)
