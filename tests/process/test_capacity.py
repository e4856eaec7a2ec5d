"""The use of the GPUs, as the real agent process publishes it on a sandbox node."""

import json
from collections.abc import Iterator

import pytest

from mig_manager.core.objects import well_known
from mig_manager.sandbox.node import cluster_view, objects
from testkit import apiserver
from tests.rigs.stage import agent_stage

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


@pytest.fixture
def stage() -> Iterator[agent_stage.AgentStage]:
    """A node with a layout that no pod uses, at rest."""
    with agent_stage.AgentStage("1xA100-SXM4-40GB") as stage:
        stage.apply_layout("all-balanced")
        await_use(stage)
        yield stage


def run_pod(stage: agent_stage.AgentStage, name: str) -> None:
    profile = {"small": "2g.10gb", "large": "3g.20gb"}[name]
    stage.run_pods([(name, f"nvidia.com/mig-{profile}", {})])


@pytest.mark.slow
def test_an_agent_at_rest_neither_follows_pods_nor_asks_the_api(
    stage: agent_stage.AgentStage,
) -> None:
    stage.server.log.clear()

    run_pod(stage, "large")

    assert agents_requests(stage.server) == []
    assert published_use(stage) == []


@pytest.mark.slow
def test_published_use_follows_pods_while_the_node_is_on_demand(
    stage: agent_stage.AgentStage,
) -> None:
    run_pod(stage, "large")
    stage.patch(partitioning=well_known.ON_DEMAND)
    await_use(stage, LARGE)
    stage.server.log.clear()

    run_pod(stage, "small")
    await_use(stage, SMALL, LARGE)
    assert agents_requests(stage.server) == [("patch", "nodes")]
    delete(stage, "large")
    await_use(stage, SMALL)


@pytest.mark.slow
def test_published_use_stays_once_the_node_is_no_longer_on_demand(
    stage: agent_stage.AgentStage,
) -> None:
    server = stage.server
    run_pod(stage, "small")
    stage.patch(partitioning=well_known.ON_DEMAND)
    await_use(stage, SMALL)
    watches = server.watch_count

    stage.patch(partitioning=None)

    stage.wait(lambda: server.watch_count < watches, "end of the watch of the pods")
    server.log.clear()
    delete(stage, "small")
    stage.wait(lambda: not stage.workloads(), "end of the pod")
    assert agents_requests(server) == []
    assert published_use(stage) == [SMALL]


@pytest.mark.slow
def test_a_restarted_agent_publishes_the_use_of_a_node_without_a_request(
    stage: agent_stage.AgentStage,
) -> None:
    stage.stop_agent()
    stage.label(None)
    stage.patch(partitioning=well_known.ON_DEMAND)
    run_pod(stage, "large")

    stage.start_agent()

    await_use(stage, LARGE)
