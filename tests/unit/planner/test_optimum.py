"""No plan is better, by everything that the GPU could be brought to."""

import dataclasses
import itertools
import random

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager.core import model
from mig_manager.core.planner import planner
from tests.rigs.node import driver_rules, samples
from tests.rigs.planner import oracle
from tests.unit import drawn_gpus

QUICK = (("H100", False), ("RTX6000", False), ("A30", True), ("RTX6000", True))
"""Products, and whether GPU instances are split, that the oracle searches quickly."""

USE = st.sampled_from((0, 0, 0, 1, 1, 2, 7))
"""How much the loss of a device matters; many are not in use."""


@pytest.mark.parametrize("product", samples.PRODUCTS)
@hypothesis.given(data=st.data())
def test_executing_a_plan_reaches_exactly_the_desired_devices(
    product: str, data: st.DataObject
) -> None:
    gpu, desired = (
        data.draw(drawn_gpus.gpus(product)),
        data.draw(drawn_gpus.desired_devices(product)),
    )
    desired_gpus = {gpu.uuid: desired}
    plan = planner.plan([gpu], desired_gpus)
    after = driver_rules.execute(gpu, plan.steps)
    assert samples.devices_of(after) == dict(desired.devices)
    assert planner.plan([after], desired_gpus).is_empty
    for gpu_plan in plan.gpus:
        assert {
            (t.profile, t.placement.start): frozenset(
                (ci.placement.size, ci.placement.start) for ci in t.compute_instances
            )
            for t in gpu_plan.target
        } == oracle.state_of(after)


@hypothesis.given(data=st.data(), seeded=st.randoms(use_true_random=False))
def test_the_order_of_gpus_and_instances_makes_no_difference(
    data: st.DataObject, seeded: random.Random
) -> None:
    names = ("A100", "RTX6000", "A100")
    gpus = [data.draw(drawn_gpus.gpus(name, index=i)) for i, name in enumerate(names)]
    desired = {
        gpu.uuid: data.draw(drawn_gpus.desired_devices(name))
        for gpu, name in zip(gpus, names, strict=True)
    }
    uuids = [uuid for gpu in gpus for uuid in gpu.mig_uuids]
    use = {uuid: data.draw(USE) for uuid in uuids}
    shuffle = seeded.sample
    mixed = [
        dataclasses.replace(
            gpu,
            gpu_instances=tuple(
                dataclasses.replace(
                    gi,
                    compute_instances=tuple(
                        shuffle(gi.compute_instances, len(gi.compute_instances))
                    ),
                )
                for gi in shuffle(gpu.gpu_instances, len(gpu.gpu_instances))
            ),
        )
        for gpu in shuffle(gpus, len(gpus))
    ]
    assert planner.plan(mixed, desired, use=use) == planner.plan(gpus, desired, use=use)


def check_against_everything(data: st.DataObject, product: str, *, splits: bool) -> None:
    gpu = data.draw(drawn_gpus.gpus(product, splits=splits))
    desired = data.draw(drawn_gpus.desired_devices(product, splits=splits))
    use = {uuid: data.draw(USE) for uuid in gpu.mig_uuids}
    plan = planner.plan([gpu], {gpu.uuid: desired}, use=use)
    lost = sum(use[uuid] for uuid in plan.destroyed_uuids)
    goal = oracle.state_of(driver_rules.execute(gpu, plan.steps))
    expected = oracle.best(gpu, dict(desired.devices), use)
    assert (lost, len(plan.steps), *oracle.rank(gpu, goal, use)[2:]) == expected


@pytest.mark.parametrize(("product", "splits"), QUICK)
@hypothesis.given(data=st.data())
def test_no_other_plan_is_better(product: str, data: st.DataObject, *, splits: bool) -> None:
    check_against_everything(data, product, splits=splits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("product", "splits"),
    [each for each in itertools.product(samples.PRODUCTS, (False, True)) if each not in QUICK],
)
@hypothesis.given(data=st.data())
@hypothesis.settings(deadline=None, max_examples=150)
def test_no_other_plan_is_better_for_further_gpus(
    product: str, data: st.DataObject, *, splits: bool
) -> None:
    check_against_everything(data, product, splits=splits)


@hypothesis.given(gpu=drawn_gpus.gpus("A30"))
def test_no_sequence_of_driver_calls_is_shorter(gpu: model.Gpu) -> None:
    for desired, calls in oracle.fewest_calls(gpu).items():
        desired_gpu = model.DesiredGpu.of(model.MigMode.ENABLED, dict(desired))
        assert len(planner.plan([gpu], {gpu.uuid: desired_gpu}).steps) == calls
