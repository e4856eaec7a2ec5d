import pytest

from mig_manager.sandbox.node import cluster_view, control_plane
from testkit import apiserver
from tests.sandbox import apirig

NEW = {"key": control_plane.NOT_READY_TAINT, "effect": "NoSchedule"}
OTHER = {"key": "example.com/flaky", "effect": "NoSchedule"}


@pytest.mark.parametrize(("is_ready", "expected"), [(True, [OTHER]), (False, [NEW, OTHER])])
def test_a_new_node_loses_the_taint_of_new_nodes_and_no_other_when_it_is_ready(
    ask: apirig.Client,
    server: apiserver.ApiServer,
    expected: list[apirig.Object],
    *,
    is_ready: bool,
) -> None:
    status = {"conditions": [{"type": "Ready", "status": str(is_ready)}]}
    server.store.create(apirig.a_node() | {"spec": {"taints": [NEW, OTHER]}, "status": status})

    with cluster_view.ClusterView(server.url) as cluster:
        control_plane.sync_nodes(cluster)

    assert ask("GET", f"{apirig.NODES}/n1").body["spec"]["taints"] == expected
