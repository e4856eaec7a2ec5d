import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager import errors
from mig_manager.core import model
from mig_manager.core.layout import config, layouts
from tests.unit import samples

UUID = "GPU-0a1b2c3d-0000-4000-8000-00000000000f"
OTHER_UUID = "GPU-0a1b2c3d-0000-4000-8000-0000000000ff"
ADDRESS = "00000000:3b:00.0"


def gpus(count: int = 3) -> list[model.Gpu]:
    """GPUs; number 1 has the UUID and the address above."""
    found = [
        dataclasses.replace(
            samples.gpu(samples.A100, index=index),
            name="NVIDIA A100-SXM4-40GB",
            pci_address=f"00000000:{index:02x}:00.0",
        )
        for index in range(count)
    ]
    found[1] = dataclasses.replace(found[1], uuid=UUID, pci_address=ADDRESS)
    return found


def parse(rule: str, *, is_lenient: bool = False) -> config.Document:
    text = (
        f"version: v1\nmig-configs:\n  x:\n  - {{{rule}, mig-enabled: true, mig-devices: {{}}}}\n"
    )
    return config.parse(text, source="f", is_lenient=is_lenient)


def selected(rule: str, *, is_lenient: bool = False) -> list[int]:
    layout = parse(rule, is_lenient=is_lenient).layout("x")
    here = gpus()
    wanted = config.select(layout, here)
    return [gpu.index for gpu in here if gpu.uuid in wanted]


# GPUs by UUID, address and a single number


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("0", [0]),
        ("2", [2]),
        (f"[{UUID}]", [1]),
        (UUID, [1]),
        (f"[{UUID.replace('0a1b2c3d', '0A1B2C3D')}]", [1]),
        (f"[{ADDRESS}]", [1]),
        ('["0000:3B:00.0"]', [1]),
        ("[3b:00.0]", [1]),
        ("3b:00.0", [1]),
        (f"[0, {UUID}]", [0, 1]),
        (f"[0, {ADDRESS}, 2]", [0, 1, 2]),
        (f"[0, {OTHER_UUID}]", [0]),
    ],
)
def test_gpus_can_be_named_by_index_uuid_and_address(devices: str, expected: list[int]) -> None:
    assert selected(f"devices: {devices}") == expected


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
    with pytest.raises(errors.ConfigError) as caught:
        parse(f"devices: {devices}")
    assert complaint in caught.value.message
    assert caught.value.message.startswith("f:4:")


def test_an_address_that_is_not_here_is_an_error_like_an_index() -> None:
    with pytest.raises(errors.LayoutError, match=r"names GPU 00000000:ff:00\.0, and"):
        selected('devices: [0, "ff:00.0"]')


def test_a_layout_only_for_gpus_of_other_nodes_matches_no_gpu() -> None:
    with pytest.raises(errors.LayoutError) as caught:
        selected(f"devices: [{OTHER_UUID}]")
    assert caught.value.reason is errors.Reason.NO_GPU_MATCHES


def test_naming_a_gpu_without_mig_by_uuid_is_an_error() -> None:
    here = [dataclasses.replace(gpu, current_mode=None, pending_mode=None) for gpu in gpus()]
    with pytest.raises(errors.LayoutError) as caught:
        config.select(parse(f"devices: [{UUID}]").layout("x"), here)
    assert caught.value.reason is errors.Reason.NOT_MIG_CAPABLE


# Models by name


@pytest.mark.parametrize(
    "name",
    [
        "A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB", "nvidia a100-sxm4-40gb", "a100*",
        "NVIDIA A100*", "NVIDIA*40GB", "*A100*", "*", "A100-SXM?-40GB", "A[13]00-*",
        "NVIDIA A100 SXM4 40GB",
    ],
)  # fmt: skip
def test_a_filter_can_be_a_product_name_or_a_glob_of_it(name: str) -> None:
    assert selected(f'device-filter: "{name}", devices: all') == [0, 1, 2]


@pytest.mark.parametrize("name", ["A100", "H100*", "A100-SXM4-80GB", "Tesla T4", "A[3]0-*"])
def test_a_name_of_another_product_matches_nothing(name: str) -> None:
    with pytest.raises(errors.LayoutError) as caught:
        selected(f'device-filter: "{name}", devices: all')
    assert caught.value.reason is errors.Reason.NO_GPU_MATCHES


def test_names_and_ids_can_stand_side_by_side() -> None:
    assert selected('device-filter: ["0x20B710DE", "*A100*"], devices: [0]') == [0]


@hypothesis.given(st.text(max_size=20) | st.text("NVIDAnvida 10-*?[]x:_", max_size=20))
def test_any_filter_is_read_or_refused_and_prints_as_itself(text: str) -> None:
    try:
        read = layouts.parse_filter(text)
    except ValueError:
        return
    assert layouts.parse_filter(str(read)) == read


# What mig-parted cannot read


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ("devices: 0", "f:4:15: devices is a single value; nvidia-mig-parted takes [0]"),
        (f"devices: {UUID}", f"f:4:15: '{UUID}' names a GPU"),
        (f"devices: [{UUID}]", f"f:4:16: '{UUID}' names a GPU"),
        ("devices: [3b:00.0]", "f:4:16: '3b:00.0' names a GPU"),
        ('device-filter: "*A100*", devices: all', "f:4:21: device-filter '*A100*' is a product"),
    ],
)
def test_extensions_are_reported_with_their_location(rule: str, complaint: str) -> None:
    extensions = parse(rule).extensions
    assert str(extensions[0]).startswith(complaint)


def test_nothing_that_mig_parted_reads_is_reported_as_an_extension() -> None:
    read = parse('device-filter: ["0x20B010DE", "0x20B710DE:0x0"], devices: [0, 1]')
    assert read.extensions == ()


# Leniently


@pytest.mark.parametrize(
    ("rule", "expected", "warning"),
    [
        ("devices: [0, 9]", [0], "names GPU 9, and this node has 3, counted from 0 (it matches"),
        ("devices: [9]", [], "is about none of this node's GPUs"),
        ("devices: []", [], "(nothing is done)"),
        ('device-filter: "0x20B710DE", devices: all', [], "is about none of this node's GPUs"),
        ('devices: [1, "ff:00.0"]', [1], "and this node has none there (it matches no GPU)"),
    ],
)
def test_a_lenient_rule_without_a_match_is_a_warning(
    rule: str, expected: list[int], warning: str
) -> None:
    assert selected(rule, is_lenient=True) == expected
    layout = parse(rule, is_lenient=True).layout("x")
    warnings = [str(each) for each in layouts.lenient_warnings(layout, gpus())]
    assert any(warning in each for each in warnings)
    assert all(each.startswith("f:") for each in warnings)


def test_a_lenient_rule_skips_a_gpu_without_mig() -> None:
    here = gpus()
    here[0] = dataclasses.replace(here[0], current_mode=None, pending_mode=None)
    layout = parse("devices: [0, 1]", is_lenient=True).layout("x")
    assert list(config.select(layout, here)) == [UUID]
    (remark,) = layouts.lenient_warnings(layout, here)
    assert "which has no MIG (it is left as it is)" in remark.message


def test_a_strict_layout_has_no_lenient_warnings() -> None:
    assert layouts.lenient_warnings(parse("devices: [9]").layout("x"), gpus()) == ()
