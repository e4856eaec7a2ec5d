"""``partitioner --simulate --replay``: past pods with the real decision and on fixed layouts."""

import datetime as dt
import http.server
import json
import pathlib
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from mig_manager.core import bar
from mig_manager.core.fleet import decisions, past_pods, simulated_cluster
from mig_manager.partitioner import replay
from tests import programs, waiting
from tests.cluster import envtest
from tests.partitioner import rig as rigs
from tests.shell import commandline
from tests.unit import partitions
from tests.unit.partitions import NOW, SMALL, node, pod


def past(
    name: str,
    profile: str,
    *,
    arrival_s: float,
    runs_s: float,
    wait_s: float = 0,
    **more: Any,
) -> Any:
    """A pod that has ended."""
    item = pod(name, profile, node="a", age_s=-arrival_s, **more)
    began = NOW + dt.timedelta(seconds=arrival_s + wait_s)
    ended = (began + dt.timedelta(seconds=runs_s)).isoformat()
    item["status"] = {
        "phase": "Succeeded",
        "startTime": began.isoformat(),
        "containerStatuses": [{"state": {"terminated": {"finishedAt": ended}}}],
    }
    return item


def sampled(
    name: str,
    resource: str,
    *,
    arrival_s: float,
    last_s: float,
    ran_s: tuple[float, float] | None = None,
    **labels: str,
) -> list[dict[str, Any]]:
    """The series of a pod as Prometheus returns them; ``ran_s``: start and completion."""
    common = {"namespace": "old", "pod": name, "uid": f"uid-{name}", **labels}
    at_s = NOW.timestamp()
    values = {"kube_pod_created": at_s + arrival_s}
    if ran_s:
        values["kube_pod_start_time"] = at_s + ran_s[0]
        values["kube_pod_completion_time"] = at_s + ran_s[1]
    series: list[dict[str, Any]] = [
        {
            "metric": {"__name__": metric, **common},
            "values": [[at_s + last_s - 60, str(value)], [at_s + last_s, str(value)]],
        }
        for metric, value in values.items()
    ]
    requests = {
        "__name__": "kube_pod_container_resource_requests",
        "container": "main",
        "resource": resource,
        "unit": "integer",
    }
    series.append({"metric": requests | common, "values": [[at_s + last_s, "1"]]})
    return series


def matrix(*series: list[dict[str, Any]]) -> str:
    result = [each for some in series for each in some]
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}})


def replayed(
    shell: commandline.Shell,
    nodes: Sequence[Mapping[str, Any]],
    pods: Sequence[Mapping[str, Any]],
    *options: str,
) -> commandline.Answer:
    return rigs.simulated(shell, nodes, pods, "--replay", *options)


def rows(answer: commandline.Answer) -> dict[str, Any]:
    assert answer.status == 0, answer.err
    return {row["name"]: row for row in answer.data["rows"]}


_NODES = [node("a", SMALL), node("b", SMALL)]
_DAY = [
    *(past(f"s{n}", "1g.5gb", arrival_s=n, runs_s=600) for n in range(7)),
    past("large", "7g.40gb", arrival_s=20, runs_s=600, wait_s=90),
    past("late", "3g.20gb", arrival_s=2000, runs_s=300, metadata={"namespace": "ci"}),
]


def test_text_has_waits_by_profile_and_namespace_beside_present_layouts(
    shell: commandline.Shell,
) -> None:
    answer = replayed(shell, _NODES, _DAY, "--scheduler", "packed")

    assert answer.status == 0, answer.err
    lines = [" ".join(line.split()) for line in answer.out.splitlines()]
    assert lines[0].startswith("2026-03-01 12:00:00Z to 2026-03-01 12:38:20Z: 9 pods, 0 of them")
    assert "partitioner 9 of 9 2 s 8 s 2 0 10 s" in lines
    assert "present layouts 7 of 9 4.8 min -" in lines
    assert "as it was 9 of 9 10 s 1.5 min" in lines
    assert "1x 7g.40gb 1 of 1 8 s 8 s 0 placed, mean 38.0 min" in lines
    assert "ci 1 of 1 8 s 8 s 0 placed, mean 5.0 min" in lines
    assert max(map(len, answer.out.splitlines())) <= 100


