"""Check the fields of a YAML tree; errors have the location."""

from collections.abc import Collection
from typing import NoReturn

from mig_manager import errors
from mig_manager.core import messages
from mig_manager.core.files import yaml_text, yaml_tree


def fail(node: yaml_tree.Node, message: str) -> NoReturn:
    """Raise a ConfigError about a node."""
    raise errors.ConfigError(message, location=node.location)


def document(text: str, *, source: str, section: str, version: str) -> yaml_tree.Mapping | None:
    """Parse a document with ``version`` and one section; None if it is empty."""
    root = yaml_text.parse(text, source=source)
    if root is None or yaml_tree.is_null(root):
        return None
    top = mapping(root, f"expected a mapping with 'version: {version}' and '{section}'")
    check_keys(top, ("version", section))
    check_version(require(top, "version", example=version), version)
    return top


def check_version(node: yaml_tree.Node, version: str, *, key: str = "version") -> None:
    """Raise a ConfigError if a node is not this version as a text."""
    if not (isinstance(node, yaml_tree.Scalar) and node.value == version):
        fail(node, f"{key} must be the text {version}, not {shown(node)}")


def mapping(node: yaml_tree.Node, problem: str) -> yaml_tree.Mapping:
    """Return a node that is a mapping; ConfigError with the problem if it is something else."""
    if not isinstance(node, yaml_tree.Mapping):
        fail(node, f"{problem}, not {shown(node)}")
    return node


def items(node: yaml_tree.Node | None, what: str) -> tuple[yaml_tree.Node, ...]:
    """Return the items of a list, none for null; ConfigError if it is something else."""
    if node is None or yaml_tree.is_null(node):
        return ()
    if not isinstance(node, yaml_tree.Sequence):
        fail(node, f"{what} must be a list, not {shown(node)}")
    return node.items


def check_keys(node: yaml_tree.Mapping, keys: Collection[str]) -> None:
    """Raise a ConfigError about an unknown key; it suggests a similar one."""
    for entry in node.entries:
        check_key(entry, keys)


def check_key(entry: yaml_tree.Entry, keys: Collection[str]) -> None:
    """Raise a ConfigError if a key is unknown."""
    if entry.key not in keys:
        raise errors.ConfigError(
            f"unexpected key '{entry.key}'{messages.did_you_mean(entry.key, keys)}"
            f" (known here: {', '.join(keys)})",
            location=entry.location,
        )


def require(node: yaml_tree.Mapping, key: str, *, example: str = "") -> yaml_tree.Node:
    """Return the value of a key; ConfigError with the example if it is missing."""
    value = node.get(key)
    if value is None:
        hint = f"; write, for example, '{key}: {example}'" if example else ""
        fail(node, f"'{key}' is missing{hint}")
    return value


def natural(node: yaml_tree.Node, what: str) -> int:
    """Return a whole number, 0 or more; ConfigError about ``what`` for any other node."""
    number = whole(node)
    if number is None or number < 0:
        fail(node, f"{what} must be a whole number, 0 or more, not {shown(node)}")
    return number


def whole(node: yaml_tree.Node) -> int | None:
    """Return a whole number, ``1.0`` included; None if the node is something else."""
    value = node.value if isinstance(node, yaml_tree.Scalar) else None
    # To Python, true is a number; infinity and NaN have a remainder.
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        return None
    return int(value)


def shown(node: yaml_tree.Node) -> str:
    """Return a node as error messages quote it."""
    match node:
        case yaml_tree.Scalar(value=None):
            return "nothing"
        case yaml_tree.Scalar(value=str()):
            return repr(node.text[:60])
        case yaml_tree.Scalar():
            return node.text[:60]
        case yaml_tree.Sequence():
            return "a list" if node.items else "an empty list"
        case yaml_tree.Mapping():
            return "a mapping" if node.entries else "an empty mapping"
