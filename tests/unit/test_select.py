"""Which GPUs of a node a layout is about, and what each of them gets."""

import dataclasses

import pytest

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.layout import config
from tests.unit import samples
from tests.unit.test_config import layout_of, wanted

A100, A30, T4 = 0x20B010DE, 0x20B710DE, 0x1EB810DE
ENABLED, DISABLED = model.MigMode.ENABLED, model.MigMode.DISABLED


def gpu(index: int, *, device_id: int = A100, mode: model.MigMode | None = DISABLED) -> model.Gpu:
    return dataclasses.replace(
        samples.gpu(None, index=index, mode=mode), pci_device_id=device_id, name="NVIDIA Test"
    )


OFF, EMPTY = "mig-enabled: false", "mig-enabled: true, mig-devices: {}"
SEVEN_SMALL = "mig-enabled: true, mig-devices: {1g.5gb: 7}"
PLAIN, SECOND, OTHER_MODEL = gpu(0), gpu(1), gpu(1, device_id=A30)
WITHOUT_MIG = gpu(0, device_id=T4, mode=None), gpu(1, device_id=T4, mode=None)


@pytest.mark.parametrize(
    ("rules", "gpus", "expected"),
    [
        pytest.param(
            [f'device-filter: "0x20B010DE", devices: all, {SEVEN_SMALL}',
             f'device-filter: "0x20B710DE", devices: all, {EMPTY}'],
            [PLAIN, OTHER_MODEL, gpu(2, device_id=T4)],
            {"GPU-0": wanted(p1g_5gb=7), "GPU-1": wanted()},
            id="each model has a rule",
        ),
        pytest.param(
            [f"devices: all, {SEVEN_SMALL}", f"devices: [1], {OFF}"],
            [PLAIN, SECOND],
            {"GPU-0": wanted(p1g_5gb=7), "GPU-1": wanted(DISABLED)},
            id="the last rule decides",
        ),
        pytest.param(
            [f"devices: [1], {EMPTY}"], [PLAIN, SECOND], {"GPU-1": wanted()}, id="without a rule"
        ),
        pytest.param(
            [f'device-filter: "0x20B710DE", devices: [0, 1], {EMPTY}'],
            [PLAIN, OTHER_MODEL],
            {"GPU-1": wanted()},
            id="an index counts all GPUs and not the filtered ones",
        ),
        pytest.param(
            [f'device-filter: "0x20B710DE", devices: [7], {EMPTY}', f"devices: all, {OFF}"],
            [PLAIN],
            {"GPU-0": wanted(DISABLED)},
            id="a rule for another model",
        ),
        pytest.param(
            [f"devices: all, {EMPTY}"],
            [WITHOUT_MIG[0], SECOND],
            {"GPU-1": wanted()},
            id="all skips GPUs without MIG",
        ),
        pytest.param([f"devices: all, {OFF}"], WITHOUT_MIG, {}, id="disabled without MIG"),
        pytest.param([f"devices: [0], {OFF}"], WITHOUT_MIG, {}, id="disabled by index"),
        pytest.param(
            [f"devices: [0, 1], {EMPTY}", f"devices: [1], {OFF}"],
            [PLAIN, WITHOUT_MIG[1]],
            {"GPU-0": wanted()},
            id="a later rule excludes a GPU without MIG",
        ),
    ],
)  # fmt: skip
def test_each_gpu_gets_what_the_last_rule_about_it_wants(
    rules: list[str], gpus: list[model.Gpu], expected: dict[str, model.DesiredGpu]
) -> None:
    assert config.select(layout_of(*rules), gpus) == expected


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ('device-filter: "0x20B710DE", devices: all, mig-enabled: false', "(0x20B010DE)"),
        ('device-filter: "0x20B710DE", devices: [0], mig-enabled: false', "none of this node's"),
        ("devices: [], mig-enabled: false", "is about none of this node's GPUs"),
        ("devices: [2], mig-enabled: false", "names GPU 2, and this node has 2"),
        ("devices: [0, 9, 5], mig-enabled: false", "names GPU 5"),
    ],
)
def test_a_layout_that_matches_no_gpu_or_counts_too_far_is_an_error(
    rule: str, complaint: str
) -> None:
    with pytest.raises(errors.LayoutError) as caught:
        config.select(layout_of(rule), [gpu(0), gpu(1)])
    assert caught.value.reason is errors.Reason.NO_GPU_MATCHES
    assert caught.value.location is not None
    assert complaint in str(caught.value)


def test_a_node_without_gpus_is_matched_by_no_layout() -> None:
    with pytest.raises(errors.LayoutError, match="it has none"):
        config.select(layout_of("devices: all, mig-enabled: false"), [])


def test_naming_a_gpu_without_mig_by_index_is_an_error() -> None:
    layout = layout_of("devices: [0, 1], mig-enabled: true, mig-devices: {}")
    with pytest.raises(errors.LayoutError, match="enables MIG on GPU 1") as caught:
        config.select(layout, [gpu(0), gpu(1, mode=None)])
    assert caught.value.reason is errors.Reason.NOT_MIG_CAPABLE
    assert str(caught.value.location) == "f.yaml:4:5"


def test_enabling_mig_on_a_node_where_no_gpu_has_it_is_an_error() -> None:
    layout = layout_of("devices: all, mig-enabled: true, mig-devices: {}")
    with pytest.raises(errors.LayoutError) as caught:
        config.select(layout, [gpu(0, mode=None), gpu(1, mode=None)])
    assert caught.value.reason is errors.Reason.NOT_MIG_CAPABLE
