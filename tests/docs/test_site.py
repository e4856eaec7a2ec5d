"""The site in a real browser, opened as files: search, tables, code, pictures, colours.

With the variable DIST pictures of some pages stay in that folder, for a review.
"""

import os
import pathlib
from collections.abc import Iterator

import pytest

from tests import programs
from tests.docs import browser, pages

pytestmark = pytest.mark.release

LAYOUT = pathlib.Path(__file__).with_name("layout.js").read_text(encoding="utf-8")
DESK, PHONE = 1280, 390
"""Widths in pixels."""
PAGES = [page.stem for page in pages.SITE]
REVIEWED = (
    *("index", "quick-start", "install", "command-reference"),
    *("failed", "compatibility", "partitioner", "reasons"),
)
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
    mkdocs = programs.needed("mkdocs")
    programs.output(mkdocs, "build", "--strict", "--site-dir", folder, cwd=pages.ROOT)
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    program = programs.needed("chromium")
    with browser.started(program, tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder for pictures."""
    dist = os.environ.get("DIST")
    folder = pathlib.Path(dist) / "site-pictures" if dist else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
        here = (site.as_uri(), "data:")

        assert page.evaluate(LAYOUT) == []
        assert page.errors() == []
        assert [url for url in page.requests() if not url.startswith(here)] == []


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("document.body.style.width = '1400px'", "the page is 1400 pixels wide"),
        ("row.closest('.md-typeset__scrollwrap').style.overflow = 'hidden'", "is cut"),
        ("row.cells[0].style.position = 'static'", "does not stay visible"),
        ("row.cells[2].innerHTML = '<span style=position:relative;left:9rem>no'", "leaves"),
        ("row.style.fontSize = '9px'", "is too small"),
        ("row.style.color = '#999'", "has a contrast of 2.8"),
        ("text.style.cssText = 'width: 3rem; overflow-wrap: anywhere'", "success is broken"),
        ("picture.style.width = '20rem'", "too small to read"),
        ("picture.parentElement.style.overflow = 'hidden'", "may end: cut"),
        ("picture.src = 'none.svg'", "no picture"),
    ],
)
def test_a_page_that_does_not_fit_is_found(
    page: browser.Page, site: pathlib.Path, damage: str, complaint: str
) -> None:
    show(page, site, "reconfiguration", width=PHONE)
    assert page.evaluate(LAYOUT) == []

    page.evaluate(
        "const [row, text, picture] = "
        "['tbody tr', 'article p', 'article img'].map(each => document.querySelector(each));"
        f"(async () => {{ {damage}; await picture.decode().catch(() => 0) }})()"
    )

    assert complaint in "\n".join(page.evaluate(LAYOUT))


def test_a_table_that_scrolls_on_a_desk_is_found(page: browser.Page, site: pathlib.Path) -> None:
    show(page, site, "reconfiguration", width=DESK)
    page.evaluate("document.querySelector('tbody tr').style.whiteSpace = 'nowrap'")
    assert "is wider than the text" in "\n".join(page.evaluate(LAYOUT))


def test_an_error_and_a_request_to_another_host_are_found(
    page: browser.Page, site: pathlib.Path
) -> None:
    show(page, site, "index", width=DESK)

    page.evaluate("fetch('https://example.invalid/font').catch(error => console.error('no font'))")

    assert "https://example.invalid/font" in page.requests()
    assert "no font" in str(page.errors())


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


@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("name", REVIEWED)
def test_pictures_of_pages_stay_for_a_review(
    page: browser.Page, site: pathlib.Path, pictures: pathlib.Path, name: str, width: int
) -> None:
    show(page, site, name, width=width)

    picture = page.picture(height=2400)

    (pictures / f"{name}-{width}.png").write_bytes(picture)
    assert int.from_bytes(picture[16:20]) == width
