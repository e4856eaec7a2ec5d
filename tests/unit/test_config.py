import json
from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager import errors
from mig_manager.core import model, profile_name, yaml_tree
from mig_manager.core.layout import config, layouts

A100 = 0x20B010DE
A30 = 0x20B710DE
T4 = 0x1EB810DE
ENABLED = model.MigMode.ENABLED
DISABLED = model.MigMode.DISABLED


def gpu(
    index: int,
    *,
    device_id: int = A100,
    subsystem_id: int = 0x144E10DE,
    mode: model.MigMode | None = DISABLED,
    instances: Sequence[tuple[str, ...]] = (),
) -> model.Gpu:
    """A GPU; each of ``instances`` is a GPU instance with compute instances of these profiles."""
    return model.Gpu(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA Test",
        architecture=model.Architecture.AMPERE,
        pci_address=f"00000000:{index:02x}:00.0",
        pci_device_id=device_id,
        pci_subsystem_id=subsystem_id,
        memory_mib=40960,
        current_mode=mode,
        pending_mode=mode,
        mode_change_needs_reset=True,
        profiles=None,
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


def parse(text: str) -> config.Document:
    return config.parse(text, source="f.yaml")


def layout_of(*rules: str) -> config.Layout:
    """A layout from its rules in flow style."""
    body = "".join(f"  - {{{rule}}}\n" for rule in rules)
    return parse(f"version: v1\nmig-configs:\n  x:\n{body}").layout("x")


def rule_of(rule: str) -> config.Rule:
    return layout_of(rule).rules[0]


def message_of(text: str) -> str:
    with pytest.raises(errors.ConfigError) as caught:
        parse(text)
    assert caught.value.location is not None
    assert caught.value.reason is errors.Reason.INVALID_CONFIG
    return str(caught.value)


def message_of_rule(rule: str) -> str:
    return message_of(f"version: v1\nmig-configs:\n  x:\n  - {{{rule}}}\n")


def wanted(mode: model.MigMode = ENABLED, **counts: int) -> model.DesiredGpu:
    return model.DesiredGpu.of(
        mode,
        {
            profile_name.parse(name.removeprefix("p").replace("_", ".")): count
            for name, count in counts.items()
        },
    )


# The document


@pytest.mark.parametrize("text", ["", "# nothing\n", "null\n", "---\n", "version: v1\n"])
def test_a_document_can_be_without_layouts(text: str) -> None:
    assert parse(text).layouts == {}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "'version' is missing; write, for example, 'version: v1'"),
        ("mig-configs: {x: [{devices: all, mig-enabled: false}]}", "'version' is missing"),
        ("version: 1", "version must be the text v1, not 1"),
        ("version: v2", "version must be the text v1, not 'v2'"),
        ("version:", "version must be the text v1, not nothing"),
        ("version: [v1]", "version must be the text v1, not a list"),
        ("Version: v1", "unexpected key 'Version'; did you mean 'version'?"),
        ("version: v1\nbogus: 1", "unexpected key 'bogus' (known here: version, mig-configs)"),
        ("version: v1\nmig-config: {}", "did you mean 'mig-configs'?"),
        ("version: v1\nmig-configs:", "mig-configs must map layout names to rules, not nothing"),
        ("version: v1\nmig-configs: {}", "mig-configs must map"),
        (
            "version: v1\nmig-configs: [x]",
            "mig-configs must map layout names to rules, not a list",
        ),
        ("version: v1\nmig-configs: {x: }", "layout 'x' must be a list of rules"),
        ("version: v1\nmig-configs: {x: []}", "layout 'x' must be a list of rules"),
        ("version: v1\nmig-configs: {x: {devices: all}}", "layout 'x' must be a list of rules"),
        ("version: v1\nmig-configs: {x: [~]}", "a rule must be a mapping"),
        ("version: v1\nmig-configs: {x: [all]}", "a rule must be a mapping"),
        ("- version: v1", "expected a mapping with 'version: v1'"),
        ("v1", "expected a mapping with 'version: v1'"),
        ("version: v1\nversion: v1", "key 'version' is given twice"),
        ("version: [", "not readable as YAML"),
    ],
)
def test_a_malformed_document_is_refused(text: str, complaint: str) -> None:
    assert complaint in message_of(text)


