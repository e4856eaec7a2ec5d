"""Code, pages and manifests use the terms of the field, as ``language.py`` lists them."""

import pathlib

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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("told_as = 1", ["told"]),
        ("class ToldAs: ...", ["told"]),
        ("# brought\n# back", ["brought back"]),
        ("the lock is held, due to a crash", []),
        ("retold, peerless, minds_", ["minds"]),
        ("def given(): ...", ["name given"]),
        ("given = 1  # of_which", ["name given", "of which"]),
    ],
)
def test_words_are_found_in_identifiers_and_over_lines(
    text: str, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(language, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(text if "=" in text or ":" in text else f'"""{text}"""')

    assert [each.word for each in language.findings(tmp_path / "a.py")] == words


def test_the_agent_has_stricter_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(language, "ROOT", tmp_path)
    file = tmp_path / "mig_manager/agent/a.py"
    file.parent.mkdir(parents=True)
    file.write_text("found = 1\ndef planned(): ...\n@property\ndef is_new(): ...\n")

    assert [each.word for each in language.findings(file)] == ["name found", "name planned"]
