"""What NVIDIA's mig-parted takes and refuses, row by row, beside what is made of it here.

The rows are those of its own tests (``api/spec/v1/spec_test.go``) and of trying its binary.
"""

import pytest

from mig_manager import errors
from mig_manager.core.layout import config
from tests.unit import samples

RULE = "[{devices: all, mig-enabled: false}]"


def document(rule: str) -> str:
    return f"version: v1\nmig-configs:\n  x:\n  - {{{rule}}}\n"


def enabled(devices: str) -> str:
    return document(f"devices: all, mig-enabled: true, mig-devices: {devices}")


def at(devices: str) -> str:
    return document(f"devices: {devices}, mig-enabled: false")


def filtered(device_filter: str) -> str:
    return document(f"device-filter: {device_filter}, devices: all, mig-enabled: false")


def parse(text: str, *, is_lenient: bool = False) -> config.Document:
    return config.parse(text, source="f", is_lenient=is_lenient)


ACCEPTED = {
    "empty file": "",
    "only a comment": "# nothing\n",
    "null": "null\n",
    "version alone": "version: v1\n",
    "well formed": enabled("{1g.5gb: 2, 2g.10gb: 1}"),
    "JSON": '{"version": "v1", "mig-configs": {"x": [{"devices": "all", "mig-enabled": false}]}}',
    "anchor, alias and merge": (
        "version: v1\nmig-configs:\n  a: &a\n  - &r {devices: all, mig-enabled: false}\n"
        "  b: *a\n  c:\n  - {<<: *r, devices: [0]}\n"
    ),
    "number as layout name": f"version: v1\nmig-configs: {{1: {RULE}}}\n",
    "boolean as layout name": f"version: v1\nmig-configs: {{on: {RULE}}}\n",
    "empty layout name": f"version: v1\nmig-configs: {{'': {RULE}}}\n",
    "mig-enabled yes": document("devices: all, mig-enabled: yes, mig-devices: {}"),
    "mig-enabled on": document("devices: all, mig-enabled: on, mig-devices: {}"),
    "mig-enabled null": document("devices: all, mig-enabled: "),
    "devices all": at("all"),
    "devices list": at("[0, 1, 2, 3]"),
    "devices empty": at("[]"),
    "devices twice the same": at("[1, 1]"),
    "devices out of range": at("[1000]"),
    "devices 1.0": at("[1.0]"),
    "filter string": filtered('"0x20B010DE"'),
    "filter list": filtered('["0x20B010DE", "0x20B710DE"]'),
    "filter with subsystem": filtered('"0x25B610DE:0x14A910DE"'),
    "filter null": filtered(""),
    "filter empty": filtered('""'),
    "filter empty list": filtered("[]"),
    "filter decimal": filtered('"548409566"'),
    "filter binary": filtered('"0b101"'),
    "filter octal": filtered('"017"'),
    "filter with underscore": filtered('"0x20B0_10DE"'),
    "filter by words": filtered('"A100-SXM4-40GB"'),
    "enabled without instances": enabled("{}"),
    "disabled with empty mig-devices": document(
        "devices: all, mig-enabled: false, mig-devices: {}"
    ),
    "disabled without mig-devices": document("devices: all, mig-enabled: false"),
    "disabled with null mig-devices": document("devices: all, mig-enabled: false, mig-devices: "),
    "zero beside a positive count": enabled("{1g.5gb: 0, 2g.10gb: 1}"),
    "null beside a positive count": enabled("{1g.5gb: , 2g.10gb: 1}"),
    "count without bound": enabled("{1g.5gb: 100000}"),
    "count 1.0": enabled("{1g.5gb: 1.0}"),
    "profile that no GPU has": enabled("{0g.0gb: 100}"),
    "unknown attribute": enabled("{1g.5gb+me.you: 1}"),
    "overlapping rules": (
        "version: v1\nmig-configs:\n  x:\n  - {devices: all, mig-enabled: false}\n"
        "  - {devices: [0], mig-enabled: true, mig-devices: {}}\n"
    ),
}
"""Read by both without a word."""

PASSED_OVER = {
    "second document": (f"version: v1\nmig-configs: {{x: {RULE}}}\n---\na: 1\n", 3, 1),
    "second document that is no YAML": ("version: v1\n---\n[\n", 2, 1),
    "version twice": ("version: v2\nversion: v1\n", 2, 1),
    "layout twice": (f"version: v1\nmig-configs:\n  x: []\n  x: {RULE}\n", 4, 3),
    "key of a rule twice": (document("devices: 0.5, devices: all, mig-enabled: no"), 4, 20),
    "profile twice": (enabled("{1g.5gb: x, 1g.5gb: 2}"), 4, 64),
    "negative index": (at("[0, -1]"), 4, 19),
    "null as index": (at("[~]"), 4, 16),
    "filter that is no id": (filtered('"0x20B010DE:extra"'), 4, 21),
    "filter without 0x": (filtered('"20B010DE"'), 4, 21),
    "filter with a space": (filtered('" 0x20B010DE"'), 4, 21),
    "filter with three parts": (filtered('"0x1:0x2:0x3"'), 4, 21),
    "empty filter in a list": (filtered('[""]'), 4, 22),
}
"""Taken by mig-parted, which then does something else than it says: with line and column."""

