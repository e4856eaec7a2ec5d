"""KubeApi: what a request carries, what its errors say, and when it is sent again."""

import gzip
import json
import pathlib
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes.client import configuration as kube_configuration
from kubernetes.config import incluster_config

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, responses
from tests.adapters import kube_rig
from tests.adapters.kube_rig import Server, Step, answer, cut_off, failure, refuse, reset, silence

server = kube_rig.server
FORBIDDEN = errors.Reason.FORBIDDEN
UNAVAILABLE = errors.Reason.API_UNAVAILABLE


def test_a_get_sends_token_and_query_and_returns_the_object(server: Server) -> None:
    server.script = [answer({"kind": "Node"})]
    query = {"fieldSelector": "metadata.name=a"}

    assert server.kube.get("/api/v1/nodes", query) == {"kind": "Node"}
    ((method, path, headers, _body),) = server.seen
    assert (method, path) == ("GET", "/api/v1/nodes?fieldSelector=metadata.name%3Da")
    assert headers["Authorization"] == f"Bearer {kube_rig.TOKEN}"
    assert headers["User-Agent"] == "mig-manager"


@pytest.mark.parametrize("kind", list(api.PatchType))
def test_a_patch_sends_its_content_type(server: Server, kind: api.PatchType) -> None:
    server.script = [answer()]
    body: Any = [{"op": "test"}] if kind is api.PatchType.JSON else {"metadata": {"a": None}}

    server.kube.patch("/x", body, kind=kind)
    ((method, _path, headers, sent),) = server.seen
    assert (method, headers["Content-Type"], json.loads(sent)) == ("PATCH", kind.value, body)


def test_post_put_and_delete_carry_their_body_over_one_connection(server: Server) -> None:
    addresses = []

    def note(handler: kube_rig.Handler) -> None:
        addresses.append(handler.client_address)
        answer()(handler)

    server.script = [note, note, note]
    server.kube.post("/x", {"a": 1})
    server.kube.put("/x", {"a": 2})
    server.kube.delete("/x", {"a": 3})
    assert [(method, path, json.loads(body)) for method, path, _, body in server.seen] == [
        ("POST", "/x", {"a": 1}),
        ("PUT", "/x", {"a": 2}),
        ("DELETE", "/x", {"a": 3}),
    ]
    assert len(set(addresses)) == 1


@pytest.mark.parametrize(
    ("statuses", "reason"),
    [
        ((401, 403), FORBIDDEN),
        ((302, 404, 409, 410, 422), errors.Reason.API_ERROR),
        ((429, 500, 503, 599), UNAVAILABLE),
    ],
)
def test_a_status_becomes_a_reason(
    server: Server, statuses: tuple[int, ...], reason: errors.Reason
) -> None:
    for status in statuses:
        server.script = [refuse(status, "because")]
        error = failure(server.kube.post, "/x", {})
        assert (error.status, error.reason) == (status, reason)
        assert "POST /x: because" in error.message
        assert kube_rig.TOKEN not in repr(error)


def test_a_redirect_is_not_followed_with_our_token(server: Server) -> None:
    server.script = [answer(status=307, headers={"Location": f"{server.url}/elsewhere"})]
    failure(server.kube.get, "/x")
    assert [path for _, path, _, _ in server.seen] == ["/x"]


def test_the_explanation_includes_the_causes_of_a_status(server: Server) -> None:
    server.script = [refuse(429, "Cannot evict pod.", causes=("The budget web needs 1.",))]
    error = failure(server.kube.post, "/x", {})
    assert isinstance(error, responses.ApiError)
    assert error.explanation == "Cannot evict pod. The budget web needs 1."


def test_a_long_error_page_is_quoted_in_part(server: Server) -> None:
    server.script = [answer(b"<html>" + b"x" * 5000, status=404)]
    error = failure(server.kube.get, "/x")
    assert "<html>xx" in error.message
    assert len(error.message) < 400


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b'{"kind": ', b'{"a":' * 100_000])
def test_a_response_that_is_not_an_object_is_an_error(server: Server, body: bytes) -> None:
    server.script = [answer(body)] * 4
    assert "not a JSON object" in failure(server.kube.get, "/x").message
    server.script = [answer(body, status=404)]
    assert failure(server.kube.get, "/x").status == 404


