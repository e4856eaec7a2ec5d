"""Least privilege: what is shipped is enough, each right of it is needed, and less is survived."""

import pathlib
from collections.abc import Callable, Mapping

import pytest

from mig_manager.core import model
from mig_manager.core.node import cluster
from mig_manager.sandbox import stages
from mig_manager.sandbox.node import node_options, objects
from tests.cluster import clusters

LAYOUT = "all-1g.5gb"


@pytest.mark.parametrize("style", node_options.DeployStyle)
def test_the_shipped_rights_are_enough_for_a_whole_reconfiguration(
    where: clusters.Cluster, tmp_path: pathlib.Path, style: node_options.DeployStyle
) -> None:
    with clusters.stage(where, tmp_path, style=style) as stage:
        stage.run_pods(clusters.gpu_pods(["train"]))
        stage.label(LAYOUT)

        assert stage.wait_for_end(LAYOUT) is model.State.SUCCESS
        # The Event comes after the labels; an agent that has stopped has published it.
        assert stage.stop_agent() == 0
        assert set(clusters.event_reasons(stage)) == {"Draining", "Applied"}
        assert stage.allocatable() == {"nvidia.com/mig-1g.5gb": 7}
        clusters.assert_nothing_taken(stage)


def said_no(stage: stages.Stage) -> str:
    """Return the lines of the agent's log about something forbidden."""
    lines = stage.agent_log.read_text().splitlines()
    return "\n".join(line for line in lines if "403" in line)


def never_begins(stage: stages.Stage, right: clusters.Right) -> None:
    """The agent says what it lacks, and the node stays as it is."""
    stage.wait(lambda: complaint(right) in said_no(stage), "the agent's complaint")
    assert cluster.STATE_LABEL not in objects.labels(stage.node())
    assert "train" in stage.workloads()
    clusters.assert_nothing_taken(stage)


def fails(stage: stages.Stage, right: clusters.Right) -> None:
    """The run ends, says what was forbidden, and restores what it took."""
    assert stage.wait_for_end(LAYOUT) is model.State.FAILED
    assert stage.status()["reason"] == "Forbidden"
    assert complaint(right, quote='"') in stage.status()["message"]
    clusters.assert_nothing_taken(stage)


def is_served(stage: stages.Stage, right: clusters.Right) -> None:
    """The layout becomes active, perhaps later, and the agent says what it lacks."""
    assert stage.wait_for_end(LAYOUT) is model.State.SUCCESS
    assert complaint(right) in said_no(stage)


def is_not_asked_without_claims(stage: stages.Stage, right: clusters.Right) -> None:
    """No pod of this node has a ResourceClaim; ``test_api`` has one that does."""
    assert stage.wait_for_end(LAYOUT) is model.State.SUCCESS
    assert complaint(right) not in said_no(stage)


def is_served_in_silence(stage: stages.Stage, right: clusters.Right) -> None:
    """The layout becomes active, no Event appears, and the agent says why."""
    assert stage.wait_for_end(LAYOUT) is model.State.SUCCESS
    assert stage.stop_agent() == 0
    assert clusters.event_reasons(stage) == ()
    assert complaint(right) in said_no(stage)


def complaint(right: clusters.Right, quote: str = '\\"') -> str:
    _, resource, verb = right
    return f"cannot {verb} resource {quote}{resource}{quote}"


WITHOUT: Mapping[clusters.Right, Callable[[stages.Stage, clusters.Right], None]] = {
    ("", "nodes", "get"): never_begins,
    ("", "nodes", "list"): never_begins,
    ("", "nodes", "patch"): never_begins,
    ("", "nodes", "watch"): is_served,
    ("", "pods", "list"): fails,
    ("", "pods", "watch"): is_served,
    ("", "pods", "delete"): fails,
    ("", "pods/eviction", "create"): fails,
    ("policy", "poddisruptionbudgets", "list"): is_served,
    ("resource.k8s.io", "resourceclaims", "get"): is_not_asked_without_claims,
    ("", "events", "create"): is_served_in_silence,
}


def test_every_shipped_right_has_a_test_that_shows_its_need() -> None:
    assert clusters.SHIPPED.everywhere == WITHOUT.keys()


def test_the_shipped_rules_are_as_narrow_as_a_cluster_role_can_be() -> None:
    for rule in clusters.shipped_rules():
        assert rule.keys() == {"apiGroups", "resources", "verbs"}
        assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])


@pytest.mark.parametrize("right", WITHOUT, ids=lambda right: f"{right[2]}-{right[1]}")
def test_without_one_of_the_rights_the_agent_cannot_do_its_work_and_says_so(
    where_in_depth: clusters.Cluster, tmp_path: pathlib.Path, right: clusters.Right
) -> None:
    with clusters.stage(
        where_in_depth,
        tmp_path,
        *clusters.PATIENT,
        *("--drain-timeout-s", "2"),
        rights=clusters.SHIPPED.without(right),
        style=node_options.DeployStyle.PLAIN,
    ) as stage:
        stage.run_pods(clusters.gpu_pods(["train"]))

        stage.label(LAYOUT)

        WITHOUT[right](stage, right)
