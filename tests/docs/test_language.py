"""Code, pages and manifests use the terms of the field, as ``language.py`` lists them."""

import pytest

from tests.docs import language

PARTS = [part for part in language.SCANNED if (language.ROOT / part).exists()]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_repository_uses_the_terms_of_the_field(part: str) -> None:
    found = [
        str(each)
        for path in language.files([language.ROOT / part])
        for each in language.findings(path)
    ]

    assert found == []
