"""The rights and the policy that a budget for the cluster needs; slots on either API server."""

import functools
import pathlib
import signal
from collections.abc import Callable, Iterator, Mapping

import pytest

from mig_manager import errors
from mig_manager.adapters.host import clock
from mig_manager.adapters.kubernetes import api, api_errors, leases
from mig_manager.core import model
from mig_manager.sandbox.demo import stages
from mig_manager.sandbox.node import objects
from tests.cluster import envtest, worlds

LAYOUT = "all-1g.5gb"
NAMESPACE = worlds.OURS.namespace
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
BUDGET = ("--max-concurrent-nodes", "1", "--slots-namespace", NAMESPACE)
GROUP = "coordination.k8s.io"


def holders(kube: api.KubeApi) -> list[str]:
    return [each["spec"].get("holderIdentity", "") for each in kube.get(LEASES)["items"]]


def complaints(world: stages.Stage, right: worlds.Right) -> list[str]:
    """Return the lines of the agent's log that tell of this right."""
    said = f'cannot {right[2]} resource \\"leases\\"'
    return [line for line in world.agent_log.read_text().splitlines() if said in line]


def test_the_shipped_rights_are_enough_for_a_reconfiguration_with_a_budget(
    where: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with worlds.stage(where, tmp_path, *BUDGET, rights=worlds.BUDGET) as world:
        world.label(LAYOUT)

        assert world.wait_for_end(LAYOUT) is model.State.SUCCESS
        assert world.stop_agent() == 0
        assert holders(world.api) == [""]


def test_after_an_agent_that_was_killed_in_a_change_the_next_one_takes_its_slot_again(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with worlds.stage(where_in_depth, tmp_path, *BUDGET, rights=worlds.BUDGET) as world:
        world.run_pods(worlds.gpu_pods(["train"]))
        worlds.guard(where_in_depth, world, {"app": "train"})
        world.label(LAYOUT)
        world.wait(lambda: bool(world.node()["spec"].get("taints")), "the taint")
        world.stop_agent(signal.SIGKILL)
        assert holders(world.api) == [worlds.NODE]
        world.api.delete(f"{worlds.BUDGETS}/guard")

        world.start_agent()

        assert world.wait_for_end(LAYOUT) is model.State.SUCCESS
        assert world.stop_agent() == 0
        assert holders(world.api) == [""]


def fails(world: stages.Stage, right: worlds.Right) -> None:
    """The run says what was forbidden before it has touched anything."""
    assert world.wait_for_end(LAYOUT) is model.State.FAILED
    assert world.status()["reason"] == "Forbidden"
    assert complaints(world, right) or right[2] in world.status()["message"]
    worlds.assert_nothing_taken(world)


def keeps_its_slot(world: stages.Stage, right: worlds.Right) -> None:
    """The layout comes into force; the slot is not given back, and expires."""
    assert world.wait_for_end(LAYOUT) is model.State.SUCCESS
    assert world.stop_agent() == 0
    assert holders(world.api) == [worlds.NODE]
    assert "slot_not_released" in world.agent_log.read_text()
    assert complaints(world, right)


WITHOUT: Mapping[worlds.Right, Callable[[stages.Stage, worlds.Right], None]] = {
    (GROUP, "leases", "list"): fails,
    (GROUP, "leases", "create"): fails,
    (GROUP, "leases", "update"): keeps_its_slot,
}


def test_every_right_of_the_budget_has_a_test_that_shows_its_need() -> None:
    assert worlds.BUDGET.within == WITHOUT.keys()
    assert worlds.BUDGET.everywhere == worlds.SHIPPED.everywhere


@pytest.mark.parametrize("right", WITHOUT, ids=lambda right: f"{right[2]}-{right[1]}")
def test_without_one_of_the_rights_the_agent_cannot_keep_to_its_budget_and_says_so(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path, right: worlds.Right
) -> None:
    rights = worlds.BUDGET.without(right)
    with worlds.stage(where_in_depth, tmp_path, *worlds.PATIENT, *BUDGET, rights=rights) as world:
        world.label(LAYOUT)

        WITHOUT[right](world, right)


def test_slots_are_taken_renewed_and_given_back_as_the_api_has_them(
    where: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with where.admit(tmp_path, worlds.BUDGET) as credentials:
        kube = api.KubeApi.connect(kubeconfig=str(credentials.people))

        def of(node: str) -> leases.LeaseSlots:
            return leases.LeaseSlots(
                kube,
                namespace=NAMESPACE,
                node_name=node,
                limit=1,
                clock=clock.SystemClock(),
                times=leases.Times(lease_s=1, renew_s=0.05),
            )

        first, second = of("a"), of("b")
        assert first.take() == ""
        assert "under change now: a" in second.take()
        (before,) = kube.get(LEASES)["items"]
        envtest.wait(
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
    real_cluster: worlds.Real, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[api.KubeApi]:
    folder = tmp_path_factory.mktemp("slots")
    with real_cluster.admit(folder, worlds.BUDGET) as credentials:
        kube = api.KubeApi.connect(kubeconfig=str(credentials.agent))
        envtest.wait(
            lambda: bool(refusal(lambda: kube.post(LEASES, a_lease("other", "")))), "the policy"
        )
        yield kube
        kube.close()


def a_lease(name: str, holder: str) -> worlds.Object:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": 90},
    }


def refusal(act: Callable[[], object]) -> str:
    """Return the policy's words; nothing if it lets the act pass."""
    try:
        act()
    except api_errors.ApiError as error:
        if error.reason is errors.Reason.FORBIDDEN and "AdmissionPolicy" in error.explanation:
            return error.explanation
        if error.status == 409:
            return ""
        raise
    return ""


def write(real: worlds.Real, agent: api.KubeApi, name: str, *, before: str, now: str) -> str:
    """Have people make a Lease and the agent write another holder; return what is said."""
    real.kube.delete(LEASES)
    made = real.kube.post(LEASES, a_lease(name, before))
    wanted = a_lease(name, now)
    wanted["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"]
    return refusal(functools.partial(agent.put, f"{LEASES}/{objects.name(made)}", wanted))


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("name", "before", "now", "is_allowed"),
    [
        ("mig-manager-slot-0", "", worlds.NODE, True),
        ("mig-manager-slot-12", "other", worlds.NODE, True),
        ("mig-manager-slot-0", worlds.NODE, worlds.NODE, True),
        ("mig-manager-slot-0", worlds.NODE, "", True),
        ("mig-manager-slot-0", "other", "", False),
        ("mig-manager-slot-0", "", "other", False),
        ("mig-manager-slot-01", "", worlds.NODE, False),
        ("leader", "", worlds.NODE, False),
    ],
)
def test_the_agent_writes_slots_alone_and_for_its_own_node(
    real_cluster: worlds.Real,
    agent: api.KubeApi,
    name: str,
    before: str,
    now: str,
    is_allowed: bool,  # noqa: FBT001 - a row of the table
) -> None:
    said = write(real_cluster, agent, name, before=before, now=now)

    assert (not said) is is_allowed


@pytest.mark.cluster
def test_the_agent_makes_no_lease_but_slots_of_its_own(
    real_cluster: worlds.Real, agent: api.KubeApi
) -> None:
    real_cluster.kube.delete(LEASES)

    assert refusal(lambda: agent.post(LEASES, a_lease("mig-manager-slot-0", "other")))
    assert refusal(lambda: agent.post(LEASES, a_lease("leader", worlds.NODE)))
    assert not refusal(lambda: agent.post(LEASES, a_lease("mig-manager-slot-0", worlds.NODE)))
