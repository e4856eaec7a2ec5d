"""Keep messages for people short: name a few of many, and cut at a word."""

from collections.abc import Iterable, Mapping, Sequence

LONGEST_BYTES = 4096
"""Of a message in the status annotation."""
LONGEST_EVENT_BYTES = 1024
"""What the API server takes as the ``note`` of events.k8s.io/v1; it counts bytes."""
_MOST_NAMED = 5
_ELLIPSIS = " ... "


def listed(names: Sequence[str], *, most: int = _MOST_NAMED) -> str:
    """Name the first of many things, and count the others; empty where there are none."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def by_cause(causes: Iterable[tuple[str, str]]) -> str:
    """Name things with what is the matter with each, a cause that they share once.

    Args:
        causes: Name and cause of each thing.
    """
    names: dict[str, list[str]] = {}
    for name, cause in causes:
        names.setdefault(cause, []).append(name)
    return listed_causes(names)


def listed_causes(names: Mapping[str, Sequence[str]]) -> str:
    """Name the first of many causes, with things that have them."""
    return listed([f"{listed(each)} ({cause})" for cause, each in names.items()])


def fit(text: str, limit: int) -> str:
    """Cut a message at a word to some bytes of UTF-8; its last sentence, the remedy, stays."""
    if len(text.encode()) <= limit:
        return text
    head, dot, last = text.rpartition(". ")
    tail = _ELLIPSIS + last if dot and len(last.encode()) < limit // 2 else _ELLIPSIS.rstrip()
    room = limit - len(tail.encode())
    start = (head if dot else text).encode()[:room].decode(errors="ignore")
    return (start.rpartition(" ")[0] or start) + tail