def test_an_error_names_its_exact_location() -> None:
    text = "version: v1\nmig-configs:\n  x:\n  - devices: all\n    mig-enabled: true\n"
    assert message_of(text + "    mig-devices:\n      1g.5gb: 2\n      bogus: 1\n").startswith(
        "f.yaml:8:7: 'bogus' is not a MIG profile"
    )
    assert message_of(text + "    mig-devices:\n      1g.5gb: -2\n").startswith("f.yaml:7:15: ")
    assert message_of(text).startswith("f.yaml:4:5: ")


def test_layouts_keep_the_order_and_locations_of_the_file() -> None:
    rule = "[{devices: all, mig-enabled: false}]"
    layouts = parse(f"version: v1\nmig-configs:\n  b: {rule}\n  a: {rule}\n").layouts
    assert [(name, each.name, each.location.line) for name, each in layouts.items()] == [
        ("b", "b", 3),
        ("a", "a", 4),
    ]


def test_layout_names_are_texts_whatever_yaml_makes_of_them() -> None:
    rule = "[{devices: all, mig-enabled: false}]"
    layouts = parse(
        f"version: v1\nmig-configs:\n  1: {rule}\n  on: {rule}\n  '': {rule}\n"
    ).layouts
    assert list(layouts) == ["1", "true", ""]


def test_a_layout_given_twice_is_an_error() -> None:
    rule = "[{devices: all, mig-enabled: false}]"
    text = f"version: v1\nmig-configs:\n  x: {rule}\n  x: {rule}\n"
    assert message_of(text).startswith("f.yaml:4:3: key 'x' is given twice")


def test_anchors_aliases_and_merges_work() -> None:
    text = """\
version: v1
mig-configs:
  one: &one
  - &rule
    devices: [0]
    mig-enabled: true
    mig-devices: {1g.5gb: 7}
  two: *one
  three:
  - <<: *rule
    devices: [1]
"""
    layouts = parse(text).layouts
    assert layouts["one"].rules == layouts["two"].rules
    assert layouts["three"].rules[0].indices == (1,)
    assert layouts["three"].rules[0].wanted == wanted(p1g_5gb=7)


def test_a_document_in_json_means_the_same() -> None:
    data = {
        "version": "v1",
        "mig-configs": {
            "x": [{"devices": "all", "mig-enabled": True, "mig-devices": {"1g.5gb": 7}}]
        },
    }
    assert parse(json.dumps(data)).layout("x") == layout_of(
        "devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}"
    )


def test_a_known_layout_is_found_by_name() -> None:
    assert layout_of("devices: all, mig-enabled: false").name == "x"


def test_an_unknown_layout_is_answered_with_close_ones_and_their_number() -> None:
    rule = "[{devices: all, mig-enabled: false}]"
    parsed = parse(f"version: v1\nmig-configs:\n  all-1g.5gb: {rule}\n  all-disabled: {rule}\n")
    with pytest.raises(errors.LayoutError) as caught:
        parsed.layout("all-1g.6gb")
    assert caught.value.reason is errors.Reason.UNKNOWN_CONFIG
    assert str(caught.value) == (
        "f.yaml has no layout 'all-1g.6gb' among its 2; did you mean 'all-1g.5gb'?"
    )


def test_an_unknown_layout_that_resembles_none_is_just_unknown() -> None:
    with pytest.raises(errors.LayoutError, match=r"has no layout 'x' among its 0$"):
        parse("").layout("x")


# A rule


