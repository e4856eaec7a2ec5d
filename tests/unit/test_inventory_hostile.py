"""The published inventory of a node, parsed without trust."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_manager.core import bar, model, picture
from mig_manager.core.records import gpu_codec
from tests.unit import samples

BALANCED = ("1g.5gb@0", "1g.5gb@1", "2g.10gb@2[1c@0 1c@1]", "3g.20gb@4")
GPUS = [
    pytest.param(samples.gpu(samples.A100, *BALANCED), id="partitioned"),
    pytest.param(samples.gpu(samples.A100, "3g.20gb@4[]"), id="garbage"),
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
    (back,) = gpu_codec.from_json(gpu_codec.to_json([gpu]))

    assert picture.draw_gpus([back], style=bar.Style()) == picture.draw_gpus(
        [gpu], style=bar.Style()
    )
    assert dataclasses.replace(back, gpu_instances=()) == dataclasses.replace(
        gpu, gpu_instances=()
    )


def test_a_product_can_be_idle() -> None:
    gpu = samples.gpu(samples.A100, *BALANCED)

    assert gpu_codec.idle(gpu) == samples.gpu(samples.A100, mode=model.MigMode.DISABLED)
    assert gpu_codec.idle(samples.gpu(None, mode=None)).current_mode is None


def test_an_inventory_cannot_contain_terminal_control_characters() -> None:
    gpu = dataclasses.replace(samples.gpu(samples.A100), name="A\x1b[2J\u202e100", uuid="GPU-\r0")

    (back,) = gpu_codec.from_json(gpu_codec.to_json([gpu]))

    assert back.name.isprintable()
    assert back.uuid.isprintable()


def changed(**members: Any) -> str:
    """Return a good annotation with members of its GPU or model replaced."""
    data = json.loads(gpu_codec.to_json([samples.gpu(samples.A100, *BALANCED)]))
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
    "long number": f'{{"version": {"9" * 5000}}}',
    "negative model": changed(model=-1),
    "true as index": changed(index=True),
    "huge index": changed(index=10**30),
    "unknown mode": changed(mode="half"),
    "endless name": changed(name="x" * 81),
    "no uuid": changed(uuid=None),
    "overlap": changed(instances=[GOOD, GOOD]),
    "out of the GPU": changed(instances=[["3g.20gb", 9, 14, 4, []]]),
    "no size": changed(instances=[["3g.20gb", 9, 0, 0, []]]),
    "no slices": changed(instances=[["0g.20gb", 9, 0, 4, []]]),
    "endless slices": changed(instances=[["999999999g.20gb", 9, 0, 4, []]]),
    "part larger than whole": changed(instances=[["3g.20gb", 9, 0, 4, [["3g.20gb", 2, 3]]]]),
    "too many parts": changed(instances=[["1g.5gb", 9, 0, 1, [["1g.5gb", 0, 1]] * 2]]),
    "too many profiles": changed(profiles=[a_profile()] * 65),
    "endless memory": changed(profiles=[a_profile("1g.99999999gb")]),
    "three engines": changed(profiles=[a_profile(engines=[0] * 3)]),
    "no placement": changed(profiles=[a_profile(place="0:1")]),
    "placement out of the GPU": changed(profiles=[a_profile(place=[16, 1])]),
    "placement in fractions": changed(profiles=[a_profile(place=[0.5, 1])]),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_values_that_no_gpu_can_have_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        gpu_codec.from_json(text)


@pytest.mark.parametrize(
    ("index", "uuid", "member"), [(0, "GPU-9", "index"), (1, "GPU-0", "uuid")]
)
def test_two_gpus_cannot_share_an_identity(index: int, uuid: str, member: str) -> None:
    first = samples.gpu(samples.A100)
    other = dataclasses.replace(first, index=index, uuid=uuid)

    with pytest.raises(ValueError, match=f"same {member}"):
        gpu_codec.from_json(gpu_codec.to_json([first, other]))


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
        found = gpu_codec.from_json(json.dumps(whole))
    except ValueError:
        return
    assert all(gpu.name.isprintable() for gpu in found)
