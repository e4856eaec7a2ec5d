"""``partitioner --simulate``: the decision about nodes and pods in files, and fixed layouts."""

import datetime as dt
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from mig_manager.core.fleet import mixes
from tests.shell import commandline
from tests.unit import partitions
from tests.unit.partitions import EMPTY, NOW, SMALL, node, pod


@pytest.fixture
def shell(tmp_path: pathlib.Path) -> Iterator[commandline.Shell]:
    yield commandline.Shell(tmp_path)
    commandline.forget_log()


def simulated(
    shell: commandline.Shell,
    nodes: Sequence[Mapping[str, Any]],
    pods: Sequence[Mapping[str, Any]],
    *options: str,
) -> commandline.Answer:
    files = [
        shell.file(json.dumps({"kind": "List", "items": items}), name)
        for name, items in (("nodes.json", nodes), ("pods.json", pods))
    ]
    return shell("partitioner", "--simulate", *files, *options)


def past(name: str, profile: str, *, arrival_s: float, runs_s: float, wait_s: float = 0) -> Any:
    """A pod that has ended."""
    item = pod(name, profile, node="a", age_s=-arrival_s)
    began = NOW + dt.timedelta(seconds=arrival_s + wait_s)
    ended = (began + dt.timedelta(seconds=runs_s)).isoformat()
    item["status"] = {
        "phase": "Succeeded",
        "startTime": began.isoformat(),
        "containerStatuses": [{"state": {"terminated": {"finishedAt": ended}}}],
    }
    return item


def test_shows_each_node_before_and_after_and_each_pod_without_room(
    shell: commandline.Shell,
) -> None:
    every = partitions.gpus("c", EMPTY)
    nodes = [
        node("a", ["1g.5gb@0*", "3g.20gb@4"]),
        node("b", ["7g.40gb@0*"]),
        partitions.item("c", every, None),
    ]
    pods = [
        pod("p", "2g.10gb"),
        pod("x", "7g.80gb"),
        pod("y", "7g.40gb", age_s=1),
        pod("u", "1g.5gb", node="a"),
        pod("v", "7g.40gb", node="b"),
    ]
    answer = simulated(shell, nodes, pods)
    assert answer.status == 0
    assert "room for 1 pod on GPU 0, for ml/p." in answer.out
    assert "new" in answer.out
    assert "left alone: its agent has not published which instances are in use." in answer.out
    assert "ml/x: it needs a node with room for 1x 7g.80gb" in answer.out
    assert "ml/y: it waits for" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 100


def test_the_answer_in_json_has_layout_steps_and_reasons(shell: commandline.Shell) -> None:
    answer = simulated(shell, [node("a", SMALL)], [pod("p", "7g.40gb")], "-o", "json")
    (found,) = answer.data["nodes"]
    assert found["pods"] == ["ml/p"]
    assert len(found["steps"][0]["steps"]) == 16
    assert list(json.loads(found["layout"])["mig-configs"]) == ["on-demand"]
    assert answer.data["waiting"] == answer.data["unmet"] == answer.data["mixes"] == []


def test_limits_and_selector_count_in_a_simulation_too(shell: commandline.Shell) -> None:
    nodes, pods = [node("a", SMALL)], [pod("p", "7g.40gb")]
    kept = simulated(shell, nodes, pods, "--reserve", "1g.5gb=1", "-o", "json").data
    assert kept["waiting"][0]["reason"] == "in-use"
    other = simulated(shell, nodes, pods, "--node-selector", "pool=x", "-o", "json").data
    assert other["nodes"] == []
    assert "no node has the label" in other["unmet"][0]["message"]


