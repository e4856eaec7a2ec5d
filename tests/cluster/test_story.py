"""The agent's whole story, on the embedded API server and on a real one."""

import json
import pathlib
import signal
import threading

import pytest

from mig_manager.adapters.kubernetes import api
from mig_manager.catalogue import hardware
from mig_manager.core import model
from mig_manager.core.node import cluster
from mig_manager.sandbox.demo import scenarios, stages
from mig_manager.sandbox.node import cluster_view, node_options, objects
from tests.cluster import worlds

FOREIGN_TAINT = {"key": "example.com/flaky", "effect": "PreferNoSchedule"}


@pytest.mark.parametrize("story", scenarios.STORIES)
def test_every_story_of_the_demo_comes_out_as_it_must_on_a_mixed_node(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path, story: str
) -> None:
    spec = "2xA100-SXM4-80GB+1xA30"
    told = scenarios.STORIES[story]
    gpus = [hardware.template(p, i) for i, p in enumerate(hardware.parse_node(spec))]
    with worlds.stage(where_in_depth, tmp_path, *told.agent_options, spec=spec) as world:
        told.prepare(world)

        checks = told.play(world, told.layout(gpus), lambda _text: None)

        assert checks
        assert [check.text for check in checks if not check.holds] == []
        worlds.assert_nothing_taken(world)


def test_a_plugin_without_deploy_label_is_held_off_during_the_change_and_restarted(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with worlds.stage(where_in_depth, tmp_path, style=node_options.DeployStyle.PLAIN) as world:
        world.label("all-1g.5gb")

        assert world.wait_for_end("all-1g.5gb") is model.State.SUCCESS
        assert world.allocatable() == {"nvidia.com/mig-1g.5gb": 7}
        worlds.assert_nothing_taken(world)


def test_taints_of_others_outlive_the_hold_taint(
    where: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with worlds.stage(where, tmp_path, style=node_options.DeployStyle.PLAIN) as world:
        add_taint(world.api, FOREIGN_TAINT)
        world.label("all-1g.5gb")

        assert world.wait_for_end("all-1g.5gb") is model.State.SUCCESS
        assert world.api.get(f"/api/v1/nodes/{worlds.NODE}")["spec"]["taints"] == [FOREIGN_TAINT]


def add_taint(kube: api.KubeApi, taint: dict[str, str]) -> None:
    change = [{"op": "add", "path": "/spec/taints", "value": [taint]}]
    kube.patch(f"/api/v1/nodes/{worlds.NODE}", change, kind=api.PatchType.JSON)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("all-9g.1gb", "UnknownConfig"),
        ("all-1g.10gb.me", "UnknownProfile"),
        (scenarios.TOO_MUCH, "DoesNotFit"),
    ],
)
def test_a_wish_that_cannot_be_touches_nothing(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path, layout: str, reason: str
) -> None:
    with worlds.stage(where_in_depth, tmp_path) as world:
        world.run_pods(worlds.gpu_pods(["train"]))
        pods = {objects.uid(pod) for pod in world.cluster.list(cluster_view.Kind.POD)}
        labels = dict(objects.labels(world.node()))

        world.label(layout)

        assert world.wait_for_end(layout) is model.State.FAILED
        assert world.status()["reason"] == reason
        assert {objects.uid(pod) for pod in world.cluster.list(cluster_view.Kind.POD)} == pods
        ours = {cluster.CONFIG_LABEL: layout, cluster.STATE_LABEL: "failed"}
        assert dict(objects.labels(world.node())) == {**labels, **ours}


