"""The grammar of layout files: what is read, refused, or passed over as mig-parted does.

Rows about mig-parted are those of its own tests (``api/spec/v1/spec_test.go``) and of trying its
binary.
"""

import pytest

from mig_manager import errors, reasons
from mig_manager.core import model
from mig_manager.core.files import yaml_text, yaml_tree
from mig_manager.core.layout import gpu_selectors, layout_parser, layouts
from tests.rigs import contract
from tests.rigs.node import samples
from tests.rigs.node.samples import desired_gpu
from tests.unit.layout.rules import (
    DISABLED,
    layout_of,
    of_mig_devices,
    of_rules,
    parse,
)


def at(devices: str) -> str:
    return of_rules(f"devices: {devices}, mig-enabled: false")


def of_filter(device_filter: str) -> str:
    return of_rules(f"device-filter: {device_filter}, devices: all, mig-enabled: false")


# -- what is refused --------------------------------------------------------------------------


NO_CONFIGS = "mig-configs must map layout names to rules"
NO_RULES = "layout 'x' must be a list of rules"
NO_DEVICES = "devices must be all, or a list"
NO_INDEX = "a GPU index must be a whole number, 0 or more"
NO_COUNTS = "mig-devices must map profiles to counts"
NO_COUNT = "must be a whole number, 0 or more, not "
ALL_ZERO = "all counts in mig-devices are 0"
NO_TEXT = " must be a text in quotes"
REFUSED = [
    ("'version' is missing; write, for example, 'version: v1'", "{}"),
    ("'version' is missing", "mig-configs: {x: [{devices: all, mig-enabled: false}]}"),
    ("version must be the text v1, not 1", "version: 1"),
    ("version must be the text v1, not 'v2'", "version: v2\nmig-configs: {x: }"),
    ("version must be the text v1, not nothing", "version:"),
    ("version must be the text v1, not a list", "version: [v1]"),
    ("unexpected key 'Version'; did you mean 'version'?", "Version: v1"),
    ("unexpected key 'bogus' (known here: version, mig-configs)", "version: v1\nbogus: 1"),
    ("did you mean 'mig-configs'?", "version: v1\nmig-config: {}"),
    ("this is a Kubernetes ConfigMap, not a layout file", "apiVersion: v1\nkind: ConfigMap"),
    ("this is a Kubernetes object, not a layout file", "apiVersion: v1\nkind: []"),
    ("this is a GPU clients file (--gpu-clients-file)", "version: v1\nsystemd-services: []"),
    ("this is a hooks file (--hooks-file), not a layout", "version: v1\nhooks: {}"),
    (f"{NO_CONFIGS}, not nothing", "version: v1\nmig-configs:"),
    (f"{NO_CONFIGS}, not an empty mapping", "version: v1\nmig-configs: {}"),
    (f"{NO_CONFIGS}, not a list", "version: v1\nmig-configs: [x]"),
    (NO_RULES, "version: v1\nmig-configs: {x: }"),
    (f"{NO_RULES} (- devices: ...), not an empty list", "version: v1\nmig-configs: {x: []}"),
    (NO_RULES, "version: v1\nmig-configs: {x: {devices: all}}"),
    ("a rule must be a mapping", "version: v1\nmig-configs: {x: [~]}"),
    ("a rule must be a mapping", "version: v1\nmig-configs: {x: [all]}"),
    ("expected a mapping with 'version: v1'", "- version: v1"),
    ("expected a mapping with 'version: v1'", "v1"),
    ("not readable as YAML", "version: ["),
    ("'devices' is missing; write, for example, 'devices: all'", of_rules("mig-enabled: false")),
    ("'mig-enabled' is missing", of_rules("devices: all")),
    ("did you mean 'mig-enabled'", of_rules("devices: all, mig-enable: false")),
    ("did you mean 'devices'", of_rules("device: all, mig-enabled: false")),
    ("unexpected key 'bogus'", of_rules("devices: all, mig-enabled: false, bogus: 1")),
    *[
        ("mig-enabled must be true or false", of_rules(f"devices: all, mig-enabled: {mode}"))
        for mode in ('"true"', "1", "[]")
    ],
    *[
        (NO_DEVICES, at(devices))
        for devices in ("", "1.5", "ALL", "bogus", "{}", '["0"]', "[GPU-1]")
    ],
    *[(NO_INDEX, at(devices)) for devices in ("[1.5]", "[true]", "[[0]]", "[.inf]", "[.nan]")],
    (NO_COUNTS, of_rules("devices: all, mig-enabled: true")),
    (NO_COUNTS, of_rules("devices: all, mig-enabled: false, mig-devices: [1]")),
    *[(NO_COUNTS, of_mig_devices(devices)) for devices in ("", "[1g.5gb]", "all")],
    (f"the count of 1g.5gb {NO_COUNT}'7'", of_mig_devices("{1g.5gb: '7'}")),
    (f"{NO_COUNT}-1", of_mig_devices("{1g.5gb: -1}")),
    (f"{NO_COUNT}1.5", of_mig_devices("{1g.5gb: 1.5}")),
    (f"{NO_COUNT}true", of_mig_devices("{1g.5gb: true}")),
    (f"{NO_COUNT}a list", of_mig_devices("{1g.5gb: [1]}")),
    (f"{NO_COUNT}an empty mapping", of_mig_devices("{1g.5gb: {}}")),
    (ALL_ZERO, of_mig_devices("{1g.5gb: 0}")),
    (ALL_ZERO, of_mig_devices("{1g.5gb: }")),
    (ALL_ZERO, of_rules("devices: all, mig-enabled: false, mig-devices: {1g.5gb: 0}")),
    ("must be empty when", of_rules("devices: all, mig-enabled: no, mig-devices: {1g.5gb: 1}")),
    ("did you mean '1g.5gb+me'?", of_mig_devices("{1g.5gb.me: 1}")),
    ("'bogus' is not a MIG profile", of_mig_devices("{bogus: 0, 1g.5gb: 1}")),
    (f"0x20B010DE{NO_TEXT}", of_filter("0x20B010DE")),
    (f"0x20B010DE{NO_TEXT}", of_filter("[0x20B010DE]")),
    (f"true{NO_TEXT}", of_filter("true")),
    (f"a mapping{NO_TEXT}", of_filter("{a: 1}")),
    (f"nothing{NO_TEXT}", of_filter("[~]")),
    (f"a list{NO_TEXT}", of_filter("[[x]]")),
]


