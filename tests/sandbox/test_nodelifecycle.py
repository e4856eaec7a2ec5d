from collections.abc import Iterator

import pytest

from mig_manager.sandbox.node import cluster_view, control_plane
from testkit import apiserver
from tests.sandbox import apirig

NEW = {"key": control_plane.NOT_READY_TAINT, "effect": "NoSchedule"}
OTHER = {"key": "example.com/flaky", "effect": "NoSchedule"}


@pytest.fixture
def server() -> Iterator[apiserver.ApiServer]:
    with apiserver.serve() as running:
        yield running


def taints_after(server: apiserver.ApiServer, *, is_ready: bool) -> list[apirig.Object]:
    status = {"conditions": [{"type": "Ready", "status": str(is_ready)}]}
    node = apirig.a_node() | {"spec": {"taints": [NEW, OTHER]}, "status": status}
    server.store.create(node)
    with cluster_view.ClusterView(server.url) as cluster:
        control_plane.sync_nodes(cluster)
    taints: list[apirig.Object] = apirig.Client(server)("GET", f"{apirig.NODES}/n1").body["spec"][
        "taints"
    ]
    return taints


def test_a_new_node_that_is_ready_loses_the_taint_of_new_nodes_and_no_other(
    server: apiserver.ApiServer,
) -> None:
    assert taints_after(server, is_ready=True) == [OTHER]


def test_a_node_that_is_not_ready_keeps_the_taint_of_new_nodes(
    server: apiserver.ApiServer,
) -> None:
    assert taints_after(server, is_ready=False) == [NEW, OTHER]
