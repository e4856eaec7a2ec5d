"""The node of most tests."""

import pytest

from tests.rigs.node import local_rig


@pytest.fixture
def rig() -> local_rig.LocalRig:
    """Return a node with an active layout."""
    return local_rig.LocalRig()
