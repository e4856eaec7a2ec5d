"""Which GPUs of a node a layout is about, and what each of them gets."""

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager import errors, reasons
from mig_manager.core import model
from mig_manager.core.layout import gpu_selectors, layout_documents, layout_parser, selection
from tests.rigs.node import samples
from tests.rigs.node.samples import desired_gpu
from tests.unit.layout.rules import layout_of

A100, A30, T4 = 0x20B010DE, 0x20B710DE, 0x1EB810DE
A16, A16_SUBSYSTEM = 0x25B610DE, 0x14A910DE
ENABLED, DISABLED = model.MigMode.ENABLED, model.MigMode.DISABLED
UUID = "GPU-0a1b2c3d-0000-4000-8000-00000000000f"
OTHER_UUID = "GPU-0a1b2c3d-0000-4000-8000-0000000000ff"
ADDRESS = "00000000:3b:00.0"


def gpu(index: int, **changed: object) -> model.Gpu:
    a100 = samples.gpu(None, index=index, mode=DISABLED)
    return dataclasses.replace(a100, name="NVIDIA A100-SXM4-40GB", **changed)  # type: ignore[arg-type]


def without_mig(index: int) -> model.Gpu:
    return gpu(index, pci_device_id=T4, current_mode=None, pending_mode=None)


OFF, EMPTY = "mig-enabled: false", "mig-enabled: true, mig-devices: {}"
SEVEN_SMALL = "mig-enabled: true, mig-devices: {1g.5gb: 7}"
PLAIN, SECOND, OTHER_MODEL = gpu(0), gpu(1), gpu(1, pci_device_id=A30)
THREE = (gpu(0), gpu(1, uuid=UUID, pci_address=ADDRESS), gpu(2))


@pytest.mark.parametrize(
    ("rules", "gpus", "expected"),
    [
        pytest.param(
            [f'device-filter: "0x20B010DE", devices: all, {SEVEN_SMALL}',
             f'device-filter: "0x20B710DE", devices: all, {EMPTY}'],
            [PLAIN, OTHER_MODEL, gpu(2, pci_device_id=T4)],
            {"GPU-0": desired_gpu({"1g.5gb": 7}), "GPU-1": desired_gpu()},
            id="each model has a rule",
        ),
        pytest.param(
            [f"devices: all, {SEVEN_SMALL}", f"devices: [1], {OFF}"],
            [PLAIN, SECOND],
            {"GPU-0": desired_gpu({"1g.5gb": 7}), "GPU-1": desired_gpu(mode=DISABLED)},
            id="the last rule decides",
        ),
        pytest.param(
            [f'device-filter: "0x20B710DE", devices: [0, 1], {EMPTY}'],
            [PLAIN, OTHER_MODEL],
            {"GPU-1": desired_gpu()},
            id="an index counts all GPUs and not the filtered ones",
        ),
        pytest.param(
            [f'device-filter: "0x20B710DE", devices: [7], {EMPTY}', f"devices: all, {OFF}"],
            [PLAIN],
            {"GPU-0": desired_gpu(mode=DISABLED)},
            id="a rule for another model",
        ),
        pytest.param(
            [f"devices: all, {EMPTY}"],
            [without_mig(0), SECOND],
            {"GPU-1": desired_gpu()},
            id="all skips GPUs without MIG",
        ),
        pytest.param([f"devices: all, {OFF}"], [without_mig(0)], {}, id="disabled without MIG"),
        pytest.param([f"devices: [0], {OFF}"], [without_mig(0)], {}, id="disabled by index"),
        pytest.param(
            [f"devices: [0, 1], {EMPTY}", f"devices: [1], {OFF}"],
            [PLAIN, without_mig(1)],
            {"GPU-0": desired_gpu()},
            id="a later rule excludes a GPU without MIG",
        ),
    ],
)  # fmt: skip
def test_the_last_matching_rule_decides_about_a_gpu(
    rules: list[str], gpus: list[model.Gpu], expected: dict[str, model.DesiredGpu]
) -> None:
    assert selection.select(layout_of(*rules), gpus) == expected


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("devices: 0", [0]),
        (f"devices: {UUID}", [1]),
        (f"devices: [{UUID.replace('0a1b2c3d', '0A1B2C3D')}]", [1]),
        (f"devices: [{ADDRESS}]", [1]),
        ('devices: ["0000:3B:00.0"]', [1]),
        ("devices: 3b:00.0", [1]),
        (f"devices: [0, {UUID}]", [0, 1]),
        (f"devices: [0, {ADDRESS}, 2]", [0, 1, 2]),
        (f"devices: [0, {OTHER_UUID}]", [0]),
        *[
            (f'device-filter: "{name}", devices: all', [0, 1, 2])
            for name in (
                *("A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB", "nvidia a100-sxm4-40gb", "a100*"),
                *("NVIDIA A100*", "NVIDIA*40GB", "*A100*", "*", "A100-SXM?-40GB", "A[13]00-*"),
                "NVIDIA A100 SXM4 40GB",
            )
        ],
        ('device-filter: ["0x20B710DE", "*A100*"], devices: [0]', [0]),
    ],
)
def test_gpus_can_be_named_by_index_uuid_address_and_product(
    rule: str, expected: list[int]
) -> None:
    selected = selection.select(layout_of(f"{rule}, {EMPTY}"), THREE)
    assert [each.index for each in THREE if each.uuid in selected] == expected


