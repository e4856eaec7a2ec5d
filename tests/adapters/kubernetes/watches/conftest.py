"""An API server whose watches tests break, and a client of it."""

from collections.abc import Iterator

import pytest

from testkit import apiserver
from tests.rigs.cluster import watch_rig


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    with watch_rig.serving() as running:
        yield running


@pytest.fixture
def faulty_api(server: apiserver.ApiServer) -> Iterator[watch_rig.FaultyApi]:
    with watch_rig.faulty_api(server) as client:
        yield client
