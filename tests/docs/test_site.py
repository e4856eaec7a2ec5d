"""The site in a real browser, opened as files: search, tables, code, pictures, colours.

With the variable DIST a picture of every page in either width stays there, for a review.
"""

import os
import pathlib
from collections.abc import Iterator

import pytest

from tests.docs import browser, pages
from tests.rigs import programs

pytestmark = pytest.mark.release

LAYOUT = pathlib.Path(__file__).with_name("layout.js").read_text(encoding="utf-8")
DESK, PHONE = 1280, 390  # widths in pixels
PAGES = [page.stem for page in pages.SITE]
RESULT = """
new Promise(resolve => {
  const check = () =>
    document.querySelector(".md-search-result__link") ? resolve() : requestAnimationFrame(check);
  check();
})
"""
"""Waits until search has found something."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("site")
    mkdocs = programs.path_or_skip("mkdocs")
    programs.output(mkdocs, "build", "--strict", "--site-dir", folder, cwd=pages.ROOT)
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    program = programs.path_or_skip("chromium")
    with browser.open_page(program, tmp_path_factory.mktemp("browser")) as page:
        yield page


def show(
    page: browser.Page, site: pathlib.Path, name: str, *, width: int, is_dark: bool = False
) -> None:
    page.resize(width=width, height=900)
    page.darken(is_dark=is_dark)
    page.open((site / f"{name}.html").as_uri())
    page.evaluate("localStorage.clear()")  # else the next page has the same colours


@pytest.mark.parametrize("name", PAGES)
def test_page_fits_a_desk_and_a_phone_and_needs_no_network(
    page: browser.Page, site: pathlib.Path, name: str
) -> None:
    for width, is_dark in ((DESK, True), (PHONE, False)):
        show(page, site, name, width=width, is_dark=is_dark)
        allowed = (site.as_uri(), "data:")

        assert page.evaluate(LAYOUT) == []
        assert page.errors() == []
        assert [url for url in page.requests() if not url.startswith(allowed)] == []
        if dist := os.environ.get("DIST"):
            picture = pathlib.Path(dist, "site-pictures", f"{name}-{width}.png")
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_bytes(page.picture(height=2400))


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_search_leads_from_a_word_to_its_page_without_a_server(
    page: browser.Page, site: pathlib.Path, width: int
) -> None:
    show(page, site, "index", width=width)
    page.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
    page.write("DrainStalled")
    page.evaluate(RESULT)

    page.follow(".md-search-result__link")

    assert page.evaluate("location.pathname") == str(site / "reasons.html")