@pytest.mark.parametrize(
    "rule",
    [
        "devices: all, mig-enabled: false",
        "devices: all, mig-enabled: false, mig-devices: {}",
        "devices: all, mig-enabled: false, mig-devices: ",
        "devices: all, mig-enabled: no",
        "devices: all, mig-enabled: off",
        "devices: all, mig-enabled: ",
        "device-filter: , devices: all, mig-enabled: false",
        'device-filter: "", devices: all, mig-enabled: false',
        "device-filter: [], devices: all, mig-enabled: false",
    ],
)
def test_spellings_of_disabling_mig_everywhere_mean_the_same(rule: str) -> None:
    read = rule_of(rule)
    assert (read.filters, read.indices, read.wanted) == ((), None, wanted(DISABLED))


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("all", None),
        ('"all"', None),
        ("[]", ()),
        ("[0]", (0,)),
        ("[3, 1, 3]", (1, 3)),
        ("[1.0]", (1,)),
        ("[0x10]", (16,)),
        ("[100000]", (100000,)),
    ],
)
def test_devices_are_all_or_indices(devices: str, expected: tuple[int, ...] | None) -> None:
    assert rule_of(f"devices: {devices}, mig-enabled: true, mig-devices: {{}}").indices == expected


@pytest.mark.parametrize(
    "devices",
    ["", "1.5", "ALL", "bogus", "{}", '["0"]', "[GPU-1]", "[1.5]", "[-1]", "[~]", "[true]",
     "[[0]]", "[.inf]", "[.nan]"],
)  # fmt: skip
def test_malformed_devices_are_refused(devices: str) -> None:
    message = message_of_rule(f"devices: {devices}, mig-enabled: false")
    assert "devices must be all, or a list" in message or "a GPU index must be" in message


@pytest.mark.parametrize(
    ("enabled", "expected"), [("true", True), ("yes", True), ("On", True), ("no", False)]
)
def test_mig_enabled_is_any_boolean_of_yaml(enabled: str, expected: bool) -> None:  # noqa: FBT001
    read = rule_of(f"devices: all, mig-enabled: {enabled}, mig-devices: {{}}")
    assert (read.wanted.mode is ENABLED) is expected


@pytest.mark.parametrize("enabled", ['"true"', "1", "0", "maybe", "[true]", "{}"])
def test_malformed_mig_enabled_is_refused(enabled: str) -> None:
    message = message_of_rule(f"devices: all, mig-enabled: {enabled}, mig-devices: {{}}")
    assert "mig-enabled must be true or false" in message


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("{}", wanted()),
        ("{1g.5gb: 7}", wanted(p1g_5gb=7)),
        ("{1c.1g.5gb: 7}", wanted(p1g_5gb=7)),
        ("{1g.5gb: 3, 1c.1g.5gb: 4}", wanted(p1g_5gb=7)),
        ("{1g.5gb: 0, 2g.10gb: 1}", wanted(p2g_10gb=1)),
        ("{1g.5gb: , 2g.10gb: 1}", wanted(p2g_10gb=1)),
        ("{1g.5gb: 1.0}", wanted(p1g_5gb=1)),
        ("{1g.5gb: 100000}", wanted(p1g_5gb=100000)),
        ("{0g.0gb: 100}", wanted(p0g_0gb=100)),
    ],
)
def test_mig_devices_are_counted_by_profile(devices: str, expected: model.DesiredGpu) -> None:
    assert rule_of(f"devices: all, mig-enabled: true, mig-devices: {devices}").wanted == expected


