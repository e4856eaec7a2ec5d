import math
import re

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

from mig_manager import errors
from mig_manager.core.files import yaml_text, yaml_tree

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
)
DATA = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.fixture(params=["C", "Python"], autouse=True)
def _both_parsers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    # The library can come without its C part; everything must hold for either.
    if request.param == "Python":
        monkeypatch.setattr(yaml_text, "_Loader", yaml.SafeLoader)


def read(text: str) -> object:
    return yaml_tree.plain(yaml_text.parse(text, source="f"))


def error_of(text: str) -> str:
    with pytest.raises(errors.ConfigError) as caught:
        yaml_text.parse(text, source="f")
    assert caught.value.location is not None
    return str(caught.value)


@pytest.mark.parametrize("text", ["", " \n", "# only a comment\n", "---\n...\n", "null\n", "~"])
def test_a_document_without_content_is_nothing(text: str) -> None:
    assert read(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("yes", True),
        ("On", True),
        ("FALSE", False),
        ("no", False),
        ("y", "y"),
        ('"yes"', "yes"),
        ("5", 5),
        ("-5", -5),
        ("+5", 5),
        ("0", 0),
        ("010", 8),
        ("08", "08"),
        ("0x20B010DE", 0x20B010DE),
        ("0b101", 5),
        ("1_000", 1000),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("1.5", 1.5),
        ("1_0.5", 10.5),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        (".nan", pytest.approx(math.nan, nan_ok=True)),
        ("2024-05-01", "2024-05-01"),
        ("=", "="),
        ("!!str 5", "5"),
        ('!!int "5"', 5),
        ("!!float 5", 5.0),
        ("!!map {a: !!seq [1]}", {"a": [1]}),
        ("\ufeffa", "a"),
        ("a\n---\n", "a"),
        ("---\na\n...\n---\n# end\n", "a"),
    ],
)
def test_scalars_are_resolved_as_yaml_1_1_does(text: str, expected: object) -> None:
    got = read(text)
    assert got == expected
    assert type(got) is type(expected) or text == ".nan"


def locations(node: yaml_tree.Node | None) -> list[object]:
    """Return the locations of a node and of all in it."""
    assert node is not None
    match node:
        case yaml_tree.Mapping():
            inside = [
                [entry.key, str(entry.location), *locations(entry.value)] for entry in node.entries
            ]
            return [str(node.location), *inside]
        case yaml_tree.Sequence():
            return [str(node.location), *map(locations, node.items)]
        case yaml_tree.Scalar():
            return [node.text, str(node.location)]


def test_every_key_and_value_has_its_location() -> None:
    root = yaml_text.parse("# top\na:\n  - b: 1\n    c: [2]\n", source="f")
    item = ["f:3:5", ["b", "f:3:5", "1", "f:3:8"], ["c", "f:4:5", "f:4:8", ["2", "f:4:9"]]]
    assert locations(root) == ["f:2:1", ["a", "f:2:1", "f:3:3", item]]


def test_keys_become_texts_as_json_has_them() -> None:
    assert read("1: a\non: b\n2.0: c\n1.5: d\n010: e\n'': f\n") == {
        "1": "a",
        "true": "b",
        "2": "c",
        "1.5": "d",
        "8": "e",
        "": "f",
    }


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3\n", "1: x\nb: 2\n'1': y\n"])
def test_a_duplicate_key_is_an_error_with_both_locations(text: str) -> None:
    message = error_of(text)
    assert message.startswith("f:3:1: ")
    assert "given twice; the first is in line 1" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &x {k: [1]}\nb: [*x, *x]\n", {"a": {"k": [1]}, "b": [{"k": [1]}, {"k": [1]}]}),
        (
            "a: &a {p: 1, q: 1, r: 1}\nb: &b {p: 2, s: 2}\nc: {r: 3, <<: [*b, *a], t: 3}\n",
            {
                "a": {"p": 1, "q": 1, "r": 1},
                "b": {"p": 2, "s": 2},
                "c": {"p": 2, "s": 2, "q": 1, "r": 3, "t": 3},
            },
        ),
        ('{"<<": 1}', {"<<": 1}),
    ],
    ids=["aliases", "own keys, then the first merge", "a quoted merge sign"],
)
def test_aliases_and_merges_are_expanded(text: str, expected: object) -> None:
    assert read(text) == expected


