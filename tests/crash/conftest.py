"""One fork server and one recording of each scenario for a whole session."""

from collections.abc import Callable, Iterator

import pytest

from tests.crash import forkserver, matrix, scenarios


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
