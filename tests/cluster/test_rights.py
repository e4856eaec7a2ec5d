"""Least privilege: what is shipped is enough, each right of it is needed, and less is survived."""

import pathlib
from collections.abc import Callable, Mapping

import pytest

from mig_manager.core import model
from mig_manager.core.node import cluster
from mig_manager.sandbox.demo import stages
from mig_manager.sandbox.node import node_options, objects
from tests.cluster import worlds

LAYOUT = "all-1g.5gb"


@pytest.mark.parametrize("style", node_options.DeployStyle)
def test_the_shipped_rights_are_enough_for_a_whole_reconfiguration(
    where: worlds.Cluster, tmp_path: pathlib.Path, style: node_options.DeployStyle
) -> None:
    with worlds.stage(where, tmp_path, style=style) as world:
        world.run_pods(worlds.gpu_pods(["train"]))
        world.label(LAYOUT)

        assert world.wait_for_end(LAYOUT) is model.State.SUCCESS
        # The Event comes after the labels; an agent that has stopped has published it.
        assert world.stop_agent() == 0
        assert set(worlds.event_reasons(world)) == {"Draining", "Applied"}


def said_no(world: stages.Stage) -> str:
    """Return the lines of the agent's log that tell of something forbidden."""
    lines = world.agent_log.read_text().splitlines()
    return "\n".join(line for line in lines if "403" in line)


def never_begins(world: stages.Stage, right: worlds.Right) -> None:
    """The agent says what it lacks, and the node stays as it is."""
    world.wait(lambda: complaint(right) in said_no(world), "the agent's complaint")
    assert cluster.STATE_LABEL not in objects.labels(world.node())
    assert "train" in world.workloads()
    worlds.assert_nothing_taken(world)


def fails(world: stages.Stage, right: worlds.Right) -> None:
    """The run ends, says what was forbidden, and gives back what it took."""
    assert world.wait_for_end(LAYOUT) is model.State.FAILED
    assert world.status()["reason"] == "Forbidden"
    assert complaint(right, quote='"') in world.status()["message"]
    worlds.assert_nothing_taken(world)


def is_served_by_lists(world: stages.Stage, right: worlds.Right) -> None:
    """The agent says what it lacks, and learns of the wish all the same, only later."""
    assert world.wait_for_end(LAYOUT) is model.State.SUCCESS
    assert complaint(right) in said_no(world)


def is_served_by_looking(world: stages.Stage, right: worlds.Right) -> None:
    """The layout comes into force, and the agent says what it has to do without."""
    assert world.wait_for_end(LAYOUT) is model.State.SUCCESS
    assert complaint(right) in said_no(world)


def is_not_asked_without_claims(world: stages.Stage, right: worlds.Right) -> None:
    """No pod of this node has a ResourceClaim; ``test_api`` has one that does."""
    assert world.wait_for_end(LAYOUT) is model.State.SUCCESS
    assert complaint(right) not in said_no(world)


def is_served_in_silence(world: stages.Stage, right: worlds.Right) -> None:
    """The layout comes into force, nobody sees Events, and the agent says why."""
    assert world.wait_for_end(LAYOUT) is model.State.SUCCESS
    assert world.stop_agent() == 0
    assert worlds.event_reasons(world) == ()
    assert complaint(right) in said_no(world)


def complaint(right: worlds.Right, quote: str = '\\"') -> str:
    _, resource, verb = right
    return f"cannot {verb} resource {quote}{resource}{quote}"


WITHOUT: Mapping[worlds.Right, Callable[[stages.Stage, worlds.Right], None]] = {
    ("", "nodes", "get"): never_begins,
    ("", "nodes", "list"): never_begins,
    ("", "nodes", "patch"): never_begins,
    ("", "nodes", "watch"): is_served_by_lists,
    ("", "pods", "list"): fails,
    ("", "pods", "watch"): is_served_by_looking,
    ("", "pods", "delete"): fails,
    ("", "pods/eviction", "create"): fails,
    ("policy", "poddisruptionbudgets", "list"): is_served_by_looking,
    ("resource.k8s.io", "resourceclaims", "get"): is_not_asked_without_claims,
    ("", "events", "create"): is_served_in_silence,
}


def test_every_shipped_right_has_a_test_that_shows_its_need() -> None:
    assert worlds.SHIPPED.everywhere == WITHOUT.keys()


def test_the_shipped_rules_are_as_narrow_as_a_cluster_role_can_be() -> None:
    for rule in worlds.shipped_rules():
        assert rule.keys() == {"apiGroups", "resources", "verbs"}
        assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])


@pytest.mark.parametrize("right", WITHOUT, ids=lambda right: f"{right[2]}-{right[1]}")
def test_without_one_of_the_rights_the_agent_cannot_do_its_work_and_says_so(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path, right: worlds.Right
) -> None:
    with worlds.stage(
        where_in_depth,
        tmp_path,
        *worlds.PATIENT,
        *("--drain-timeout-s", "2"),
        rights=worlds.SHIPPED.without(right),
        style=node_options.DeployStyle.PLAIN,
    ) as world:
        world.run_pods(worlds.gpu_pods(["train"]))

        world.label(LAYOUT)

        WITHOUT[right](world, right)
