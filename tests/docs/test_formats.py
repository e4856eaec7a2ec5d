"""The files that pages show as examples are what the programs read."""

import re

import pytest

from mig_manager.core import host_files
from tests.docs import pages

DOCS = pages.ROOT / "docs"
_BLOCK = re.compile(
    r"^```yaml\n(version: v1\n(?:systemd-services|hooks):.*?)^```$", re.DOTALL | re.MULTILINE
)
_SERVICES = "systemd-services:"


def examples(kind: str) -> list[tuple[str, str]]:
    """Return the pages with example files of a kind, and these files."""
    found = [(page.name, text) for page in pages.SITE for text in _BLOCK.findall(page.read_text())]
    return [(page, text) for page, text in found if text.splitlines()[1] == kind]


def test_the_list_of_host_services_on_its_page_names_the_units_that_it_says() -> None:
    ((page, text),) = examples(_SERVICES)

    assert page == "mode-changes.md"
    assert host_files.parse_services(text, source=page) == (
        *("nvsm-notifier.timer", "nvsm.service", "nvidia-dcgm.service"),
    )


def test_the_limit_of_host_services_on_their_page_is_the_one_that_holds() -> None:
    text = (DOCS / "mode-changes.md").read_text(encoding="utf-8")

    assert f"names of systemd units, {host_files.MOST_SERVICES} at most" in text


@pytest.mark.parametrize(("page", "text"), examples("hooks:"))
def test_the_hooks_that_a_page_shows_are_valid(page: str, text: str) -> None:
    assert host_files.parse_hooks(text, source=page)


def test_pages_that_show_hooks_are_found() -> None:
    assert {page for page, _ in examples("hooks:")} >= {"hooks.md", "mode-changes.md"}
