"""Values in JSON about GPUs that others can write; ValueError if one is invalid."""

from typing import Any

from mig_manager.core import messages, model

MAX_LETTERS = 80
_MAX_LISTED = 64  # GPUs, models, profiles and instances
_MAX_SLICE = 1_000  # more than any GPU has: a journal must be readable on GPUs of the future
_MAX_NUMBER = 2**32 - 1


def span(start: object, size: object, *, limit: int = _MAX_SLICE) -> model.Placement:
    """Return a span of memory slices, or of the compute slices of an instance, below a limit."""
    place = model.Placement(number(start), number(size))
    if not (place.size > 0 and place.end <= limit):
        raise ValueError(f"{place} is no span of {limit} slices")
    return place


def text(value: object, *, limit: int = MAX_LETTERS) -> str:
    """Return a text, with unprintable characters replaced."""
    if not isinstance(value, str) or len(value) > limit:
        raise ValueError("a text is missing or too long")
    return messages.printable(value)


def number(value: object) -> int:
    """Return a number that fits in 32 bits without a sign."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_NUMBER:
        raise ValueError("a number is missing or out of range")
    return value


def items(value: object) -> list[Any]:
    """Return the items of a list."""
    if not isinstance(value, list) or len(value) > _MAX_LISTED:
        raise ValueError("a list is missing or too long")
    return value
