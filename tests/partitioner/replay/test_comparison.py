"""``partitioner --simulate --replay``: past pods with the real decision and on fixed layouts."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from mig_manager.core.display import styles
from mig_manager.core.objects import well_known
from mig_manager.core.partitioning.decision import decisions
from mig_manager.core.records import run_status
from mig_manager.partitioner.replay import comparison, past_pods, simulated_cluster
from tests.partitioner.replay import replays
from tests.rigs import api_objects
from tests.rigs.cluster import partitions
from tests.rigs.cluster.partitions import NOW, SMALL, node, pod
from tests.rigs.shell import commandline

_NODES = [node("a", SMALL), node("b", SMALL)]
_DAY = [
    *(replays.past(f"s{n}", "1g.5gb", arrival_s=n, runs_s=600) for n in range(7)),
    replays.past("large", "7g.40gb", arrival_s=20, runs_s=600, wait_s=90),
    replays.past("late", "3g.20gb", arrival_s=2000, runs_s=300, metadata={"namespace": "ci"}),
]


def test_text_has_waits_by_profile_and_namespace_beside_present_layouts(
    shell: commandline.Shell,
) -> None:
    answer = replays.replay(shell, _NODES, _DAY, "--scheduler", "packed")

    assert answer.status == 0, answer.err
    lines = [" ".join(line.split()) for line in answer.out.splitlines()]
    assert lines[0].startswith("2026-03-01 12:00:00Z to 2026-03-01 12:38:20Z: 9 pods, 0 of them")
    assert "partitioner 9 of 9 2 s 8 s 3 0 15 s" in lines
    assert "present layouts 7 of 9 4.8 min -" in lines
    assert "as it was 9 of 9 10 s 1.5 min" in lines
    assert "1x 7g.40gb 1 of 1 8 s 8 s 0 placed, mean 38.0 min" in lines
    assert "ci 1 of 1 8 s 8 s 0 placed, mean 5.0 min" in lines
    (head,) = (line for line in lines if line.startswith("LAYOUTS"))
    table = lines[lines.index(head) + 1 :]
    assert table.index("") == 3 + 8  # with the best eight layouts
    assert max(map(len, answer.out.splitlines())) <= 100


def test_json_has_changes_tainted_time_and_every_generated_layout(
    shell: commandline.Shell,
) -> None:
    answer = replays.replay(shell, _NODES, _DAY, "--scheduler", "packed", "-o", "json")

    rows = replays.rows(answer)
    assert list(rows)[:3] == ["partitioner", "present layouts", "as it was"]
    assert {"all-1g.5gb", "all-7g.40gb", "all-balanced"} <= rows.keys()
    partitioner = rows["partitioner"]
    assert (partitioner["changes"], partitioner["refused"], partitioner["taintedSeconds"]) == (
        3,
        0,
        15,
    )
    assert partitioner["byProfile"]["1x 1g.5gb"] == {
        "pods": 7,
        "placed": 7,
        "meanSeconds": 0.0,
        "p95Seconds": 0.0,
    }
    assert partitioner["byNamespace"]["ci"]["placed"] == 1
    assert rows["present layouts"]["byNamespace"]["ci"]["placed"] == 0
    assert rows["all-7g.40gb"]["byProfile"]["1x 7g.40gb"]["placed"] == 1
    placed = [row["waits"]["placed"] for row in answer.data["rows"][3:]]
    assert placed == sorted(placed, reverse=True)
    assert answer.data["isComplete"]


@pytest.mark.parametrize(
    ("nodes", "pods", "options", "placed", "present"),
    [
        # Both pods run on a fixed layout, the second after the first; smaller pods pass.
        (
            [node("a", ["4g.20gb@0", "1g.5gb@4"])],
            [
                replays.past("first", "4g.20gb", arrival_s=0, runs_s=100),
                replays.past("second", "4g.20gb", arrival_s=10, runs_s=100),
                replays.past("small", "1g.5gb", arrival_s=20, runs_s=100),
            ],
            (),
            3,
            3,
        ),
        # All devices of a pod are on one node.
        (
            [node("a", ["3g.20gb@0"]), node("b", ["3g.20gb@0"])],
            [replays.past("pair", "2x3g.20gb", arrival_s=0, runs_s=100)],
            (),
            1,
            0,
        ),
        # A node selector that no node has.
        (
            [node("a", SMALL)],
            [
                replays.past(
                    "p", "1g.5gb", arrival_s=0, runs_s=9, spec={"nodeSelector": {"x": "y"}}
                )
            ],
            (),
            0,
            0,
        ),
        # Memory counts, too.
        (
            [node("a", SMALL)],
            [
                replays.past(name, "1g.5gb", arrival_s=0, runs_s=100, requests={"memory": "300Gi"})
                for name in "pq"
            ],
            (),
            1,
            1,
        ),
        # A reserve on the only GPU.
        (
            [node("a", SMALL)],
            [replays.past("p", "7g.40gb", arrival_s=0, runs_s=100)],
            ("--reserve", "1g.5gb=1"),
            0,
            0,
        ),
        # What keeps a node from a change today does not count.
        (
            [node("a", SMALL, is_ready=False)],
            [replays.past("p", "7g.40gb", arrival_s=0, runs_s=100)],
            ("--scheduler", "packed"),
            1,
            0,
        ),
        (
            [node("a", SMALL, spec={"unschedulable": True})],
            [replays.past("p", "1g.5gb", arrival_s=0, runs_s=100)],
            (),
            1,
            1,
        ),
        # Pods that failed, and whose app containers have no end.
        (
            [node("a", ["7g.40gb@0"])],
            [
                replays.failed_pod(
                    "init",
                    "7g.40gb",
                    arrival_s=0,
                    status={"initContainerStatuses": [replays.terminated_status(at_s=20)]},
                ),
                replays.failed_pod("rejected", "7g.40gb", arrival_s=25, status={}),
                replays.failed_pod(
                    "collected",
                    "7g.40gb",
                    arrival_s=30,
                    status={"conditions": [replays.condition("DisruptionTarget", at_s=40)]},
                ),
                replays.past("next", "7g.40gb", arrival_s=50, runs_s=100),
            ],
            (),
            4,
            4,
        ),
    ],
    ids=[
        "queue",
        "one node",
        "selector",
        "memory",
        "reserve",
        "not ready today",
        "cordoned today",
        "failed without an end",
    ],
)
def test_pods_are_placed_where_they_fit(
    shell: commandline.Shell,
    nodes: Sequence[Any],
    pods: Sequence[Any],
    options: Sequence[str],
    placed: int,
    present: int,
) -> None:
    rows = replays.rows(replays.replay(shell, nodes, pods, *options, "-o", "json"))

    assert rows["partitioner"]["waits"]["placed"] == placed
    assert rows["present layouts"]["waits"]["placed"] == present


@pytest.mark.parametrize(
    "text",
    [
        api_objects.a_status("all", reason="Applied", finishedAt="2126-01-01T00:00:00Z"),
        api_objects.a_status("all", run_status.State.PENDING),
    ],
)
def test_the_present_run_of_an_agent_is_not_replayed(shell: commandline.Shell, text: str) -> None:
    pods = [replays.past("large", "7g.40gb", arrival_s=0, runs_s=60)]
    state = run_status.parse(text).state.value
    today = node(
        "a",
        SMALL,
        labels={well_known.CONFIG_LABEL: "all", well_known.STATE_LABEL: state},
        annotations=api_objects.annotations_of_agent(status_text=text),
    )

    rows = replays.rows(replays.replay(shell, [today], pods, "-o", "json"))

    assert rows["partitioner"]["waits"]["placed"] == 1


def test_pods_of_one_moment_are_replayed(shell: commandline.Shell) -> None:
    pending = pod("p", "1g.5gb")

    assert replays.replay(shell, [node("a", SMALL)], [pending]).status == 0


def test_a_request_that_an_agent_failed_before_changes_no_replay(shell: commandline.Shell) -> None:
    pods = [replays.past(f"p{n}", "1g.5gb", arrival_s=60 * n, runs_s=30) for n in range(9)]
    decision = partitions.decide([node("a", SMALL)], [pod("p", "7g.40gb")])
    text = partitions.only(decision).layout
    for retry_at in (None, NOW.isoformat()):
        report = api_objects.a_status(
            "custom", run_status.State.FAILED, reason="InUse", retryAt=retry_at
        )
        failed = node(
            "a",
            SMALL,
            labels={well_known.CONFIG_LABEL: "custom", well_known.STATE_LABEL: "failed"},
            annotations={
                well_known.LAYOUT_ANNOTATION: text,
                **api_objects.annotations_of_agent(status_text=report),
            },
        )
        rows = replays.rows(replays.replay(shell, [failed], pods, "-o", "json"))
        assert rows["partitioner"]["changes"] == 0


def test_idle_instances_return_to_the_base_layout(shell: commandline.Shell) -> None:
    pods = [
        replays.past("large", "7g.40gb", arrival_s=0, runs_s=60),
        replays.past("small", "1g.5gb", arrival_s=3600, runs_s=60),
    ]
    file = shell.file(
        "{version: v1, mig-configs: {home: [{devices: all, mig-enabled: true, "
        "mig-devices: {1g.5gb: 7}}]}}"
    )
    options = ("--merge-back-after-s", "600", "-o", "json", "--base-layout")

    for base in ("all-1g.5gb", "home", "all-9g.99gb"):
        config = ("-f", file) if base == "home" else ()
        partitioner = replays.rows(
            replays.replay(shell, [node("a", SMALL)], pods, *options, base, *config)
        )["partitioner"]
        assert partitioner["changes"] == 2
        is_back = partitioner["byProfile"]["1x 1g.5gb"]["meanSeconds"] == 0
        assert is_back is (base != "all-9g.99gb")


def test_only_the_last_days_are_counted_and_older_pods_use_devices(
    shell: commandline.Shell,
) -> None:
    pods = [
        replays.past("gone", "7g.40gb", arrival_s=-9 * 86400, runs_s=60),
        pod("running", "7g.40gb", node_name="a", age_s=9 * 86400),
        replays.past("small", "1g.5gb", arrival_s=0, runs_s=60),
    ]

    rows = replays.rows(replays.replay(shell, [node("a", ["7g.40gb@0*"])], pods, "-o", "json"))

    # Nothing can be placed beside the pod that has been running for days.
    waits = rows["partitioner"]["waits"]
    assert (waits["pods"], waits["placed"]) == (1, 0)


def test_pods_that_no_node_can_serve_are_named_with_the_reason(shell: commandline.Shell) -> None:
    pods = [replays.past("x", "7g.80gb", arrival_s=0, runs_s=60)]

    answer = replays.replay(shell, [node("a", SMALL)], pods)

    assert "ml/x: it needs a node with room for 1x 7g.80gb" in answer.out


def test_without_opted_in_nodes_all_are_replayed_and_the_text_says_so(
    shell: commandline.Shell,
) -> None:
    nodes = [node("a", SMALL, labels={"mig-manager.io/partitioning": "no"})]
    nodes.append(partitions.node_object("bare", partitions.gpus("bare"), None))

    answer = replays.replay(shell, nodes, [replays.past("p", "7g.40gb", arrival_s=0, runs_s=60)])

    text = " ".join(answer.out.split())
    assert "No node is opted in: all are replayed as if they were." in text
    assert "Left out: 1 node whose GPUs no agent publishes." in text
    assert "partitioner 1 of 1" in text


@pytest.mark.parametrize(
    ("pods", "message"),
    [
        ([], "no pod of the files requested MIG devices"),
        ([pod("p", node_name="a")], "no pod of the files requested MIG devices"),
    ],
)
def test_nothing_to_replay_is_an_error(
    shell: commandline.Shell, pods: Sequence[Any], message: str
) -> None:
    answer = replays.replay(shell, [node("a", SMALL)], pods)

    assert answer.status == 2
    assert message in answer.err


def test_without_published_gpus_there_is_nothing_to_replay(shell: commandline.Shell) -> None:
    bare = partitions.node_object("bare", partitions.gpus("bare"), None)

    answer = replays.replay(shell, [bare], [replays.past("p", "1g.5gb", arrival_s=0, runs_s=9)])

    assert answer.status == 2
    assert "no node of the file has published GPUs" in answer.err


def test_old_pods_alone_are_nothing_to_replay(shell: commandline.Shell) -> None:
    pods = [pod("p", "1g.5gb", node_name="a", age_s=9 * 86400)]
    pods[0]["status"]["startTime"] = NOW.isoformat()

    answer = replays.replay(shell, [node("a", SMALL)], pods)

    assert answer.status == 2
    assert "no pod was created in these days; --replay-days allows more" in answer.err


def test_a_replay_that_is_stopped_reports_the_time_that_it_reached() -> None:
    parsed, _ = partitions.parse_cluster([node("a", SMALL)], [])
    pods = [
        replays.past(f"p{n}", ("7g.40gb", "1g.5gb")[n % 2], arrival_s=60 * n, runs_s=90)
        for n in range(50)
    ]
    events = itertools.count()
    settings = comparison.ReplaySettings(
        limits=decisions.PartitionerLimits(),
        scheduler=simulated_cluster.Scheduler.SPREAD,
        days=7,
        quiet_s=2,
        longest_wait_s=15,
    )

    report = comparison.replay(
        parsed,
        [each for each in map(past_pods.parse, pods) if each],
        prometheus_pods=[],
        settings=settings,
        proceed=lambda *_: next(events) < 200,
    )

    assert not report.is_complete
    partitioner, present, real = report.rows[:3]
    assert 20 <= partitioner.waits.pods == present.waits.pods == real.waits.pods <= 27
    assert 1400 <= (report.end - report.begin).total_seconds() <= 1600
    assert "The time limit ended the replay early" in " ".join(report.text(styles.Style()).split())
