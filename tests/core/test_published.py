"""What an agent publishes of its GPUs, read back by somebody who may not trust it."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_manager.core import bar, model, picture, planner, published
from mig_manager.sandbox import hardware
from tests.core import boards

WHEN = "2026-03-01T12:00:00Z"
PRODUCTS = [
    pytest.param(product, id=product.key)
    for product in hardware.products().values()
    if not product.not_simulatable
]
BALANCED = ("1g.5gb@0", "1g.5gb@1", "2g.10gb@2[1c@0 1c@1]", "3g.20gb@4")


def through(*gpus: model.Gpu) -> tuple[model.Gpu, ...]:
    return published.gpus(published.to_json(gpus, observed_at=WHEN))


def nameless(gpu: model.Gpu) -> model.Gpu:
    """Leave out what is not published: the driver's ids and the UUIDs of MIG devices."""
    instances = tuple(
        dataclasses.replace(
            gi,
            instance_id=number,
            compute_instances=tuple(
                dataclasses.replace(ci, instance_id=inner, uuid=None)
                for inner, ci in enumerate(gi.compute_instances)
            ),
        )
        for number, gi in enumerate(gpu.gpu_instances)
    )
    return dataclasses.replace(gpu, gpu_instances=instances)


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_known_product_comes_back_as_it_was(product: hardware.Product) -> None:
    gpus = tuple(hardware.template(product, index) for index in range(3))

    assert through(*gpus) == gpus


@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param(boards.gpu(boards.A100, *BALANCED), id="partitioned"),
        pytest.param(boards.gpu(boards.A100, "3g.20gb@4[]"), id="garbage"),
        pytest.param(boards.gpu(boards.A100, "3g.20gb@4[1c 1c]"), id="spans-not-told"),
        pytest.param(boards.gpu(boards.A100, mode=model.MigMode.DISABLED), id="off"),
        pytest.param(boards.gpu(None, mode=model.MigMode.DISABLED), id="profiles-not-told"),
        pytest.param(boards.gpu(None, mode=None), id="no-mig"),
        pytest.param(
            dataclasses.replace(
                boards.gpu(boards.A100), pending_mode=model.MigMode.DISABLED, index=5
            ),
            id="waits-for-reset",
        ),
        pytest.param(
            dataclasses.replace(boards.gpu(boards.A100), virtualization=model.Virtualization.VGPU),
            id="guest",
        ),
    ],
)
def test_a_gpu_comes_back_but_for_ids(gpu: model.Gpu) -> None:
    (back,) = through(gpu)

    assert back == nameless(gpu)
    assert picture.draw_gpus([back], style=bar.Style()) == picture.draw_gpus(
        [gpu], style=bar.Style()
    )


def test_the_planner_plans_the_same_from_afar() -> None:
    here = boards.gpu(boards.A100, *BALANCED)
    wish = {here.uuid: boards.want({"1g.5gb": 3, "3g.20gb": 1})}

    (afar,) = planner.plan(through(here), wish).gpus
    (near,) = planner.plan([here], wish).gpus

    assert afar.target == near.target
    assert [type(step) for step in afar.steps] == [type(step) for step in near.steps]


def test_gpus_of_one_product_share_its_table() -> None:
    product = hardware.find("A100-SXM4-40GB")
    one = published.to_json([hardware.template(product)], observed_at=WHEN)
    eight = published.to_json(
        [hardware.template(product, index) for index in range(8)], observed_at=WHEN
    )

    assert len(json.loads(eight)["products"]) == 1
    assert len(eight) < len(one) + 8 * 256
    assert published.read(eight).observed_at == WHEN


def test_a_product_can_be_had_idle() -> None:
    gpu = boards.gpu(boards.A100, *BALANCED)

    assert published.idle(gpu) == boards.gpu(boards.A100, mode=model.MigMode.DISABLED)
    assert published.idle(boards.gpu(None, mode=None)).current_mode is None


