"""The planner accepts exactly what can be placed: every product, every layout, by trying it all.

What can be placed is closed downwards: leaving an instance out never makes a layout impossible.
So all layouts that fit, and each of them with one instance more, are all that need to be tried.
"""

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager import errors, reasons
from mig_manager.catalogue import hardware, product_table
from mig_manager.core import model, steps
from mig_manager.core.planner import planner
from tests.rigs.node import driver_rules
from tests.rigs.planner import oracle
from tests.unit.bruteforce import Counts, one_more, placeable, template

PRODUCTS = [
    product
    for product in hardware.products().values()
    if product.is_mig_capable and not product.not_simulatable
]
ONE_OF_EACH_GRID = {product.grid: product for product in reversed(PRODUCTS)}.values()


def desired_gpu(gpu: model.Gpu, counts: Counts) -> model.DesiredGpu:
    profiles = [spec.profile for spec in gpu.profiles or ()]
    return model.DesiredGpu.of(model.MigMode.ENABLED, dict(zip(profiles, counts, strict=True)))


def is_accepted(gpu: model.Gpu, counts: Counts) -> bool:
    try:
        plan = planner.plan([gpu], {gpu.uuid: desired_gpu(gpu, counts)})
    except errors.LayoutError as error:
        assert error.reason is reasons.Reason.DOES_NOT_FIT  # noqa: PT017 - both are fine
        return False
    created = [step for step in plan.steps if isinstance(step, steps.CreateGpuInstance)]
    assert len(created) == sum(counts)
    return True


BY_PRODUCT = [
    pytest.param(each, id=each.key, marks=() if each in ONE_OF_EACH_GRID else pytest.mark.slow)
    for each in PRODUCTS
]


@pytest.mark.parametrize("product", BY_PRODUCT)
def test_the_planner_accepts_exactly_what_can_be_placed(product: product_table.Product) -> None:
    gpu = template(product)
    possible = placeable(gpu)
    beyond = {more for counts in possible for more in one_more(counts)} - possible
    assert len(possible) > 10
    assert len(beyond) > 10
    assert [counts for counts in sorted(possible) if not is_accepted(gpu, counts)] == []
    assert [counts for counts in sorted(beyond) if is_accepted(gpu, counts)] == []


@pytest.mark.parametrize("product", BY_PRODUCT)
@hypothesis.given(data=st.data())
@hypothesis.settings(deadline=None, max_examples=20)
def test_compute_instances_are_accepted_exactly_where_they_can_be_packed(
    product: product_table.Product, data: st.DataObject
) -> None:
    gpu = template(product)
    devices = [
        dataclasses.replace(spec.profile, compute_slices=size)
        for spec in gpu.profiles or ()
        for size in range(1, spec.profile.gpu_slices + 1)
        if driver_rules.spans(size, spec.profile.gpu_slices)
    ]
    counts = data.draw(st.dictionaries(st.sampled_from(devices), st.integers(1, 4), max_size=3))
    desired = {gpu.uuid: model.DesiredGpu.of(model.MigMode.ENABLED, counts)}
    if next(oracle.goals(gpu, counts), None) is not None:
        reached = driver_rules.execute(gpu, planner.plan([gpu], desired).steps)
        assert planner.plan([reached], desired).is_empty
    else:
        with pytest.raises(errors.LayoutError, match="does not fit"):
            planner.plan([gpu], desired)