def test_json_has_changes_tainted_time_and_every_generated_layout(
    shell: commandline.Shell,
) -> None:
    answer = replayed(shell, _NODES, _DAY, "--scheduler", "packed", "-o", "json")

    found = rows(answer)
    assert list(found)[:3] == ["partitioner", "present layouts", "as it was"]
    assert {"all-1g.5gb", "all-7g.40gb", "all-balanced"} <= found.keys()
    own = found["partitioner"]
    assert (own["changes"], own["refused"], own["tainted_s"]) == (2, 0, 10)
    assert own["by_profile"]["1x 1g.5gb"] == {"pods": 7, "placed": 7, "mean_s": 0.0, "p95_s": 0.0}
    assert own["by_namespace"]["ci"]["placed"] == 1
    assert found["present layouts"]["by_namespace"]["ci"]["placed"] == 0
    assert found["all-7g.40gb"]["by_profile"]["1x 7g.40gb"]["placed"] == 1
    placed = [row["waits"]["placed"] for row in answer.data["rows"][3:]]
    assert placed == sorted(placed, reverse=True)
    assert answer.data["is_complete"]


@pytest.mark.parametrize(
    ("nodes", "pods", "options", "placed", "present"),
    [
        # Both pods run on a fixed layout, the second after the first; smaller pods pass.
        (
            [node("a", ["4g.20gb@0", "1g.5gb@4"])],
            [
                past("first", "4g.20gb", arrival_s=0, runs_s=100),
                past("second", "4g.20gb", arrival_s=10, runs_s=100),
                past("small", "1g.5gb", arrival_s=20, runs_s=100),
            ],
            (),
            3,
            3,
        ),
        # All devices of a pod are on one node.
        (
            [node("a", ["3g.20gb@0"]), node("b", ["3g.20gb@0"])],
            [past("pair", "2x3g.20gb", arrival_s=0, runs_s=100)],
            (),
            1,
            0,
        ),
        # A node selector that no node has.
        (
            [node("a", SMALL)],
            [past("p", "1g.5gb", arrival_s=0, runs_s=9, spec={"nodeSelector": {"x": "y"}})],
            (),
            0,
            0,
        ),
        # Memory counts, too.
        (
            [node("a", SMALL)],
            [
                past(name, "1g.5gb", arrival_s=0, runs_s=100, requests={"memory": "300Gi"})
                for name in "pq"
            ],
            (),
            1,
            1,
        ),
        # A reserve on the only GPU.
        (
            [node("a", SMALL)],
            [past("p", "7g.40gb", arrival_s=0, runs_s=100)],
            ("--reserve", "1g.5gb=1"),
            0,
            0,
        ),
        # What keeps a node from a change today does not count.
        (
            [node("a", SMALL, is_ready=False)],
            [past("p", "7g.40gb", arrival_s=0, runs_s=100)],
            ("--scheduler", "packed"),
            1,
            0,
        ),
    ],
    ids=["queue", "one node", "selector", "memory", "reserve", "not ready today"],
)
def test_pods_are_placed_where_they_fit(
    shell: commandline.Shell,
    nodes: Sequence[Any],
    pods: Sequence[Any],
    options: Sequence[str],
    placed: int,
    present: int,
) -> None:
    found = rows(replayed(shell, nodes, pods, *options, "-o", "json"))

    assert found["partitioner"]["waits"]["placed"] == placed
    assert found["present layouts"]["waits"]["placed"] == present


