"""Where long names of the site may break over two lines."""

import html
import re

import hypothesis
import pytest
from hypothesis import strategies

from docs.generator import breaks


def lines(name: str) -> list[str]:
    """Return the longest lines into which a name may fall."""
    page = breaks.on_post_page(f"<td><code>{html.escape(name)}</code></td>")
    (broken,) = re.findall(r"<code>(.*)</code>", page)
    return [html.unescape(re.sub(r"<[^>]*>", "", line)) for line in broken.split("<wbr>")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("DrainTimeout", ["DrainTimeout"]),
        ("1g.10gb", ["1g.10gb"]),
        ("MIG_MANAGER_LOCK_FILE", ["MIG_", "MANAGER_", "LOCK_", "FILE"]),
        ("nvidia.com/mig.config.state", ["nvidia.com/", "mig.", "config.", "state"]),
        ("RepartitioningRecommended", ["Repartitioning", "Recommended"]),
    ],
)
def test_a_long_name_breaks_at_its_signs(name: str, expected: list[str]) -> None:
    assert lines(name) == expected


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("all-balanced", "all-balanced"),
        ("--pod-resources-socket", "--pod"),
        ("mig-manager.io/partitioning=on-demand", "mig-manager.io/"),
    ],
)
def test_a_short_part_with_a_hyphen_stays_whole(name: str, whole: str) -> None:
    page = breaks.on_post_page(f"<code>{name}</code>")

    assert f'<span class="whole">{whole}</span>' in page


@hypothesis.given(name=strategies.text(alphabet="aB0-_./=:, <&'\"", max_size=40))
def test_a_name_keeps_its_text(name: str) -> None:
    assert "".join(lines(name)) == name


def test_commands_in_a_block_stay_as_they_are() -> None:
    block = "<pre><span></span><code>kubectl get node -L nvidia.com/mig.config\n</code></pre>"

    assert breaks.on_post_page(block) == block
