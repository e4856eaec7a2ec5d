"""The GPUs of the in-memory node refuse what the simulated driver refuses."""

import collections
import dataclasses

import pytest

from mig_manager.catalogue import hardware
from mig_manager.core import model, profile_name, steps
from mig_manager.core.planner import planner
from tests import gpu_values
from tests.sandbox import driver_rules

OFF = hardware.template(hardware.find("A100-SXM4-40GB"))


def wanted(*names: str) -> model.DesiredGpu:
    counts = collections.Counter(profile_name.parse(name) for name in names)
    return model.DesiredGpu.of(model.MigMode.ENABLED, counts)


(FULL,) = gpu_values.brought_to((OFF,), wanted("3g.20gb", "2g.10gb", "1g.5gb"))
STEPS = planner.plan((OFF,), {OFF.uuid: wanted("3g.20gb", "2g.10gb")}).steps


def test_steps_of_a_plan_are_refused_without_those_that_come_before() -> None:
    assert len(STEPS) == 5
    for step in STEPS[1:]:
        with pytest.raises(driver_rules.ImpossibleStepError):
            gpu_values.apply_step(OFF, step)


@pytest.mark.parametrize(
    "step",
    [
        next(step for step in STEPS if isinstance(step, steps.CreateGpuInstance)),
        steps.DestroyGpuInstance(
            gpu_uuid=FULL.uuid,
            gpu_instance_id=FULL.gpu_instances[0].instance_id,
            profile=FULL.gpu_instances[0].profile,
            placement=FULL.gpu_instances[0].placement,
        ),
        steps.SetMode(gpu_uuid=FULL.uuid, mode=model.MigMode.DISABLED, needs_reset=True),
    ],
    ids=["create", "destroy", "mode"],
)
def test_a_step_that_the_driver_would_refuse_is_refused(step: steps.Step) -> None:
    with pytest.raises(driver_rules.ImpossibleStepError):
        gpu_values.apply_step(FULL, step)


def test_an_instance_at_a_place_that_its_profile_has_not_is_refused() -> None:
    create = next(step for step in STEPS if isinstance(step, steps.CreateGpuInstance))
    (bare,) = gpu_values.brought_to((OFF,), model.DesiredGpu(mode=model.MigMode.ENABLED))

    gpu_values.apply_step(bare, create)
    for wrong in (model.Placement(start=1, size=4), model.Placement(start=0, size=2)):
        with pytest.raises(driver_rules.ImpossibleStepError):
            gpu_values.apply_step(bare, dataclasses.replace(create, placement=wrong))