def test_idle_instances_return_to_the_base_layout(shell: commandline.Shell) -> None:
    pods = [
        past("large", "7g.40gb", arrival_s=0, runs_s=60),
        past("small", "1g.5gb", arrival_s=3600, runs_s=60),
    ]
    file = shell.file(
        "{version: v1, mig-configs: {home: [{devices: all, mig-enabled: true, "
        "mig-devices: {1g.5gb: 7}}]}}"
    )
    options = ("--merge-back-after-s", "600", "-o", "json", "--base-layout")

    for base in ("all-1g.5gb", "home", "all-9g.99gb"):
        config = ("-f", file) if base == "home" else ()
        own = rows(replayed(shell, [node("a", SMALL)], pods, *options, base, *config))[
            "partitioner"
        ]
        assert own["changes"] == 2
        is_back = own["by_profile"]["1x 1g.5gb"]["mean_s"] == 0
        assert is_back is (base != "all-9g.99gb")


def test_only_the_last_days_are_counted_and_older_pods_use_devices(
    shell: commandline.Shell,
) -> None:
    pods = [
        past("gone", "7g.40gb", arrival_s=-9 * 86400, runs_s=60),
        pod("running", "7g.40gb", node="a", age_s=9 * 86400),
        past("small", "1g.5gb", arrival_s=0, runs_s=60),
    ]

    found = rows(replayed(shell, [node("a", ["7g.40gb@0*"])], pods, "-o", "json"))

    # Nothing can be placed beside the pod that has been running for days.
    waits = found["partitioner"]["waits"]
    assert (waits["pods"], waits["placed"]) == (1, 0)


def test_pods_that_no_node_can_serve_are_named_with_the_reason(shell: commandline.Shell) -> None:
    pods = [past("x", "7g.80gb", arrival_s=0, runs_s=60)]

    answer = replayed(shell, [node("a", SMALL)], pods)

    assert "ml/x: it needs a node with room for 1x 7g.80gb" in answer.out


def test_without_opted_in_nodes_all_are_replayed_and_the_text_says_so(
    shell: commandline.Shell,
) -> None:
    nodes = [node("a", SMALL, labels={"mig-manager.io/partitioning": "no"})]
    nodes.append(partitions.item("bare", partitions.gpus("bare"), None))

    answer = replayed(shell, nodes, [past("p", "7g.40gb", arrival_s=0, runs_s=60)])

    text = " ".join(answer.out.split())
    assert "No node is opted in: all are replayed as if they were." in text
    assert "Left out: 1 nodes whose GPUs no agent publishes." in text
    assert "partitioner 1 of 1" in text


# -- Prometheus ----------------------------------------------------------------------------------


_FORGOTTEN = matrix(
    sampled("known", "nvidia_com_mig_7g_40gb", arrival_s=0, last_s=900),
    sampled("done", "nvidia_com_mig_7g_40gb", arrival_s=60, last_s=900, ran_s=(90, 600)),
    sampled("deleted", "nvidia_com_mig_1g_5gb", arrival_s=0, last_s=300),
    sampled(
        "renamed",
        "nvidia_com_mig_3g_20gb",
        arrival_s=5,
        last_s=300,
        exported_namespace="real",
        exported_pod="renamed",
    ),
)


