"""Least privilege: what is shipped is enough, each right of it is needed, and less is survived."""

import pathlib
from collections.abc import Callable, Mapping

import pytest

from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.sandbox.node import objects
from tests.rigs.cluster import account_rights, api_servers, deploy_files
from tests.rigs.stage import agent_stage, clusters

LAYOUT = "all-1g.5gb"
COORDINATION = "coordination.k8s.io"


PLAIN, OPERATOR = objects.DeployStyle.PLAIN, objects.DeployStyle.GPU_OPERATOR


@pytest.mark.parametrize(
    ("options", "rights", "style", "slots"),
    [
        pytest.param(
            account_rights.BUDGET_OPTIONS,
            account_rights.BUDGET,
            OPERATOR,
            [""],
            id="with a budget",
        ),
        pytest.param(
            *((), account_rights.SHIPPED, PLAIN, []), id="without a budget", marks=pytest.mark.slow
        ),
    ],
)
def test_the_shipped_rights_are_enough_for_a_whole_reconfiguration(
    where: api_servers.Cluster,
    tmp_path: pathlib.Path,
    options: tuple[str, ...],
    rights: account_rights.Rights,
    style: objects.DeployStyle,
    slots: list[str],
) -> None:
    with clusters.stage(where, tmp_path, *options, rights=rights, style=style) as stage:
        stage.run_pods(clusters.TRAIN)
        stage.apply_layout(LAYOUT)

        assert clusters.event_reasons(stage) == {"Draining", "Applied"}
        assert stage.allocatable() == {"nvidia.com/mig-1g.5gb": 7}
        stage.assert_restored()
        assert clusters.slot_owners(stage.api) == slots


def never_begins(stage: agent_stage.AgentStage, right: account_rights.Right) -> None:
    """The agent says what it lacks, and the node stays as it is."""
    stage.wait(lambda: complains(stage, right), "the agent's complaint")
    assert well_known.STATE_LABEL not in objects.labels(stage.node())
    assert "train" in stage.workloads()
    stage.assert_restored()


def fails(stage: agent_stage.AgentStage, right: account_rights.Right) -> None:
    """The run ends, says what was forbidden, and restores what it took."""
    assert stage.wait_for_end(LAYOUT) is run_status.State.FAILED
    assert stage.status()["reason"] == "Forbidden"
    assert f'cannot {right[2]} resource "{right[1]}"' in stage.status()["message"]
    stage.assert_restored()


def is_served(stage: agent_stage.AgentStage, right: account_rights.Right) -> None:
    """The layout becomes active, perhaps later, and the agent says what it lacks."""
    assert stage.wait_for_end(LAYOUT) is run_status.State.SUCCESS
    assert complains(stage, right)


def is_not_asked_without_dra(stage: agent_stage.AgentStage, right: account_rights.Right) -> None:
    """No pod of this node has a ResourceClaim; ``test_dra`` has those that do."""
    assert stage.wait_for_end(LAYOUT) is run_status.State.SUCCESS
    assert not complains(stage, right)


def is_served_in_silence(stage: agent_stage.AgentStage, right: account_rights.Right) -> None:
    """The layout becomes active, no Event appears, and the agent says why."""
    assert stage.wait_for_end(LAYOUT) is run_status.State.SUCCESS
    assert clusters.event_reasons(stage) == set()
    assert complains(stage, right)


def keeps_its_slot(stage: agent_stage.AgentStage, right: account_rights.Right) -> None:
    """The layout becomes active; the slot is not released, and expires."""
    assert stage.wait_for_end(LAYOUT) is run_status.State.SUCCESS
    assert stage.stop_agent() == 0
    assert clusters.slot_owners(stage.api) == [clusters.NODE]
    assert "lease_not_released" in stage.machine.log.read_text()
    assert complains(stage, right)


def complains(stage: agent_stage.AgentStage, right: account_rights.Right) -> bool:
    refusal = f'cannot {right[2]} resource \\"{right[1]}\\"'
    return any(
        "403" in line and refusal in line for line in stage.machine.log.read_text().splitlines()
    )


WITHOUT: Mapping[
    account_rights.Right, Callable[[agent_stage.AgentStage, account_rights.Right], None]
] = {
    ("", "nodes", "get"): never_begins,
    ("", "nodes", "list"): never_begins,
    ("", "nodes", "patch"): never_begins,
    ("", "nodes", "watch"): is_served,
    ("", "nodes/status", "patch"): is_served,
    ("", "pods", "list"): fails,
    ("", "pods", "watch"): is_served,
    ("", "pods", "delete"): fails,
    ("", "pods/eviction", "create"): fails,
    ("policy", "poddisruptionbudgets", "list"): is_served,
    ("resource.k8s.io", "resourceclaims", "get"): is_not_asked_without_dra,
    ("resource.k8s.io", "resourceclaims", "list"): is_not_asked_without_dra,
    ("resource.k8s.io", "resourceslices", "list"): is_not_asked_without_dra,
    ("resource.k8s.io", "resourceslices", "delete"): is_not_asked_without_dra,
    ("", "events", "create"): is_served_in_silence,
    (COORDINATION, "leases", "list"): fails,
    (COORDINATION, "leases", "create"): fails,
    (COORDINATION, "leases", "update"): keeps_its_slot,
}


def test_shipped_rights_each_have_a_test_and_no_rule_is_wider() -> None:
    assert account_rights.SHIPPED.everywhere | account_rights.BUDGET.within == WITHOUT.keys()
    assert {group for group, _, _ in account_rights.BUDGET.within} == {COORDINATION}
    (role,) = deploy_files.manifest_objects("base/rbac.yaml", "ClusterRole")
    for rule in role["rules"]:
        assert rule.keys() == {"apiGroups", "resources", "verbs"}


@pytest.mark.parametrize("right", WITHOUT, ids=lambda right: f"{right[2]}-{right[1]}")
def test_agent_without_one_right_fails_and_reports_it(
    where_in_depth: api_servers.Cluster, tmp_path: pathlib.Path, right: account_rights.Right
) -> None:
    options = account_rights.BUDGET_OPTIONS if right in account_rights.BUDGET.within else ()
    with clusters.stage(
        where_in_depth,
        tmp_path,
        *agent_stage.PATIENT,
        *("--drain-timeout-s", "2"),
        *options,
        rights=account_rights.BUDGET.without(right),
        style=objects.DeployStyle.PLAIN,
    ) as stage:
        stage.run_pods(clusters.TRAIN)

        stage.label(LAYOUT)

        WITHOUT[right](stage, right)
