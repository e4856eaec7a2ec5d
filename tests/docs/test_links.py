"""Links, anchors and names of files, in the repository and on the site."""

import pathlib

import pytest
import yaml

from tests.docs import pages


def nav() -> list[str]:
    """Return the pages of the navigation, in order."""

    class Loader(yaml.SafeLoader):
        """Ignore the tags for Python in the navigation file."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    text = (pages.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    site = yaml.load(text, Loader)  # noqa: S506 - a safe loader that passes over the tag
    return list(leaves(site["nav"]))


def leaves(node: object) -> list[str]:
    match node:
        case str():
            return [node]
        case list():
            return [leaf for each in node for leaf in leaves(each)]
        case dict():
            return [leaf for each in node.values() for leaf in leaves(each)]
        case other:
            raise AssertionError(other)


def named(page: pathlib.Path) -> str:
    return str(page.relative_to(pages.ROOT))


def test_every_page_of_the_site_is_in_its_navigation_once_and_no_other_is() -> None:
    assert sorted(nav()) == [str(page.relative_to(pages.ROOT / "docs")) for page in pages.SITE]


@pytest.mark.parametrize("page", pages.PAGES, ids=named)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: pathlib.Path) -> None:
    broken = []
    for link in pages.links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if pages.is_outside(link):
            assert link.startswith("https://"), link
        elif not target.exists() or (anchor and anchor not in pages.anchors(target)):
            broken.append(link)

    assert broken == []


@pytest.mark.parametrize("page", pages.SITE, ids=named)
def test_pages_of_the_site_link_to_nothing_beside_it(page: pathlib.Path) -> None:
    inside = pages.ROOT / "docs"
    paths = [link.partition("#")[0] for link in pages.links(page) if not pages.is_outside(link)]

    assert [p for p in paths if not (page.parent / p).resolve().is_relative_to(inside)] == []


@pytest.mark.parametrize("page", pages.PAGES, ids=named)
def test_every_path_of_the_repository_that_a_page_names_is_there(page: pathlib.Path) -> None:
    assert {path for path in pages.named_paths(page) if not path.exists()} == set()


def test_from_the_readme_links_lead_to_every_page_of_the_site() -> None:
    reached, pending = set(), [pages.ROOT / "README.md"]
    while pending:
        page = pending.pop()
        reached.add(page)
        paths = [
            link.partition("#")[0] for link in pages.links(page) if not pages.is_outside(link)
        ]
        pending += {
            (page.parent / path).resolve() for path in paths if path.endswith(".md")
        } - reached

    assert [named(page) for page in pages.SITE if page not in reached] == []
