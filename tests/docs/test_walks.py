"""The steps of the guides, taken as they are shown: nobody needs to read source to take them."""

import os
import pathlib
import shutil

import pytest

from docs.generator import pictures
from tests.docs import pages, walk

DOCS = pages.ROOT / "docs"
PICTURE = DOCS / "pictures" / "demo.svg"


@pytest.fixture(autouse=True)
def kubectl_is_there() -> None:
    if shutil.which("kubectl"):
        return
    if os.environ.get("CI"):
        pytest.fail("kubectl must be there when CI runs these tests")
    pytest.skip("kubectl is not installed")


@pytest.mark.slow
def test_the_quick_start_leads_to_a_changed_node_and_from_a_mistake_to_its_remedy(
    tmp_path: pathlib.Path,
) -> None:
    steps = pages.steps(DOCS / "quick-start.md")
    assert any("nvidia.com/mig.config=" in step.command for step in steps)

    with walk.reader(tmp_path) as reader:
        for step in steps:
            reader.take(step)
        told = pictures.timeline(reader.demonstration().splitlines())

    # If this fails, 'just generate' draws the README's picture anew.
    assert pictures.differences(PICTURE.read_text("utf-8"), told) == []


@pytest.mark.slow
def test_the_guide_to_failures_leads_from_a_failed_node_to_its_remedy(
    tmp_path: pathlib.Path,
) -> None:
    steps = pages.steps(DOCS / "failed.md")
    assert any("DrainTimeout" in step.shown for step in steps)

    with walk.reader(tmp_path) as reader:
        for step in steps:
            reader.take(step)
