"""A real API server, the shipped policies and the agent that offers simulated GPUs."""

import contextlib
import itertools
import pathlib
from collections.abc import Iterator

import pytest

from mig_manager import errors
from mig_manager.adapters.kubernetes import advertise, api
from tests.cluster import envtest, worlds

pytestmark = pytest.mark.cluster

SIMULATED = worlds.Rights(
    everywhere=worlds.SHIPPED.everywhere | worlds.to("nodes/status", "patch")
)
"""Those of ``deploy/overlays/simulated``."""


@contextlib.contextmanager
def agent(
    where: worlds.Real, folder: pathlib.Path, rights: worlds.Rights
) -> Iterator[api.KubeApi]:
    with where.admit(folder, rights) as credentials:
        where.kube.post("/api/v1/nodes", {"metadata": {"name": worlds.NODE}})
        where.kube.post("/api/v1/nodes", {"metadata": {"name": "other"}})
        kube = api.KubeApi.connect(kubeconfig=str(credentials.agent))
        (wanted,) = worlds.to("nodes/status", "patch")
        may = worlds.access_of(wanted, "")
        envtest.wait(
            lambda: where._may(rights.account.user, may) is (wanted in rights.everywhere),
            "the right to the node's status",
        )
        yield kube
        kube.close()


def test_the_node_offers_what_is_published_and_0_of_what_is_gone(
    real_cluster: worlds.Real, tmp_path: pathlib.Path
) -> None:
    with agent(real_cluster, tmp_path, SIMULATED) as kube:
        offer = advertise.NodeResources(kube, name=worlds.NODE)
        offer.publish({"nvidia.com/gpu": 8})
        offer.publish({"nvidia.com/mig-1g.5gb": 56})

        status = kube.get(f"/api/v1/nodes/{worlds.NODE}")["status"]

    expected = {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "56"}
    assert status["capacity"] == expected
    assert status["allocatable"] == expected


def test_nobody_advertises_for_another_node(
    real_cluster: worlds.Real, tmp_path: pathlib.Path
) -> None:
    with agent(real_cluster, tmp_path, SIMULATED) as kube:
        # What the node offers already is not written again.
        counts = itertools.count(1)

        def is_refused() -> bool:
            try:
                offer = advertise.NodeResources(kube, name="other")
                offer.publish({"nvidia.com/gpu": next(counts)})
            except errors.ClusterError as error:
                return "may not change another node" in error.message
            return False

        # The policy comes into force a moment after the server has started.
        envtest.wait(is_refused, "the policy of the nodes")


def test_the_rights_of_an_agent_with_real_gpus_do_not_reach_the_nodes_status(
    real_cluster: worlds.Real, tmp_path: pathlib.Path
) -> None:
    with (
        agent(real_cluster, tmp_path, worlds.SHIPPED) as kube,
        pytest.raises(errors.ClusterError) as caught,
    ):
        advertise.NodeResources(kube, name=worlds.NODE).publish({"nvidia.com/gpu": 8})

    assert caught.value.reason is errors.Reason.FORBIDDEN
