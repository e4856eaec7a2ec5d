"""Matrices play every strike at every moment of a change; ``docs/results`` has what they counted.

They share these words:

moment: Where a strike can come: a call of a port, of NVML, of the API server or of kubelet.
strike: What comes there: a kill, an error, silence, or a write of another program.
case: One strike at one moment. It is struck if the strike came into effect there.
end: How the node is once the change, or what recovers it, has ended.
result: What was counted in one case or in many, and what is wrong with their ends.
row: The results of all cases of one change or one strike.
"""

import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

_FOLDER = pathlib.Path(__file__).parents[3] / "docs" / "results"
_KEPT = 0.8  # the share of its cases that a row may not fall below, or it shrank unnoticed
_MAX_PLAYS = 8

Note = Callable[[str, object], None]
"""Pytest's ``record_property``: the first argument is the name of the matrix."""

_Case = TypeVar("_Case")
_End = TypeVar("_End")


def sample(cases: Sequence[_Case], every: int, *, start: int | None = None) -> Sequence[_Case]:
    """Return every n-th case, the same ones in every run."""
    return cases[every // 2 if start is None else start :: every]


class MatrixRow:
    """Plays the cases of a row and counts them.

    Args:
        matrix: The name of the matrix, such as ``kill matrix``.
        key: The values that identify the row in its matrix.
    """

    def __init__(self, matrix: str, **key: str) -> None:
        self._matrix = matrix
        self._key = key
        self.tried = self.struck = self.played_again = 0
        self._problems: list[str] = []

    def until_struck(self, case: object, strike: Callable[[], _End | None]) -> _End | None:
        """Repeat a case until its strike comes: a wait may be over before its n-th poll.

        Args:
            case: Its name.
            strike: Plays it once and returns its end; None if the strike did not come.
        """
        for number in range(_MAX_PLAYS):
            self.played_again += number > 0
            end = strike()
            if end is not None:
                self.count(is_struck=True)
                return end
        self.count(is_struck=False)
        self.report([f"{case}: the strike never came"])
        return None

    def count(self, *, is_struck: bool) -> None:
        """Count a case, in which the strike came into effect or did not."""
        self.tried += 1
        self.struck += is_struck

    def report(self, problems: Iterable[str]) -> None:
        """Keep what is wrong with the end of a case, for ``assert_complete``."""
        self._problems += problems

    def assert_complete(self, note: Note, counts: Mapping[str, object], *, of: int | None) -> None:
        """Note the row; every case must have been struck, and there may not be fewer than before.

        Args:
            note: Takes the row.
            counts: What else it has.
            of: The number of cases; the row is a sample if fewer were played, or if it is None.
        """
        numbers = {"tried": self.tried, "struck": self.struck}
        section = self._matrix if self.tried == of else f"{self._matrix}, a sample"
        note(section, {**self._key, **numbers, **counts})
        assert self._problems == []
        assert self.struck == self.tried > 0
        assert of is None or of >= minimum_count(self._matrix, **self._key)


def require_rows(matrix: str, keys: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return the published rows of a matrix, which must be exactly those with some keys.

    Raises:
        AssertionError: A row is missing, or no test counts it any more.
    """
    rows = published_rows(matrix)
    published = {_row_name({name: each[name] for name in keys[0]}) for each in rows}
    present = {*map(_row_name, keys)}
    missing, old = sorted(present - published), sorted(published - present)
    assert not missing, _missing(matrix, " and ".join(missing))
    assert not old, f"{matrix} has a row that no test counts, which you remove: {'; '.join(old)}"
    return rows


def published_rows(matrix: str) -> list[dict[str, Any]]:
    """Return the rows of a matrix as they were last counted whole."""
    path = _FOLDER / f"{matrix.replace(' ', '-')}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
    return rows


def minimum_count(matrix: str, *, of: str = "tried", **key: str) -> float:
    """Return how many cases, or others of its numbers, a row must still have.

    Raises:
        AssertionError: They were never counted.
    """
    numbers = {tuple(each[name] for name in key): int(each[of]) for each in published_rows(matrix)}
    number = numbers.get(tuple(key.values()))
    assert number is not None, _missing(matrix, _row_name(key))
    return _KEPT * number


def _row_name(key: Mapping[str, str]) -> str:
    return ", ".join("=".join(each) for each in key.items())


def _missing(matrix: str, row: str) -> str:
    return (
        f"{matrix} has no row {row} yet: run its whole test with "
        '-m "slow or not slow" --results=docs/results, which writes the row, and then once more'
    )
