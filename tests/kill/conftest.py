"""One fork server and one recording of each scenario for a whole session, and its counts."""

from collections.abc import Callable, Iterator

import pytest

from tests.kill import forkserver, matrix, scenarios

_COUNTS = "kill matrix"


@pytest.fixture(scope="session")
def forks() -> Iterator[forkserver.ForkServer]:
    with forkserver.ForkServer() as server:
        yield server


@pytest.fixture(scope="session")
def recorded(
    forks: forkserver.ForkServer,
) -> Callable[[scenarios.Scenario], matrix.Recording]:
    known: dict[str, matrix.Recording] = {}

    def record(scenario: scenarios.Scenario) -> matrix.Recording:
        if scenario.name not in known:
            known[scenario.name] = matrix.record(scenario, forks)
        return known[scenario.name]

    return record


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was struck and what converged."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    lines = [value for each in reports for key, value in each.user_properties if key == _COUNTS]
    if lines:
        terminalreporter.section(_COUNTS)
        for line in sorted(map(str, lines)):
            terminalreporter.line(line)