@pytest.mark.parametrize(
    ("text", "subsystem_id", "expected"),
    [
        ("0x25B610DE", A16_SUBSYSTEM, True),
        ("0x25B610DE:0x14A910DE", A16_SUBSYSTEM, True),
        ("0x25B610DE:0x159D10DE", A16_SUBSYSTEM, False),
        ("0x25B610DE:0x14A910DE", 0, False),
        ("0x25B610DE:0x00000000", 0, True),
        ("0x20B010DE", A16_SUBSYSTEM, False),
        ("0x20B010DE:0x14A910DE", A16_SUBSYSTEM, False),
        ("not-a-device-id", A16_SUBSYSTEM, False),
    ],
)
def test_an_id_matches_as_in_the_tables_of_mig_parted(
    text: str, subsystem_id: int, *, expected: bool
) -> None:
    a16 = gpu(0, pci_device_id=A16, pci_subsystem_id=subsystem_id)
    assert gpu_selectors.parse_filter(text).matches(a16) is expected


NO_MATCH, NO_MIG = reasons.Reason.NO_GPU_MATCHES, reasons.Reason.NOT_MIG_CAPABLE


@pytest.mark.parametrize(
    ("rule", "gpus", "reason", "complaint"),
    [
        ('device-filter: "0x20B710DE", devices: all', THREE, NO_MATCH, "(0x20B010DE)"),
        ('device-filter: "0x20B710DE", devices: [0]', THREE, NO_MATCH, "none of this node's"),
        *[
            (f'device-filter: "{name}", devices: all', THREE, NO_MATCH, "none of this node's")
            for name in ("A100", "H100*", "A100-SXM4-80GB", "Tesla T4", "A[3]0-*")
        ],
        ("devices: []", THREE, NO_MATCH, "selects none of this node's GPUs"),
        (f"devices: [{OTHER_UUID}]", THREE, NO_MATCH, "selects none of this node's GPUs"),
        ("devices: [3]", THREE, NO_MATCH, "names GPU 3, and this node has 3"),
        ("devices: [0, 9, 5]", THREE, NO_MATCH, "names GPU 5"),
        ('devices: [0, "ff:00.0"]', THREE, NO_MATCH, "names GPU 00000000:ff:00.0, and"),
        ("devices: all", [], NO_MATCH, "it has none"),
        ("devices: [0, 1]", [PLAIN, without_mig(1)], NO_MIG, "enables MIG on GPU 1"),
        ("devices: all", [without_mig(0), without_mig(1)], NO_MIG, "which has no MIG"),
        ("devices: [GPU-1]".replace("GPU-1", UUID),
         [dataclasses.replace(without_mig(0), uuid=UUID), SECOND], NO_MIG, UUID),
    ],
)  # fmt: skip
def test_a_layout_that_matches_no_gpu_or_cannot_be_enabled_is_an_error(
    rule: str, gpus: list[model.Gpu], reason: reasons.Reason, complaint: str
) -> None:
    with pytest.raises(errors.LayoutError) as caught:
        selection.select(layout_of(f"{rule}, {EMPTY}"), gpus)
    assert caught.value.reason is reason
    assert str(caught.value.location) in ("f.yaml:3:3", "f.yaml:4:5")
    assert complaint in str(caught.value)