def test_a_text_of_somebody_else_cannot_drive_a_terminal() -> None:
    gpu = dataclasses.replace(boards.gpu(boards.A100), name="A\x1b[2J\u202e100", uuid="GPU-\r0")

    (back,) = through(gpu)

    assert back.name.isprintable()
    assert back.uuid.isprintable()


def changed(**members: Any) -> str:
    """Return a good annotation with members of the first GPU or product replaced."""
    data = json.loads(published.to_json([boards.gpu(boards.A100, *BALANCED)], observed_at=WHEN))
    for name, value in members.items():
        where = data["gpus"][0] if name in data["gpus"][0] else data["products"][0]
        (where if name in where else data)[name] = value
    return json.dumps(data)


GOOD = ["3g.20gb", 9, 0, 4, [["3g.20gb", 0, 3]]]
BAD = {
    "no JSON": "{",
    "no object": "[]",
    "deep": "[" * 100_000,
    "long number": f'{{"version": {"9" * 5000}}}',
    "next version": changed(version=2),
    "no GPUs": json.dumps({"version": 1, "products": []}),
    "other product": changed(product=1),
    "negative product": changed(product=-1),
    "true as index": changed(index=True),
    "huge index": changed(index=10**30),
    "unknown mode": changed(mode="half"),
    "endless name": changed(name="x" * 81),
    "no uuid": changed(uuid=None),
    "overlap": changed(instances=[GOOD, GOOD]),
    "out of the board": changed(instances=[["3g.20gb", 9, 14, 4, []]]),
    "no size": changed(instances=[["3g.20gb", 9, 0, 0, []]]),
    "no slices": changed(instances=[["0g.20gb", 9, 0, 4, []]]),
    "endless slices": changed(instances=[["999999999g.20gb", 9, 0, 4, []]]),
    "part larger than whole": changed(instances=[["3g.20gb", 9, 0, 4, [["3g.20gb", 2, 3]]]]),
    "too many parts": changed(instances=[["1g.5gb", 9, 0, 1, [["1g.5gb", 0, 1]] * 2]]),
    "too many instances": changed(instances=[["1g.5gb", 9, 0, 1, []]] * 17),
    "too many profiles": changed(profiles=[[]] * 33),
    "short profile": changed(profiles=[["3g.20gb"]]),
    "endless memory": changed(profiles=[["1g.99999999gb", 0, 0, 0, 0, 0, [0] * 4, "0:1"]]),
    "three engines": changed(profiles=[["1g.5gb", 0, 0, 0, 0, 0, [0] * 3, "0:1"]]),
    "no placement": changed(profiles=[["1g.5gb", 0, 0, 0, 0, 0, [0] * 4, "0-1"]]),
    "placement out of the board": changed(profiles=[["1g.5gb", 0, 0, 0, 0, 0, [0] * 4, "16:1"]]),
    "placement in other digits": changed(profiles=[["1g.5gb", 0, 0, 0, 0, 0, [0] * 4, "٣:1"]]),
    "reset not told": changed(modeNeedsReset="no"),
    "GPU no mapping": json.dumps({"version": 1, "products": [], "gpus": [1]}),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        published.gpus(text)


def test_two_gpus_cannot_share_an_index() -> None:
    gpus = [boards.gpu(boards.A100), dataclasses.replace(boards.gpu(boards.A100), uuid="GPU-9")]

    with pytest.raises(ValueError, match="same index"):
        through(*gpus)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["products", "gpus", "profiles", "instances", "uuid", "index"]),
                inner,
            )
        ),
        max_leaves=20,
    )
)
def test_no_json_provokes_anything_but_a_refusal(data: object) -> None:
    whole = {"version": 1, **data} if isinstance(data, dict) else data
    try:
        found = published.gpus(json.dumps(whole))
    except ValueError:
        return
    assert all(gpu.name.isprintable() for gpu in found)
