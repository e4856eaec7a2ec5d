"""The agent's whole story, on the embedded API server and on a real one."""

import pathlib
import signal
import threading

import pytest

from mig_manager.adapters.kubernetes import api
from mig_manager.core.objects import well_known
from mig_manager.core.records import run_status
from mig_manager.sandbox import scenarios, stages
from mig_manager.sandbox.node import cluster_view, objects
from tests.rigs import api_objects
from tests.rigs.cluster import account_rights, api_servers
from tests.rigs.node import gpu_values
from tests.rigs.stage import agent_stage, clusters

NODE_PATH = f"/api/v1/nodes/{clusters.NODE}"
FOREIGN_TAINT = {"key": "example.com/flaky", "effect": "PreferNoSchedule"}

# A connection that a dying server resets before its handshake leaves a socket open in Python's
# ssl.SSLSocket._create: it raises what recv raises without closing.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning"
)


KINDS = ("8xA100-SXM4-40GB", "8xH100", "4xA30", "4xRTX-PRO-6000", "4xA100-SXM4-80GB+2xA30")


@pytest.mark.parametrize("story", scenarios.BY_NAME)
@pytest.mark.parametrize(
    ("where", "spec"),
    [
        *(pytest.param("embedded", kind, marks=pytest.mark.slow) for kind in KINDS),
        pytest.param("real", "2xA100-SXM4-80GB+1xA30", marks=pytest.mark.cluster),
    ],
    indirect=["where"],
)
def test_every_story_of_the_demo_comes_out_as_it_must(
    where: api_servers.Cluster, tmp_path: pathlib.Path, spec: str, story: str
) -> None:
    story_ = scenarios.BY_NAME[story]
    gpus = gpu_values.gpus_of(spec)
    with clusters.stage(where, tmp_path, *story_.agent_options, spec=spec) as stage:
        story_.prepare(stage)

        checks = story_.play(stage, story_.layout(gpus), lambda _text: None)

        assert checks
        assert [text for text, holds in checks.items() if not holds] == []
        stage.assert_restored()


STARTUP = "example.com/mig-not-ready"


def ready(stage: agent_stage.AgentStage) -> api_objects.Object:
    """Return the condition of the node; empty if the agent has written none."""
    conditions = stage.node()["status"].get("conditions") or ()
    return next((dict(each) for each in conditions if each["type"] == "MigReady"), {})


