"""The checkpoint: mig-parted's bytes, parsing them, and restoring GPUs from them."""

import dataclasses
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager import errors, reasons
from mig_manager.catalogue import hardware
from mig_manager.core import model, steps
from mig_manager.core.files import checkpoint
from mig_manager.core.layout import layout_parser, selection
from mig_manager.core.planner import planner
from tests.rigs.node import driver_rules, gpu_values, samples
from tests.rigs.planner import oracle
from tests.unit import drawn_gpus

LAYOUTS = layout_parser.parse(
    """
version: v1
mig-configs:
  mixed:
  - {devices: [0], mig-enabled: true, mig-devices: {1c.3g.20gb: 1, 2c.3g.20gb: 1, 2g.10gb: 1}}
  - {devices: [1], mig-enabled: false}
  small:
  - {devices: all, mig-enabled: true, mig-devices: {1g.5gb: 4, 3g.20gb: 1}}
  large:
  - {devices: all, mig-enabled: true, mig-devices: {1c.7g.40gb: 3}}
""",
    source="layouts.yaml",
)
FIRST = "GPU-00000000-0000-0000-0000-000000000000"
INSTANCE = {
    "ProfileID": 2,
    "Placement": {"Start": 4, "Size": 4},
    "ComputeInstances": [{"ProfileID": 2, "EngProfileID": 0}],
}


SMALLEST = {"ProfileID": 0, "EngProfileID": 0}


def with_media(start: int) -> dict[str, object]:
    """Return a ``1g.5gb+me``; a GPU has one at most."""
    return {
        "ProfileID": 7,
        "Placement": {"Start": start, "Size": 1},
        "ComputeInstances": [SMALLEST],
    }


TWO = gpu_values.gpus_of("2xA100-SXM4-40GB")
GUEST = dataclasses.replace(TWO[0], virtualization=model.Virtualization.VGPU)


def gpus_with(layout: str) -> tuple[model.Gpu, ...]:
    plan = planner.plan(TWO, selection.select(LAYOUTS.layout(layout), TWO))
    return gpu_values.execute(TWO, plan)


def read(text: str) -> tuple[checkpoint.SavedGpu, ...]:
    return checkpoint.parse(text, source="c.json")


def device(**changes: object) -> dict[str, object]:
    return {"UUID": FIRST, "MigMode": 1, "GpuInstances": [INSTANCE]} | changes


def text_of(*devices: object, **changes: object) -> str:
    return json.dumps({"Version": "v1", "MigState": {"Devices": list(devices)}} | changes)


def test_render_writes_the_bytes_that_mig_parted_writes() -> None:
    assert checkpoint.render(gpus_with("mixed")) == (
        '{"Version":"v1","MigState":{"Devices":['
        f'{{"UUID":"{FIRST}","MigMode":1,"GpuInstances":['
        '{"ProfileID":1,"Placement":{"Start":0,"Size":2},'
        '"ComputeInstances":[{"ProfileID":1,"EngProfileID":0}]},'
        '{"ProfileID":2,"Placement":{"Start":4,"Size":4},'
        '"ComputeInstances":[{"ProfileID":1,"EngProfileID":0},{"ProfileID":0,"EngProfileID":0}]}'
        "]},"
        '{"UUID":"GPU-00000001-0000-0000-0000-000000000000","MigMode":0,"GpuInstances":null}'
        "]}}"
    )


def test_gpus_without_mig_are_omitted_and_empty_lists_are_null() -> None:
    nothing = '{"Version":"v1","MigState":{"Devices":null}}'
    assert checkpoint.render([samples.gpu(None, mode=None)]) == nothing
    assert read(nothing) == ()
    idle = checkpoint.render([samples.gpu(samples.A100, "3g.20gb@0[]")])
    assert '"ComputeInstances":null' in idle


def test_one_slice_with_more_processors_is_filled_by_its_own_profile() -> None:
    gpu = dataclasses.replace(
        hardware.template(hardware.find("H100"), 0),
        current_mode=model.MigMode.ENABLED,
        pending_mode=model.MigMode.ENABLED,
    )
    gpus = gpu_values.with_desired((gpu,), samples.desired_gpu({"1g.20gb": 1, "1g.10gb": 1}))
    instances = json.loads(checkpoint.render(gpus))["MigState"]["Devices"][0]["GpuInstances"]

    assert [(gi["ProfileID"], gi["ComputeInstances"][0]["ProfileID"]) for gi in instances] == [
        (0, 0),
        (9, 7),
    ]
    assert planner.restore_checkpoint(read(checkpoint.render(gpus)), gpus).is_empty


@pytest.mark.parametrize("names", [("mixed", "small"), ("small", "mixed"), ("large", "mixed")])
def test_from_another_layout_a_checkpoint_is_restored_in_its_places(
    names: tuple[str, str],
) -> None:
    was, gpus = map(gpus_with, names)
    text = checkpoint.render(was)

    after = gpu_values.execute(gpus, planner.restore_checkpoint(read(text), gpus))

    assert checkpoint.render(after) == text
    assert planner.restore_checkpoint(read(text), after).is_empty


