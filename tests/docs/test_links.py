"""Links of the pages beside the site, which MkDocs does not check, and names of files."""

import pathlib
import re

import pytest

from tests.docs import pages


def path_of(page: pathlib.Path) -> str:
    return str(page.relative_to(pages.ROOT))


@pytest.mark.parametrize("page", pages.OTHERS, ids=path_of)
def test_a_link_leads_to_a_file_and_a_heading(page: pathlib.Path) -> None:
    broken = []
    for link in pages.links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if pages.is_outside(link):
            assert link.startswith("https://"), link
        elif not target.exists() or (anchor and anchor not in pages.anchors(target)):
            broken.append(link)

    assert broken == []


@pytest.mark.parametrize("page", pages.PAGES, ids=path_of)
def test_a_page_names_paths_of_the_repository(page: pathlib.Path) -> None:
    assert {path for _, path in pages.named_code(page) if not path.exists()} == set()


@pytest.mark.parametrize("page", pages.PAGES, ids=path_of)
def test_what_a_page_names_is_in_the_module(page: pathlib.Path) -> None:
    missing = {
        name
        for name, path in pages.named_code(page)
        if name and not re.search(rf"\b{name}\b", path.read_text("utf-8"))
    }

    assert missing == set()
