"""Any text is a document that the schema admits, or an error with its place.

What is written reads as it was.
"""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager import errors
from mig_manager.core.files import yaml_text, yaml_tree
from mig_manager.core.layout import layout_documents, layout_parser
from tests.rigs import contract
from tests.unit.layout.drawn_documents import (
    SOURCE,
    WELL_FORMED,
    WORDS,
    documents,
    mutated,
    rules_as_data,
)


def check(text: str) -> None:
    """Read a text strictly and leniently; see that it is read, or refused with a place."""
    for is_lenient in (False, True):
        try:
            read = layout_parser.parse(text, source=SOURCE, is_lenient=is_lenient)
        except errors.ConfigError as error:
            assert error.location is not None  # noqa: PT017 - both outcomes are fine
            assert error.location.line >= 1  # noqa: PT017 - as above
            assert error.location.column >= 1  # noqa: PT017 - as above
        else:
            again = layout_parser.parse(written(read), source=SOURCE)
            assert again == read
            if not is_lenient:
                contract.check("LayoutFile", yaml_tree.plain(yaml_text.parse(text, source=SOURCE)))


def written(read: layout_documents.Document) -> str:
    return yaml_text.dump(layout_documents.render(read.layouts.values()))


JUMBLES = st.lists(WORDS, max_size=30).map("".join)

STRUCTURED = st.builds(
    lambda members, write: write({"version": "v1", "mig-configs": {"x": members}}),
    st.lists(rules_as_data(), min_size=1, max_size=2),
    st.sampled_from([yaml_text.dump, json.dumps]),
)

TEXTS = {
    "any text": st.text(max_size=200),
    "jumbles of the grammar's words": JUMBLES,
    "a document with mistakes": mutated(WELL_FORMED),
    "the right form with any content": STRUCTURED,
}


def test_the_document_that_is_mutated_is_well_formed() -> None:
    read = layout_parser.parse(WELL_FORMED, source=SOURCE)
    assert list(read.layouts) == ["all-disabled", "balanced", "again", "third"]
    check(WELL_FORMED)


@pytest.mark.parametrize("texts", TEXTS.values(), ids=TEXTS.keys())
@hypothesis.given(data=st.data())
def test_any_text_is_a_document_or_an_error_with_a_location(
    texts: st.SearchStrategy[str], data: st.DataObject
) -> None:
    check(data.draw(texts))


# -- documents themselves ---------------------------------------------------------------------


@hypothesis.given(documents())
def test_a_document_that_is_written_reads_as_it_was(read: layout_documents.Document) -> None:
    assert layout_parser.parse(written(read), source=SOURCE) == read
    assert (
        layout_parser.parse(
            json.dumps(layout_documents.render(read.layouts.values())), source=SOURCE
        )
        == read
    )
    if read.layouts:
        contract.check("LayoutFile", layout_documents.render(read.layouts.values()))


# -- texts whose grammar the schema has as a pattern ------------------------------------------

NOT_CONTROL = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cc", "Cs"])
NUMBERS = st.builds(
    "{}{}".format,
    st.sampled_from(["0x", "0X", "0x_", "0x0_00", "0b", "0o", "0", ""]),
    st.text("01279aF_", min_size=1, max_size=10),
)
NAMES = st.text(st.sampled_from("aZgG09x*?[]()!./ _-:\u212a\u017f") | NOT_CONTROL, max_size=12)
FILTER_TEXTS = (
    NUMBERS
    | st.builds("{}:{}".format, NUMBERS, NUMBERS)
    | st.builds("{}{}".format, NAMES, NUMBERS)
    | st.builds("a{}".format, NAMES)
)
DIGITS = st.integers(1, 9) | st.integers(0, 10**19)
PROFILE_TEXTS = st.builds(
    "{}{}g.{}gb{}{}".format,
    st.sampled_from(["", "", "", "1c.", "0c.", "01c.", "c."]),
    DIGITS,
    DIGITS,
    st.sampled_from(["", "", "+me", "-me", "+me.all,gfx", "-ME,a..b", "+a.", "+,", "+", " "]),
    st.sampled_from(["", "", "@", "@4", "@012", "@0123", "@x"]),
)


def parse_within_schema(rule: dict[str, object]) -> bool:
    """Parse a layout of one rule; return whether it is valid, and check the schema if it is."""
    data = {"version": "v1", "mig-configs": {"x": [{"mig-enabled": False, "devices": 0, **rule}]}}
    try:
        layout_parser.parse(json.dumps(data), source=SOURCE)
    except errors.ConfigError:
        return False
    contract.check("LayoutFile", data)
    return True


@hypothesis.given(FILTER_TEXTS, PROFILE_TEXTS)
def test_the_schema_admits_every_filter_and_profile_that_the_parser_reads(
    text: str, name: str
) -> None:
    parse_within_schema({"device-filter": text})
    parse_within_schema({"mig-enabled": True, "mig-devices": {name: 1}})


@pytest.mark.parametrize(
    "text", ["0b1", "017", "4294967295:0x_f", "0x0_00020B010DE", "NVIDIA \u212a", "a"]
)
def test_the_schema_admits_filters_in_rare_spellings(text: str) -> None:
    assert parse_within_schema({"device-filter": text})


@pytest.mark.parametrize("name", ["1g.5gb-me", "1g.5gb+me.all,gfx@4"])
def test_the_schema_admits_profiles_in_rare_spellings(name: str) -> None:
    assert parse_within_schema({"mig-enabled": True, "mig-devices": {name: 1}})
