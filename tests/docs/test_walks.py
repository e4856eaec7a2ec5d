"""The commands of the guides give the output that the guides show."""

import pathlib

import pytest

from docs.generator import pictures
from tests import programs
from tests.docs import pages, walk

DOCS = pages.ROOT / "docs"
PICTURE = DOCS / "pictures" / "demo.svg"


@pytest.fixture(autouse=True)
def kubectl_is_there() -> None:
    programs.needed("kubectl")


@pytest.mark.slow
def test_the_quick_start_leads_to_a_changed_node_and_from_a_mistake_to_its_remedy(
    tmp_path: pathlib.Path,
) -> None:
    steps = pages.steps(DOCS / "quick-start.md")
    assert any("nvidia.com/mig.config=" in step.command for step in steps)

    with walk.reader(tmp_path) as reader:
        for step in steps:
            reader.take(step)
        timeline = pictures.timeline(reader.demonstration().splitlines())

    # If this fails, 'just generate' draws the README's picture.
    assert pictures.differences(PICTURE.read_text("utf-8"), timeline) == []


@pytest.mark.slow
def test_the_guide_to_failures_leads_from_a_failed_node_to_its_remedy(
    tmp_path: pathlib.Path,
) -> None:
    steps = pages.steps(DOCS / "failed.md")
    assert any("DrainTimeout" in step.shown for step in steps)

    with walk.reader(tmp_path) as reader:
        for step in steps:
            reader.take(step)
