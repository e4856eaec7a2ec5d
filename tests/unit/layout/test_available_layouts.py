"""Which layouts a node serves, and the list of them that it publishes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_manager import errors
from mig_manager.catalogue import hardware
from mig_manager.core import model
from mig_manager.core.layout import (
    available_layouts,
    generator,
    layout_documents,
    layout_list,
    layout_parser,
)
from mig_manager.core.records import run_status

A100 = hardware.template(hardware.find("A100-SXM4-40GB"))
MADE = available_layouts.generate([A100])
SOURCE = "own.yaml"

names = st.sets(st.sampled_from([*MADE, "team-a", "team-b"]))


def document(layout_names: set[str]) -> layout_documents.Document:
    rules = "[{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 3}}]"
    lines = [f"  {name}: {rules}" for name in sorted(layout_names)]
    text = "\n".join(["version: v1", *(["mig-configs:", *lines] if lines else [])])
    return layout_parser.parse(text, source=SOURCE)


@given(own_names=names, is_default=st.booleans())
def test_every_name_is_served_once_and_the_right_one_wins(
    *, own_names: set[str], is_default: bool
) -> None:
    merged = available_layouts.merge(document(own_names), MADE, is_default=is_default).layouts

    assert merged.keys() == own_names | MADE.keys()
    for name, layout in merged.items():
        is_own = name in own_names and not (is_default and name in MADE)
        assert layout.location.source == (SOURCE if is_own else "generated for " + A100.name)


@given(names)
def test_where_nothing_is_generated_the_file_counts_alone(own_names: set[str]) -> None:
    assert available_layouts.merge(document(own_names), {}, is_default=True) == document(own_names)


@pytest.mark.parametrize("name", hardware.product_names())
def test_every_generated_layout_fits_and_is_shown_with_its_instances(name: str) -> None:
    gpu = hardware.template(hardware.find(name))
    made = available_layouts.generate([gpu])

    fits = {fit.layout.name: fit.gpus for fit in available_layouts.fitting(made.values(), [gpu])}

    assert fits.keys() == made.keys()
    for layout, (shown,) in fits.items():
        (rule,) = made[layout].rules
        expected = {str(profile): count for profile, count in rule.desired.devices}
        assert run_status.device_counts(shown) == expected
        assert shown.current_mode is rule.desired.mode


def test_no_layout_is_generated_for_gpus_without_mig() -> None:
    assert available_layouts.generate([hardware.template(hardware.find("T4"))]) == {}


@given(
    st.lists(
        st.builds(
            layout_list.Entry,
            name=st.from_regex(r"[a-z0-9.-]{1,63}", fullmatch=True),
            content_hash=st.from_regex(r"[0-9a-f]{12}", fullmatch=True),
            origin=st.from_regex(r"[ -~]{1,200}", fullmatch=True),
        ),
        unique_by=lambda each: each.name,
    )
)
def test_the_list_is_read_as_it_was_written(entries: list[layout_list.Entry]) -> None:
    assert layout_list.from_json(layout_list.to_json(entries)).layouts == tuple(entries)


def test_a_list_that_is_too_long_for_an_annotation_is_cut() -> None:
    entries = [
        layout_list.Entry(name=f"layout-{number}", content_hash="0" * 12, origin="x" * 100)
        for number in range(10_000)
    ]

    text = layout_list.to_json(entries)

    assert len(text) < 80_000
    read = layout_list.from_json(text)
    assert read.layouts == tuple(entries[: len(read.layouts)])
    assert len(read.layouts) > 300
    assert not read.is_complete
    assert layout_list.from_json(layout_list.to_json(read.layouts)).is_complete


def test_a_layout_that_gpus_cannot_have_is_left_out() -> None:
    own_document = document({"team-a"})
    a30 = hardware.template(hardware.find("A30"))

    assert list(available_layouts.fitting(own_document.layouts.values(), [a30])) == []
    (fit,) = available_layouts.fitting(own_document.layouts.values(), [A100])
    assert [gpu.current_mode for gpu in fit.gpus] == [model.MigMode.ENABLED]
    with pytest.raises(errors.LayoutError):
        available_layouts.merge(
            own_document, generator.layouts_of(generator.kinds_of([a30])), is_default=False
        ).layout("all-1g.5gb")
