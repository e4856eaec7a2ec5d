"""The list of the layouts that a node serves, as its agent publishes it."""

import dataclasses
import json
from collections.abc import Iterable

from mig_manager.core import messages
from mig_manager.core.files import json_text
from mig_manager.core.layout import layouts

_VERSION = 1
_MAX_BYTES = 64 << 10  # limit of the annotation
_MAX_LAYOUTS = 1000  # layouts in it
_MAX_LETTERS = 200  # limit of a name or an origin


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One layout in a node's list."""

    name: str
    content_hash: str
    origin: str

    @staticmethod
    def of(layout: layouts.Layout) -> "Entry":
        """Return the entry of a layout."""
        return Entry(name=layout.name, content_hash=layout.content_hash, origin=layout.origin)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutList:
    """The list of a node."""

    layouts: tuple[Entry, ...]
    is_complete: bool  # whether its agent has no layout that is missing here
    takes_custom: bool | None
    """Whether its agent also takes a layout from the node's annotation; None: unknown."""

    def find(self, name: str) -> Entry | None:
        """Return the entry of a layout; None if the list has none."""
        return next((each for each in self.layouts if each.name == name), None)


UNKNOWN = LayoutList(layouts=(), is_complete=False, takes_custom=None)
"""For a node without a valid list."""


def to_json(entries: Iterable[Entry], *, takes_custom: bool = False) -> str:
    """Return the annotation that lists a node's layouts, up to its maximum size.

    The API server refuses a node with more than 256 KiB of annotations
    (``TotalAnnotationSizeLimitB`` of ``k8s.io/apimachinery``), also when a run ends.
    """
    rows: dict[str, dict[str, str]] = {}
    members = {"custom": True} if takes_custom else {}
    size = 0
    for each in entries:
        row = {"hash": each.content_hash, "origin": each.origin}
        size += len(json.dumps({each.name: row}))
        if size > _MAX_BYTES or len(rows) == _MAX_LAYOUTS:
            members["truncated"] = True
            break
        rows[each.name] = row
    return json.dumps({"version": _VERSION, **members, "layouts": rows})


def from_json(text: str) -> LayoutList:
    """Parse that annotation, with printable texts; ValueError if it is malformed."""
    with json_text.decoding("a list of layouts"):
        data = json_text.parse_object(text)
        if data.get("version") != _VERSION:
            raise ValueError("from a version this program does not know")
        return LayoutList(
            layouts=tuple(
                Entry(
                    name=messages.word(name, _MAX_LETTERS),
                    content_hash=messages.word(json_text.string(row, "hash"), _MAX_LETTERS),
                    origin=messages.word(json_text.string(row, "origin"), _MAX_LETTERS),
                )
                for name, row in list(data["layouts"].items())[:_MAX_LAYOUTS]
            ),
            is_complete=not data.get("truncated"),
            takes_custom=data.get("custom") is True,
        )