@pytest.mark.parametrize(
    ("nodes", "pods", "message"),
    [
        ("{", "{}", "nodes is not JSON, line 1; write it with 'kubectl get nodes"),
        ("[]", "{}", "nodes is not a list of Node objects"),
        ('{"items": []}', '{"items": [7]}', "pods is not a list of Pod objects"),
        ('{"items": [{"kind": "Pod"}]}', "{}", "nodes is not a list of Node objects"),
        ('{"items": [{}]}', '{"items": []}', "from the Kubernetes API is malformed"),
    ],
)
def test_a_file_that_is_something_else_is_refused(
    shell: commandline.Shell, nodes: str, pods: str, message: str
) -> None:
    files = shell.file(nodes, "nodes.json"), shell.file(pods, "pods.json")
    answer = shell("partitioner", "--simulate", *files)
    assert answer.status in (1, 2)
    assert message in answer.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--simulate", "a.json"], "--simulate needs two files: --simulate NODES PODS"),
        (["--mix"], "--mix needs --simulate NODES PODS"),
        (["--simulate", "a.json", "b.json"], "cannot read a.json"),
        (["--simulate", "/dev/null", "/dev/null"], "See 'mig-manager partitioner --help'"),
    ],
)
def test_a_simulation_needs_both_files(
    shell: commandline.Shell, argv: list[str], message: str
) -> None:
    answer = shell("partitioner", *argv)
    assert answer.status == 2
    assert message in answer.err


def test_says_which_mix_would_have_served_the_pods_best(shell: commandline.Shell) -> None:
    pods = [past(f"s{n}", "1g.5gb", arrival_s=n, runs_s=600) for n in range(7)]
    pods.append(past("large", "7g.40gb", arrival_s=0, runs_s=600))
    nodes = [node("a", SMALL, SMALL)]
    answer = simulated(shell, nodes, pods, "--mix")
    assert " ".join(answer.out.splitlines()[1].split()) == "best mix found 8 of 8 0.0 h"
    assert "1 x GPU with 7x 1g.5gb" in answer.out
    assert "1 x GPU with 1x 7g.40gb" in answer.out
    data = simulated(shell, nodes, pods, "--mix", "-o", "json").data
    found = {each["name"]: each["served"] for each in data["mixes"]}
    assert found["all-1g.5gb"] == found["as they are"] == 7
    assert found["all-7g.40gb"] == 1
    assert found["all-balanced"] == 7


def scores(nodes: Sequence[Any], pods: Sequence[Any]) -> dict[str, mixes.Score]:
    parsed, _ = partitions.seen(nodes, [])
    jobs = [job for job in map(mixes.parse_job, pods) if job]
    return {score.name: score for score in mixes.compare(parsed, jobs)}


def test_a_pod_waits_until_another_ends_and_lets_smaller_ones_pass() -> None:
    pods = [
        past("first", "4g.20gb", arrival_s=0, runs_s=100),
        past("second", "4g.20gb", arrival_s=10, runs_s=100),
        past("small", "1g.5gb", arrival_s=20, runs_s=100),
    ]
    now = scores([node("a", ["4g.20gb@0", "1g.5gb@4"])], pods)[mixes.NOW]
    assert (now.served, now.waited_s) == (3, 90.0)


def test_a_pod_that_never_fits_waits_until_the_end_of_the_file() -> None:
    pods = [
        past("never", "7g.40gb", arrival_s=0, runs_s=50),
        past("small", "1g.5gb", arrival_s=0, runs_s=400),
    ]
    now = scores([node("a", SMALL)], pods)[mixes.NOW]
    assert (now.served, now.waited_s) == (1, 400.0)


def test_all_devices_of_a_pod_are_on_one_node_that_it_may_run_on() -> None:
    item = past("pair", "2x3g.20gb", arrival_s=0, runs_s=1)
    half = ["3g.20gb@0"]
    assert scores([node("a", half), node("b", half)], [item])[mixes.NOW].served == 0
    assert scores([node("a", half, half)], [item])[mixes.NOW].served == 1
    item["spec"]["nodeSelector"] = {"pool": "x"}
    assert scores([node("a", half, half)], [item])[mixes.NOW].served == 0


def test_the_best_mix_is_never_worse_than_a_generated_layout() -> None:
    profiles = ("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb")
    pods = [
        past(f"p{n}", profiles[(n * n) % 4], arrival_s=60 * n, runs_s=400 + 37 * (n % 7))
        for n in range(60)
    ]
    found = scores([node("a", SMALL, SMALL), node("b", SMALL, SMALL)], pods)
    assert found[mixes.BEST].rank == min(score.rank for score in found.values())


def test_a_pod_without_mig_devices_is_no_job() -> None:
    assert mixes.parse_job(pod("p", node="a")) is None