@pytest.mark.parametrize("name", ["A100-SXM4-40GB", "H100", "A30", "H200", "B200"])
def test_every_single_profile_of_every_product_comes_back_after_a_reboot(name: str) -> None:
    product = hardware.find(name)
    off = hardware.template(product, 0)
    for spec in off.profiles or ():
        desired = model.DesiredGpu.of(model.MigMode.ENABLED, {spec.profile: 1})
        text = checkpoint.render(gpu_values.with_desired((off,), desired))

        restored = driver_rules.execute(off, planner.restore_checkpoint(read(text), [off]).steps)

        assert checkpoint.render([restored]) == text


def test_matching_compute_instances_stay_when_a_gpu_instance_changes() -> None:
    was = samples.gpu(samples.A100, "7g.40gb@0[1c@0 1c@1 1c@2]")
    now = samples.gpu(samples.A100, "7g.40gb@0[1c@1 1c@2]")
    plan = planner.restore_checkpoint(read(checkpoint.render([was])), [now])
    assert samples.step_lines(plan) == ["+ci 1c.7g.40gb 0:1 in 0:8"]


def test_gpus_are_matched_by_uuid_and_missing_ones_stay() -> None:
    gpus = gpus_with("mixed")
    data = json.loads(checkpoint.render(gpus))
    data["MigState"]["Devices"].reverse()
    assert planner.restore_checkpoint(read(json.dumps(data)), gpus).is_empty

    plan = planner.restore_checkpoint(read(text_of(device())), gpus_with("small"))
    assert {each.gpu_uuid for each in plan.gpus} == {FIRST}


def test_mode_is_restored_alone_on_request_and_before_hidden_profiles() -> None:
    desired = read(checkpoint.render(gpus_with("small")))
    plan = planner.restore_checkpoint(desired, gpus_with("mixed"), is_mode_only=True)
    assert [type(step) for step in plan.steps] == [steps.SetMode]
    assert plan.gpus[0].gpu_index == 1

    blind = [dataclasses.replace(gpu, profiles=None) for gpu in TWO]
    plan = planner.restore_checkpoint(desired, blind)
    assert plan.is_provisional
    assert {type(step) for step in plan.steps} == {steps.SetMode}


BAD = [
    ("", "c.json:1:1: the checkpoint is empty"),
    ("[]", "c.json:1:1: expected a mapping with Version, MigState"),
    ("[}", "c.json:1:2: not readable"),
    (text_of(device(), Version="v2"), "c.json:1:13: Version must be the text v1, not 'v2'"),
    (text_of(device(), Version=None), "c.json:1:13: Version must be the text v1, not nothing"),
    ('{"MigState": {}}', "c.json:1:1: 'Version' is missing"),
    ('{"Version": "v1"}', "c.json:1:1: 'MigState' is missing"),
    ('{"Version": "v1", "MigState": 1}', "c.json:1:31: expected a mapping with Devices"),
    ('{"Version": "v1", "MigState": {}}', "c.json:1:31: 'Devices' is missing"),
    (text_of(1), "expected a mapping with UUID"),
    (text_of(device(UUID="")), "UUID must be a text"),
    (text_of(device(UUID=7)), "UUID must be a text, not 7"),
    (text_of(device(), device()), "is listed twice"),
    (text_of(device(MigMode=2)), "MigMode must be 0 or 1, not 2"),
    (text_of(device(MigMode=True)), "MigMode must be a whole number"),
    (text_of(device(MigMode=0)), "GpuInstances must be empty where MigMode is 0"),
    (text_of(device(GpuInstances={})), "GpuInstances must be a list, not an empty mapping"),
    (text_of(device(More=1)), "unexpected key 'More'"),
    (text_of(device()).replace('"Start": 4', '"Start": -4'), "Start must be a whole number"),
    (text_of(device()).replace('"Start": 4', '"Start": "4"'), "Start must be a whole number"),
    (text_of(device()).replace('"Size": 4', '"Size": 0'), "Size must be 1 or more"),
    (
        text_of(device()).replace('"EngProfileID": 0', '"EngProfileID": 1'),
        "unknown engine profile 1",
    ),
    (text_of(device()).replace('2, "EngP', '9, "EngP'), "unknown compute-instance profile 9"),
]


