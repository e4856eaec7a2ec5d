"""``partitioner --simulate``: the decision about nodes and pods in files."""

import datetime as dt
import json

import pytest

from tests.partitioner import partitioner_rig
from tests.rigs import api_objects
from tests.rigs.cluster import partitions
from tests.rigs.cluster.partitions import EMPTY, SMALL, node, pod
from tests.rigs.shell import commandline


def test_simulation_shows_nodes_before_and_after_and_unserved_pods(
    shell: commandline.Shell,
) -> None:
    gpus = partitions.gpus("c", EMPTY)
    nodes = [
        node("a", ["1g.5gb@0*", "3g.20gb@4"]),
        node("b", ["7g.40gb@0*"]),
        partitions.node_object("c", gpus, None),
    ]
    pods = [
        pod("p", "2g.10gb"),
        pod("x", "7g.80gb"),
        pod("y", "7g.40gb", age_s=1),
        pod("u", "1g.5gb", node_name="a"),
        pod("v", "7g.40gb", node_name="b"),
    ]
    answer = partitioner_rig.simulate(shell, nodes, pods)
    assert answer.status == 0
    assert "room for 1 pod on GPU 0, for ml/p." in answer.out
    assert "new" in answer.out
    assert "left alone: its agent has not published which instances are in use." in answer.out
    assert "ml/x: it needs a node with room for 1x 7g.80gb" in answer.out
    assert "ml/y: it waits for" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 100


def test_the_answer_in_json_has_layout_steps_and_reasons(shell: commandline.Shell) -> None:
    answer = partitioner_rig.simulate(
        shell, [node("a", SMALL)], [pod("p", "7g.40gb")], "-o", "json"
    )
    (changed_node,) = answer.data["nodes"]
    assert changed_node["pods"] == ["ml/p"]
    assert len(changed_node["steps"][0]["steps"]) == 16
    assert list(json.loads(changed_node["layout"])["mig-configs"]) == ["on-demand"]
    assert answer.data["waiting"] == answer.data["unmet"] == []


@pytest.mark.parametrize("age_s", [1, -7200], ids=["just now", "by a clock that is ahead"])
def test_a_node_that_has_just_changed_does_not_rest_in_a_simulation(
    shell: commandline.Shell, age_s: float
) -> None:
    finished_at = dt.datetime.now(tz=dt.UTC) - dt.timedelta(seconds=age_s)
    text = api_objects.a_status("x", finishedAt=finished_at.isoformat())
    changed = node("a", SMALL, annotations=api_objects.annotations_of_agent(status_text=text))
    answer = partitioner_rig.simulate(shell, [changed], [pod("p", "7g.40gb")], "-o", "json")
    assert answer.data["nodes"][0]["pods"] == ["ml/p"]


def test_limits_and_selector_count_in_a_simulation_too(shell: commandline.Shell) -> None:
    nodes, pods = [node("a", SMALL)], [pod("p", "7g.40gb")]
    kept = partitioner_rig.simulate(shell, nodes, pods, "--reserve", "1g.5gb=1", "-o", "json").data
    assert "the reserve leaves too little" in kept["unmet"][0]["message"]
    other = partitioner_rig.simulate(
        shell, nodes, pods, "--node-selector", "pool=x", "-o", "json"
    ).data
    assert other["nodes"] == []
    assert "no node has the label" in other["unmet"][0]["message"]


def test_a_simulation_without_opted_in_nodes_says_how_to_opt_in(shell: commandline.Shell) -> None:
    answer = partitioner_rig.simulate(shell, [], [])
    assert "'kubectl label node NODE mig-manager.io/partitioning=on-demand'" in answer.out


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
def test_a_file_that_is_no_list_of_nodes_or_pods_is_refused(
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
        (["--replay"], "--replay needs --simulate NODES PODS"),
        (["--simulate", "a", "b", "--prometheus", "c"], "--prometheus needs --replay"),
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
