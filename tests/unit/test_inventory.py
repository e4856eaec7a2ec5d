"""GPUs through the annotation and back: a plan made from it is the plan of the node."""

import contextlib
import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_manager import errors
from mig_manager.catalogue import hardware
from mig_manager.core import model
from mig_manager.core.planner import planner
from mig_manager.core.records import gpu_codec
from tests import gpu_values
from tests.unit import samples

PRODUCTS = [each for each in hardware.products().values() if not each.not_simulatable]


def eight(product: hardware.Product) -> tuple[model.Gpu, ...]:
    return tuple(hardware.template(product, index) for index in range(8))


def full(product: hardware.Product) -> tuple[model.Gpu, ...]:
    """Eight GPUs, each full of the smallest instances that fill it."""
    gpus = eight(product)
    if not gpus[0].profiles:
        return gpus
    smallest = max((info.profile for info in gpus[0].profiles or ()), key=lambda p: p.sort_key)
    for count in range(8, 0, -1):
        wanted = model.DesiredGpu.of(model.MigMode.ENABLED, {smallest: count})
        try:
            return gpu_values.brought_to(gpus, wanted)
        except errors.LayoutError:
            continue
    return gpus


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.key)
def test_the_gpus_of_every_product_round_trip_without_ids(
    product: hardware.Product,
) -> None:
    gpus = full(product)

    back = gpu_codec.from_json(gpu_codec.to_json(gpus))

    assert planner.restore(back, [gpu.snapshot for gpu in gpus]).is_empty
    bare = [dataclasses.replace(gpu, gpu_instances=()) for gpu in gpus]
    assert [dataclasses.replace(gpu, gpu_instances=()) for gpu in back] == bare


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.key)
def test_eight_full_gpus_take_five_kilobytes(product: hardware.Product) -> None:
    assert len(gpu_codec.to_json(full(product))) < 5 * 1024


@given(
    before=st.dictionaries(st.sampled_from(["1g.5gb", "2g.10gb", "3g.20gb"]), st.integers(0, 2)),
    after=st.dictionaries(st.sampled_from(["1g.5gb", "2g.10gb", "3g.20gb"]), st.integers(0, 2)),
)
def test_a_plan_from_the_inventory_equals_the_plan_from_the_gpus(
    before: dict[str, int], after: dict[str, int]
) -> None:
    def wanted(counts: dict[str, int]) -> model.DesiredGpu:
        return samples.want(counts)

    def shape(gpus: tuple[model.Gpu, ...]) -> object:
        try:
            plan = planner.plan(gpus, {gpu.uuid: wanted(after) for gpu in gpus})
        except errors.LayoutError as error:
            return str(error)
        return [
            (type(step), getattr(step, "profile", None), getattr(step, "placement", None))
            for step in plan.steps
        ]

    gpus: tuple[model.Gpu, ...] = (hardware.template(hardware.find("A100-SXM4-40GB")),)
    with contextlib.suppress(errors.LayoutError):
        # What does not fit is not there before.
        gpus = gpu_values.brought_to(gpus, wanted(before))

    assert shape(gpu_codec.from_json(gpu_codec.to_json(gpus))) == shape(gpus)


def test_a_gpu_without_listed_profiles_and_one_without_mig_round_trip() -> None:
    product = hardware.find("A100-SXM4-40GB")
    gpus = (
        dataclasses.replace(hardware.template(product, 0), profiles=None),
        dataclasses.replace(hardware.template(product, 1), current_mode=None, pending_mode=None),
    )

    assert gpu_codec.from_json(gpu_codec.to_json(gpus)) == gpus


GOOD = json.loads(gpu_codec.to_json(eight(hardware.find("A30"))[:1]))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps(GOOD | {"version": 2}),
        json.dumps(GOOD | {"models": []}),
        json.dumps(GOOD | {"models": {}}),
        json.dumps(GOOD | {"gpus": [{}]}),
        json.dumps(GOOD | {"gpus": [GOOD["gpus"][0] | {"model": "x"}]}),
        json.dumps(GOOD | {"models": [GOOD["models"][0] | {"profiles": [[1]]}]}),
        json.dumps(GOOD | {"models": [GOOD["models"][0] | {"architecture": "new"}]}),
    ],
)
def test_invalid_texts_are_refused_with_one_error_type(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any text of it
        gpu_codec.from_json(text)


def test_an_unreachable_gpu_is_published_and_comes_back_beside_the_others() -> None:
    gpus = eight(hardware.find("A100-SXM4-40GB"))
    seen = gpu_values.seen_of(gpus, {gpus[3].uuid})

    back = gpu_codec.from_json(gpu_codec.to_json(seen))

    assert [gpu.index for gpu in back] == [0, 1, 2, 4, 5, 6, 7]
    assert back.unreachable == seen.unreachable


@pytest.mark.parametrize("row", [3, {}, {"index": -1}, {"index": 3, "uuid": "x" * 999}])
def test_an_invalid_unreachable_gpu_is_refused(row: object) -> None:
    data = json.loads(gpu_codec.to_json(eight(hardware.find("A100-SXM4-40GB"))))

    with pytest.raises(ValueError, match=r"."):
        gpu_codec.from_json(json.dumps(data | {"unreachable": [row]}))
