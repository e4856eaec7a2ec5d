"""The rights and the policy that a budget for the cluster needs; slots on either API server."""

import functools
import pathlib
import signal
from collections.abc import Callable, Iterator, Mapping

import pytest

from mig_manager.adapters import host
from mig_manager.adapters.kubernetes import api, leases
from mig_manager.core import model
from mig_manager.sandbox import stages
from mig_manager.sandbox.node import objects
from tests import waiting
from tests.cluster import clusters

LAYOUT = "all-1g.5gb"
NAMESPACE = clusters.OURS.namespace
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
BUDGET = ("--max-concurrent-nodes", "1", "--slots-namespace", NAMESPACE)
GROUP = "coordination.k8s.io"


def holders(kube: api.KubeApi) -> list[str]:
    return [each["spec"].get("holderIdentity", "") for each in kube.get(LEASES)["items"]]


def complaints(stage: stages.Stage, right: clusters.Right) -> list[str]:
    """Return the lines of the agent's log about this right."""
    refusal = f'cannot {right[2]} resource \\"leases\\"'
    return [line for line in stage.agent_log.read_text().splitlines() if refusal in line]


def test_the_shipped_rights_are_enough_for_a_reconfiguration_with_a_budget(
    where: clusters.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(where, tmp_path, *BUDGET, rights=clusters.BUDGET) as stage:
        stage.label(LAYOUT)

        assert stage.wait_for_end(LAYOUT) is model.State.SUCCESS
        assert stage.stop_agent() == 0
        assert holders(stage.api) == [""]


def test_after_an_agent_that_was_killed_in_a_change_the_next_one_takes_its_slot_again(
    where_in_depth: clusters.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(where_in_depth, tmp_path, *BUDGET, rights=clusters.BUDGET) as stage:
        stage.run_pods(clusters.gpu_pods(["train"]))
        clusters.guard(where_in_depth, stage, {"app": "train"})
        stage.label(LAYOUT)
        stage.wait(lambda: bool(stage.node()["spec"].get("taints")), "the taint")
        stage.stop_agent(signal.SIGKILL)
        assert holders(stage.api) == [clusters.NODE]
        stage.api.delete(f"{clusters.BUDGETS}/guard")

        stage.start_agent()

        assert stage.wait_for_end(LAYOUT) is model.State.SUCCESS
        assert stage.stop_agent() == 0
        assert holders(stage.api) == [""]


def fails(stage: stages.Stage, right: clusters.Right) -> None:
    """The run says what was forbidden before it has touched anything."""
    assert stage.wait_for_end(LAYOUT) is model.State.FAILED
    assert stage.status()["reason"] == "Forbidden"
    assert complaints(stage, right) or right[2] in stage.status()["message"]
    clusters.assert_nothing_taken(stage)


def keeps_its_slot(stage: stages.Stage, right: clusters.Right) -> None:
    """The layout becomes active; the slot is not released, and expires."""
    assert stage.wait_for_end(LAYOUT) is model.State.SUCCESS
    assert stage.stop_agent() == 0
    assert holders(stage.api) == [clusters.NODE]
    assert "slot_not_released" in stage.agent_log.read_text()
    assert complaints(stage, right)


WITHOUT: Mapping[clusters.Right, Callable[[stages.Stage, clusters.Right], None]] = {
    (GROUP, "leases", "list"): fails,
    (GROUP, "leases", "create"): fails,
    (GROUP, "leases", "update"): keeps_its_slot,
}


def test_every_right_of_the_budget_has_a_test_that_shows_its_need() -> None:
    assert clusters.BUDGET.within == WITHOUT.keys()
    assert clusters.BUDGET.everywhere == clusters.SHIPPED.everywhere


@pytest.mark.parametrize("right", WITHOUT, ids=lambda right: f"{right[2]}-{right[1]}")
def test_without_one_of_the_rights_the_agent_cannot_keep_to_its_budget_and_says_so(
    where_in_depth: clusters.Cluster, tmp_path: pathlib.Path, right: clusters.Right
) -> None:
    rights = clusters.BUDGET.without(right)
    with clusters.stage(
        where_in_depth, tmp_path, *clusters.PATIENT, *BUDGET, rights=rights
    ) as stage:
        stage.label(LAYOUT)

        WITHOUT[right](stage, right)


def test_slots_are_acquired_renewed_and_released_over_the_api(
    where: clusters.Cluster, tmp_path: pathlib.Path
) -> None:
    with where.admit(tmp_path, clusters.BUDGET) as credentials:
        kube = api.KubeApi.connect(kubeconfig=str(credentials.people))

        def of(node: str) -> leases.LeaseSlots:
            return leases.LeaseSlots(
                kube,
                namespace=NAMESPACE,
                node_name=node,
                limit=1,
                clock=host.SystemClock(),
                times=leases.Times(lease_s=1, renew_s=0.05),
            )

        first, second = of("a"), of("b")
        assert first.take() == ""
        assert "under change now: a" in second.take()
        (before,) = kube.get(LEASES)["items"]
        waiting.until(
            lambda: bool(kube.get(LEASES)["items"][0]["spec"]["renewTime"]
                         > before["spec"]["renewTime"]),
            "a renewal",
        )  # fmt: skip
        first.release()
        assert second.take() == ""
        assert kube.get(LEASES)["items"][0]["spec"]["leaseTransitions"] == 2
        second.release()
        kube.close()


# -- the policy -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agent(
    real_cluster: clusters.Real, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[api.KubeApi]:
    folder = tmp_path_factory.mktemp("slots")
    with real_cluster.admit(folder, clusters.BUDGET) as credentials:
        kube = api.KubeApi.connect(kubeconfig=str(credentials.agent))
        waiting.until(
            lambda: bool(clusters.refusal(lambda: kube.post(LEASES, a_lease("other", "")))),
            "the policy",
        )
        yield kube
        kube.close()


def a_lease(name: str, holder: str) -> clusters.Object:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": 90},
    }


def write(real: clusters.Real, agent: api.KubeApi, name: str, *, before: str, now: str) -> str:
    """Have people make a Lease and the agent write another holder; return what is said."""
    real.kube.delete(LEASES)
    made = real.kube.post(LEASES, a_lease(name, before))
    wanted = a_lease(name, now)
    wanted["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"]
    return clusters.refusal(functools.partial(agent.put, f"{LEASES}/{objects.name(made)}", wanted))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "before", "now", "is_allowed"),
    [
        ("mig-manager-slot-0", "", clusters.NODE, True),
        ("mig-manager-slot-12", "other", clusters.NODE, True),
        ("mig-manager-slot-0", clusters.NODE, clusters.NODE, True),
        ("mig-manager-slot-0", clusters.NODE, "", True),
        ("mig-manager-slot-0", "other", "", False),
        ("mig-manager-slot-0", "", "other", False),
        ("mig-manager-slot-01", "", clusters.NODE, False),
        ("leader", "", clusters.NODE, False),
    ],
)
def test_the_agent_writes_slots_alone_and_for_its_own_node(
    real_cluster: clusters.Real,
    agent: api.KubeApi,
    name: str,
    before: str,
    now: str,
    is_allowed: bool,  # noqa: FBT001 - a row of the table
) -> None:
    message = write(real_cluster, agent, name, before=before, now=now)

    assert (not message) is is_allowed


@pytest.mark.cluster
def test_the_agent_makes_no_lease_but_slots_of_its_own(
    real_cluster: clusters.Real, agent: api.KubeApi
) -> None:
    real_cluster.kube.delete(LEASES)

    assert clusters.refusal(lambda: agent.post(LEASES, a_lease("mig-manager-slot-0", "other")))
    assert clusters.refusal(lambda: agent.post(LEASES, a_lease("leader", clusters.NODE)))
    assert not clusters.refusal(
        lambda: agent.post(LEASES, a_lease("mig-manager-slot-0", clusters.NODE))
    )
