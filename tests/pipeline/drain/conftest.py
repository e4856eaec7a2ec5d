"""What tests of the drain share."""

import pytest

from tests.pipeline.drain.drains import empty, gpu_pod
from tests.rigs.node.node_rig import NodeRig


@pytest.fixture
def rig() -> NodeRig:
    """A node with the pod ``train``, whose device is destroyed."""
    node = empty()
    gpu_pod(node)
    return node