@pytest.mark.parametrize(
    ("devices", "complaint"),
    [
        ("", "mig-devices must map profiles to counts"),
        ("[1g.5gb]", "mig-devices must map profiles to counts"),
        ("all", "mig-devices must map profiles to counts"),
        ("{1g.5gb: '7'}", "the count of 1g.5gb must be a whole number, 0 or more, not '7'"),
        ("{1g.5gb: -1}", "must be a whole number, 0 or more, not -1"),
        ("{1g.5gb: 1.5}", "must be a whole number, 0 or more, not 1.5"),
        ("{1g.5gb: true}", "must be a whole number, 0 or more, not true"),
        ("{1g.5gb: [1]}", "must be a whole number, 0 or more, not a list"),
        ("{1g.5gb: {}}", "must be a whole number, 0 or more, not a mapping"),
        ("{1g.5gb: 0}", "all counts in mig-devices are 0"),
        ("{1g.5gb: }", "all counts in mig-devices are 0"),
        ("{1g.5gb.me: 1}", "did you mean '1g.5gb+me'?"),
        ("{bogus: 1}", "'bogus' is not a MIG profile"),
        ("{1g.5gb: 1, 1g.5gb: 2}", "key '1g.5gb' is given twice"),
    ],
)
def test_malformed_mig_devices_are_refused(devices: str, complaint: str) -> None:
    message = message_of_rule(f"devices: all, mig-enabled: true, mig-devices: {devices}")
    assert complaint in message


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ("mig-enabled: false", "'devices' is missing; write, for example, 'devices: all'"),
        ("devices: all", "'mig-enabled' is missing"),
        ("devices: all, mig-enabled: true", "mig-devices must map profiles to counts"),
        ("devices: all, mig-enabled: false, mig-devices: {1g.5gb: 1}", "must be empty when"),
        ("devices: all, mig-enabled: false, mig-devices: {1g.5gb: 0}", "all counts"),
        ("devices: all, mig-enabled: false, mig-devices: [1]", "mig-devices must map"),
        ("devices: all, mig-enable: false", "did you mean 'mig-enabled'"),
        ("device: all, mig-enabled: false", "did you mean 'devices'"),
        ("devices: all, devices: all, mig-enabled: no", "key 'devices' is given twice"),
    ],
)
def test_a_malformed_rule_is_refused(rule: str, complaint: str) -> None:
    assert complaint in message_of_rule(rule)


def test_a_rule_knows_where_it_and_its_profiles_are_written() -> None:
    text = """\
version: v1
mig-configs:
  x:
  - devices: all
    mig-enabled: true
    mig-devices:
      1g.5gb: 2
      2g.10gb: 1
"""
    rule = parse(text).layout("x").rules[0]
    assert str(rule.location) == "f.yaml:4:5"
    assert {str(name): str(place) for name, place in rule.profile_locations.items()} == {
        "1g.5gb": "f.yaml:7:7",
        "2g.10gb": "f.yaml:8:7",
    }


# Filters


@pytest.mark.parametrize(
    ("text", "device_id", "subsystem_id"),
    [
        ("0x20B010DE", 0x20B010DE, None),
        ("0X20b010de", 0x20B010DE, None),
        ("0x20B0_10DE", 0x20B010DE, None),
        ("548409566", 0x20B010DE, None),
        ("0b101", 5, None),
        ("0o17", 15, None),
        ("017", 15, None),
        ("0_17", 15, None),
        ("0", 0, None),
        ("0xFFFFFFFF", 0xFFFFFFFF, None),
        ("0x25B610DE:0x14A910DE", 0x25B610DE, 0x14A910DE),
        ("0x25B610DE:0x00000000", 0x25B610DE, 0),
    ],
)
def test_a_pci_id_is_read_as_go_reads_numbers(
    text: str, device_id: int, subsystem_id: int | None
) -> None:
    assert config.parse_filter(text) == config.DeviceFilter(
        device_id=device_id, subsystem_id=subsystem_id
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "20B010DE",
        "20B010DE:144E10DE",
        " 0x20B010DE",
        "0x20B010DE ",
        "0x20B010DE:",
        ":0x20B010DE",
        "0x20B010DE:extra",
        "0x20B010DE:0x1:0x2",
        "0x1FFFFFFFF",
        "+1",
        "-1",
        "1__0",
        "_1",
        "1_",
        "0x",
        "089",
        "\u0661",
        "9" * 5000,
    ],
)
def test_an_invalid_pci_id_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r'is no PCI id; .*"0x20B010DE"'):
        config.parse_filter(text)


