"""The cluster of the partitioner's tests."""

import pathlib
from collections.abc import Iterator

import pytest

from tests.partitioner import partitioner_rig
from tests.rigs.shell import commandline


@pytest.fixture
def rig() -> Iterator[partitioner_rig.PartitionerRig]:
    with partitioner_rig.serving() as serving_rig:
        yield serving_rig


@pytest.fixture
def shell(tmp_path: pathlib.Path) -> Iterator[commandline.Shell]:
    yield commandline.Shell(tmp_path)
    commandline.forget_log()
