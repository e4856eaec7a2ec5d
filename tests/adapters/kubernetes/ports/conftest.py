"""The ports of a node, for each test twice."""

from collections.abc import Iterator

import pytest

from tests.adapters.kubernetes.ports import port_rigs


@pytest.fixture(params=[port_rigs.in_memory, port_rigs.on_servers], ids=["fakes", "adapters"])
def rig(request: pytest.FixtureRequest) -> Iterator[port_rigs.Rig]:
    with request.param() as running:
        yield running
