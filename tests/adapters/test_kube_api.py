"""KubeApi against a server that follows a script, also where the script is bad HTTP."""

import contextlib
import gzip
import http.server
import json
import pathlib
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from kubernetes.client import configuration as kube_configuration
from kubernetes.config import incluster_config

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, responses

_TOKEN = "a-secret-token"  # noqa: S105 - of a server in this file


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers each request with the next entry of the script."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, self.path, dict(self.headers), body))
        self.server.script.pop(0)(self)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815 - stdlib's names

    def log_message(self, *_args: object) -> None:
        """Keep the test's output clean."""


Step = Callable[[Handler], None]


class Server(http.server.ThreadingHTTPServer):
    """The script, and what was asked: method, path, headers, body."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Step] = []
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_args: object) -> None:
        """Broken connections are what these tests are about."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.over.set()
        running.shutdown()
        thread.join()


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def kube(server: Server, pauses: list[float]) -> Iterator[api.KubeApi]:
    client = api.KubeApi.at(server.url, token=_TOKEN, request_timeout_s=2.0, sleep=pauses.append)
    yield client
    client.close()


def answer(
    document: object = None, *, status: int = 200, headers: dict[str, str] | None = None
) -> Step:
    body = document if isinstance(document, bytes) else json.dumps(document or {}).encode()

    def step(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return step


def refuse(
    status: int, message: str = "no", *, causes: tuple[str, ...] = (), after: int | None = None
) -> Step:
    details = {"causes": [{"message": cause} for cause in causes]}
    headers = {} if after is None else {"Retry-After": str(after)}
    document = {"kind": "Status", "code": status, "message": message, "details": details}
    return answer(document, status=status, headers=headers)


def reset(handler: Handler) -> None:
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.close_connection = True
    handler.connection.close()


def silence(handler: Handler) -> None:
    handler.server.over.wait(30)
    handler.close_connection = True


def cut_off(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"kind": ')
    handler.close_connection = True


def lines(*events: object, then: Step | None = None) -> Step:
    """Stream events in chunks; then end in order, or do something else."""

    def step(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for event in events:
            data = event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n"
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            handler.wfile.flush()
        if then is None:
            handler.wfile.write(b"0\r\n\r\n")
        else:
            then(handler)

    return step


def not_a_chunk(handler: Handler) -> None:
    handler.wfile.write(b"zz\r\n")
    handler.close_connection = True


def event(kind: str = "MODIFIED", /, **fields: object) -> dict[str, object]:
    return {"type": kind, "object": fields}


def watch(kube: api.KubeApi, *, idle_timeout_s: float = 10.0) -> Any:
    return kube.watch(
        "/api/v1/nodes",
        query={"resourceVersion": "7"},
        timeout_s=300,
        idle_timeout_s=idle_timeout_s,
    )


class TestRequests:
    def test_a_get_sends_token_and_query_and_returns_the_object(
        self, kube: api.KubeApi, server: Server
    ) -> None:
        server.script = [answer({"kind": "Node"})]
        assert kube.get("/api/v1/nodes", {"fieldSelector": "metadata.name=a"}) == {"kind": "Node"}
        ((method, path, headers, _body),) = server.seen
        assert (method, path) == ("GET", "/api/v1/nodes?fieldSelector=metadata.name%3Da")
        assert headers["Authorization"] == f"Bearer {_TOKEN}"
        assert headers["User-Agent"] == "mig-manager"

    @pytest.mark.parametrize("kind", list(api.PatchType))
    def test_a_patch_sends_its_content_type(
        self, kube: api.KubeApi, server: Server, kind: api.PatchType
    ) -> None:
        server.script = [answer()]
        body: Any = [{"op": "test"}] if kind is api.PatchType.JSON else {"metadata": {"a": None}}
        kube.patch("/x", body, kind=kind)
        ((method, _path, headers, sent),) = server.seen
        assert (method, headers["Content-Type"], json.loads(sent)) == ("PATCH", kind.value, body)

    def test_post_put_and_delete_carry_their_body(self, kube: api.KubeApi, server: Server) -> None:
        server.script = [answer(), answer(), answer()]
        kube.post("/x", {"a": 1})
        kube.put("/x", {"a": 2})
        kube.delete("/x", {"a": 3})
        assert [(method, path, json.loads(body)) for method, path, _, body in server.seen] == [
            ("POST", "/x", {"a": 1}),
            ("PUT", "/x", {"a": 2}),
            ("DELETE", "/x", {"a": 3}),
        ]

    def test_connections_are_reused(self, kube: api.KubeApi, server: Server) -> None:
        addresses = []

        def note(handler: Handler) -> None:
            addresses.append(handler.client_address)
            answer({})(handler)

        server.script = [note, note]
        kube.get("/x")
        kube.get("/x")
        assert len(set(addresses)) == 1


class TestErrors:
    @pytest.mark.parametrize(
        ("status", "reason"),
        [
            (401, errors.Reason.FORBIDDEN),
            (403, errors.Reason.FORBIDDEN),
            (404, errors.Reason.API_ERROR),
            (409, errors.Reason.API_ERROR),
            (410, errors.Reason.API_ERROR),
            (422, errors.Reason.API_ERROR),
            (429, errors.Reason.API_UNAVAILABLE),
            (500, errors.Reason.API_UNAVAILABLE),
            (503, errors.Reason.API_UNAVAILABLE),
            (302, errors.Reason.API_ERROR),
            (599, errors.Reason.API_UNAVAILABLE),
        ],
    )
    def test_a_status_becomes_a_reason(
        self, kube: api.KubeApi, server: Server, status: int, reason: errors.Reason
    ) -> None:
        server.script = [refuse(status, "because")]
        with pytest.raises(errors.ClusterError, match="POST /x: because") as caught:
            kube.post("/x", {})
        assert (caught.value.status, caught.value.reason) == (status, reason)

    def test_a_redirect_is_not_followed_with_our_token(
        self, kube: api.KubeApi, server: Server
    ) -> None:
        server.script = [answer(status=307, headers={"Location": f"{server.url}/elsewhere"})]
        with pytest.raises(errors.ClusterError):
            kube.get("/x")
        assert [path for _, path, _, _ in server.seen] == ["/x"]

    def test_the_explanation_includes_the_causes_of_a_status(
        self, kube: api.KubeApi, server: Server
    ) -> None:
        server.script = [refuse(429, "Cannot evict pod.", causes=("The budget web needs 1.",))]
        with pytest.raises(responses.ApiError) as caught:
            kube.post("/x", {})
        assert caught.value.explanation == "Cannot evict pod. The budget web needs 1."

    def test_a_long_error_page_is_quoted_in_part(self, kube: api.KubeApi, server: Server) -> None:
        server.script = [answer(b"<html>" + b"x" * 5000, status=404)]
        with pytest.raises(errors.ClusterError, match="<html>xx") as caught:
            kube.get("/x")
        assert len(caught.value.message) < 400

    @pytest.mark.parametrize("body", [b"<html>", b"[1]", b'{"kind": '])
    def test_a_response_that_is_not_an_object_is_an_error(
        self, kube: api.KubeApi, server: Server, body: bytes
    ) -> None:
        server.script = [answer(body)] * 4
        with pytest.raises(errors.ClusterError, match="not a JSON object"):
            kube.get("/x")

    @pytest.mark.parametrize("status", [200, 404])
    def test_a_response_nested_too_deeply_is_an_error(
        self, kube: api.KubeApi, server: Server, status: int
    ) -> None:
        server.script = [answer(b'{"a":' * 100_000, status=status)] * 4
        with pytest.raises(errors.ClusterError):
            kube.get("/x")

    def test_a_response_above_64_mib_is_an_error_and_is_not_retried(
        self, kube: api.KubeApi, server: Server
    ) -> None:
        sent = []

        def flood(handler: Handler) -> None:
            handler.send_response(200)
            handler.send_header("Content-Length", str(1 << 40))
            handler.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    sent.append(handler.wfile.write(b" " * (1 << 20)))

        server.script = [flood]
        with pytest.raises(errors.ClusterError, match="more than 64 MiB") as caught:
            kube.get("/x")
        assert caught.value.reason is errors.Reason.API_ERROR
        assert sum(sent) < 128 << 20

    def test_an_endless_error_page_still_yields_its_http_status(
        self, kube: api.KubeApi, server: Server
    ) -> None:
        def flood(handler: Handler) -> None:
            handler.send_response(403)
            handler.send_header("Content-Length", str(1 << 40))
            handler.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    handler.wfile.write(b"x" * (1 << 20))

        server.script = [flood]
        with pytest.raises(errors.ClusterError, match="too large") as caught:
            kube.get("/x")
        assert caught.value.reason is errors.Reason.FORBIDDEN

    def test_a_compressed_response_is_not_decompressed(
        self, kube: api.KubeApi, server: Server
    ) -> None:
        packed = gzip.compress(b'{"a": "' + b" " * (80 << 20) + b'"}')
        server.script = [answer(packed, headers={"Content-Encoding": "gzip"})]
        tracemalloc.start()
        with pytest.raises(errors.ClusterError, match="not a JSON object"):
            kube.post("/x", {})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 40 << 20

    @pytest.mark.parametrize("after", ["1e999", "nan", "-1", "Fri, 31 Dec 9999 23:59:59 GMT"])
    def test_an_invalid_retry_after_is_ignored(
        self, kube: api.KubeApi, server: Server, after: str
    ) -> None:
        server.script = [answer(status=503, headers={"Retry-After": after})]
        with pytest.raises(errors.ClusterError) as caught:
            kube.post("/x", {})
        assert caught.value.retry_after_s is None

    @pytest.mark.parametrize("fault", [reset, silence, cut_off])
    def test_an_incomplete_response_is_api_unavailable(self, server: Server, fault: Step) -> None:
        client = api.KubeApi.at(server.url, request_timeout_s=0.2)
        server.script = [fault]
        with pytest.raises(errors.ClusterError) as caught:
            client.post("/x", {})
        assert (caught.value.status, caught.value.reason) == (None, errors.Reason.API_UNAVAILABLE)

    def test_an_endless_response_times_out(self, server: Server) -> None:
        def drip(handler: Handler) -> None:
            handler.send_response(200)
            handler.send_header("Content-Length", "100000")
            handler.end_headers()
            while not handler.server.over.wait(0.01):
                handler.wfile.write(b" ")
                handler.wfile.flush()

        client = api.KubeApi.at(server.url, request_timeout_s=0.1)
        server.script = [drip]
        with pytest.raises(errors.ClusterError, match="does not end"):
            client.post("/x", {})

    def test_no_error_contains_the_token(self, kube: api.KubeApi, server: Server) -> None:
        server.script = [refuse(401, "Unauthorized")]
        with pytest.raises(errors.ClusterError) as caught:
            kube.get("/x")
        assert _TOKEN not in repr(caught.value)

    def test_the_line_end_of_a_token_is_not_sent(self, server: Server) -> None:
        client = api.KubeApi.at(server.url, token=f"{_TOKEN}\n")
        server.script = [answer()]
        client.get("/x")
        assert server.seen[0][2]["Authorization"] == f"Bearer {_TOKEN}"


class TestRepetition:
    @pytest.mark.parametrize("fault", [reset, cut_off, refuse(429), refuse(500), refuse(503)])
    def test_a_get_is_retried(
        self, kube: api.KubeApi, server: Server, fault: Step, pauses: list[float]
    ) -> None:
        server.script = [fault, fault, answer({"kind": "Node"})]
        assert kube.get("/x") == {"kind": "Node"}
        assert len(pauses) == 2

    @pytest.mark.parametrize("fault", [reset, refuse(429), refuse(503)])
    def test_a_merge_patch_and_a_delete_are_retried(
        self, kube: api.KubeApi, server: Server, fault: Step
    ) -> None:
        server.script = [fault, answer({"a": 1}), fault, answer({"a": 2})]
        assert kube.patch("/x", {}, kind=api.PatchType.STRATEGIC) == {"a": 1}
        assert kube.delete("/x") == {"a": 2}

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 422])
    def test_a_permanent_error_is_not_retried(
        self, kube: api.KubeApi, server: Server, status: int
    ) -> None:
        server.script = [refuse(status)]
        with pytest.raises(errors.ClusterError):
            kube.get("/x")
        assert len(server.seen) == 1

    @pytest.mark.parametrize("fault", [reset, refuse(429), refuse(503)])
    def test_a_post_is_never_retried(self, kube: api.KubeApi, server: Server, fault: Step) -> None:
        server.script = [fault]
        with pytest.raises(errors.ClusterError):
            kube.post("/x", {})
        assert len(server.seen) == 1

    def test_a_json_patch_that_may_have_been_applied_is_not_retried(
        self, kube: api.KubeApi, server: Server
    ) -> None:
        server.script = [reset]
        with pytest.raises(errors.ClusterError):
            kube.patch("/x", [], kind=api.PatchType.JSON)
        assert len(server.seen) == 1

    def test_the_servers_retry_after_is_honoured(
        self, kube: api.KubeApi, server: Server, pauses: list[float]
    ) -> None:
        server.script = [refuse(429, after=3), answer()]
        kube.get("/x")
        assert pauses == [3.0]

    def test_a_long_retry_after_is_left_to_the_caller(
        self, kube: api.KubeApi, server: Server, pauses: list[float]
    ) -> None:
        server.script = [refuse(503, after=60)]
        with pytest.raises(errors.ClusterError) as caught:
            kube.get("/x")
        assert (caught.value.retry_after_s, pauses) == (60.0, [])

    def test_retries_end(self, kube: api.KubeApi, server: Server) -> None:
        server.script = [refuse(503, "still down")] * 50
        with pytest.raises(errors.ClusterError, match="still down"):
            kube.get("/x")
        assert len(server.seen) < 10

    def test_a_connection_to_a_missing_server_is_retried_a_few_times(
        self, pauses: list[float]
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        client = api.KubeApi.at(f"http://127.0.0.1:{port}", sleep=pauses.append)
        with pytest.raises(errors.ClusterError, match="refused"):
            client.patch("/x", [], kind=api.PatchType.JSON)
        assert 0 < len(pauses) < 10

    def test_closing_ends_the_pause_between_attempts(self, server: Server) -> None:
        client = api.KubeApi.at(server.url, request_timeout_s=30.0)
        server.script = [refuse(503, after=9)] * 9
        threading.Timer(0.1, client.close).start()
        with pytest.raises(errors.ClusterError):
            client.get("/x")
        assert len(server.seen) <= 2


class TestCredentials:
    def test_a_token_that_was_rotated_is_read_again_after_a_401(
        self, server: Server, tmp_path: pathlib.Path
    ) -> None:
        path = self._kubeconfig(tmp_path, server.url, "old")
        client = api.KubeApi.connect(kubeconfig=str(path))

        def rotate(handler: Handler) -> None:
            self._kubeconfig(tmp_path, server.url, "new")
            refuse(401)(handler)

        server.script = [rotate, answer({"a": 1})]
        assert client.get("/x") == {"a": 1}
        sent = [headers["Authorization"] for _, _, headers, _ in server.seen]
        assert sent == ["Bearer old", "Bearer new"]

    def test_a_token_that_stays_refused_is_forbidden(
        self, server: Server, tmp_path: pathlib.Path
    ) -> None:
        client = api.KubeApi.connect(kubeconfig=str(self._kubeconfig(tmp_path, server.url, "old")))
        server.script = [refuse(401), refuse(401)]
        with pytest.raises(errors.ClusterError) as caught:
            client.get("/x")
        assert caught.value.reason is errors.Reason.FORBIDDEN

    def test_in_a_pod_the_service_account_is_used_and_its_rotated_token_too(
        self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        token, authority = tmp_path / "token", tmp_path / "ca.crt"
        token.write_text("old\n")
        authority.write_text("a certificate")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
        monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
        client = api.KubeApi.connect(kubeconfig=None)
        assert client._configuration.host == "https://10.0.0.1:443"
        assert client._headers("GET /x", None)["Authorization"] == "bearer old"
        token.write_text("new")
        assert client._reload_credentials()
        assert client._headers("GET /x", None)["Authorization"] == "bearer new"
        token.unlink()
        assert not client._reload_credentials()

    def test_a_missing_kubeconfig_is_a_usage_error(self, tmp_path: pathlib.Path) -> None:
        with pytest.raises(errors.UsageError, match="nowhere"):
            api.KubeApi.connect(kubeconfig=str(tmp_path / "nowhere"))

    @pytest.mark.parametrize("text", ["", "[]", "{", "contexts: 7\ncurrent-context: a\n"])
    def test_a_malformed_kubeconfig_is_a_usage_error(
        self, tmp_path: pathlib.Path, text: str
    ) -> None:
        path = tmp_path / "config"
        path.write_text(text)
        with pytest.raises(errors.UsageError):
            api.KubeApi.connect(kubeconfig=str(path))

    def test_outside_a_cluster_the_missing_kubeconfig_is_a_usage_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        with pytest.raises(errors.UsageError, match="not in a pod"):
            api.KubeApi.connect(kubeconfig=None)

    @staticmethod
    def _kubeconfig(directory: pathlib.Path, url: str, token: str) -> pathlib.Path:
        path = directory / "config"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path.write_text(yaml.safe_dump(document))
        return path


class TestWatch:
    def test_events_are_yielded_as_they_come_until_the_server_ends_the_watch(
        self, kube: api.KubeApi, server: Server
    ) -> None:
        server.script = [lines(event(a=1), b"\n", event("BOOKMARK"))]
        with watch(kube) as stream:
            assert list(stream) == [event(a=1), event("BOOKMARK")]
        assert "watch=true" in server.seen[0][1]
        assert "timeoutSeconds=300" in server.seen[0][1]
        assert "allowWatchBookmarks=true" in server.seen[0][1]
        assert "resourceVersion=7" in server.seen[0][1]

    def test_events_may_be_split_and_joined_by_the_transport(
        self, kube: api.KubeApi, server: Server
    ) -> None:
        text = b"".join(json.dumps(event(a="ü" * n)).encode() + b"\n" for n in range(50))
        server.script = [lines(*(text[n : n + 7] for n in range(0, len(text), 7)))]
        with watch(kube) as stream:
            assert len(list(stream)) == 50

    def test_a_stream_without_chunks_ends_with_its_connection(
        self, kube: api.KubeApi, server: Server
    ) -> None:
        def old_style(handler: Handler) -> None:
            handler.send_response(200)
            handler.send_header("Connection", "close")
            handler.end_headers()
            handler.wfile.write(json.dumps(event(a=1)).encode() + b"\n")

        server.script = [old_style]
        with watch(kube) as stream:
            assert list(stream) == [event(a=1)]

    def test_an_expired_resource_version_is_410_also_within_the_stream(
        self, kube: api.KubeApi, server: Server
    ) -> None:
        status = event("ERROR", kind="Status", code=410, message="too old resource version")
        server.script = [refuse(410, "too old"), lines(status)]
        with pytest.raises(errors.ClusterError) as caught:
            watch(kube)
        assert caught.value.status == 410
        with watch(kube) as stream, pytest.raises(errors.ClusterError, match="too old") as caught:
            next(stream)
        assert caught.value.status == 410

    def test_silence_ends_the_watch_with_an_error(self, kube: api.KubeApi, server: Server) -> None:
        server.script = [lines(event(a=1), then=silence)]
        with watch(kube, idle_timeout_s=0.2) as stream:
            assert next(stream) == event(a=1)
            with pytest.raises(errors.ClusterError, match="timed out"):
                next(stream)

    def test_silence_before_the_response_ends_the_watch_sooner(self, server: Server) -> None:
        client = api.KubeApi.at(server.url, request_timeout_s=0.2)
        server.script = [silence]
        with pytest.raises(errors.ClusterError) as caught:
            watch(client, idle_timeout_s=600)
        assert caught.value.reason is errors.Reason.API_UNAVAILABLE

    def test_a_watch_may_be_silent_longer_than_the_request_time_out(self, server: Server) -> None:
        client = api.KubeApi.at(server.url, request_timeout_s=0.2)

        def late(handler: Handler) -> None:
            handler.server.over.wait(0.6)
            data = json.dumps(event(a=2)).encode() + b"\n"
            handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))

        server.script = [lines(event(a=1), then=late)]
        with watch(client, idle_timeout_s=30) as stream:
            assert list(stream) == [event(a=1), event(a=2)]

    @pytest.mark.parametrize(
        "step",
        [
            lines(b'{"type": "MODIF', then=reset),
            lines(b'{"type": "MODIF'),
            lines(b"<html>\n"),
            lines(b"[]\n"),
            lines(b'{"type":' * 100_000 + b"\n"),
            lines(b'{"type": "MODIFIED"}\n'),
            lines(b"x" * 1000, then=not_a_chunk),
        ],
    )
    def test_anything_but_whole_events_is_api_unavailable(
        self, kube: api.KubeApi, server: Server, step: Step
    ) -> None:
        server.script = [step]
        with watch(kube) as stream, pytest.raises(errors.ClusterError) as caught:
            next(stream)
        assert caught.value.reason is errors.Reason.API_UNAVAILABLE

    def test_an_endless_line_is_an_error(self, kube: api.KubeApi, server: Server) -> None:
        server.script = [lines(*([b"x" * (1 << 20)] * 9), then=silence)]
        with watch(kube) as stream, pytest.raises(errors.ClusterError, match="more than"):
            next(stream)

    def test_another_thread_can_interrupt_a_blocked_read(
        self, kube: api.KubeApi, server: Server
    ) -> None:
        server.script = [lines(event(a=1), then=silence)]
        with watch(kube, idle_timeout_s=600) as stream:
            assert next(stream) == event(a=1)
            threading.Timer(0.1, stream.interrupt).start()
            assert list(stream) == []

    def test_interrupting_twice_or_after_the_end_is_harmless(
        self, kube: api.KubeApi, server: Server
    ) -> None:
        server.script = [lines(event(a=1))]
        with watch(kube) as stream:
            assert len(list(stream)) == 1
            stream.interrupt()
        stream.interrupt()
        stream.close()


def test_requests_beyond_the_rate_limit_wait(server: Server, pauses: list[float]) -> None:
    configuration = kube_configuration.Configuration()
    configuration.host = server.url
    limit = api.RateLimit(per_s=0.5, burst=2, monotonic=lambda: 0.0)
    client = api.KubeApi(configuration, sleep=pauses.append, limit=limit)
    server.script = [answer({}) for _ in range(4)]
    for _ in range(4):
        client.get("/version")
    client.close()
    assert pauses == [2.0, 4.0]


@pytest.fixture
def behind_a_proxy(
    server: Server, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], api.KubeApi]]:
    """Connect to a cluster that only a proxy knows the way to."""
    config = tmp_path / "kubeconfig"
    named = {"clusters": "cluster", "users": "user", "contexts": "context"}
    inner: dict[str, dict[str, str]] = {
        "clusters": {"server": "http://cluster.invalid:8080"},
        "users": {},
        "contexts": {"cluster": "c", "user": "c"},
    }
    document = {key: [{"name": "c", named[key]: inner[key]}] for key in named}
    config.write_text(yaml.safe_dump({**document, "current-context": "c"}))
    for name in ("HTTPS_PROXY", "https_proxy", "http_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", server.url)
    clients: list[api.KubeApi] = []

    def connect() -> api.KubeApi:
        clients.append(api.KubeApi.connect(kubeconfig=str(config), request_timeout_s=1.0))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def test_the_environments_proxy_is_used(
    server: Server, behind_a_proxy: Callable[[], api.KubeApi]
) -> None:
    server.script = [answer({"major": "1"})]
    assert behind_a_proxy().get("/version") == {"major": "1"}
    assert server.seen[0][1] == "http://cluster.invalid:8080/version"


def test_hosts_in_no_proxy_are_connected_to_directly(
    server: Server,
    behind_a_proxy: Callable[[], api.KubeApi],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_PROXY", "cluster.invalid")
    with pytest.raises(errors.ClusterError):
        behind_a_proxy().post("/version", {})
    assert server.seen == []


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_passes_without_waiting() -> None:
    bucket = api.RateLimit(per_s=10, burst=5, monotonic=Time())

    assert [bucket.take() for _ in range(5)] == [0.0] * 5


def test_a_request_after_the_burst_waits() -> None:
    bucket = api.RateLimit(per_s=10, burst=2, monotonic=Time())

    waits = [bucket.take() for _ in range(5)]

    assert waits == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.3])


def test_tokens_return_with_time_up_to_the_burst() -> None:
    time = Time()
    bucket = api.RateLimit(per_s=10, burst=2, monotonic=time)
    for _ in range(4):
        bucket.take()

    time.now_s += 0.3
    assert bucket.take() == pytest.approx(0.0)
    time.now_s += 3600
    assert [bucket.take() for _ in range(3)] == pytest.approx([0.0, 0.0, 0.1])