def test_pods_that_the_api_forgot_come_from_a_saved_answer(shell: commandline.Shell) -> None:
    file = shell.file(_FORGOTTEN, "answer.json")
    pods = [past("known", "1g.5gb", arrival_s=0, runs_s=60)]

    answer = replayed(shell, [node("a", SMALL, SMALL)], pods, "--prometheus", file, "-o", "json")

    found = rows(answer)
    assert answer.data["forgotten"] == 3
    own = found["partitioner"]
    assert {key: each["pods"] for key, each in own["by_profile"].items()} == {
        "1x 1g.5gb": 2,
        "1x 3g.20gb": 1,
        "1x 7g.40gb": 1,
    }
    assert {key: each["pods"] for key, each in own["by_namespace"].items()} == {
        "ml": 1,
        "old": 2,
        "real": 1,
    }
    assert found["as it was"]["by_profile"]["1x 7g.40gb"]["mean_s"] == 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not one of its range API about pods, line 1"),
        ("[]", "not a JSON object"),
        ('{"status": "error", "error": "x"}', "not a matrix of pods"),
        ('{"data": {"resultType": "vector", "result": []}}', "no answer to a range query"),
        (
            '{"data": {"resultType": "matrix", "result": [{"metric": {}, "values": []}]}}',
            "not a matrix of pods",
        ),
    ],
)
def test_a_file_that_is_no_answer_of_prometheus_is_refused(
    shell: commandline.Shell, text: str, message: str
) -> None:
    file = shell.file(text, "answer.json")

    answer = replayed(shell, [node("a", SMALL)], [], "--prometheus", file)

    assert answer.status == 2
    assert message in answer.err
    assert "docs/partitioner.md" in answer.err