def test_a_response_above_64_mib_is_an_error_and_is_not_retried(server: Server) -> None:
    server.script = [kube_rig.endless(200, b" " * (1 << 20))]
    error = failure(server.kube.get, "/x")
    assert "more than 64 MiB" in error.message
    assert error.reason is errors.Reason.API_ERROR


def test_an_endless_error_page_still_yields_its_http_status(server: Server) -> None:
    server.script = [kube_rig.endless(403, b"x" * (1 << 20))]
    error = failure(server.kube.get, "/x")
    assert "too large" in error.message
    assert error.reason is FORBIDDEN


def test_an_endless_response_times_out(server: Server) -> None:
    server.script = [kube_rig.endless(200, b" ", pause_s=0.01)]
    assert "does not end" in failure(server.client(0.1).post, "/x", {}).message


def test_a_compressed_response_is_not_decompressed(server: Server) -> None:
    packed = gzip.compress(b'{"a": "' + b" " * (80 << 20) + b'"}')
    server.script = [answer(packed, headers={"Content-Encoding": "gzip"})]
    tracemalloc.start()
    message = failure(server.kube.post, "/x", {}).message
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "not a JSON object" in message
    assert peak < 40 << 20


@pytest.mark.parametrize("after", ["1e999", "nan", "-1", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_an_invalid_retry_after_is_ignored(server: Server, after: str) -> None:
    server.script = [refuse(503, after=after)]
    assert failure(server.kube.post, "/x", {}).retry_after_s is None


@pytest.mark.parametrize("fault", [reset, silence, cut_off])
def test_an_incomplete_response_is_api_unavailable(server: Server, fault: Step) -> None:
    server.script = [fault]
    error = failure(server.client(0.2).post, "/x", {})
    assert (error.status, error.reason) == (None, UNAVAILABLE)


@pytest.mark.parametrize("fault", [reset, cut_off, refuse(429), refuse(500), refuse(503)])
def test_a_get_is_retried(server: Server, fault: Step) -> None:
    server.script = [fault, fault, answer({"kind": "Node"})]
    assert server.kube.get("/x") == {"kind": "Node"}
    assert len(server.pauses) == 2


@pytest.mark.parametrize("fault", [reset, refuse(429), refuse(503)])
def test_a_merge_patch_and_a_delete_are_retried_and_a_post_is_not(
    server: Server, fault: Step
) -> None:
    server.script = [fault, answer({"a": 1}), fault, answer({"a": 2}), fault]
    assert server.kube.patch("/x", {}, kind=api.PatchType.STRATEGIC) == {"a": 1}
    assert server.kube.delete("/x") == {"a": 2}
    failure(server.kube.post, "/x", {})
    assert len(server.seen) == 5


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 422])
def test_a_permanent_error_is_not_retried(server: Server, status: int) -> None:
    server.script = [refuse(status)]
    failure(server.kube.get, "/x")
    assert len(server.seen) == 1


def test_a_json_patch_that_may_have_been_applied_is_not_retried(server: Server) -> None:
    server.script = [reset]
    failure(server.kube.patch, "/x", [], kind=api.PatchType.JSON)
    assert len(server.seen) == 1


def test_the_servers_retry_after_is_honoured_unless_it_is_long(server: Server) -> None:
    server.script = [refuse(429, after=3), refuse(503, after=60)]
    assert failure(server.kube.get, "/x").retry_after_s == 60.0
    assert server.pauses == [3.0]


def test_retries_end(server: Server) -> None:
    server.script = [refuse(503, "still down")] * 50
    assert "still down" in failure(server.kube.get, "/x").message
    assert len(server.seen) < 10


def test_a_connection_to_a_missing_server_is_retried_a_few_times() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    pauses: list[float] = []
    client = api.KubeApi.at(f"http://127.0.0.1:{port}", sleep=pauses.append)
    assert "refused" in failure(client.patch, "/x", [], kind=api.PatchType.JSON).message
    assert 0 < len(pauses) < 10


def test_closing_ends_the_pause_between_attempts(server: Server) -> None:
    client = api.KubeApi.at(server.url, request_timeout_s=30.0)
    server.script = [refuse(503, after=9)] * 9
    threading.Timer(0.1, client.close).start()
    failure(client.get, "/x")
    assert len(server.seen) <= 2


