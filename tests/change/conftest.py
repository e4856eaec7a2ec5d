"""The node of most tests."""

import pytest

from tests.rigs.node import local_rig


@pytest.fixture
def node() -> local_rig.LocalNode:
    """Return a node with an active layout."""
    return local_rig.LocalNode()
