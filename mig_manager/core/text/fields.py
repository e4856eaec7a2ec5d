"""Reading a document field by field: what it should be, or an error that points at it."""

from collections.abc import Iterable, Sequence
from typing import NoReturn

from mig_manager import errors
from mig_manager.core.text import document


def fail(node: document.Node, message: str) -> NoReturn:
    """Raise an error about a node.

    Raises:
        ConfigError: Always.
    """
    raise errors.ConfigError(message, location=node.location)


def check_keys(node: document.Mapping, known: Sequence[str]) -> None:
    """Refuse keys that are not known, rather than ignore what somebody meant.

    Raises:
        ConfigError: There is one; the message names the known key that resembles it.
    """
    for entry in node.entries:
        if entry.key not in known:
            raise errors.ConfigError(
                f"unexpected key '{entry.key}'{did_you_mean(entry.key, known)}"
                f" (known here: {', '.join(known)})",
                location=entry.location,
            )


def required(node: document.Mapping, key: str, *, example: str) -> document.Node:
    """Return the value of a key.

    Raises:
        ConfigError: The key is missing; the message shows the example.
    """
    value = node.get(key)
    if value is None:
        fail(node, f"'{key}' is missing; write, for example, '{key}: {example}'")
    return value


def is_null(node: document.Node) -> bool:
    """Tell whether a key has no value, ``null`` or ``~``."""
    return isinstance(node, document.Scalar) and node.value is None


def natural(node: document.Node, what: str) -> int:
    """Return a whole number, 0 or more; ``1.0`` is one, as in JSON.

    Raises:
        ConfigError: The node is something else; ``what`` names it in the message.
    """
    number = whole(node)
    if number is None or number < 0:
        fail(node, f"{what} must be a whole number, 0 or more, not {shown(node)}")
    return number


def whole(node: document.Node) -> int | None:
    """Return a whole number, which ``1.0`` is, too; None if the node is something else."""
    value = node.value if isinstance(node, document.Scalar) else None
    # To Python, true is a number; infinity and what is no number have a rest.
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        return None
    return int(value)


def shown(node: document.Node) -> str:
    """Return a node as an error message quotes it."""
    match node:
        case document.Scalar(value=None):
            return "nothing"
        case document.Scalar(value=str()):
            return repr(node.text[:60])
        case document.Scalar():
            return node.text[:60]
        case document.Sequence():
            return "a list"
        case document.Mapping():
            return "a mapping"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'a' or 'b'?`` for the words that resemble one, or nothing."""
    import difflib  # noqa: PLC0415 - for mistakes alone

    by_folded = {each.lower(): each for each in known}
    close = difflib.get_close_matches(word.lower(), by_folded)
    names = " or ".join(f"'{by_folded[each]}'" for each in close)
    return f"; did you mean {names}?" if names else ""
