"""What GPUs have now, as a layout."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager import errors, reasons
from mig_manager.core import model, profile_name
from mig_manager.core.files import yaml_text
from mig_manager.core.layout import layout_documents, layout_parser, layouts, selection
from tests.rigs.node import samples
from tests.unit.layout import drawn_documents

A100, A30, T4 = 0x20B010DE, 0x20B710DE, 0x1EB810DE
ENABLED, DISABLED = model.MigMode.ENABLED, model.MigMode.DISABLED


def gpu(
    index: int,
    *,
    device_id: int = A100,
    mode: model.MigMode | None = DISABLED,
    instances: Sequence[tuple[str, ...]] = (),
) -> model.Gpu:
    """A GPU; each of ``instances`` is a GPU instance with compute instances of these profiles."""
    return dataclasses.replace(
        samples.gpu(None, index=index, mode=mode),
        pci_device_id=device_id,
        gpu_instances=tuple(instance(number, names) for number, names in enumerate(instances)),
    )


def instance(number: int, names: tuple[str, ...]) -> model.GpuInstance:
    profiles = [profile_name.parse(name) for name in names] or [profile_name.parse("1g.5gb")]
    return model.GpuInstance(
        instance_id=number,
        profile=profiles[0].gpu_instance,
        profile_id=0,
        placement=model.Placement(number, 1),
        compute_instances=tuple(
            model.ComputeInstance(
                instance_id=each, profile=profile_name.parse(name), placement=None, uuid=None
            )
            for each, name in enumerate(names)
        ),
    )


def rule(devices: object, mode: model.MigMode = DISABLED, **more: Any) -> dict[str, object]:
    content = {"devices": devices, "mig-enabled": mode is ENABLED, "mig-devices": {}}
    return content | {key.replace("_", "-"): value for key, value in more.items()}


SEVEN = [("1g.5gb",)] * 7
SMALL = {"1g.5gb": 7}
ANY = [("1g.5gb",), (), ("1c.3g.20gb", "2c.3g.20gb"), ("1g.5gb+me",)]
BOTH = ["0x20B010DE", "0x20B710DE"]


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        pytest.param(
            [gpu(0, mode=ENABLED, instances=SEVEN)],
            [rule("all", ENABLED, mig_devices=SMALL)],
            id="one GPU",
        ),
        pytest.param(
            [gpu(0, mode=ENABLED, instances=SEVEN), gpu(1), gpu(2)],
            [rule([0], ENABLED, mig_devices=SMALL), rule([1, 2])],
            id="one model in two states",
        ),
        pytest.param([gpu(0), gpu(1, device_id=A30)], [rule("all")], id="two models, one state"),
        pytest.param(
            [gpu(0), gpu(1, device_id=A30, mode=ENABLED), gpu(2)],
            [rule("all", device_filter=BOTH[0]), rule("all", ENABLED, device_filter=BOTH[1])],
            id="a state for each model",
        ),
        pytest.param(
            [gpu(0, device_id=A30), gpu(1, device_id=A30, mode=ENABLED), gpu(2),
             gpu(3, mode=ENABLED)],
            [rule([0, 2], device_filter=BOTH), rule([1, 3], ENABLED, device_filter=BOTH)],
            id="mixed states",
        ),
        pytest.param(
            [gpu(0, mode=ENABLED, instances=ANY)],
            [rule("all", ENABLED, mig_devices={
                "2c.3g.20gb": 1, "1c.3g.20gb": 1, "1g.5gb+me": 1, "1g.5gb": 1})],
            id="compute instances only",
        ),
        pytest.param([gpu(0, mode=None)], [rule("all")], id="without MIG"),
    ],
)  # fmt: skip
def test_equal_gpus_share_a_rule_and_only_other_models_have_filters(
    gpus: list[model.Gpu], expected: list[dict[str, object]]
) -> None:
    data = layout_documents.render([layouts.export(gpus, name="now")])

    assert data == {"version": "v1", "mig-configs": {"now": expected}}


def test_keys_and_profiles_are_in_their_usual_order() -> None:
    other = gpu(1, device_id=A30, mode=ENABLED, instances=ANY)
    text = yaml_text.dump(layout_documents.render([layouts.export([gpu(0), other], name="now")]))

    keys = [line.strip(" -").partition(":")[0] for line in text.splitlines()[3:]]
    rule_keys = ["device-filter", "devices", "mig-enabled", "mig-devices"]
    assert keys == [*rule_keys, *rule_keys, "2c.3g.20gb", "1c.3g.20gb", "1g.5gb+me", "1g.5gb"]


def test_a_node_without_gpus_has_nothing_to_export() -> None:
    with pytest.raises(errors.LayoutError) as caught:
        layouts.export([], name="now")
    assert caught.value.reason is reasons.Reason.NO_GPU_MATCHES


NAMES = ("1g.5gb", "1c.2g.10gb", "2g.10gb", "1c.3g.20gb", "3g.20gb", "1g.5gb+me", "1g.24gb-me")
GPUS = st.lists(
    st.tuples(
        st.sampled_from([A100, A30, T4]),
        st.sampled_from([DISABLED, ENABLED]),
        st.lists(st.lists(st.sampled_from(NAMES), max_size=2).map(tuple), max_size=4),
    ),
    min_size=1,
    max_size=8,
).map(
    lambda kinds: [
        gpu(
            index,
            device_id=device_id,
            mode=None if device_id == T4 else mode,
            instances=instances if mode is ENABLED and device_id != T4 else (),
        )
        for index, (device_id, mode, instances) in enumerate(kinds)
    ]
)


@hypothesis.given(GPUS, st.booleans(), drawn_documents.LABELS)
def test_an_exported_layout_selects_the_observed_devices(
    gpus: list[model.Gpu],
    as_json: bool,  # noqa: FBT001 - hypothesis passes by position
    label: str,
) -> None:
    data = layout_documents.render([layouts.export(gpus, name=label)])
    text = json.dumps(data) if as_json else yaml_text.dump(data)
    layout = layout_parser.parse(text, source="f").layout(label)
    expected = {each.uuid: layouts.current(each) for each in gpus if each.is_mig_capable}
    assert selection.select(layout, gpus) == expected
