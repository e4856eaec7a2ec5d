"""What the matrices counted when they were last played whole, in ``docs/results``."""

import json
import pathlib
from typing import Any

_FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "results"
_KEPT = 0.8
"""The share of its cases that a matrix may not fall below, or it shrank unnoticed."""


def rows(matrix: str) -> list[dict[str, Any]]:
    """Return the rows of a matrix, such as ``kill-matrix``."""
    found: list[dict[str, Any]] = json.loads((_FOLDER / f"{matrix}.json").read_text("utf-8"))
    return found


def least(matrix: str, *, of: str = "tried", **row: str) -> float:
    """Return how many cases, or others of its numbers, a row must still have.

    Raises:
        KeyError: They were never counted.
    """
    numbers = {tuple(each[key] for key in row): int(each[of]) for each in rows(matrix)}
    return _KEPT * numbers[tuple(row.values())]