def document(rule: str, *, is_lenient: bool = False) -> layout_documents.Document:
    text = f"version: v1\nmig-configs:\n  x:\n  - {{{rule}, {EMPTY}}}\n"
    return layout_parser.parse(text, source="f", is_lenient=is_lenient)


@pytest.mark.parametrize(
    ("devices", "complaint"),
    [
        ('["0"]', "not '0'; did you mean 0, without quotes?"),
        ("ALL", "not 'ALL'; did you mean 'devices: all'?"),
        ("[all]", "did you mean 'devices: all'?"),
        ("[MIG-1]", "that is a MIG device"),
        ("[GPU-0a1b2c3d]", "a UUID is 'GPU-' and 32 hexadecimal digits"),
        ("[3b:00.9]", "not '3b:00.9'"),
        ("-1", "a GPU index must be a whole number, 0 or more, not -1"),
        ("true", "devices must be all, or a list"),
    ],
)
def test_an_invalid_device_is_refused_with_a_hint(devices: str, complaint: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"^f:4:") as caught:
        document(f"devices: {devices}")
    assert complaint in caught.value.message


@hypothesis.given(st.text(max_size=20) | st.text("NVIDAnvida 10-*?[]x:_", max_size=20))
def test_any_filter_is_read_or_refused_and_prints_as_itself(text: str) -> None:
    try:
        read = gpu_selectors.parse_filter(text)
    except ValueError:
        return
    assert gpu_selectors.parse_filter(str(read)) == read


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ("devices: 0", "f:4:15: devices is a single value; nvidia-mig-parted takes [0]"),
        (f"devices: {UUID}", f"f:4:15: '{UUID}' names a GPU"),
        ("devices: [3b:00.0]", "f:4:16: '3b:00.0' names a GPU"),
        ('device-filter: "*A100*", devices: all', "f:4:21: device-filter '*A100*' is a product"),
        ('device-filter: ["0x20B010DE", "0x20B710DE:0x0"], devices: [0, 1]', ""),
    ],
)
def test_a_file_that_mig_parted_cannot_read_is_reported_with_location(
    rule: str, complaint: str
) -> None:
    extensions = document(rule).extensions
    assert str(extensions[0]).startswith(complaint) if complaint else not extensions


@pytest.mark.parametrize(
    ("rule", "expected", "warning"),
    [
        ("devices: [0, 9]", [0], "names GPU 9, and this node has 4, counted from 0 (it matches"),
        ("devices: [9]", [], "selects none of this node's GPUs"),
        ("devices: []", [], "(nothing is done)"),
        ('device-filter: "0x20B710DE", devices: all', [], "selects none of this node's GPUs"),
        ('devices: [1, "ff:00.0"]', [1], "and this node has none there (it matches no GPU)"),
        ("devices: [1, 3]", [1], "which has no MIG (the GPU stays unchanged)"),
    ],
)
def test_a_lenient_rule_without_a_match_is_a_warning(
    rule: str, expected: list[int], warning: str
) -> None:
    layout, gpus = document(rule, is_lenient=True).layout("x"), [*THREE, without_mig(3)]
    assert [each.index for each in gpus if each.uuid in selection.select(layout, gpus)] == expected
    warnings = [str(each) for each in selection.lenient_warnings(layout, gpus)]
    assert any(warning in each for each in warnings)
    assert all(each.startswith("f:") for each in warnings)
    assert selection.lenient_warnings(document(rule).layout("x"), gpus) == ()
