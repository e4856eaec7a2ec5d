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
from mig_manager.sandbox import scenarios, stages
from mig_manager.sandbox.node import cluster_view, node_options, objects
from tests.cluster import clusters

NODE_PATH = f"/api/v1/nodes/{clusters.NODE}"
FOREIGN_TAINT = {"key": "example.com/flaky", "effect": "PreferNoSchedule"}

# A connection that a dying server resets before its handshake leaves a socket open in Python's
# ssl.SSLSocket._create: it raises what recv raises without closing.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning"
)


@pytest.mark.parametrize("story", scenarios.STORIES)
def test_every_story_of_the_demo_comes_out_as_it_must_on_a_mixed_node(
    where_in_depth: clusters.Cluster, tmp_path: pathlib.Path, story: str
) -> None:
    spec = "2xA100-SXM4-80GB+1xA30"
    story_ = scenarios.STORIES[story]
    gpus = [hardware.template(p, i) for i, p in enumerate(hardware.parse_node(spec))]
    with clusters.stage(where_in_depth, tmp_path, *story_.agent_options, spec=spec) as stage:
        story_.prepare(stage)

        checks = story_.play(stage, story_.layout(gpus), lambda _text: None)

        assert checks
        assert [text for text, holds in checks.items() if not holds] == []
        clusters.assert_nothing_taken(stage)


def test_taints_of_others_outlive_the_hold_taint(
    where: clusters.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(where, tmp_path, style=node_options.DeployStyle.PLAIN) as stage:
        change = {"spec": {"taints": [FOREIGN_TAINT]}}
        stage.api.patch(NODE_PATH, change, kind=api.PatchType.MERGE)
        stage.label("all-1g.5gb")

        assert stage.wait_for_end("all-1g.5gb") is model.State.SUCCESS
        assert stage.api.get(NODE_PATH)["spec"]["taints"] == [FOREIGN_TAINT]


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("all-9g.1gb", "UnknownConfig"),
        ("all-1g.10gb.me", "UnknownProfile"),
        (scenarios.TOO_MUCH, "DoesNotFit"),
    ],
)
def test_an_impossible_layout_touches_nothing(
    where_in_depth: clusters.Cluster, tmp_path: pathlib.Path, layout: str, reason: str
) -> None:
    with clusters.stage(where_in_depth, tmp_path) as stage:
        stage.run_pods(clusters.gpu_pods(["train"]))
        pods = {objects.uid(pod) for pod in stage.cluster.list(cluster_view.Kind.POD)}
        labels = dict(objects.labels(stage.node()))

        stage.label(layout)

        assert stage.wait_for_end(layout) is model.State.FAILED
        assert stage.status()["reason"] == reason
        assert {objects.uid(pod) for pod in stage.cluster.list(cluster_view.Kind.POD)} == pods
        ours = {cluster.CONFIG_LABEL: layout, cluster.STATE_LABEL: "failed"}
        assert dict(objects.labels(stage.node())) == {**labels, **ours}


