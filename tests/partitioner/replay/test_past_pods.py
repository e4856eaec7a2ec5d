"""Pods of a replay that only Prometheus remembers."""

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

from tests.partitioner.replay import replays
from tests.rigs import programs, waiting
from tests.rigs.cluster import envtest
from tests.rigs.cluster.partitions import NOW, SMALL, node
from tests.rigs.shell import commandline


def samples_of(
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


_FORGOTTEN = matrix(
    samples_of("known", "nvidia_com_mig_7g_40gb", arrival_s=0, last_s=900),
    samples_of("done", "nvidia_com_mig_7g_40gb", arrival_s=60, last_s=900, ran_s=(90, 600)),
    samples_of("deleted", "nvidia_com_mig_1g_5gb", arrival_s=0, last_s=300),
    samples_of(
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
    pods = [replays.past("known", "1g.5gb", arrival_s=0, runs_s=60)]

    answer = replays.replay(
        shell, [node("a", SMALL, SMALL)], pods, "--prometheus", file, "-o", "json"
    )

    rows = replays.rows(answer)
    assert answer.data["forgotten"] == 3
    partitioner = rows["partitioner"]
    assert {key: each["pods"] for key, each in partitioner["byProfile"].items()} == {
        "1x 1g.5gb": 2,
        "1x 3g.20gb": 1,
        "1x 7g.40gb": 1,
    }
    assert {key: each["pods"] for key, each in partitioner["byNamespace"].items()} == {
        "ml": 1,
        "old": 2,
        "real": 1,
    }
    assert rows["as it was"]["byProfile"]["1x 7g.40gb"]["meanSeconds"] == 30


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
        (_FORGOTTEN.replace('"1"', '"NaN"'), "cannot convert float NaN to integer"),
        (_FORGOTTEN.replace('"1"', '"+Inf"'), "not a matrix of pods"),
        (
            matrix(samples_of("ms", "nvidia_com_mig_1g_5gb", arrival_s=1e14, last_s=9)),
            "not a matrix",
        ),
    ],
)
def test_a_file_that_lacks_an_answer_of_prometheus_is_refused(
    shell: commandline.Shell, text: str, message: str
) -> None:
    file = shell.file(text, "answer.json")

    answer = replays.replay(shell, [node("a", SMALL)], [], "--prometheus", file)

    assert answer.status == 2
    assert message in answer.err
    assert "docs/partitioner.md" in answer.err


class _Prometheus(http.server.BaseHTTPRequestHandler):
    """Answers every part of a range with the same series, or refuses."""

    queries: list[dict[str, list[str]]]
    status = 200
    is_cut_off = False

    def do_GET(self) -> None:
        """Answer."""
        path, _, query = self.path.partition("?")
        assert path == "/prefix/api/v1/query_range"
        self.queries.append(urllib.parse.parse_qs(query))
        self.send_response(self.status)
        if self.is_cut_off:
            self.send_header("Transfer-Encoding", "chunked")
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

    answer = replays.replay(
        shell, [node("a", SMALL)], [], "--prometheus", url, "--replay-days", "2", "-o", "json"
    )

    assert replays.rows(answer)["partitioner"]["waits"]["pods"] == 4
    assert f"querying {url} about 2 days" in answer.err
    assert len(handler.queries) == 8
    begin, end = (float(handler.queries[n][key][0]) for n, key in ((0, "start"), (-1, "end")))
    assert end - begin == pytest.approx(2 * 86400)
    assert "kube_pod_created" in handler.queries[0]["query"][0]


@pytest.mark.parametrize("status", [200, 503])
def test_cut_off_answer_of_prometheus_is_named(
    shell: commandline.Shell, prometheus: tuple[str, type[_Prometheus]], status: int
) -> None:
    url, handler = prometheus
    handler.status, handler.is_cut_off = status, True

    cut = replays.replay(shell, [node("a", SMALL)], [], "--prometheus", url)

    assert cut.status == 2
    assert "cannot query Prometheus at http://127.0.0.1" in cut.err


def test_a_refusing_or_unreachable_prometheus_is_named(
    shell: commandline.Shell, prometheus: tuple[str, type[_Prometheus]]
) -> None:
    url, handler = prometheus
    handler.status = 400
    refused = replays.replay(shell, [node("a", SMALL)], [], "--prometheus", url)
    away = replays.replay(shell, [node("a", SMALL)], [], "--prometheus", "http://127.0.0.1:9")

    assert (refused.status, away.status) == (2, 2)
    assert "refused the query: 400 bad query" in refused.err
    assert "cannot query Prometheus at http://127.0.0.1:9: Connection refused" in away.err


def test_the_query_finds_pods_with_mig_devices_in_a_real_prometheus(
    shell: commandline.Shell, tmp_path: pathlib.Path
) -> None:
    promtool, program = (programs.path_or_skip(name) for name in ("promtool", "prometheus"))
    shift_s = time.time() - 86400 - NOW.timestamp()
    series = [
        *samples_of("done", "nvidia_com_mig_7g_40gb", arrival_s=60, last_s=900, ran_s=(90, 600)),
        *samples_of("deleted", "nvidia_com_mig_1g_5gb", arrival_s=0, last_s=300),
        *samples_of("web", "cpu", arrival_s=0, last_s=900),
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
            answer = replays.replay(
                shell, [node("a", SMALL), node("b", SMALL)], [], "--prometheus", url, "-o", "json"
            )
        finally:
            running.kill()

    waits = replays.rows(answer)["as it was"]["byProfile"]
    assert {key: each["pods"] for key, each in waits.items()} == {"1x 1g.5gb": 1, "1x 7g.40gb": 1}
    assert waits["1x 7g.40gb"]["meanSeconds"] == pytest.approx(30, abs=1)


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