@pytest.mark.parametrize(("text", "why"), BAD)
def test_an_invalid_file_is_refused_with_its_location(text: str, why: str) -> None:
    with pytest.raises(errors.CheckpointError) as caught:
        read(text)

    assert why in caught.value.message
    assert caught.value.message.startswith("c.json:1:")
    assert caught.value.reason is reasons.Reason.INVALID_CHECKPOINT


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (text_of(device(UUID="GPU-of-another-node")), "GPU-of-another-node is not on this node"),
        (text_of(device()).replace('"ProfileID": 2, "Pl', '"ProfileID": 17, "Pl'), "profile 17"),
        (
            text_of(device()).replace('"Start": 4', '"Start": 2'),
            f"3g.20gb cannot be at 2:4 on GPU 0 (NVIDIA A100-SXM4-40GB, {FIRST}); it can be at",
        ),
        (text_of(device()).replace('"Start": 4', f'"Start": {2**63}'), "cannot be at"),
        (text_of(device()).replace('"Size": 4', '"Size": 3'), "cannot be at 4:3"),
        (text_of(device(GpuInstances=[INSTANCE, INSTANCE])), "overlaps another"),
        (text_of(device()).replace('2, "EngP', '4, "EngP'), "no compute instance of 7 slices"),
        (
            text_of(device()).replace(
                '{"ProfileID": 2, "EngProfileID": 0}',
                ", ".join(['{"ProfileID": 1, "EngProfileID": 0}'] * 2),
            ),
            "compute instances of 2c, 2c do not fit 3g.20gb",
        ),
        (
            text_of(device(GpuInstances=[with_media(start) for start in (0, 4)])),
            "needs 2 x JPEG engine (NVJPG) and the GPU has 1",
        ),
        # Packing so many would take too long.
        (
            text_of(device(GpuInstances=[INSTANCE | {"ComputeInstances": [SMALLEST] * 1000}])),
            "do not fit",
        ),
    ],
)
def test_an_impossible_instance_is_refused_with_its_location(text: str, why: str) -> None:
    with pytest.raises(errors.CheckpointError) as caught:
        planner.restore_checkpoint(read(text), TWO)

    assert why in caught.value.message
    assert caught.value.message.startswith("c.json:1:")


def test_a_gpu_without_mig_and_a_vgpu_are_refused() -> None:
    with pytest.raises(errors.CheckpointError, match="has no MIG"):
        planner.restore_checkpoint(
            read(text_of(device())), [dataclasses.replace(TWO[0], current_mode=None)]
        )
    with pytest.raises(errors.LayoutError, match="is a vGPU"):
        planner.restore_checkpoint(read(text_of(device())), [GUEST])


_GOOD = checkpoint.render(gpus_with("mixed"))
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["Version", "MigState", "Devices", "UUID", "MigMode", "GpuInstances", "Start"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
_NUMBERS = st.integers(min_value=0, max_value=20)


@st.composite
def checkpoints(draw: st.DrawFn) -> str:
    """Draw what looks like a checkpoint of the first GPU, sense or nonsense."""
    instances = st.fixed_dictionaries(
        {
            "ProfileID": _NUMBERS,
            "Placement": st.fixed_dictionaries({"Start": _NUMBERS, "Size": _NUMBERS}),
            "ComputeInstances": st.none()
            | st.lists(
                st.fixed_dictionaries(
                    {"ProfileID": st.integers(0, 9), "EngProfileID": st.integers(0, 1)}
                ),
                max_size=4,
            ),
        }
    )
    return text_of(device(GpuInstances=draw(st.lists(instances, max_size=3))))


@st.composite
def damaged_checkpoints(draw: st.DrawFn) -> str:
    """Draw a checkpoint with a piece of it replaced."""
    at = draw(st.integers(0, len(_GOOD)))
    length = draw(st.integers(0, 20))
    return _GOOD[:at] + draw(st.text(max_size=5)) + _GOOD[at + length :]


@hypothesis.given(
    st.one_of(st.text(), _JSON.map(json.dumps), checkpoints(), damaged_checkpoints())
)
@hypothesis.example(_GOOD)
@hypothesis.example("[" * 5000)
def test_any_text_is_restored_or_is_a_typed_error(text: str) -> None:
    try:
        plan = planner.restore_checkpoint(read(text), TWO)
    except errors.CheckpointError:
        return
    after = gpu_values.execute(TWO, plan)
    assert planner.restore_checkpoint(read(text), after).is_empty


@pytest.mark.parametrize("capacity", samples.PRODUCTS)
@hypothesis.given(data=st.data())
def test_restoring_any_state_from_any_state_needs_only_the_necessary_steps(
    capacity: str, data: st.DataObject
) -> None:
    was, now = data.draw(drawn_gpus.gpus(capacity)), data.draw(drawn_gpus.gpus(capacity))
    desired = read(checkpoint.render([was]))

    plan = planner.restore_checkpoint(desired, [now])
    after = driver_rules.execute(now, plan.steps)

    def content(gpu: model.Gpu) -> dict[oracle.Spot, list[int]]:
        return {
            spot: sorted(n for n, _ in inside) for spot, inside in oracle.state_of(gpu).items()
        }

    assert content(after) == content(was)
    assert planner.restore_checkpoint(desired, [after]).is_empty
    destroyed = {
        (step.profile, step.placement.start)
        for step in plan.steps
        if isinstance(step, steps.DestroyGpuInstance)
    }
    assert not oracle.state_of(was).keys() & oracle.state_of(now).keys() & destroyed
