"""The node of most tests."""

import pytest

from tests.rigs.node import applying_rig


@pytest.fixture
def node() -> applying_rig.ApplyingNode:
    """Return a node with an active layout."""
    return applying_rig.ApplyingNode()
