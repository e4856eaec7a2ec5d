"""What pages have from the code is what the code has now; ``just generate`` sees to it."""

import logging
from collections.abc import Iterator

import pytest
import structlog

from docs.generator import __main__ as generated
from docs.generator import blocks, diagram, phases, pictures, reference, terminal
from mig_manager import errors
from mig_manager.agent import settings
from mig_manager.cli import parser
from mig_manager.core import model
from tests.docs import pages


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


def test_every_renderer_has_its_place_in_one_page() -> None:
    used = [name for page in pages.SITE for name in blocks.names(page.read_text("utf-8"))]

    assert sorted(used) == sorted(reference.RENDERERS)


@pytest.mark.slow
def test_pages_and_pictures_have_what_the_code_has_and_the_phases_are_as_the_pages_describe() -> (
    None
):
    stale = [
        path.name
        for path, new in generated.files(with_demo=False)
        if path.read_text("utf-8") != new
    ]
    story = phases.played()
    seen = {phase for move in story.moves for phase in move}

    assert stale == []
    assert seen == set(model.Phase)
    assert (model.Phase.EXECUTE, model.Phase.ROLL_BACK) in story.moves
    assert not {model.Phase.EXECUTE, model.Phase.ROLL_BACK} & story.superseded_in
    assert errors.Reason.DRAIN_TIMEOUT in story.failures[model.Phase.DRAIN]
    assert errors.Reason.DOES_NOT_FIT in story.failures[model.Phase.RESOLVE]
    assert (model.Phase.RESOLVE, model.Phase.ROLL_BACK) in phases.recovered().moves


def test_a_story_that_goes_another_way_gives_another_picture() -> None:
    there = (model.Phase.RESOLVE, model.Phase.EXECUTE)
    back = (model.Phase.EXECUTE, model.Phase.ROLL_BACK)
    story, shorter = phases.Story(moves={there, back}), phases.Story(moves={there})

    assert diagram.draw(shorter, title="t") != diagram.draw(story, title="t")


def test_a_default_in_words_is_the_one_that_is_used() -> None:
    chosen = settings.agent_settings({"node_name": "a"}, {})
    options = parser.options_of("agent")
    in_words = {each.key: each.default_text for each in options if "/" in each.default_text[:1]}

    assert {"lock_file", "verified_layout_file", "pod_resources_socket"} < in_words.keys()
    for name in in_words.keys() - {"nvidia_driver_root", "host_root_mount"}:
        assert str(getattr(chosen, name)) == in_words[name]


# -- how it is done -----------------------------------------------------------------------------


def page_with(rows: str) -> str:
    return f"<!-- generated: x -->\n\n| A | B |\n|---|---|\n{rows}\n\n<!-- end of generated -->\n"


def test_words_that_a_person_has_written_are_kept_when_their_row_moves() -> None:
    def render(body: str) -> str:
        known = blocks.kept(body)
        return blocks.table(("A", "B"), ((n, blocks.words(known, n)) for n in ("one", "two")))

    before = page_with("| two | second \\| last |\n| one | first |\n| gone | old |")
    after = page_with("| one | first |\n| two | second \\| last |")

    assert blocks.rewritten(before, {"x": render}) == after
    assert blocks.rewritten(after, {"x": render}) == after


def test_a_row_without_words_is_named() -> None:
    with pytest.raises(blocks.MissingWordsError, match="write what new means"):
        blocks.words({"old": "x"}, "new")


def test_a_terminal_is_drawn_with_its_colours_and_joined_lines() -> None:
    picture = terminal.draw(["\x1b[31mbad\x1b[0m ┌──┐ <&>"], title="a & b")

    assert 'fill="#ff7b72"' in picture
    assert ">bad</text>" in picture
    assert "&lt;&amp;&gt;" in picture
    assert "<title>a &amp; b</title>" in picture
    # Four characters: one line across and two halves down.
    (path,) = [line for line in picture.splitlines() if line.startswith("<path")]
    assert (path.count("H"), path.count("V")) == (3, 2)


def test_a_timeline_is_the_same_whatever_its_times_and_order() -> None:
    lines = ["   0.00 s  you  label", "   1.00 s  pods  daemonset-abcde runs"]
    picture = pictures.demo(lines)
    later = ["   2.50 s  pods  daemonset-fffff runs", "   0.10 s  you  label"]

    assert pictures.differences(picture, later) == []
    assert pictures.differences(picture, lines[:1]) == ["T pods daemonset-N runs"]