def test_a_new_node_is_not_ready_and_tainted_until_its_layout_is_verified(
    where_in_depth: api_servers.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(where_in_depth, tmp_path, "--startup-taint", STARTUP) as stage:
        # The device plugin of this node tolerates no other effect.
        taints = [FOREIGN_TAINT, {"key": STARTUP, "effect": "PreferNoSchedule"}]
        stage.wait(lambda: ready(stage).get("reason") == "NoLayoutRequested", "the condition")
        stage.api.patch(NODE_PATH, {"spec": {"taints": taints}})

        stage.fail_to_apply("no-such-layout")
        stage.wait(lambda: ready(stage).get("reason") == "UnknownConfig", "the condition")
        assert ready(stage)["status"] == "False"
        assert {each["key"] for each in stage.node()["spec"]["taints"]} >= {STARTUP}

        stage.apply_layout("all-1g.5gb")

        stage.wait(lambda: ready(stage)["reason"] == "LayoutVerified", "the condition")
        assert ready(stage)["status"] == "True"
        assert stage.node()["spec"]["taints"] == [FOREIGN_TAINT]


def request_guarded(where: api_servers.Cluster, stage: agent_stage.AgentStage) -> None:
    """Request a layout that must evict a pod which a budget keeps."""
    stage.run_pods(clusters.TRAIN)
    stage.guard({"matchLabels": {"app": "train"}})
    where.count_disruptions(stage.api, stages.BUDGET)
    stage.label("all-1g.5gb")


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped agent", "newer label"])
def test_a_drain_that_is_interrupted_restores_everything(
    where_in_depth: api_servers.Cluster, tmp_path: pathlib.Path, *, is_stopped: bool
) -> None:
    with clusters.stage(where_in_depth, tmp_path) as stage:
        request_guarded(where_in_depth, stage)
        stage.wait(lambda: stage.status().get("phase") == "Drain", "the drain")

        if is_stopped:
            assert stage.stop_agent() == 0
            stage.wait(lambda: stage.status().get("state") == "failed", "a terminal state")
            assert stage.status()["reason"] == "Interrupted"
        else:
            stage.apply_layout("all-disabled")

        assert "train" in stage.workloads()
        stage.assert_restored()


def test_agent_killed_with_a_paused_plugin_is_resumed_by_the_next(
    where_in_depth: api_servers.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(where_in_depth, tmp_path) as stage:
        plugin = next(filter(objects.is_plugin, stage.cluster.list(cluster_view.WatchedKind.POD)))
        # The pause lasts until this pod has stopped, so the kill cannot come too late.
        slow = {"metadata": {"annotations": {objects.STOP_SECONDS: "600"}}}
        stage.cluster.patch(cluster_view.WatchedKind.POD, plugin, slow)
        stage.label("all-1g.5gb")
        stage.wait(
            lambda: well_known.PAUSED_VALUE in objects.labels(stage.node()).values(), "the pause"
        )
        stage.stop_agent(signal.SIGKILL)
        assert well_known.PAUSED_VALUE in objects.labels(stage.api.get(NODE_PATH)).values()
        stage.cluster.delete(cluster_view.WatchedKind.POD, plugin, now=True)

        stage.start_agent()

        stage.wait(lambda: stage.status().get("state") == "success", "success", timeout_s=120)
        assert stage.allocatable() == {"nvidia.com/mig-1g.5gb": 7}
        stage.assert_restored()


def test_agent_after_one_killed_in_a_change_takes_its_slot_again(
    where_in_depth: api_servers.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(
        where_in_depth, tmp_path, *account_rights.BUDGET_OPTIONS, rights=account_rights.BUDGET
    ) as stage:
        request_guarded(where_in_depth, stage)
        stage.wait(lambda: bool(stage.node()["spec"].get("taints")), "the taint")
        stage.stop_agent(signal.SIGKILL)
        assert clusters.slot_owners(stage.api) == [clusters.NODE]
        stage.unguard()

        stage.start_agent()

        assert stage.wait_for_end("all-1g.5gb") is run_status.State.SUCCESS
        assert stage.stop_agent() == 0
        assert clusters.slot_owners(stage.api) == [""]


def test_a_label_that_changes_after_the_watch_was_lost_for_good_is_served(
    where_in_depth: api_servers.Cluster, tmp_path: pathlib.Path
) -> None:
    with clusters.stage(where_in_depth, tmp_path) as stage:
        stage.apply_layout("all-1g.5gb")
        # A later write of the agent would be newer than the versions that expire. The condition
        # is its last one.
        stage.wait(lambda: ready(stage).get("status") == "True", "a node that is ready")

        where_in_depth.expire_watches()
        stage.apply_layout("all-2g.10gb")

        stage.wait(lambda: has_lost_its_watch(stage), "the end of the watch")


def has_lost_its_watch(stage: agent_stage.AgentStage) -> bool:
    """Return whether the agent had to list its node again.

    A server that is just starting may refuse the watch before it can say that it has expired.
    """
    return any(
        line["event"] == "node_watch_expired"
        or (line["event"] == "node_watch_lost" and line["status"] is not None)
        for line in stage.lines()
    )


def test_writers_of_taints_do_not_lose_each_others_changes(
    where_in_depth: api_servers.Cluster, tmp_path: pathlib.Path
) -> None:
    is_over = threading.Event()

    def tag_until_ended(kube: api.KubeApi) -> None:
        """Write the node again and again, as its status and its labels are in real clusters."""
        count = 0
        # A write makes an attempt of the agent fail, which gives up after eight in a row. On a
        # slow machine too most attempts must be quicker than the next write.
        while not is_over.wait(0.2):
            count += 1
            change = {"metadata": {"annotations": {"example.com/count": str(count)}}}
            kube.patch(NODE_PATH, change)

    with clusters.stage(where_in_depth, tmp_path, style=objects.DeployStyle.PLAIN) as stage:
        change = {"spec": {"taints": [FOREIGN_TAINT]}}
        stage.api.patch(NODE_PATH, change)
        writer = threading.Thread(target=tag_until_ended, args=(stage.api,))
        writer.start()
        try:
            stage.apply_layout("all-1g.5gb")
        finally:
            is_over.set()
            writer.join()

        assert stage.api.get(NODE_PATH)["spec"]["taints"] == [FOREIGN_TAINT]