def test_a_corrected_file_is_served_without_touching_the_label(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with worlds.stage(where_in_depth, tmp_path) as world:
        good = world.config_file.read_text()
        world.config_file.write_text("version: v1\nmig-configs:\n  all-1g.5gb: 7\n")
        world.label("all-1g.5gb")
        assert world.wait_for_end("all-1g.5gb") is model.State.FAILED
        assert world.status()["reason"] == "InvalidConfig"
        assert "config.yaml:3:" in world.status()["message"]

        world.config_file.write_text(good)

        world.wait(lambda: world.status().get("state") == "success", "success")
        assert world.allocatable() == {"nvidia.com/mig-1g.5gb": 7}


def in_a_guarded_drain(where: worlds.Cluster, world: stages.Stage) -> None:
    world.run_pods(worlds.gpu_pods(["train"]))
    worlds.guard(where, world, {"app": "train"})
    world.label("all-1g.5gb")
    world.wait(lambda: world.status().get("phase") == "Drain", "the drain")


def test_a_newer_label_during_the_drain_takes_over_at_once(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with worlds.stage(where_in_depth, tmp_path) as world:
        in_a_guarded_drain(where_in_depth, world)

        world.label("all-disabled")

        assert world.wait_for_end("all-disabled") is model.State.SUCCESS
        assert "train" in world.workloads()
        worlds.assert_nothing_taken(world)


def test_an_agent_told_to_stop_during_the_drain_gives_everything_back(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with worlds.stage(where_in_depth, tmp_path) as world:
        in_a_guarded_drain(where_in_depth, world)

        assert world.stop_agent() == 0

        world.wait(lambda: world.status().get("state") == "failed", "a terminal state")
        assert world.status()["reason"] == "Interrupted"
        worlds.assert_nothing_taken(world)


def test_a_drain_that_a_budget_blocks_ends_with_the_budgets_name(
    where: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with worlds.stage(where, tmp_path, "--drain-timeout-s", "1", *worlds.PATIENT) as world:
        in_a_guarded_drain(where, world)

        assert world.wait_for_end("all-1g.5gb") is model.State.FAILED
        assert world.status()["reason"] == "DrainTimeout"
        assert "PodDisruptionBudget guard needs" in world.status()["message"]
        assert "train" in world.workloads()
        worlds.assert_nothing_taken(world)


def test_an_agent_killed_while_the_plugin_is_paused_is_made_good_by_its_successor(
    where: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with worlds.stage(where, tmp_path) as world:
        world.label("all-1g.5gb")
        world.wait(
            lambda: cluster.PAUSED_VALUE in objects.labels(world.node()).values(), "the pause"
        )
        world.stop_agent(signal.SIGKILL)

        world.start_agent()

        world.wait(lambda: world.status().get("state") == "success", "success")
        assert world.allocatable() == {"nvidia.com/mig-1g.5gb": 7}
        worlds.assert_nothing_taken(world)


def test_a_label_that_is_taken_away_leaves_the_layout_in_force(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with worlds.stage(where_in_depth, tmp_path) as world:
        world.label("all-1g.5gb")
        assert world.wait_for_end("all-1g.5gb") is model.State.SUCCESS

        unlabelled = {"metadata": {"labels": {cluster.CONFIG_LABEL: None}}}
        world.cluster.patch(cluster_view.Kind.NODE, world.node(), unlabelled)
        # The agent's answer to a later wish shows that it has seen the removal before.
        world.label("all-9g.1gb")

        assert world.wait_for_end("all-9g.1gb") is model.State.FAILED
        assert objects.labels(world.node())[cluster.APPLIED_LABEL] == "all-1g.5gb"
        assert world.allocatable() == {"nvidia.com/mig-1g.5gb": 7}


def test_a_label_that_changes_after_the_watch_was_lost_for_good_is_served(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with worlds.stage(where_in_depth, tmp_path) as world:
        world.label("all-1g.5gb")
        assert world.wait_for_end("all-1g.5gb") is model.State.SUCCESS

        where_in_depth.expire_watches()
        world.label("all-2g.10gb")

        assert world.wait_for_end("all-2g.10gb") is model.State.SUCCESS
        world.wait(lambda: has_lost_its_watch(world), "the end of the watch")


def has_lost_its_watch(world: stages.Stage) -> bool:
    """Tell whether the agent had to list its node anew.

    A server that is just starting may refuse the watch before it could say that it has expired.
    """
    lines = [json.loads(line) for line in world.agent_log.read_text().splitlines()]
    return any(
        line["event"] == "node_watch_expired"
        or (line["event"] == "node_watch_lost" and line["status"] is not None)
        for line in lines
    )


def test_events_on_the_node_tell_what_happened(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with worlds.stage(where_in_depth, tmp_path) as world:
        world.run_pods(worlds.gpu_pods(["train"]))
        world.label("all-1g.5gb")
        assert world.wait_for_end("all-1g.5gb") is model.State.SUCCESS
        # The Event comes after the labels; an agent that has stopped has published it.
        assert world.stop_agent() == 0

        assert set(worlds.event_reasons(world)) == {"Draining", "Applied"}


def test_writers_of_taints_do_not_lose_each_others_changes(
    where_in_depth: worlds.Cluster, tmp_path: pathlib.Path
) -> None:
    with worlds.stage(where_in_depth, tmp_path, style=node_options.DeployStyle.PLAIN) as world:
        ended = threading.Event()
        writer = threading.Thread(target=tag_until, args=(world.api, ended))
        writer.start()
        try:
            world.label("all-1g.5gb")
            assert world.wait_for_end("all-1g.5gb") is model.State.SUCCESS
        finally:
            ended.set()
            writer.join()

        worlds.assert_nothing_taken(world)


def tag_until(kube: api.KubeApi, ended: threading.Event) -> None:
    """Write the node again and again, as its status and its labels are in real clusters."""
    count = 0
    while not ended.wait(0.02):
        count += 1
        change = {"metadata": {"annotations": {"example.com/count": str(count)}}}
        kube.patch(f"/api/v1/nodes/{worlds.NODE}", change, kind=api.PatchType.MERGE)
