#!/usr/bin/env python3
"""Prints what CHANGELOG.md says of the version; refuses a tag that is not this version's.

    release/notes.py [TAG]

Without a tag it prints what a release of this commit would say: the section Unreleased, or where
that is empty, as just before the tag, the version's.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> str:
    """Return the notes of a tag.

    Raises:
        SystemExit: The tag is not of this version, or the changelog has nothing about it.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)[0]
    tag = arguments[0] if arguments else ""
    if tag and tag != f"v{version}":
        sys.exit(f"The tag {tag} is not of version {version}: tag v{version}, or set the version.")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    of_version = rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d"
    for heading in (of_version,) if tag else ("Unreleased", of_version):
        section = re.search(
            rf"^## {heading}\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
        )
        if section and (text := section[1].strip()):
            return text
    named = f"{version} - YYYY-MM-DD" if tag else "Unreleased"
    sys.exit(f'CHANGELOG.md has no text below "## {named}": write there what has changed.')


if __name__ == "__main__":
    print(main(sys.argv[1:]))  # noqa: T201 - what it is for
