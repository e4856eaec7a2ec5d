"""Parse untrusted JSON of other programs: annotations, files, answers; name keys as they do."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_SNAKE_CASE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)+")


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


def string(data: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """Return a string of an object; ValueError if it is none, or missing without a default."""
    value = data.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"{key} is not a string")  # noqa: TRY004 - content
    return value


def strings(value: object) -> dict[str, str]:
    """Return an object whose members are all strings; ValueError if it is anything else."""
    if not isinstance(value, dict):
        raise ValueError("not a JSON object of strings")  # noqa: TRY004 - content
    return {key: string(value, key) for key in value}


def string_list(data: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of strings of an object, empty if missing; ValueError if it is none."""
    value = data.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{key} is not a list of strings")
    return value


@contextlib.contextmanager
def decoding(what: str) -> Iterator[None]:
    """Turn the exceptions from values of wrong types into a ValueError: not ``what``."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"not {what}: {error!r}") from error


def in_camel_case(value: Any) -> Any:
    """Return plain data with keys as in Kubernetes' objects; other texts are no identifiers."""
    if isinstance(value, dict):
        return {camel_case(key): in_camel_case(each) for key, each in value.items()}
    return [in_camel_case(each) for each in value] if isinstance(value, list | tuple) else value


def camel_case(key: str) -> str:
    """Return a key such as ``is_good`` as ``isGood``."""
    if not _SNAKE_CASE.fullmatch(key):
        return key
    first, *rest = key.split("_")
    return first + "".join(map(str.capitalize, rest))