class _Prometheus(http.server.BaseHTTPRequestHandler):
    """Answers every part of a range with the same series, or refuses."""

    queries: list[dict[str, list[str]]]
    status = 200

    def do_GET(self) -> None:
        """Answer."""
        path, _, query = self.path.partition("?")
        assert path == "/prefix/api/v1/query_range"
        self.queries.append(urllib.parse.parse_qs(query))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(_FORGOTTEN.encode() if self.status == 200 else b"bad query")

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.fixture
def prometheus() -> Iterator[tuple[str, type[_Prometheus]]]:
    handler = type("Handler", (_Prometheus,), {"queries": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/prefix/", handler
    server.shutdown()
    server.server_close()
    thread.join(30)


def test_prometheus_is_queried_in_parts_of_the_days(
    shell: commandline.Shell, prometheus: tuple[str, type[_Prometheus]]
) -> None:
    url, handler = prometheus

    answer = replayed(
        shell, [node("a", SMALL)], [], "--prometheus", url, "--replay-days", "2", "-o", "json"
    )

    assert rows(answer)["partitioner"]["waits"]["pods"] == 4
    assert len(handler.queries) == 8
    begin, end = (float(handler.queries[n][key][0]) for n, key in ((0, "start"), (-1, "end")))
    assert end - begin == pytest.approx(2 * 86400)
    assert "kube_pod_created" in handler.queries[0]["query"][0]


def test_a_prometheus_that_refuses_or_is_away_is_named(
    shell: commandline.Shell, prometheus: tuple[str, type[_Prometheus]]
) -> None:
    url, handler = prometheus
    handler.status = 400
    refused = replayed(shell, [node("a", SMALL)], [], "--prometheus", url)
    away = replayed(shell, [node("a", SMALL)], [], "--prometheus", "http://127.0.0.1:9")

    assert (refused.status, away.status) == (2, 2)
    assert "refused the query: 400 bad query" in refused.err
    assert "cannot query Prometheus at http://127.0.0.1:9" in away.err


def test_the_query_finds_pods_with_mig_devices_in_a_real_prometheus(
    shell: commandline.Shell, tmp_path: pathlib.Path
) -> None:
    promtool, program = (programs.needed(name) for name in ("promtool", "prometheus"))
    shift_s = time.time() - 86400 - NOW.timestamp()
    series = [
        *sampled("done", "nvidia_com_mig_7g_40gb", arrival_s=60, last_s=900, ran_s=(90, 600)),
        *sampled("deleted", "nvidia_com_mig_1g_5gb", arrival_s=0, last_s=300),
        *sampled("web", "cpu", arrival_s=0, last_s=900),
    ]
    text, (port,) = tmp_path / "metrics.txt", envtest.free_ports(1)
    text.write_text("".join([*_openmetrics(series, shift_s), "# EOF\n"]))
    data = tmp_path / "data"
    programs.output(promtool, "tsdb", "create-blocks-from", "openmetrics", text, data)
    (tmp_path / "prometheus.yml").write_text("{}")
    url = f"http://127.0.0.1:{port}"
    command = [
        program,
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as running,  # noqa: S603
    ):
        try:
            waiting.until(lambda: _is_ready(url), "Prometheus")
            answer = replayed(
                shell, [node("a", SMALL), node("b", SMALL)], [], "--prometheus", url, "-o", "json"
            )
        finally:
            running.kill()

    waits = rows(answer)["as it was"]["by_profile"]
    assert {key: each["pods"] for key, each in waits.items()} == {"1x 1g.5gb": 1, "1x 7g.40gb": 1}
    assert waits["1x 7g.40gb"]["mean_s"] == pytest.approx(30, abs=1)


def _openmetrics(series: Sequence[Mapping[str, Any]], shift_s: float) -> Iterator[str]:
    """Yield the lines of samples every half a minute, with their times moved."""
    by_name: dict[str, list[str]] = {}
    for each in series:
        metric = dict(each["metric"])
        name = metric.pop("__name__")
        labels = ",".join(f'{key}="{value}"' for key, value in metric.items())
        end_s = float(each["values"][-1][0]) + shift_s
        value = float(each["values"][-1][1])
        value += shift_s if value > 1e9 else 0
        by_name.setdefault(name, []).extend(
            f"{name}{{{labels}}} {value} {end_s - 30 * step}\n" for step in range(5, -1, -1)
        )
    for name, lines in by_name.items():
        yield f"# TYPE {name} gauge\n"
        yield from lines


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer:  # noqa: S310
            return bool(answer.status == http.HTTPStatus.OK)
    except OSError:
        return False


# -- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pods", "message"),
    [
        ([], "no pod of the files requested MIG devices"),
        ([pod("p", node="a")], "no pod of the files requested MIG devices"),
    ],
)
def test_nothing_to_replay_is_an_error(
    shell: commandline.Shell, pods: Sequence[Any], message: str
) -> None:
    answer = replayed(shell, [node("a", SMALL)], pods)

    assert answer.status == 2
    assert message in answer.err


def test_without_published_gpus_there_is_nothing_to_replay(shell: commandline.Shell) -> None:
    bare = partitions.item("bare", partitions.gpus("bare"), None)

    answer = replayed(shell, [bare], [past("p", "1g.5gb", arrival_s=0, runs_s=9)])

    assert answer.status == 2
    assert "no node of the file has published GPUs" in answer.err


def test_old_pods_alone_are_nothing_to_replay(shell: commandline.Shell) -> None:
    pods = [pod("p", "1g.5gb", node="a", age_s=9 * 86400)]
    pods[0]["status"]["startTime"] = NOW.isoformat()

    answer = replayed(shell, [node("a", SMALL)], pods)

    assert answer.status == 2
    assert "no pod was created in these days; --replay-days allows more" in answer.err


def test_a_replay_that_is_stopped_reports_the_time_that_it_reached() -> None:
    parsed, _ = partitions.seen([node("a", SMALL)], [])
    pods = [
        past(f"p{n}", ("7g.40gb", "1g.5gb")[n % 2], arrival_s=60 * n, runs_s=90) for n in range(50)
    ]
    settings = replay.Replayed(
        limits=decisions.PartitionerLimits(),
        scheduler=simulated_cluster.Scheduler.SPREAD,
        days=7,
        quiet_s=2,
        longest_wait_s=15,
    )

    report = replay.replay(
        parsed,
        [each for each in map(past_pods.parse, pods) if each],
        [],
        settings,
        lambda name, share: name == replay.PRESENT or share < 0.5,
    )

    assert not report.is_complete
    own, present, real = report.rows[:3]
    assert 20 <= own.waits.pods == present.waits.pods == real.waits.pods <= 27
    assert 1400 <= (report.end - report.begin).total_seconds() <= 1600
    assert "The time limit ended the replay early" in " ".join(report.text(bar.Style()).split())