def test_a_corrected_file_is_served_without_touching_the_label(
    where_in_depth: clusters.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(where_in_depth, tmp_path) as stage:
        good = stage.config_file.read_text()
        stage.config_file.write_text("version: v1\nmig-configs:\n  all-1g.5gb: 7\n")
        stage.label("all-1g.5gb")
        assert stage.wait_for_end("all-1g.5gb") is model.State.FAILED
        assert stage.status()["reason"] == "InvalidConfig"
        assert "config.yaml:3:" in stage.status()["message"]

        stage.config_file.write_text(good)

        stage.wait(lambda: stage.status().get("state") == "success", "success")
        assert stage.allocatable() == {"nvidia.com/mig-1g.5gb": 7}


def in_a_guarded_drain(where: clusters.Cluster, stage: stages.Stage) -> None:
    stage.run_pods(clusters.gpu_pods(["train"]))
    clusters.guard(where, stage, {"app": "train"})
    stage.label("all-1g.5gb")
    stage.wait(lambda: stage.status().get("phase") == "Drain", "the drain")


def test_a_newer_label_during_the_drain_takes_over_at_once(
    where_in_depth: clusters.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(where_in_depth, tmp_path) as stage:
        in_a_guarded_drain(where_in_depth, stage)

        stage.label("all-disabled")

        assert stage.wait_for_end("all-disabled") is model.State.SUCCESS
        assert "train" in stage.workloads()
        clusters.assert_nothing_taken(stage)


def test_an_agent_stopped_during_the_drain_restores_everything(
    where_in_depth: clusters.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(where_in_depth, tmp_path) as stage:
        in_a_guarded_drain(where_in_depth, stage)

        assert stage.stop_agent() == 0

        stage.wait(lambda: stage.status().get("state") == "failed", "a terminal state")
        assert stage.status()["reason"] == "Interrupted"
        clusters.assert_nothing_taken(stage)


def test_a_drain_that_a_budget_blocks_ends_with_the_budgets_name(
    where: clusters.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(where, tmp_path, "--drain-timeout-s", "1", *clusters.PATIENT) as stage:
        in_a_guarded_drain(where, stage)

        assert stage.wait_for_end("all-1g.5gb") is model.State.FAILED
        assert stage.status()["reason"] == "DrainTimeout"
        assert "PodDisruptionBudget guard needs" in stage.status()["message"]
        assert "train" in stage.workloads()
        clusters.assert_nothing_taken(stage)


def test_an_agent_killed_while_the_plugin_is_paused_is_resumed_by_its_successor(
    where: clusters.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(where, tmp_path) as stage:
        stage.label("all-1g.5gb")
        stage.wait(
            lambda: cluster.PAUSED_VALUE in objects.labels(stage.node()).values(), "the pause"
        )
        stage.stop_agent(signal.SIGKILL)

        stage.start_agent()

        stage.wait(lambda: stage.status().get("state") == "success", "success")
        assert stage.allocatable() == {"nvidia.com/mig-1g.5gb": 7}
        clusters.assert_nothing_taken(stage)


def test_a_removed_label_leaves_the_layout_active(
    where_in_depth: clusters.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(where_in_depth, tmp_path) as stage:
        stage.label("all-1g.5gb")
        assert stage.wait_for_end("all-1g.5gb") is model.State.SUCCESS

        unlabelled = {"metadata": {"labels": {cluster.CONFIG_LABEL: None}}}
        stage.cluster.patch(cluster_view.Kind.NODE, stage.node(), unlabelled)
        # The agent's answer to a later request shows that it has seen the removal before.
        stage.label("all-9g.1gb")

        assert stage.wait_for_end("all-9g.1gb") is model.State.FAILED
        assert objects.labels(stage.node())[cluster.APPLIED_LABEL] == "all-1g.5gb"
        assert stage.allocatable() == {"nvidia.com/mig-1g.5gb": 7}


def test_a_label_that_changes_after_the_watch_was_lost_for_good_is_served(
    where_in_depth: clusters.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(where_in_depth, tmp_path) as stage:
        stage.label("all-1g.5gb")
        assert stage.wait_for_end("all-1g.5gb") is model.State.SUCCESS

        where_in_depth.expire_watches()
        stage.label("all-2g.10gb")

        assert stage.wait_for_end("all-2g.10gb") is model.State.SUCCESS
        stage.wait(lambda: has_lost_its_watch(stage), "the end of the watch")


def has_lost_its_watch(stage: stages.Stage) -> bool:
    """Return whether the agent had to list its node again.

    A server that is just starting may refuse the watch before it could say that it has expired.
    """
    lines = [json.loads(line) for line in stage.agent_log.read_text().splitlines()]
    return any(
        line["event"] == "node_watch_expired"
        or (line["event"] == "node_watch_lost" and line["status"] is not None)
        for line in lines
    )


def test_writers_of_taints_do_not_lose_each_others_changes(
    where_in_depth: clusters.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(where_in_depth, tmp_path, style=node_options.DeployStyle.PLAIN) as stage:
        ended = threading.Event()
        writer = threading.Thread(target=tag_until, args=(stage.api, ended))
        writer.start()
        try:
            stage.label("all-1g.5gb")
            assert stage.wait_for_end("all-1g.5gb") is model.State.SUCCESS
        finally:
            ended.set()
            writer.join()

        clusters.assert_nothing_taken(stage)


def tag_until(kube: api.KubeApi, ended: threading.Event) -> None:
    """Write the node again and again, as its status and its labels are in real clusters."""
    count = 0
    while not ended.wait(0.02):
        count += 1
        change = {"metadata": {"annotations": {"example.com/count": str(count)}}}
        kube.patch(NODE_PATH, change, kind=api.PatchType.MERGE)
