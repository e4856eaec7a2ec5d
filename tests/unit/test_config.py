import pytest

from mig_manager import errors
from mig_manager.core import model, profile_name
from mig_manager.core.layout import config

ENABLED = model.MigMode.ENABLED
DISABLED = model.MigMode.DISABLED


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
        (
            'devices: all, mig-enabled: "true", mig-devices: {}',
            "mig-enabled must be true or false",
        ),
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
        ("0x20B010DE", 0x20B010DE, None), ("0X20b010de", 0x20B010DE, None),
        ("0x20B0_10DE", 0x20B010DE, None), ("548409566", 0x20B010DE, None), ("0b101", 5, None),
        ("0o17", 15, None), ("017", 15, None), ("0_17", 15, None), ("0", 0, None),
        ("0xFFFFFFFF", 0xFFFFFFFF, None), ("0x25B610DE:0x14A910DE", 0x25B610DE, 0x14A910DE),
        ("0x25B610DE:0x00000000", 0x25B610DE, 0),
    ],
)  # fmt: skip
def test_a_pci_id_is_read_as_go_reads_numbers(
    text: str, device_id: int, subsystem_id: int | None
) -> None:
    assert config.parse_filter(text) == config.DeviceFilter(
        device_id=device_id, subsystem_id=subsystem_id
    )


@pytest.mark.parametrize(
    "text",
    ["", "20B010DE", "20B010DE:144E10DE", " 0x20B010DE", "0x20B010DE ", "0x20B010DE:",
     ":0x20B010DE", "0x20B010DE:extra", "0x20B010DE:0x1:0x2", "0x1FFFFFFFF", "+1", "-1", "1__0",
     "_1", "1_", "0x", "089", "\u0661", "9" * 5000],
)  # fmt: skip
def test_an_invalid_pci_id_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r'is no PCI id; .*"0x20B010DE"'):
        config.parse_filter(text)


@pytest.mark.parametrize("text", ["0x20B010DE", "0x25B610DE:0x14A910DE", "0x25B610DE:0x00000000"])
def test_a_filter_prints_as_it_is_written(text: str) -> None:
    assert str(config.parse_filter(text)) == text


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