def test_a_tab_as_indentation_is_named() -> None:
    with pytest.raises(errors.ConfigError, match=r"f:3:1: .*; indent with spaces, not with a tab"):
        layout_parser.parse("version: v1\nmig-configs:\n\tx: []", source="f")


@pytest.mark.parametrize("is_lenient", [False, True], ids=["strict", "lenient"])
@pytest.mark.parametrize(("complaint", "text"), REFUSED)
def test_a_document_that_mig_parted_refuses_is_refused(
    complaint: str, text: str, *, is_lenient: bool
) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        layout_parser.parse(text, source="f", is_lenient=is_lenient)
    assert complaint in caught.value.message
    assert caught.value.location is not None
    assert caught.value.reason is reasons.Reason.INVALID_CONFIG


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("version: v2\nextra: 1\nmore: 1\nmig-configs: {x: 1}\n", 4),
        (of_rules("devices: ALL, mig-enabled: 1, extra: 1, more: 1"), 4),
        (of_rules("mig-devices: {x: 1}"), 3),
        (of_rules("device: all, mig-enabled: false"), 1),  # the missing key is the misspelt one
    ],
)
def test_an_error_does_not_hide_the_others(text: str, count: int) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        parse(text)
    assert 1 + len(caught.value.others) == count


def test_an_error_names_its_exact_location() -> None:
    text = "version: v1\nmig-configs:\n  x:\n  - devices: all\n    mig-enabled: true\n"
    for more, place in (
        ("    mig-devices:\n      1g.5gb: 2\n      bogus: 1\n", "f.yaml:8:7: 'bogus' is not a"),
        ("    mig-devices:\n      1g.5gb: -2\n", "f.yaml:7:15: "),
        ("", "f.yaml:4:5: "),
    ):
        with pytest.raises(errors.ConfigError) as caught:
            parse(text + more)
        assert str(caught.value).startswith(place)


# -- what mig-parted passes over, and then does something else --------------------------------


RULE = "[{devices: all, mig-enabled: false}]"
PASSED_OVER = [
    (f"version: v1\nmig-configs: {{x: {RULE}}}\n---\na: 1\n", "f:3:1", "a second document"),
    ("version: v1\n---\n[\n", "f:2:1", ""),
    ("version: v2\nversion: v1\n", "f:2:1", "key 'version' is given twice"),
    (f"version: v1\nmig-configs:\n  x: []\n  x: {RULE}\n", "f:4:3", "key 'x' is given twice"),
    (
        of_rules("devices: 0.5, devices: all, mig-enabled: no"),
        "f:4:20",
        "'devices' is given twice",
    ),
    (of_mig_devices("{1g.5gb: x, 1g.5gb: 2}"), "f:4:64", "key '1g.5gb' is given twice"),
    (at("[0, -1]"), "f:4:19", f"{NO_INDEX}, not -1"),
    (at("[~]"), "f:4:16", f"{NO_INDEX}, not nothing"),
    (of_filter('"0x20B010DE:extra"'), "f:4:21", "'0x20B010DE:extra' is not a PCI id"),
    (of_filter('"20B010DE"'), "f:4:21", "'20B010DE' is not a PCI id; did you mean '0x20B010DE'?"),
    (of_filter('" 0x20B010DE"'), "f:4:21", "is not a PCI id"),
    (of_filter('"0x1:0x2:0x3"'), "f:4:21", "is not a PCI id"),
    (of_filter('"MODEL:A"'), "f:4:21", "'MODEL:A' is not a PCI id"),
    (of_filter('[""]'), "f:4:22", "'' is not a PCI id"),
]


