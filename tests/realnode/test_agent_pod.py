"""The agent's pod: commands in it, its end, and a node that an administrator drains meanwhile."""

import pytest

from testkit import nvml_faults
from tests.realnode import node_state, real_cluster
from tests.rigs import waiting

pytestmark = pytest.mark.realnode

_IN_POD = ("exec", "-n", "mig-manager", "ds/mig-manager", "--", "mig-manager")


def test_a_drain_by_an_administrator_during_a_change_is_not_undone(
    cluster: real_cluster.RealCluster,
) -> None:
    cluster.ensure_layout("all-1g.5gb")
    cluster.driver.gpus.add_fault(nvml_faults.Fault(function="nvmlGpuInstanceDestroy", hang_s=3.0))

    cluster.request("all-2g.10gb")
    cluster.wait_for_phase("Execute")
    cluster.kubectl("drain", real_cluster.NODE, "--ignore-daemonsets", "--delete-emptydir-data")

    assert cluster.outcome("all-2g.10gb")["state"] == "success"
    assert cluster.get("node", real_cluster.NODE)["spec"]["unschedulable"]
    cluster.kubectl("uncordon", real_cluster.NODE)
    node_state.assert_at_rest(cluster)


def test_an_agent_that_is_stopped_as_it_starts_ends_at_once(
    cluster: real_cluster.RealCluster,
) -> None:
    (old,) = node_state.containers(node_state.agents(cluster))
    cluster.node.kill_container(old)
    others = cluster.node.containers()
    waiting.until(lambda: bool(cluster.node.containers() - others), "the agent's next container")
    (new,) = cluster.node.containers() - others

    cluster.node.signal(new, "SIGTERM")

    # It may take 300 s while it changes GPUs.
    waiting.until(lambda: new not in cluster.node.containers(), "its end", within_s=60)
    waiting.until(
        lambda: node_state.is_served(cluster, real_cluster.NODE), "the agent", within_s=120
    )


def test_commands_in_the_agents_pod_list_layouts_and_find_no_problem(
    cluster: real_cluster.RealCluster,
) -> None:
    cluster.ensure_layout("all-1g.5gb")

    cluster.kubectl(*_IN_POD, "assert", "all-1g.5gb")
    assert "all-2g.10gb" in cluster.kubectl(*_IN_POD, "plan", "all-2g.10gb")
    cluster.kubectl(*_IN_POD, "doctor")
