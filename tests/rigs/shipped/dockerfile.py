"""The Dockerfile, by instruction."""

import pathlib
import re

FILE = pathlib.Path(__file__).parents[3] / "Dockerfile"


def instructions(name: str) -> list[str]:
    """Return what follows an instruction, each time it stands there."""
    text = FILE.read_text(encoding="utf-8")
    return re.findall(rf"^{name} (.*)$", text.replace("\\\n", " "), re.MULTILINE)
