"""The pods of a node on the embedded API server."""

import pytest

from mig_manager.adapters.kubernetes import api, pods
from tests.rigs.node import fakes


@pytest.fixture
def workloads(kube: api.KubeApi) -> pods.KubeWorkloads:
    return pods.KubeWorkloads(kube, node_name="n1", clock=fakes.FakeClock())
