"""Keep messages for people short: name a few of many, and cut at a word."""

import itertools
from collections.abc import Iterable, Sequence


def printable(text: str, instead: str = "?") -> str:
    """Replace unprintable characters, so that foreign text cannot control a terminal."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else instead for letter in text)


def word(text: str, limit: int = 80) -> str:
    """Return the start of an untrusted text, in printable characters."""
    return printable(text[:limit])


MAX_BYTES = 4096  # limit of a message in the status annotation
MAX_EVENT_BYTES = 1024
"""Limit of the ``note`` of events.k8s.io/v1, in bytes (kubernetes/kubernetes, ``NoteLengthLimit``
in ``pkg/apis/core/validation/events.go``); v1 has no limit."""
_MAX_NAMED = 5
MAX_AT_A_TERMINAL = 8  # nodes, pods or devices that an answer names before it counts the rest
_ELLIPSIS = " ... "
_END_MARKS = (".", "?", "!")


def count(number: int, noun: str) -> str:
    """Return a number with its noun, singular or plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def list_names(names: Sequence[str], *, limit: int = _MAX_NAMED) -> str:
    """Name the first of many things, and count the others."""
    return _list_first(len(names), names, limit)


def _list_first(number: int, names: Iterable[str], limit: int) -> str:
    more = number - limit
    first = ", ".join(itertools.islice(names, limit))
    return first + (f" and {more} more" if more > 0 else "")


def did_you_mean(mistyped: str, words: Iterable[str], *, limit: int = 3) -> str:
    """Return ``; did you mean 'a' or 'b'?`` with similar words, or nothing."""
    names = " or ".join(f"'{each}'" for each in similar(mistyped, words, limit=limit))
    return f"; did you mean {names}?" if names else ""


def similar(mistyped: str, words: Iterable[str], *, limit: int) -> list[str]:
    """Return the known words that resemble a mistyped one in any case, the most similar first."""
    import difflib  # noqa: PLC0415 - only needed after a mistake

    by_folded = {each.lower(): each for each in words}
    close = difflib.get_close_matches(mistyped.lower(), by_folded, n=limit)
    return [by_folded[each] for each in close]


def ranges(numbers: Iterable[int]) -> list[str]:
    """Render numbers for people, consecutive ones as a range: ``0-3``, ``6``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def by_cause(causes: Iterable[tuple[str, str]]) -> str:
    """Name things by their cause, which may be empty; count the things of further causes."""
    names: dict[str, list[str]] = {}
    for name, cause in causes:
        names.setdefault(cause, []).append(name)
    return list_groups([(cause, len(each), each) for cause, each in names.items()])


def list_groups(groups: Sequence[tuple[str, int, Iterable[str]]]) -> str:
    """Name things as ``by_cause``; every group is a cause, how many things, and their names."""
    texts = [
        _list_first(number, names, _MAX_NAMED) + (f" ({cause})" if cause else "")
        for cause, number, names in groups[:_MAX_NAMED]
    ]
    more = sum(number for _, number, _ in groups[_MAX_NAMED:])
    return "; ".join(texts) + (f"; {more} more" if more else "")


def with_full_stop(text: str) -> str:
    """Add a full stop to a sentence without an end mark."""
    return text if text.endswith(_END_MARKS) else f"{text}."


def join(*parts: str) -> str:
    """Join the parts that are not empty by semicolons, but not after an end mark."""
    whole = ""
    for part in filter(None, parts):
        link = " " if whole.endswith(_END_MARKS) else "; "
        whole = f"{whole}{link}{part}" if whole else part
    return whole


def fit(text: str, limit: int) -> str:
    """Cut a message at a word to some bytes of UTF-8, but keep a short remedy at its end."""
    if len(text.encode()) <= limit:
        return text
    begin = 1 + max(text.rfind(f"{mark} ") for mark in _END_MARKS)
    last = text[begin:].lstrip()
    keeps_last = begin > 0 and len(last.encode()) < limit // 2
    tail = _ELLIPSIS + last if keeps_last else _ELLIPSIS.rstrip()
    room = limit - len(tail.encode())
    start = (text[:begin] if keeps_last else text).encode()[:room].decode(errors="ignore")
    return (start.rpartition(" ")[0] or start) + tail
