"""A server that answers each request from a script."""

from collections.abc import Iterator

import pytest

from tests.adapters.kubernetes import kube_rig


@pytest.fixture
def scripted_server() -> Iterator[kube_rig.KubeServer]:
    with kube_rig.KubeServer() as running:
        yield running