@pytest.mark.parametrize(("text", "place", "complaint"), PASSED_OVER)
def test_error_that_mig_parted_ignores_is_a_warning_only_if_lenient(
    text: str, place: str, complaint: str
) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        parse(text)
    (warning,) = layout_parser.parse(text, source="f", is_lenient=True).warnings
    assert str(warning).startswith(f"{place}: ")
    assert warning.message.endswith(")")
    # What follows a document need not be YAML, which only the strict reader sees.
    if complaint:
        assert str(caught.value.location) == place.replace("f", "f.yaml")
        assert complaint in caught.value.message
        assert complaint in warning.message


UNSEEN_BY_SCHEMA = ("not readable as YAML", "given twice", "a second document")
"""What an editor reports by itself, or what its values no longer show."""
COMPLAINTS = [*REFUSED, *((complaint, text) for text, _, complaint in PASSED_OVER if complaint)]


@pytest.mark.parametrize(
    "text",
    [
        text
        for complaint, text in COMPLAINTS
        if not any(unseen in complaint for unseen in UNSEEN_BY_SCHEMA)
    ],
)
def test_the_schema_for_editors_refuses_the_same_as_the_parser(text: str) -> None:
    data = yaml_tree.plain(yaml_text.parse(text, source="f"))
    with pytest.raises(AssertionError, match=r"LayoutFile\.json refuses"):
        contract.check("LayoutFile", data)


def lenient_rule(text: str) -> layouts.Rule:
    return layout_parser.parse(text, source="f", is_lenient=True).layout("x").rules[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (at("[0, -1]"), (0,)),
        (at("[-1]"), ()),
        (at("[~]"), (0,)),
        (at("[~, 2]"), (0, 2)),
        (of_rules("devices: 0.5, devices: all, mig-enabled: no"), None),
        (f"version: v1\nmig-configs: {{x: {RULE}}}\n---\na: 1\n", None),
    ],
)
def test_a_lenient_document_means_the_same_as_in_mig_parted(
    text: str, expected: tuple[int, ...] | None
) -> None:
    assert lenient_rule(text).indices == expected


def test_lenient_duplicate_profile_has_its_last_count() -> None:
    rule = lenient_rule(of_mig_devices("{1g.5gb: x, 1g.5gb: 2}"))
    assert rule.desired == desired_gpu({"1g.5gb": 2})
    assert not lenient_rule(of_filter('"0x20B010DE:extra"')).matches(samples.gpu(None))


def test_warnings_are_in_the_order_of_the_file() -> None:
    text = at("[-1, ~]").replace("devices: [", "devices: all, devices: [")
    warnings = layout_parser.parse(text, source="f", is_lenient=True).warnings
    assert [each.location.column for each in warnings] == [20, 30, 34]


# -- what a document means --------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "null\n", "---\n", "version: v1\n", "version: v1\n---\n# end\n"]
)
def test_a_document_can_be_without_layouts(text: str) -> None:
    assert parse(text).layouts == {}


def test_layouts_keep_the_order_of_the_file_and_their_locations() -> None:
    names = "".join(f"  {name}: {RULE}\n" for name in ("1", "on", "''", "a"))
    text = f"version: v1\nmig-configs:\n{names}"
    parsed = parse(text).layouts
    assert [(name, each.name, each.location.line) for name, each in parsed.items()] == [
        *(("1", "1", 3), ("true", "true", 4), ("", "", 5), ("a", "a", 6)),
    ]


def test_json_anchors_aliases_and_merges_work() -> None:
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
    parsed = parse(text).layouts
    assert parsed["one"].rules == parsed["two"].rules
    assert parsed["three"].rules[0].indices == (1,)
    assert parsed["three"].rules[0].desired == desired_gpu({"1g.5gb": 7})
    json = '{"version": "v1", "mig-configs": {"x": [{"devices": "all", "mig-enabled": false}]}}'
    assert parse(json).layout("x") == layout_of("devices: all, mig-enabled: false")


