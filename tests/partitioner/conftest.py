"""The cluster of the partitioner's tests."""

from collections.abc import Iterator

import pytest

from tests.partitioner import rig as rigs


@pytest.fixture
def rig() -> Iterator[rigs.Rig]:
    with rigs.serving() as rig:
        yield rig
