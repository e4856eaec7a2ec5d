"""GPUs through the annotation and back, and annotations that are not to be trusted."""

import contextlib
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_manager import errors, reasons
from mig_manager.catalogue import hardware, product_table
from mig_manager.core import model
from mig_manager.core.display import picture, styles
from mig_manager.core.planner import planner
from mig_manager.core.records import inventory_codec
from tests.rigs.node import gpu_values, samples

PRODUCTS = [each for each in hardware.products().values() if not each.not_simulatable]


def eight(product: product_table.Product) -> tuple[model.Gpu, ...]:
    return gpu_values.gpus_of(f"8x{product.key}")


def full(product: product_table.Product) -> tuple[model.Gpu, ...]:
    """Eight GPUs, each full of the smallest instances that fill it."""
    gpus = eight(product)
    if not gpus[0].profiles:
        return gpus
    smallest = max(info.profile for info in gpus[0].profiles or ())
    for count in range(8, 0, -1):
        desired = model.DesiredGpu.of(model.MigMode.ENABLED, {smallest: count})
        try:
            return gpu_values.with_desired(gpus, desired)
        except errors.LayoutError:
            continue
    return gpus


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.key)
def test_gpus_of_every_product_round_trip_in_five_kilobytes(
    product: product_table.Product,
) -> None:
    gpus = full(product)
    text = inventory_codec.to_json(gpus)
    back = inventory_codec.from_json(text)

    assert len(text) < 5 * 1024
    assert planner.restore(back, [gpu.snapshot for gpu in gpus]).is_empty
    bare = [dataclasses.replace(gpu, gpu_instances=()) for gpu in gpus]
    assert [dataclasses.replace(gpu, gpu_instances=()) for gpu in back] == bare


@given(
    before=st.dictionaries(st.sampled_from(["1g.5gb", "2g.10gb", "3g.20gb"]), st.integers(0, 2)),
    after=st.dictionaries(st.sampled_from(["1g.5gb", "2g.10gb", "3g.20gb"]), st.integers(0, 2)),
)
def test_a_plan_from_the_inventory_equals_the_plan_from_the_gpus(
    before: dict[str, int], after: dict[str, int]
) -> None:
    def planned_steps(gpus: tuple[model.Gpu, ...]) -> object:
        try:
            plan = planner.plan(gpus, {gpus[0].uuid: samples.desired_gpu(after)})
            # Ids of instances are not published.
            return [line.rpartition(" ")[0] for line in samples.step_lines(plan)]
        except errors.LayoutError as error:
            return str(error)

    gpus = gpu_values.gpus_of("A100-SXM4-40GB")
    with contextlib.suppress(errors.LayoutError):
        # What does not fit is not there before.
        gpus = gpu_values.with_desired(gpus, samples.desired_gpu(before))

    assert planned_steps(
        inventory_codec.from_json(inventory_codec.to_json(gpus))
    ) == planned_steps(gpus)


def test_an_unreachable_gpu_is_published_and_comes_back_beside_the_others() -> None:
    gpus = eight(hardware.find("A100-SXM4-40GB"))
    observed = gpu_values.seen_of(gpus, {gpus[3].uuid})

    back = inventory_codec.from_json(inventory_codec.to_json(observed))

    assert [gpu.index for gpu in back] == [0, 1, 2, 4, 5, 6, 7]
    assert back.unreachable == observed.unreachable


def test_values_of_a_newer_agent_do_not_hide_the_inventory() -> None:
    gpus = eight(hardware.find("A100-SXM4-40GB"))
    data = json.loads(inventory_codec.to_json(gpu_values.seen_of(gpus, {gpus[3].uuid})))
    data["models"][0] |= {"architecture": "new", "virtualization": "new"}
    data["unreachable"][0]["reason"] = "New"

    back = inventory_codec.from_json(json.dumps(data))

    assert {gpu.architecture for gpu in back} == {model.Architecture.OTHER}
    assert [gpu.reason for gpu in back.unreachable] == [reasons.Reason.NVML_ERROR]


BALANCED = ("1g.5gb@0", "1g.5gb@1", "2g.10gb@2[1c@0 1c@1]", "3g.20gb@4")
GPUS = [
    pytest.param(samples.gpu(samples.A100, *BALANCED), id="partitioned"),
    pytest.param(samples.gpu(samples.A100, "3g.20gb@4[]"), id="garbage"),
    pytest.param(samples.gpu(None), id="no-profiles"),
    pytest.param(samples.gpu(samples.A100, mode=None), id="no-mig"),
    pytest.param(samples.gpu(samples.A100, "3g.20gb@4[1c 1c]"), id="spans-unknown"),
    pytest.param(samples.gpu(samples.RTX6000, "2g.48gb@0", "1g.24gb+me.all@9"), id="twelve"),
    pytest.param(
        dataclasses.replace(samples.gpu(samples.A100), pending_mode=model.MigMode.DISABLED),
        id="waits-for-reset",
    ),
    pytest.param(
        dataclasses.replace(samples.gpu(samples.A100), virtualization=model.Virtualization.VGPU),
        id="guest",
    ),
]