REJECTED = {
    "{}": "{}",
    "missing version": f"mig-configs: {{x: {RULE}}}\n",
    "version as a number": "version: 1\n",
    "version null": "version:\n",
    "Version": "Version: v1\n",
    "v2": "version: v2\n",
    "v2 with configs": f"version: v2\nmig-configs: {{x: {RULE}}}\n",
    "unknown key": "version: v1\nbogus: 1\n",
    "a list": "- version: v1\n",
    "no YAML": "version: [\n",
    "mig-configs null": "version: v1\nmig-configs:\n",
    "mig-configs empty": "version: v1\nmig-configs: {}\n",
    "mig-configs list": "version: v1\nmig-configs: [x]\n",
    "layout null": "version: v1\nmig-configs: {x: }\n",
    "layout empty": "version: v1\nmig-configs: {x: []}\n",
    "layout as mapping": "version: v1\nmig-configs: {x: {devices: all}}\n",
    "null rule": "version: v1\nmig-configs: {x: [~]}\n",
    "unknown key of a rule": document("devices: all, mig-enabled: false, bogus: 1"),
    "missing devices": document("mig-enabled: false"),
    "missing mig-enabled": document("devices: all"),
    "missing mig-devices": document("devices: all, mig-enabled: true"),
    "devices null": at(""),
    "devices ALL": at("ALL"),
    "devices bogus": at("bogus"),
    "devices mapping": at("{}"),
    "devices list of texts": at('["0"]'),
    "devices 1.5": at("[1.5]"),
    "filter as hex number": filtered("0x20B010DE"),
    "filter as hex number in a list": filtered("[0x20B010DE]"),
    "filter as mapping": filtered("{a: 1}"),
    "mig-enabled as text": document('devices: all, mig-enabled: "true", mig-devices: {}'),
    "mig-enabled as number": document("devices: all, mig-enabled: 1, mig-devices: {}"),
    "mig-devices null": enabled(""),
    "mig-devices list": enabled("[1g.5gb]"),
    "count as text": enabled("{1g.5gb: '7'}"),
    "negative count": enabled("{1g.5gb: -1}"),
    "count 1.5": enabled("{1g.5gb: 1.5}"),
    "all counts zero": enabled("{1g.5gb: 0}"),
    "all counts zero, disabled": document(
        "devices: all, mig-enabled: false, mig-devices: {1g.5gb: 0}"
    ),
    "bogus profile": enabled("{bogus: 1}"),
    "bogus profile, zero times": enabled("{bogus: 0, 1g.5gb: 1}"),
    "label for a profile": enabled("{1g.5gb.me: 1}"),
    "disabled with devices": document(
        "devices: all, mig-enabled: false, mig-devices: {1g.5gb: 1}"
    ),
}
"""Refused by both, leniently or not."""


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_documents_that_mig_parted_accepts_are_accepted(text: str) -> None:
    document = parse(text)
    assert document.warnings == ()
    assert parse(text, is_lenient=True) == document


@pytest.mark.parametrize(("text", "line", "column"), PASSED_OVER.values(), ids=PASSED_OVER.keys())
def test_errors_that_mig_parted_ignores_are_refused_with_their_location(
    text: str, line: int, column: int
) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        parse(text)
    assert caught.value.location is not None
    if "not readable as YAML" not in caught.value.message:
        assert str(caught.value.location) == f"f:{line}:{column}"


@pytest.mark.parametrize(("text", "line", "column"), PASSED_OVER.values(), ids=PASSED_OVER.keys())
def test_errors_that_mig_parted_ignores_are_warnings_if_lenient(
    text: str, line: int, column: int
) -> None:
    (warning,) = parse(text, is_lenient=True).warnings
    assert str(warning).startswith(f"f:{line}:{column}: ")
    assert warning.message.endswith(")")


@pytest.mark.parametrize("is_lenient", [False, True], ids=["strict", "lenient"])
@pytest.mark.parametrize("text", REJECTED.values(), ids=REJECTED.keys())
def test_documents_that_mig_parted_refuses_are_refused(text: str, *, is_lenient: bool) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        parse(text, is_lenient=is_lenient)
    assert caught.value.location is not None


def test_leniently_the_last_of_equal_keys_counts() -> None:
    rule = parse(PASSED_OVER["key of a rule twice"][0], is_lenient=True).layout("x").rules[0]
    assert rule.indices is None
    wanted = parse(PASSED_OVER["profile twice"][0], is_lenient=True).layout("x").rules[0].wanted
    assert list(wanted.counts.values()) == [2]


def test_leniently_the_first_document_counts() -> None:
    read = parse(PASSED_OVER["second document"][0], is_lenient=True)
    assert list(read.layouts) == ["x"]


@pytest.mark.parametrize(
    ("devices", "expected"), [("[0, -1]", (0,)), ("[-1]", ()), ("[~]", (0,)), ("[~, 2]", (0, 2))]
)
def test_a_lenient_index_means_what_it_means_to_mig_parted(
    devices: str, expected: tuple[int, ...]
) -> None:
    assert parse(at(devices), is_lenient=True).layout("x").rules[0].indices == expected


def test_a_lenient_invalid_filter_matches_no_gpu() -> None:
    rule = parse(filtered('"0x20B010DE:extra"'), is_lenient=True).layout("x").rules[0]
    assert not rule.matches(samples.gpu(None))


def test_an_empty_second_document_gives_no_warning() -> None:
    assert parse("version: v1\n---\n# nothing\n", is_lenient=True).warnings == ()


def test_warnings_are_in_the_order_of_the_file() -> None:
    text = at("[-1, ~]").replace("devices: [", "devices: all, devices: [")
    warnings = parse(text, is_lenient=True).warnings
    assert [each.location.column for each in warnings] == [20, 30, 34]