@pytest.mark.parametrize("text", ["0x20B010DE", "0x25B610DE:0x14A910DE", "0x25B610DE:0x00000000"])
def test_a_filter_prints_as_it_is_written(text: str) -> None:
    assert str(config.parse_filter(text)) == text


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ('""', True),
        ('"0x233010DE"', True),
        ('"0x233010DE:0x16C010DE"', True),
        ('"0x233010DE:0x16C110DE"', False),
        ('"0x233010DE:0x00000000"', False),
        ('["0x233010DE:0x16C110DE", "0x233010DE:0x16C010DE"]', True),
        ('["0x20B010DE", "0x233010DE"]', True),
        ('["0x20B010DE", "0x20B710DE"]', False),
    ],
)
def test_a_filter_matches_by_device_and_if_given_by_subsystem(
    filters: str, *, expected: bool
) -> None:
    rule = rule_of(f"device-filter: {filters}, devices: all, mig-enabled: false")
    assert rule.matches(gpu(0, device_id=0x233010DE, subsystem_id=0x16C010DE)) is expected


def test_a_zero_subsystem_matches_a_gpu_that_reports_none() -> None:
    unknown = gpu(0, device_id=0x25B610DE, subsystem_id=0)
    assert config.parse_filter("0x25B610DE:0x00000000").matches(unknown)
    assert config.parse_filter("0x25B610DE").matches(unknown)
    assert not config.parse_filter("0x25B610DE:0x14A910DE").matches(unknown)


@pytest.mark.parametrize(
    ("filters", "complaint"),
    [
        ("0x20B010DE", "0x20B010DE must be a text in quotes"),
        ("[0x20B010DE]", "0x20B010DE must be a text in quotes"),
        ("true", "true must be a text in quotes"),
        ("{a: 1}", "a mapping must be a text in quotes"),
        ("[~]", "nothing must be a text in quotes"),
        ("[[x]]", "a list must be a text in quotes"),
        ('"MODEL:A"', "'MODEL:A' is no PCI id"),
        ('[""]', "'' is no PCI id"),
        ('["0x20B010DE", 20B010DE]', "'20B010DE' is no PCI id; did you mean '0x20B010DE'?"),
    ],
)
def test_a_filter_that_could_never_match_is_an_error(filters: str, complaint: str) -> None:
    message = message_of_rule(f"device-filter: {filters}, devices: all, mig-enabled: false")
    assert complaint in message


# Meaning


ONE_SPELLING = """\
version: v1
mig-configs:
  x:
  - device-filter: ["0x20B710DE", "0x20B010DE"]
    devices: [1, 0]
    mig-enabled: true
    mig-devices: {2g.10gb: 1, 1g.5gb: 3}
"""
OTHER_SPELLING = """\
# The same desired.
mig-configs:
  x:
  - mig-devices:
      1c.1g.5gb: 3.0
      2g.10gb: 1
      7g.40gb: 0
    mig-enabled: yes
    devices: [0, 1, 1]
    device-filter: ["0x20b010de", "0x20B0_10DE", "0x20B710DE"]
version: "v1"
"""


def test_layouts_that_mean_the_same_are_equal_and_have_one_hash() -> None:
    one, other = parse(ONE_SPELLING).layout("x"), parse(OTHER_SPELLING).layout("x")
    assert one == other
    assert one.content_hash == other.content_hash
    assert len(one.content_hash) == 12


@pytest.mark.parametrize(
    "rule",
    [
        "devices: all, mig-enabled: false",
        "devices: all, mig-enabled: true, mig-devices: {}",
        "devices: [0], mig-enabled: true, mig-devices: {}",
        "devices: [], mig-enabled: true, mig-devices: {}",
        "devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}",
        "devices: all, mig-enabled: true, mig-devices: {1g.5gb: 6}",
        'device-filter: "0x20B010DE", devices: all, mig-enabled: false',
        'device-filter: "0x20B010DE:0x0", devices: all, mig-enabled: false',
    ],
)
def test_layouts_that_mean_something_else_have_another_hash(rule: str) -> None:
    other = layout_of("devices: all, mig-enabled: true, mig-devices: {1g.5gb: 5}")
    assert layout_of(rule).content_hash != other.content_hash
    assert layout_of(rule, rule).content_hash != layout_of(rule).content_hash


