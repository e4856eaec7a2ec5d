"""Brings what the pages have from the code up to date: ``python -m docs.generator``.

With ``--check`` nothing is written, and the exit status is 1 if something is not up to date. The
demonstrations run with ``--demo`` alone, because they take half a minute.
"""

import argparse
import difflib
import logging
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

import structlog

from docs.generator import blocks, diagram, manual, phases, pictures, reference

ROOT = pathlib.Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"


def files(*, with_demo: bool) -> Iterator[tuple[pathlib.Path, str]]:
    """Return everything that is generated, and what it must be.

    Args:
        with_demo: Whether to run the demonstrations for their pictures.

    Raises:
        MissingWordsError: A person has to write something; the message says what.
    """
    for name, text in manual.reference_pages().items():
        yield ROOT / "docs" / name, text
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if blocks.names(text):
            yield page, blocks.rewritten(text, reference.RENDERERS)
    yield (
        PICTURES / "phases.svg",
        diagram.draw(phases.story_without_kills(), title="The phases of a reconfiguration"),
    )
    yield (
        PICTURES / "phases-after-a-crash.svg",
        diagram.draw(phases.story_after_kills(), title="The phases after a crash"),
    )
    yield PICTURES / "status.svg", pictures.status()
    yield PICTURES / "plan.svg", pictures.plan()
    yield PICTURES / "top.svg", pictures.top()
    if with_demo:
        yield _demo_file("demo.svg", pictures.demo_lines(), pictures.demo)
        yield _demo_file("demo-nodes.svg", pictures.cluster_demo_lines(), pictures.cluster_demo)


def _demo_file(
    name: str, lines: Sequence[str], draw: Callable[[Sequence[str]], str]
) -> tuple[pathlib.Path, str]:
    path = PICTURES / name
    if path.exists() and not pictures.differences(old := path.read_text("utf-8"), lines):
        return path, old
    return path, draw(lines)


def main() -> int:
    """Write what is not up to date, or report it."""
    parser = argparse.ArgumentParser(prog="python -m docs.generator", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if need be")
    parser.add_argument("--demo", action="store_true", help="the demonstrations, too")
    options = parser.parse_args()
    # The runs that are played log as runs do.
    quiet = structlog.make_filtering_bound_logger(logging.CRITICAL)
    structlog.configure(wrapper_class=quiet)
    try:
        stale = [(path, new) for path, new in files(with_demo=options.demo) if _old(path) != new]
    except blocks.MissingWordsError as error:
        sys.exit(f"docs: {error}")
    for path, new in stale:
        print(f"{path.relative_to(ROOT)} is not up to date")
        if options.check:
            _show(_old(path), new)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(new, encoding="utf-8")
    return 1 if options.check and stale else 0


def _old(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _show(old: str, new: str) -> None:
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), "old", "new", lineterm="", n=0
    )
    print("\n".join(list(lines)[:40]))


if __name__ == "__main__":
    sys.exit(main())
