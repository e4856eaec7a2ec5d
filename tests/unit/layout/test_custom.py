"""The layout in a node's annotation: what is a request, and what is one layout."""

import datetime as dt

import hypothesis
import pytest
from hypothesis import strategies as st

from mig_manager import errors, reasons
from mig_manager.core.layout import custom_layouts, layout_documents, layout_parser
from mig_manager.core.objects import node_object, well_known
from mig_manager.kubectl import layout_requests
from tests.rigs.node import samples
from tests.unit.layout import drawn_documents

MAX_BYTES = custom_layouts.MAX_BYTES
RULE = "  - {devices: all, mig-enabled: false}\n"
ONE = f"version: v1\nmig-configs:\n  mine:\n{RULE}"


def view(label: str | None, text: str | None, **labels: str) -> node_object.NodeView:
    requested = {} if label is None else {well_known.CONFIG_LABEL: label}
    annotations = {} if text is None else {well_known.LAYOUT_ANNOTATION: text}
    return samples.node_view(labels={**requested, **labels}, annotations=annotations)


TEXTS = st.none() | st.text(max_size=20)


@hypothesis.given(label=st.sampled_from([None, "", "all-disabled", "customs"]), text=TEXTS)
def test_the_annotation_does_not_belong_to_another_request(
    label: str | None, text: str | None
) -> None:
    assert custom_layouts.of_request(view(label, text)) is None


@hypothesis.given(first=TEXTS, second=TEXTS)
def test_requests_and_their_hashes_differ_exactly_if_the_annotations_do(
    first: str | None, second: str | None
) -> None:
    one, other = (
        custom_layouts.CustomRequest.of(view("custom", text)) for text in (first, second)
    )
    is_same = (first or "") == (second or "")
    assert (one == other) is is_same
    assert (one.annotation_hash == other.annotation_hash) is is_same
    assert custom_layouts.of_request(view("custom", first)) == one


def test_only_the_label_of_the_node_makes_it_on_demand() -> None:
    key = well_known.PARTITIONING_LABEL
    for value, is_on_demand in (("on-demand", True), ("off", False), ("", False)):
        assert (
            custom_layouts.CustomRequest.of(view("custom", ONE, **{key: value})).is_on_demand
            is is_on_demand
        )
    assert not custom_layouts.CustomRequest.of(view("custom", ONE)).is_on_demand


@hypothesis.given(text=st.text(max_size=60) | drawn_documents.mutated(ONE))
def test_any_annotation_is_one_layout_or_an_error_that_names_it(text: str) -> None:
    custom = custom_layouts.CustomRequest.of(view("custom", text))
    try:
        layout, _ = custom.layout()
    except errors.LayoutError as error:
        assert not text
        assert error.reason is reasons.Reason.NO_CUSTOM_LAYOUT  # noqa: PT017 - as above
    except errors.ConfigError as error:
        assert "annotation mig-manager.io/layout of node n1" in error.message  # noqa: PT017
    else:
        assert layout.name == well_known.CUSTOM_LAYOUT
        (only,) = layout_parser.parse(text, source="s").layouts.values()
        assert only.content_hash == layout.content_hash


@hypothesis.given(drawn_documents.documents())
def test_an_annotation_by_kubectl_means_the_same_as_the_file(
    document: layout_documents.Document,
) -> None:
    for layout in document.layouts.values():
        written = layout_requests.annotation(layout, dt.datetime.now(tz=dt.UTC))
        again, _ = custom_layouts.single(written, source="annotation")
        assert (again.rules, again.content_hash) == (layout.rules, layout.content_hash)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{ONE}  more:\n{RULE}", "a:5:3: unexpected second layout 'more': write exactly one"),
        ("version: v1\n", "a has no layout; write exactly one below mig-configs"),
        ("# nothing\n", "a has no layout; write exactly one below mig-configs"),
        (
            ONE + "#" * MAX_BYTES,
            f"a has {len(ONE) + MAX_BYTES} bytes, more than {MAX_BYTES}",
        ),
        (ONE + "# é" * (MAX_BYTES // 4), "bytes, more than"),
    ],
)
def test_a_document_without_exactly_one_layout_is_refused(text: str, message: str) -> None:
    with pytest.raises(errors.ConfigError) as refused:
        custom_layouts.single(text, source="a")
    assert message in refused.value.message


def test_lenient_parsing_of_an_annotation_equals_that_of_a_file() -> None:
    text = ONE.replace("all", "[-1]")
    with pytest.raises(errors.ConfigError):
        custom_layouts.single(text, source="a")
    layout, warnings = custom_layouts.single(text, source="a", is_lenient=True)
    assert layout.is_lenient
    assert warnings