def test_the_hash_of_a_layout_stays_the_same_from_release_to_release() -> None:
    # Nodes carry it in their status; a change would look like a changed config everywhere.
    assert layout_of("devices: all, mig-enabled: false").content_hash == "7befa06a42e3"


# Selection


def test_every_gpu_gets_what_its_rule_wants() -> None:
    layout = layout_of(
        'device-filter: "0x20B010DE", devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}',
        'device-filter: "0x20B710DE", devices: all, mig-enabled: true, mig-devices: {1g.6gb: 4}',
    )
    assert config.select(layout, [gpu(0), gpu(1, device_id=A30), gpu(2, device_id=T4)]) == {
        "GPU-0": wanted(p1g_5gb=7),
        "GPU-1": wanted(p1g_6gb=4),
    }


def test_the_last_rule_about_a_gpu_decides() -> None:
    layout = layout_of(
        "devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}",
        "devices: [1], mig-enabled: false",
    )
    assert config.select(layout, [gpu(0), gpu(1)]) == {
        "GPU-0": wanted(p1g_5gb=7),
        "GPU-1": wanted(DISABLED),
    }


def test_gpus_without_a_rule_are_not_touched() -> None:
    layout = layout_of("devices: [1], mig-enabled: true, mig-devices: {}")
    assert config.select(layout, [gpu(0), gpu(1), gpu(2)]) == {"GPU-1": wanted()}


def test_an_index_counts_all_gpus_of_the_node_not_the_filtered_ones() -> None:
    layout = layout_of(
        'device-filter: "0x20B710DE", devices: [0, 1], mig-enabled: true, mig-devices: {}'
    )
    assert list(config.select(layout, [gpu(0), gpu(1, device_id=A30)])) == ["GPU-1"]


def test_one_of_several_rules_may_match_no_gpu_even_by_index() -> None:
    layout = layout_of(
        'device-filter: "0x20B710DE", devices: [7], mig-enabled: true, mig-devices: {}',
        "devices: all, mig-enabled: false",
    )
    assert list(config.select(layout, [gpu(0)])) == ["GPU-0"]


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


def test_a_rule_for_all_gpus_skips_gpus_without_mig() -> None:
    layout = layout_of("devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}")
    assert config.select(layout, [gpu(0, device_id=T4, mode=None), gpu(1)]) == {
        "GPU-1": wanted(p1g_5gb=7)
    }


@pytest.mark.parametrize("devices", ["all", "[0]"])
def test_disabling_mig_on_a_gpu_without_mig_does_nothing(devices: str) -> None:
    layout = layout_of(f"devices: {devices}, mig-enabled: false")
    assert config.select(layout, [gpu(0, mode=None)]) == {}


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


def test_a_later_rule_can_exclude_a_gpu_without_mig() -> None:
    layout = layout_of(
        "devices: [0, 1], mig-enabled: true, mig-devices: {}", "devices: [1], mig-enabled: false"
    )
    assert config.select(layout, [gpu(0), gpu(1, mode=None)]) == {"GPU-0": wanted()}


# Export


def exported_rules(*gpus: model.Gpu) -> object:
    data = config.export(gpus, label="now")
    assert list(data) == ["version", "mig-configs"]
    assert data["version"] == "v1"
    configs = data["mig-configs"]
    assert isinstance(configs, dict)
    assert list(configs) == ["now"]
    return configs["now"]


SEVEN = [("1g.5gb",)] * 7


def test_one_gpu_is_exported_as_all_without_filter() -> None:
    assert exported_rules(gpu(0, mode=ENABLED, instances=SEVEN)) == [
        {"devices": "all", "mig-enabled": True, "mig-devices": {"1g.5gb": 7}}
    ]


