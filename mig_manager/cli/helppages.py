"""Help as a page: what stands before the options of a command, and what behind."""

import textwrap
from collections.abc import Iterable, Mapping

from mig_manager.cli import helptexts

_WIDTH = 79
_INDENT = "  "


def statuses(command: str) -> Mapping[str, str]:
    """Return the exit statuses of a command and what they mean."""
    own = helptexts.text(command).statuses
    common = {status: meaning for status, meaning in helptexts.STATUSES.items() if status != "3"}
    return {**(common if command else helptexts.STATUSES), **own}


def usage(command: str) -> str:
    """Return how to call it, behind the program's name."""
    parts = ("%(prog)s", "[OPTION]...", helptexts.text(command).operands)
    return " ".join(filter(None, parts))


def description(command: str) -> str:
    """Return what stands before the options."""
    return "\n\n".join(_wrapped(paragraph) for paragraph in helptexts.text(command).paragraphs)


def epilog(command: str) -> str:
    """Return what stands behind the options."""
    blocks = [
        "examples:\n" + "\n".join(_examples(helptexts.text(command).examples)),
        "environment:\n" + _wrapped(helptexts.ENVIRONMENT, _INDENT),
        "exit status:\n" + "\n".join(_statuses(command)),
    ]
    return "\n\n".join(blocks)


def _examples(examples: Iterable[helptexts.Example]) -> Iterable[str]:
    for example in examples:
        yield f"{_INDENT}{example.line}"
        yield _wrapped(example.told, _INDENT * 3)


def _statuses(command: str) -> Iterable[str]:
    for status, meaning in statuses(command).items():
        yield _wrapped(f"{status}  {meaning}", _INDENT, further=_INDENT * 2 + " ")
    if not command:
        yield _wrapped(helptexts.OTHER_STATUSES, _INDENT)


def _wrapped(paragraph: str, indent: str = "", *, further: str | None = None) -> str:
    return textwrap.fill(
        paragraph,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if further is None else further,
        break_on_hyphens=False,
        break_long_words=False,
    )