def test_a_token_that_was_rotated_is_read_again_after_a_401(
    server: Server, tmp_path: pathlib.Path
) -> None:
    cluster = {"server": server.url}
    client = api.KubeApi.connect(
        kubeconfig=kube_rig.kubeconfig(tmp_path, cluster, {"token": "old"})
    )

    def rotate(handler: kube_rig.Handler) -> None:
        kube_rig.kubeconfig(tmp_path, cluster, {"token": "new\n"})
        refuse(401)(handler)

    server.script = [rotate, answer({"a": 1}), refuse(401), refuse(401)]
    assert client.get("/x") == {"a": 1}
    sent = [headers["Authorization"] for _, _, headers, _ in server.seen]
    assert sent == ["Bearer old", "Bearer new"]
    assert failure(client.get, "/x").reason is FORBIDDEN


def test_a_401_stands_when_the_credentials_cannot_be_reloaded(
    server: Server, tmp_path: pathlib.Path
) -> None:
    path = kube_rig.kubeconfig(tmp_path, {"server": server.url}, {"token": "old"})
    client = api.KubeApi.connect(kubeconfig=path)
    pathlib.Path(path).unlink()
    server.script = [refuse(401)]
    assert failure(client.get, "/x").reason is FORBIDDEN


def test_in_a_pod_the_service_account_is_used_and_its_rotated_token_too(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("old")
    authority.write_text("a certificate")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    client = api.KubeApi.connect(kubeconfig=None)
    configuration, reload = client._configuration, client._reload

    assert configuration.host == "https://10.0.0.1:443"
    assert configuration.auth_settings()["BearerToken"]["value"] == "bearer old"
    token.write_text("new")
    assert reload is not None
    reload()
    assert configuration.auth_settings()["BearerToken"]["value"] == "bearer new"


@pytest.mark.parametrize("text", [None, "", "[]", "{", "contexts: 7\ncurrent-context: a\n"])
def test_a_missing_or_malformed_kubeconfig_is_a_usage_error(
    tmp_path: pathlib.Path, text: str | None
) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    with pytest.raises(errors.UsageError, match=str(path)):
        api.KubeApi.connect(kubeconfig=str(path))


def test_outside_a_cluster_the_missing_kubeconfig_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(errors.UsageError, match="not in a pod"):
        api.KubeApi.connect(kubeconfig=None)


@pytest.fixture
def behind_a_proxy(
    server: Server, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], api.KubeApi]]:
    """Connect to a cluster that only a proxy knows the way to."""
    config = kube_rig.kubeconfig(tmp_path, {"server": "http://cluster.invalid:8080"}, {})
    for name in ("HTTPS_PROXY", "https_proxy", "http_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", server.url)
    clients: list[api.KubeApi] = []

    def connect() -> api.KubeApi:
        clients.append(api.KubeApi.connect(kubeconfig=config, request_timeout_s=1.0))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def test_the_environments_proxy_is_used_but_for_hosts_in_no_proxy(
    server: Server,
    behind_a_proxy: Callable[[], api.KubeApi],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.script = [answer({"major": "1"})]
    assert behind_a_proxy().get("/version") == {"major": "1"}
    assert server.seen[0][1] == "http://cluster.invalid:8080/version"

    monkeypatch.setenv("NO_PROXY", "cluster.invalid")
    failure(behind_a_proxy().post, "/version", {})
    assert len(server.seen) == 1


def test_requests_beyond_the_rate_limit_wait(server: Server) -> None:
    configuration = kube_configuration.Configuration()
    configuration.host = server.url
    limit = api.RateLimit(per_s=0.5, burst=2, monotonic=lambda: 0.0)
    client = api.KubeApi(configuration, sleep=server.pauses.append, limit=limit)
    for _ in range(4):
        client.get("/version")
    client.close()
    assert server.pauses == [2.0, 4.0]


def test_a_burst_passes_and_tokens_return_with_time_up_to_the_burst() -> None:
    now_s = 100.0
    bucket = api.RateLimit(per_s=10, burst=2, monotonic=lambda: now_s)

    assert [bucket.take() for _ in range(4)] == pytest.approx([0.0, 0.0, 0.1, 0.2])
    now_s += 0.3
    assert bucket.take() == pytest.approx(0.0)
    now_s += 3600
    assert [bucket.take() for _ in range(3)] == pytest.approx([0.0, 0.0, 0.1])