def test_gpus_of_one_model_in_two_states_are_exported_by_index_without_filter() -> None:
    assert exported_rules(gpu(0, mode=ENABLED, instances=SEVEN), gpu(1), gpu(2)) == [
        {"devices": [0], "mig-enabled": True, "mig-devices": {"1g.5gb": 7}},
        {"devices": [1, 2], "mig-enabled": False, "mig-devices": {}},
    ]


def test_two_models_in_one_state_are_exported_as_all_without_filter() -> None:
    assert exported_rules(gpu(0), gpu(1, device_id=A30)) == [
        {"devices": "all", "mig-enabled": False, "mig-devices": {}}
    ]


def test_two_models_in_different_states_are_exported_with_filters() -> None:
    rules = exported_rules(gpu(0), gpu(1, device_id=A30, mode=ENABLED), gpu(2))
    assert rules == [
        {"device-filter": "0x20B010DE", "devices": "all", "mig-enabled": False, "mig-devices": {}},
        {"device-filter": "0x20B710DE", "devices": "all", "mig-enabled": True, "mig-devices": {}},
    ]
    assert isinstance(rules, list)
    assert list(rules[0]) == ["device-filter", "devices", "mig-enabled", "mig-devices"]


def test_two_models_in_mixed_states_are_exported_by_filters_and_indices() -> None:
    both = ["0x20B010DE", "0x20B710DE"]
    assert exported_rules(
        gpu(0, device_id=A30),
        gpu(1, device_id=A30, mode=ENABLED),
        gpu(2),
        gpu(3, mode=ENABLED),
    ) == [
        {"device-filter": both, "devices": [0, 2], "mig-enabled": False, "mig-devices": {}},
        {"device-filter": both, "devices": [1, 3], "mig-enabled": True, "mig-devices": {}},
    ]


def test_only_compute_instances_are_exported_biggest_first() -> None:
    instances = [("1g.5gb",), (), ("1c.3g.20gb", "2c.3g.20gb"), ("1g.5gb+me",)]
    assert exported_rules(gpu(0, mode=ENABLED, instances=instances)) == [
        {
            "devices": "all",
            "mig-enabled": True,
            "mig-devices": {"2c.3g.20gb": 1, "1c.3g.20gb": 1, "1g.5gb+me": 1, "1g.5gb": 1},
        }
    ]


def test_a_gpu_without_mig_is_exported_as_disabled() -> None:
    assert exported_rules(gpu(0, mode=None)) == [
        {"devices": "all", "mig-enabled": False, "mig-devices": {}}
    ]


def test_a_node_without_gpus_has_nothing_to_export() -> None:
    with pytest.raises(errors.LayoutError) as caught:
        config.export([], label="now")
    assert caught.value.reason is errors.Reason.NO_GPU_MATCHES


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


# YAML knows no surrogate pairs, in which JSON writes the characters beyond these.
LABELS = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=10)


@hypothesis.given(GPUS, st.booleans(), LABELS)
def test_what_is_exported_selects_what_was_there(
    gpus: list[model.Gpu],
    as_json: bool,  # noqa: FBT001 - hypothesis passes by position
    label: str,
) -> None:
    data = config.export(gpus, label=label)
    text = json.dumps(data) if as_json else yaml_tree.dump(data)
    layout = config.parse(text, source="f").layout(label)
    expected = {each.uuid: layouts.current(each) for each in gpus if each.is_mig_capable}
    assert config.select(layout, gpus) == expected


@hypothesis.given(
    st.recursive(
        st.sampled_from(["all", "v1", "0x20B010DE", "1g.5gb", True, False, None, 0, 1, -1, 1.5]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*config.DOCUMENT_KEYS, *config.KEYS, "x", "1g.5gb"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_document_parses_or_raises_a_typed_error(data: object) -> None:
    for text in (
        yaml_tree.dump(data),
        yaml_tree.dump({"version": "v1", "mig-configs": data}),
        yaml_tree.dump({"version": "v1", "mig-configs": {"x": [data]}}),
    ):
        try:
            config.parse(text, source="f")
        except errors.ConfigError as error:
            assert error.location is not None  # noqa: PT017 - both outcomes are fine
