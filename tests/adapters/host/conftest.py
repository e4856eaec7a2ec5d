"""A system bus for the tests of what the host has."""

import pathlib
from collections.abc import Iterator

import pytest

from tests.rigs.host import systemd_rig


@pytest.fixture
def bus(tmp_path: pathlib.Path) -> Iterator[systemd_rig.DBusDaemon]:
    with systemd_rig.a_bus(tmp_path) as running:
        yield running
