"""A real API server, the shipped policies and the agent that offers simulated GPUs."""

import contextlib
import itertools
import pathlib
from collections.abc import Iterator

import pytest

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, node
from tests import waiting
from tests.cluster import clusters

pytestmark = pytest.mark.cluster

SIMULATED = clusters.Rights(
    everywhere=clusters.SHIPPED.everywhere | clusters.to("nodes/status", "patch")
)
"""Those of ``deploy/overlays/simulated``."""


@contextlib.contextmanager
def agent(
    where: clusters.Real, folder: pathlib.Path, rights: clusters.Rights
) -> Iterator[api.KubeApi]:
    with where.admit(folder, rights) as credentials:
        where.kube.post("/api/v1/nodes", {"metadata": {"name": clusters.NODE}})
        where.kube.post("/api/v1/nodes", {"metadata": {"name": "other"}})
        kube = api.KubeApi.connect(kubeconfig=str(credentials.agent))
        (wanted,) = clusters.to("nodes/status", "patch")
        may = clusters.access_of(wanted, "")
        waiting.until(
            lambda: where._may(rights.account.user, may) is (wanted in rights.everywhere),
            "the right to the node's status",
        )
        yield kube
        kube.close()


def test_the_node_offers_what_is_published_and_0_of_what_is_gone(
    real_cluster: clusters.Real, tmp_path: pathlib.Path
) -> None:
    with agent(real_cluster, tmp_path, SIMULATED) as kube:
        node.publish_resources(kube, clusters.NODE, {"nvidia.com/gpu": 8})
        node.publish_resources(kube, clusters.NODE, {"nvidia.com/mig-1g.5gb": 56})

        status = kube.get(f"/api/v1/nodes/{clusters.NODE}")["status"]

    expected = {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "56"}
    assert status["capacity"] == expected
    assert status["allocatable"] == expected


def test_no_agent_advertises_for_another_node(
    real_cluster: clusters.Real, tmp_path: pathlib.Path
) -> None:
    with agent(real_cluster, tmp_path, SIMULATED) as kube:
        # What the node offers already is not written again.
        counts = itertools.count(1)

        def is_refused() -> bool:
            try:
                node.publish_resources(kube, "other", {"nvidia.com/gpu": next(counts)})
            except errors.ClusterError as error:
                return "may not change another node" in error.message
            return False

        # The policy becomes active a moment after the server has started.
        waiting.until(is_refused, "the policy of the nodes")


def test_the_rights_of_an_agent_with_real_gpus_do_not_reach_the_nodes_status(
    real_cluster: clusters.Real, tmp_path: pathlib.Path
) -> None:
    with (
        agent(real_cluster, tmp_path, clusters.SHIPPED) as kube,
        pytest.raises(errors.ClusterError) as caught,
    ):
        node.publish_resources(kube, clusters.NODE, {"nvidia.com/gpu": 8})

    assert caught.value.reason is errors.Reason.FORBIDDEN