def test_a_merged_entry_keeps_its_original_location() -> None:
    root = yaml_text.parse("a: &a\n  p: 1\nb:\n  <<: *a\n", source="f")
    merged = ["b", "f:3:1", "f:4:3", ["p", "f:2:3", "1", "f:2:6"]]
    assert locations(root)[2] == merged


def test_an_alias_bomb_is_refused_before_it_is_expanded() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 20)]
    assert "aliases expanded" in error_of("\n".join(lines))


def test_size_and_depth_are_bounded_also_through_aliases() -> None:
    assert "characters" in error_of("#" * (yaml_text.MAX_CHARACTERS + 1))
    deep = "[" * 20 + "]" * 20
    text = f"a: &a {deep}\nb: [[[[[[[[[[[[[*a]]]]]]]]]]]]]\n"
    assert "levels deep" in error_of(text)
    # PyYAML has its own bound since 6.0.4.
    assert re.search("levels deep|nesting depth", error_of("[" * 100_000))
    assert read("[" * 32 + "]" * 32) is not None


@pytest.mark.parametrize(
    ("text", "place"), [("a: \x07\n", "f:1:4: "), ("a: 1\nb: \ud800\n", "f:2:4: ")]
)
def test_a_character_that_yaml_forbids_is_located(text: str, place: str) -> None:
    message = error_of(text)
    assert message.startswith(place)
    assert "is not allowed in YAML" in message


REFUSED = {
    "a text that begins with * takes quotes": ["a: *A100*\n", "a: *A100\n", "a: [*A100*]\n"],
    "a key must be a text": ["? [1]\n: 2\n", "? {a: 1}\n: 2\n", "~: 1\n", "null: 1\n"],
    "'<<' takes a mapping": ["<<: 1\n", "<<: [1]\n", "a: &a [1]\nb: {<<: *a}\n"],
    # An alias must follow its anchor in the same document, so that no tree contains itself.
    "undefined alias '*x'": [
        *("a: *x\n", "a: &x [*x]\n", "a: &x {b: *x}\n", "a: &x 1\n---\n*x\n"),
    ],
    "not readable as YAML": [
        *("a: [1\n", "a: 'x\n", "a: b: c\n", "@x\n", "\ta: 1\n", "{a: 1}}\n"),
        "%YAML 3.0\n--- a\n",
    ],
    "a second document starts here": [
        *("a: 1\n---\nb: 2\n", "a: 1\n---\n---\n[]\n", "---\n---\na\n"),
    ],
    "tag 'binary' has no meaning here": ["!!binary aGk="],
    "tag 'set' has no meaning here": ["!!set {a}"],
    "tag 'omap' has no meaning here": ["!!omap [a: 1]"],
    "tag '!mine' has no meaning here": ["!mine x"],
    "tag 'python/object:os.system' has no meaning here": ["!!python/object:os.system x"],
    "cannot be read as": [
        *("!!bool maybe", "!!int x", "!!float x", "0b_", "9" * 50, "9" * 5000, "0x" + "f" * 5000),
    ],
}


@pytest.mark.parametrize(
    ("why", "text"),
    [
        pytest.param(why, text, id=f"{why}: {text[:20]!r}")
        for why, texts in REFUSED.items()
        for text in texts
    ],
)
def test_yaml_that_is_invalid_or_beyond_plain_data_is_refused(why: str, text: str) -> None:
    assert why in error_of(text)


KNOWN_SHAPE = """\
version: v1
mig-configs:
  current:
  - device-filter: "0x20B010DE"
    devices: [0, 2]
    mig-enabled: true
    mig-devices:
      1g.5gb: 7
  - device-filter: ["0x20B010DE", "0x20B710DE"]
    devices: all
    mig-enabled: false
    mig-devices: {}
"""


def test_yaml_is_written_in_the_shape_that_people_know() -> None:
    assert yaml_text.dump(read(KNOWN_SHAPE)) == KNOWN_SHAPE


def test_dump_quotes_texts_if_needed_and_writes_shared_parts_out() -> None:
    assert yaml_text.dump({"on": "", "1": "yes", "n": None, "m": "null"}) == (
        '"on": ""\n"1": "yes"\nn: null\nm: "null"\n'
    )
    shared = {"a": 1}
    written = yaml_text.dump({"x": shared, "y": shared, "z": list(range(100))})
    assert "&" not in written
    assert len(written.splitlines()) == 5


@hypothesis.given(DATA)
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_written_yaml_is_read_back_unchanged(data: object) -> None:
    assert read(yaml_text.dump(data)) == data
