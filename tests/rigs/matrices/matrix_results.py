"""Pytest's options for matrices, and the report of what they counted."""

import collections
import datetime as dt
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import pytest

from tests.rigs import programs

_FOLDER = pathlib.Path(__file__).parent
_Entry = Mapping[str, object]  # a row of a matrix, as tests have counted it


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for the matrices: how much of them is played, and where their counts go."""
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="strike at every n-th moment of the matrices only (default: 1, as published)",
    )
    parser.addoption(
        "--results",
        type=pathlib.Path,
        metavar="FOLDER",
        help="write what tests count as JSON, a file for each matrix that ran (docs/results)",
    )


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what tests have counted, a section for each name, and write it where that is asked."""
    counted = _properties_by_name(terminalreporter)
    for name, entries in sorted(counted.items()):
        terminalreporter.section(name)
        for line in sorted(map(json.dumps, entries)):
            terminalreporter.line(line)
    folder: pathlib.Path | None = config.getoption("results")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        whole = [
            name
            for name, entries in counted.items()
            if _write(folder / f"{name.replace(' ', '-')}.json", entries)
        ]
        _stamp(folder / "runs.json", whole)


def _properties_by_name(
    terminalreporter: pytest.TerminalReporter,
) -> Mapping[str, Sequence[_Entry]]:
    """Return the properties of all tests by name."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    counted: dict[str, list[_Entry]] = collections.defaultdict(list)
    for report in reports:
        if report.when == "call":
            for name, value in report.user_properties:
                counted[name].append(value)
    return counted


def _write(path: pathlib.Path, entries: Sequence[_Entry]) -> bool:
    """Write the results of one matrix, an entry a line, so that two runs are easy to compare.

    Rows that did not run stay: a part of a matrix may be chosen, or the run interrupted.

    Returns:
        Whether all rows have run.
    """
    before: list[_Entry] = json.loads(path.read_text("utf-8")) if path.exists() else []
    keys = [_key(entry) for entry in entries]
    kept = [entry for entry in before if _key(entry) not in keys]
    lines = sorted(json.dumps(entry) for entry in (*kept, *entries))
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    return not kept


def _key(entry: _Entry) -> _Entry:
    """Return the values that identify a row: the others are counts."""
    return {name: value for name, value in entry.items() if isinstance(value, str)}


def _stamp(path: pathlib.Path, names: Iterable[str]) -> None:
    """Note the commit and the day of the run for each matrix with a run of all rows."""
    commit = programs.output("git", "describe", "--always", "--dirty", "--exclude=*", cwd=_FOLDER)
    run = {"commit": commit.strip(), "date": dt.datetime.now(dt.UTC).date().isoformat()}
    runs = json.loads(path.read_text("utf-8")) if path.exists() else {}
    runs |= dict.fromkeys(names, run)
    path.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n", encoding="utf-8")
