"""Rollouts by the command line itself, over nodes that keep to the contract."""

import contextlib
import pathlib
import signal
import subprocess

import pytest

from mig_manager import reasons
from mig_manager.core.objects import well_known
from mig_manager.sandbox.apiserver import kinds
from testkit import apiserver
from tests.fleet import census, fake_agents
from tests.rigs import waiting
from tests.rigs.shell import commandline
from tests.rigs.stage import whole_agents

LAYOUT = "all-1g.5gb"
FORMER = "all-balanced"
FAILURES = (
    fake_agents.NodeFailure(reason=reasons.Reason.DOES_NOT_FIT, message="no room on GPU 0"),
    fake_agents.NodeFailure(
        reason=reasons.Reason.DRAIN_TIMEOUT, message="pod a/b stays", is_retried=True
    ),
)


def requested_layouts(server: apiserver.ApiServer) -> dict[str, str | None]:
    """Name of each node -> what its label asks for."""
    return {
        node["metadata"]["name"]: node["metadata"]["labels"].get(well_known.CONFIG_LABEL)
        for node in server.objects(kinds.NODES)
    }


def count_applied(server: apiserver.ApiServer, names: list[str]) -> int:
    return sum(whole_agents.is_applied(server, name, LAYOUT) for name in names)


def start_rollout(
    kubeconfig: pathlib.Path, *options: str
) -> contextlib.AbstractContextManager["subprocess.Popen[str]"]:
    argv = ["rollout", *options, "--kubeconfig", str(kubeconfig), "--output-format", "json"]
    return commandline.start(argv)


def rollout(kubeconfig: pathlib.Path, *options: str) -> commandline.Answer:
    with start_rollout(kubeconfig, *options) as process:
        return commandline.wait_for_answer(process)


def failures_until_paused(
    kubeconfig: pathlib.Path, options: tuple[str, ...]
) -> dict[str, tuple[str, str]]:
    """Roll out until a failure pauses it; return which nodes failed, and why."""
    answer = rollout(kubeconfig, *options)
    assert (answer.status, answer.data["state"]) == (1, "paused")
    assert answer.data["counts"]["to-do"] > 0
    return {node["name"]: (node["reason"], node["message"]) for node in answer.data["failures"]}


def story(
    server: apiserver.ApiServer,
    names: list[str],
    played: fake_agents.FakeAgents,
    kubeconfig: pathlib.Path,
    *,
    most: int,
) -> None:
    """A rollout that is interrupted, resumed, paused by two failures, and ended after repair."""
    bad = dict(zip((names[len(names) // 2], names[len(names) // 2 + 1]), FAILURES, strict=True))
    played.failures |= bad
    counted = census.Census(server)
    options = (LAYOUT, "-l", "gpu=yes", "--max-unavailable", str(most), "--pause-on-failure")

    # However slow this test is, the rollout does not end before it is interrupted.
    quarter = len(names) // 4
    played.dead |= set(names[quarter:])
    with start_rollout(kubeconfig, *options, "--silence-timeout-s", "3600") as process:
        waiting.until(lambda: count_applied(server, names) == quarter, "a quarter of the nodes")
        process.send_signal(signal.SIGINT)
        answer = commandline.wait_for_answer(process)
    played.wake()
    assert (answer.status, answer.data["state"]) == (130, "interrupted")
    assert 0 < answer.data["counts"]["success"] < len(names)
    begun = sum(layout == LAYOUT for layout in requested_layouts(server).values())
    assert begun <= count_applied(server, names) + most + 1

    nodes = failures_until_paused(kubeconfig, options)
    assert set(nodes) <= set(bad)
    if len(nodes) < len(bad):
        # The other one was not yet asked; it pauses the rollout once more.
        nodes = failures_until_paused(kubeconfig, options)
    assert nodes == {name: (each.reason.value, each.message) for name, each in bad.items()}

    for name in bad:
        played.repair(name)
    answer = rollout(kubeconfig, *options)

    assert (answer.status, answer.data["state"]) == (0, "done")
    assert answer.data["counts"]["success"] == len(names)
    assert count_applied(server, names) == len(names)
    assert counted.most <= most


def serve(tmp_path: pathlib.Path, count: int, server: apiserver.ApiServer) -> tuple[
    list[str], pathlib.Path
]:  # fmt: skip
    return whole_agents.populate(server, count, gpu="yes"), server.kubeconfig(
        tmp_path / "kubeconfig"
    )


@pytest.mark.slow
def test_rollout_over_real_agents_is_resumed_and_ended(tmp_path: pathlib.Path) -> None:
    with apiserver.serve() as server:
        names, kubeconfig = serve(tmp_path, 12, server)
        with (
            whole_agents.hosts(server, names[:3]),
            fake_agents.running(fake_agents.FakeAgents(server, names[3:], work_s=0.2)) as played,
        ):
            story(server, names, played, kubeconfig, most=2)


@pytest.mark.slow
def test_rollout_over_three_hundred_nodes_keeps_its_budget(tmp_path: pathlib.Path) -> None:
    with apiserver.serve() as server:
        names, kubeconfig = serve(tmp_path, 300, server)
        with fake_agents.running(fake_agents.FakeAgents(server, names, work_s=0.1)) as played:
            story(server, names, played, kubeconfig, most=10)
