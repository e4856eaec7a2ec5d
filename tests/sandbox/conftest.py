"""An embedded API server and a client of it."""

from collections.abc import Iterator

import pytest

from testkit import apiserver
from tests.sandbox import apirig


@pytest.fixture
def ask() -> Iterator[apirig.Client]:
    with apirig.serving() as client:
        yield client


@pytest.fixture
def server(ask: apirig.Client) -> apiserver.ApiServer:
    return ask.server
