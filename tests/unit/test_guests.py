"""GPUs of virtual machines: what only their host may do is not even planned."""

import dataclasses

import pytest

from mig_manager import errors
from mig_manager.core import model, steps
from mig_manager.core.planner import planner
from tests.unit import samples

VIRTUALIZATIONS = tuple(model.Virtualization)
ON, OFF = model.MigMode.ENABLED, model.MigMode.DISABLED


def guest(*instances: str, mode: model.MigMode = ON) -> model.Gpu:
    gpu = samples.gpu(samples.A100, *instances, mode=mode)
    return dataclasses.replace(gpu, virtualization=model.Virtualization.VGPU)


@pytest.mark.parametrize(
    ("gpu", "wanted"),
    [
        (guest(mode=OFF), model.DesiredGpu(mode=ON)),
        (guest(), model.DesiredGpu(mode=OFF)),
        (guest("3g.20gb@0"), samples.want({"3g.20gb": 2})),
        (guest("3g.20gb@0"), samples.want({})),
    ],
)
def test_a_vgpu_that_only_its_host_can_partition_is_refused(
    gpu: model.Gpu, wanted: model.DesiredGpu
) -> None:
    with pytest.raises(errors.LayoutError, match="only its host can partition it") as caught:
        planner.plan([gpu], {gpu.uuid: wanted})
    assert caught.value.reason is errors.Reason.NOT_SUPPORTED


def test_a_vgpu_that_matches_or_needs_only_compute_instances_is_accepted() -> None:
    gpu = guest("3g.20gb@0")
    assert planner.plan([gpu], {gpu.uuid: samples.want({"3g.20gb": 1})}).is_empty
    inside = planner.plan([gpu], {gpu.uuid: samples.want({"1c.3g.20gb": 3})})
    assert {type(step) for step in inside.steps} == {
        steps.DestroyComputeInstance,
        steps.CreateComputeInstance,
    }


def test_a_vgpu_outside_the_layout_is_ignored() -> None:
    other = dataclasses.replace(samples.gpu(samples.A100, index=1))
    plan = planner.plan([guest(mode=OFF), other], {other.uuid: samples.want({"7g.40gb": 1})})
    assert [each.gpu_index for each in plan.gpus] == [1]


@pytest.mark.parametrize(
    "virtualization", [each for each in VIRTUALIZATIONS if each is not model.Virtualization.VGPU]
)
def test_whole_gpus_are_planned_with_any_virtualization(
    virtualization: model.Virtualization,
) -> None:
    gpu = dataclasses.replace(samples.gpu(samples.A100, mode=OFF), virtualization=virtualization)
    assert planner.plan([gpu], {gpu.uuid: samples.want({"7g.40gb": 1})}).gpus[0].changes_mode
