"""The cluster of the tests of the command ``rollout``."""

import pathlib
from collections.abc import Iterator

import pytest

from tests.fleet import rollout_rig


@pytest.fixture
def rig(tmp_path: pathlib.Path) -> Iterator[rollout_rig.RolloutRig]:
    with rollout_rig.serving(tmp_path) as serving_rig:
        yield serving_rig