@pytest.mark.parametrize("gpu", GPUS)
def test_a_gpu_from_the_inventory_is_drawn_the_same(gpu: model.Gpu) -> None:
    (back,) = inventory_codec.from_json(inventory_codec.to_json([gpu]))

    drawn, expected = (picture.draw_gpus([each], style=styles.Style()) for each in (back, gpu))
    assert drawn == expected
    assert dataclasses.replace(back, gpu_instances=gpu.gpu_instances) == gpu


def test_an_idle_gpu_of_the_same_product_is_derived() -> None:
    gpu = samples.gpu(samples.A100, *BALANCED)

    assert gpu.unpartitioned == samples.gpu(samples.A100, mode=model.MigMode.DISABLED)
    assert samples.gpu(None, mode=None).unpartitioned.current_mode is None


def test_an_inventory_cannot_contain_terminal_control_characters() -> None:
    gpu = dataclasses.replace(samples.gpu(samples.A100), name="A\x1b[2J\u202e100", uuid="GPU-\r0")

    (back,) = inventory_codec.from_json(inventory_codec.to_json([gpu]))

    assert back.name.isprintable()
    assert back.uuid.isprintable()


def annotation_with(**members: Any) -> str:
    """Return a good annotation with members of its GPU or model replaced."""
    data = json.loads(inventory_codec.to_json([samples.gpu(samples.A100, *BALANCED)]))
    for name, value in members.items():
        where = data["gpus"][0] if name in data["gpus"][0] else data["models"][0]
        (where if name in where else data)[name] = value
    return json.dumps(data)


def a_profile(
    name: str = "1g.5gb", *, engines: object = (0, 0, 0, 0), place: object = (0, 1)
) -> list[Any]:
    return [name, 0, 0, 0, 0, 0, engines, [place]]


GOOD = ["3g.20gb", 9, 0, 4, [["3g.20gb", 0, 3]]]
BAD = {
    "version": annotation_with(version=2),
    "no models": annotation_with(models=[]),
    "models as a mapping": annotation_with(models={}),
    "empty GPU": annotation_with(gpus=[{}]),
    "model as a text": annotation_with(model="x"),
    "short profile": annotation_with(profiles=[[1]]),
    **{
        f"unreachable {row}": annotation_with(unreachable=[row])
        for row in (3, {}, {"index": -1}, {"index": 3, "uuid": "x" * 99})
    },
    "long number": f'{{"version": {"9" * 5000}}}',
    "negative model": annotation_with(model=-1),
    "true as index": annotation_with(index=True),
    "huge index": annotation_with(index=10**30),
    "unknown mode": annotation_with(mode="half"),
    "endless name": annotation_with(name="x" * 81),
    "no uuid": annotation_with(uuid=None),
    "overlap": annotation_with(instances=[GOOD, GOOD]),
    "out of the GPU": annotation_with(instances=[["3g.20gb", 9, 14, 4, []]]),
    "no size": annotation_with(instances=[["3g.20gb", 9, 0, 0, []]]),
    "no slices": annotation_with(instances=[["0g.20gb", 9, 0, 4, []]]),
    "endless slices": annotation_with(instances=[["999999999g.20gb", 9, 0, 4, []]]),
    "part larger than whole": annotation_with(
        instances=[["3g.20gb", 9, 0, 4, [["3g.20gb", 2, 3]]]]
    ),
    "too many parts": annotation_with(instances=[["1g.5gb", 9, 0, 1, [["1g.5gb", 0, 1]] * 2]]),
    "too many profiles": annotation_with(profiles=[a_profile()] * 65),
    "endless memory": annotation_with(profiles=[a_profile("1g.99999999gb")]),
    "three engines": annotation_with(profiles=[a_profile(engines=[0] * 3)]),
    "no placement": annotation_with(profiles=[a_profile(place="0:1")]),
    "placement out of the GPU": annotation_with(profiles=[a_profile(place=[16, 1])]),
    "placement in fractions": annotation_with(profiles=[a_profile(place=[0.5, 1])]),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_values_that_no_gpu_can_have_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        inventory_codec.from_json(text)


@pytest.mark.parametrize(
    ("index", "uuid", "member"), [(0, "GPU-9", "index"), (1, "GPU-0", "uuid")]
)
def test_two_gpus_cannot_share_an_identity(index: int, uuid: str, member: str) -> None:
    first = samples.gpu(samples.A100)
    other = dataclasses.replace(first, index=index, uuid=uuid)

    with pytest.raises(ValueError, match=f"same {member}"):
        inventory_codec.from_json(inventory_codec.to_json([first, other]))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["models", "gpus", "profiles", "instances", "uuid", "index"]),
                inner,
            )
        ),
        max_leaves=20,
    )
)
def test_any_json_is_accepted_or_refused_with_a_value_error(data: object) -> None:
    whole = {"version": 1, **data} if isinstance(data, dict) else data
    try:
        gpus = inventory_codec.from_json(json.dumps(whole))
    except ValueError:
        return
    assert all(gpu.name.isprintable() for gpu in gpus)
