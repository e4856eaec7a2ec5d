"""A YAML document as an immutable tree, in which every key and value has its line and column."""

import dataclasses

from mig_manager import errors


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A single value."""

    value: str | int | float | bool | None
    text: str  # without quotes
    location: errors.Location

    @property
    def key(self) -> str | None:
        """The value as a key of a mapping: ``1`` as "1", ``on`` as "true"; None for null.

        mig-parted turns YAML into JSON, whose keys are strings, by the same rule.
        """
        match self.value:
            case None:
                return None
            case bool():
                return str(self.value).lower()
            case float():
                return str(self.value).removesuffix(".0")
            case int() | str():
                return str(self.value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """A list."""

    items: "tuple[Node, ...]"
    location: errors.Location


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key and its value; merged entries keep their location."""

    key: str
    value: "Node"
    location: errors.Location


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """A mapping with unique keys, including the keys merged with ``<<``."""

    entries: tuple[Entry, ...]
    location: errors.Location

    def get(self, key: str) -> "Node | None":
        """Return the value of ``key``; None when there is no such key."""
        return next((entry.value for entry in self.entries if entry.key == key), None)


Node = Scalar | Sequence | Mapping


def is_null(node: Node) -> bool:
    """Return whether a key has no value, ``null`` or ``~``."""
    return isinstance(node, Scalar) and node.value is None


def plain(node: Node | None) -> object:
    """Return the tree as dict, list and scalars, without locations."""
    match node:
        case None:
            return None
        case Scalar():
            return node.value
        case Sequence():
            return [plain(item) for item in node.items]
        case Mapping():
            return {entry.key: plain(entry.value) for entry in node.entries}