def test_an_unknown_layout_is_answered_with_close_ones_and_their_number() -> None:
    parsed = parse(f"version: v1\nmig-configs:\n  all-1g.5gb: {RULE}\n  all-disabled: {RULE}\n")
    with pytest.raises(errors.LayoutError) as caught:
        parsed.layout("all-1g.6gb")
    assert caught.value.reason is reasons.Reason.UNKNOWN_CONFIG
    assert str(caught.value) == (
        "unknown layout 'all-1g.6gb' in f.yaml; did you mean 'all-1g.5gb'?"
    )
    with pytest.raises(errors.LayoutError, match=r"^f.yaml has no layouts$"):
        parse("").layout("x")


@pytest.mark.parametrize(
    "rule",
    [
        "devices: all, mig-enabled: false",
        'devices: "all", mig-enabled: false, mig-devices: {}',
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
    (read,) = layout_of(rule).rules
    assert (read.filters, read.indices, read.desired) == ((), None, desired_gpu(mode=DISABLED))


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("[]", ()),
        ("[0]", (0,)),
        ("[3, 1, 3]", (1, 3)),
        ("[1.0]", (1,)),
        ("[0x10]", (16,)),
        ("[100000]", (100000,)),
    ],
)
def test_devices_of_a_rule_are_parsed_as_indices(devices: str, expected: tuple[int, ...]) -> None:
    assert parse(at(devices)).layout("x").rules[0].indices == expected


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("{}", desired_gpu()),
        ("{1g.5gb: 7}", desired_gpu({"1g.5gb": 7})),
        ("{1c.1g.5gb: 7}", desired_gpu({"1g.5gb": 7})),
        ("{1g.5gb: 3, 1c.1g.5gb: 4}", desired_gpu({"1g.5gb": 7})),
        ("{1g.5gb: 0, 2g.10gb: 1}", desired_gpu({"2g.10gb": 1})),
        ("{1g.5gb: , 2g.10gb: 1}", desired_gpu({"2g.10gb": 1})),
        ("{1g.5gb: 1.0}", desired_gpu({"1g.5gb": 1})),
        ("{1g.5gb: 100000}", desired_gpu({"1g.5gb": 100000})),
        ("{0g.0gb: 100}", desired_gpu({"0g.0gb": 100})),
    ],
)
def test_mig_devices_are_counted_by_profile(devices: str, expected: model.DesiredGpu) -> None:
    for mode in ("true", "on"):
        text = of_mig_devices(devices).replace("true", mode)
        assert parse(text).layout("x").rules[0].desired == expected


def test_a_rule_knows_where_it_and_its_profiles_are_written() -> None:
    rule = parse(of_mig_devices("\n      {1g.5gb: 2,\n      2g.10gb: 1}")).layout("x").rules[0]
    assert str(rule.location) == "f.yaml:4:5"
    assert {str(name): str(place) for name, place in rule.profile_locations.items()} == {
        "1g.5gb": "f.yaml:5:8",
        "2g.10gb": "f.yaml:6:7",
    }


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
    expected = gpu_selectors.PciIdFilter(device_id=device_id, subsystem_id=subsystem_id)
    (rule,) = parse(of_filter(f'"{text}"')).layout("x").rules
    assert rule.filters == (gpu_selectors.parse_filter(text),) == (expected,)
    assert gpu_selectors.parse_filter(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    ["", "20B010DE", "20B010DE:144E10DE", " 0x20B010DE", "0x20B010DE ", "0x20B010DE:",
     ":0x20B010DE", "0x20B010DE:extra", "0x20B010DE:0x1:0x2", "0x1FFFFFFFF", "+1", "-1", "1__0",
     "_1", "1_", "0x", "089", "\u0661", "9" * 5000],
)  # fmt: skip
def test_an_invalid_pci_id_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r'is not a PCI id; .*"0x20B010DE"'):
        gpu_selectors.parse_filter(text)


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
# The same layout.
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


def test_layouts_that_mean_something_else_have_another_hash() -> None:
    rules = [
        "devices: all, mig-enabled: false",
        "devices: all, mig-enabled: true, mig-devices: {}",
        "devices: [0], mig-enabled: true, mig-devices: {}",
        "devices: [], mig-enabled: true, mig-devices: {}",
        "devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}",
        "devices: all, mig-enabled: true, mig-devices: {1g.5gb: 6}",
        'device-filter: "0x20B010DE", devices: all, mig-enabled: false',
        'device-filter: "0x20B010DE:0x0", devices: all, mig-enabled: false',
    ]
    hashes = {layout_of(*each).content_hash for rule in rules for each in ([rule], [rule] * 2)}
    assert len(hashes) == 2 * len(rules)


def test_the_hash_of_a_layout_stays_the_same_from_release_to_release() -> None:
    # Nodes carry it in their status; a change would look like a changed config everywhere.
    assert layout_of("devices: all, mig-enabled: false").content_hash == "7befa06a42e3"
