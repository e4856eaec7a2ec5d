"""The use of the GPUs, as the real agent process publishes it on a sandbox node."""

import json

import pytest

from mig_manager.core.node import well_known
from mig_manager.sandbox.node import cluster_view, objects
from testkit import apiserver
from tests.stage import agent_stage

SMALL, LARGE = [0, 2], [4, 4]


def published_use(stage: agent_stage.AgentStage) -> list[list[int]] | None:
    """Return the published spans in use of the only GPU."""
    text = objects.annotations(stage.node()).get(well_known.CAPACITY_ANNOTATION)
    return json.loads(text)["gpus"][0]["inUse"] if text else None


def await_use(stage: agent_stage.AgentStage, *spans: list[int]) -> None:
    stage.wait(lambda: published_use(stage) == list(spans), f"published use {spans}")


def delete(stage: agent_stage.AgentStage, name: str) -> None:
    stage.cluster.delete(cluster_view.WatchedKind.POD, stage.workloads()[name])


def agents_requests(server: apiserver.ApiServer) -> list[tuple[str, str]]:
    """Return the agent's requests but for the Event and the condition that follow a run."""
    token = "sandbox"  # noqa: S105 - the embedded server takes any
    return [
        (one.verb, one.resource)
        for one in server.log.requests()
        if one.token == token and one.resource in ("nodes", "pods")
    ]


@pytest.mark.slow
def test_published_use_follows_the_pods_while_the_node_is_on_demand() -> None:
    with agent_stage.AgentStage("1xA100-SXM4-40GB") as stage:
        server = stage.server
        stage.assert_ends("all-balanced")
        await_use(stage)
        server.log.clear()
        stage.run_pods([("large", "nvidia.com/mig-3g.20gb", {})])
        # At rest, and without the label, the agent asks the API for nothing.
        assert agents_requests(server) == []
        assert published_use(stage) == []

        stage.patch(partitioning=well_known.ON_DEMAND)
        await_use(stage, LARGE)
        server.log.clear()
        stage.run_pods([("small", "nvidia.com/mig-2g.10gb", {})])
        await_use(stage, SMALL, LARGE)
        assert agents_requests(server) == [("patch", "nodes")]
        delete(stage, "large")
        await_use(stage, SMALL)

        watches = server.watch_count
        stage.patch(partitioning=None)
        stage.wait(lambda: server.watch_count < watches, "end of the watch of the pods")
        server.log.clear()
        delete(stage, "small")
        stage.wait(lambda: not stage.workloads(), "end of the pod")
        assert agents_requests(server) == []
        assert published_use(stage) == [SMALL]
        stage.stop_agent()
        stage.label(None)
        stage.patch(partitioning=well_known.ON_DEMAND)
        stage.run_pods([("large", "nvidia.com/mig-3g.20gb", {})])
        stage.start_agent()
        await_use(stage, LARGE)
