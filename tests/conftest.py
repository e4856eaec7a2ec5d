"""What holds for every test."""

import collections
import json
import os
import pathlib
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import TypeVar

import hypothesis
import pytest
import structlog

_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)

# Tests start hundreds of Python processes; without this each compiles all that it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A slow machine is no bug.
hypothesis.settings.register_profile(
    "patient",
    hypothesis.settings(),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("patient")


@pytest.fixture(autouse=True)
def structlog_defaults() -> Generator[None]:
    """Undo what a test configures: a logger keeps its processors for the tests that follow."""
    yield
    structlog.reset_defaults()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for the counts of the matrices."""
    parser.addoption(
        "--results",
        type=pathlib.Path,
        metavar="FOLDER",
        help="write what tests count as JSON, a file for each matrix that ran (docs/results)",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test in CI that skips itself, because CI installs what tests need; but no GPU."""
    report = yield
    return report if item.get_closest_marker("gpu") else _failed_where_skipped(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a module in CI that skips itself as a whole."""
    return _failed_where_skipped((yield))


def _failed_where_skipped(report: _Report) -> _Report:
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but CI must run it: {report.longrepr}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what tests have counted, a section for each name, and write it where that is asked."""
    counted = _counted(terminalreporter)
    for name, entries in sorted(counted.items()):
        terminalreporter.section(name)
        for line in sorted(map(json.dumps, entries)):
            terminalreporter.line(line)
    folder: pathlib.Path | None = config.getoption("results")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, entries in counted.items():
            _write(folder / f"{name.replace(' ', '-')}.json", entries)


def _counted(terminalreporter: pytest.TerminalReporter) -> Mapping[str, Sequence[object]]:
    """Return the properties of all tests by name."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    counted: dict[str, list[object]] = collections.defaultdict(list)
    for report in reports:
        if report.when == "call":
            for name, value in report.user_properties:
                counted[name].append(value)
    return counted


def _write(path: pathlib.Path, entries: Sequence[object]) -> None:
    """Write the results of one matrix, an entry a line, so that two runs are easy to compare."""
    lines = sorted(json.dumps(entry) for entry in entries)
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
