"""Parse untrusted JSON of other programs: annotations, files, answers."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any


def parse(text: str | bytes) -> Any:
    """Parse a JSON value; ValueError if it is malformed or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the members of a JSON object; ValueError if it is anything else."""
    data = parse(text)
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - content
    return data


@contextlib.contextmanager
def decoding(what: str) -> Iterator[None]:
    """Turn the exceptions from values of wrong types into a ValueError: not ``what``."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"not {what}: {error!r}") from error
