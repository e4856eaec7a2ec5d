"""An API server that follows a script, also where the script is bad HTTP."""

import contextlib
import http.server
import json
import pathlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from typing import Any, Self

import pytest

from mig_manager import errors
from mig_manager.adapters.kubernetes import api

TOKEN = "a-secret-token"  # noqa: S105 - of a server in this file


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers a request with its page, or with the next entry of the script."""

    protocol_version = "HTTP/1.1"
    server: "KubeServer"

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, dict(self.headers), body))
        page = self.server.pages.get(self.path)
        step = answer(page) if page is not None else self.server.script.pop(0)
        step(self)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815 - stdlib's names

    def log_message(self, *_args: object) -> None:
        """Keep the test's output clean."""


Step = Callable[[Handler], None]


class KubeServer(http.server.ThreadingHTTPServer):
    """The script, what was asked (method, path, headers, body), and a client of it."""

    daemon_threads = True

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{self.server_port}"
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.script: list[Step] = []
        self.pages: dict[str, Any] = {"/version": {"major": "1"}}
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.over = threading.Event()
        self.pauses: list[float] = []
        """Between attempts of ``kube``, in seconds."""
        self.kube = self.client(60.0)
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.kube.close()
        self.shutdown()
        self._thread.join()
        self.server_close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def client(self, request_timeout_s: float) -> api.KubeApi:
        return api.KubeApi.at(
            self.url, token=TOKEN, request_timeout_s=request_timeout_s, sleep=self.pauses.append
        )

    def credentials(self) -> list[tuple[str, str | None]]:
        """Return the path of each request, and what it carried to be let in."""
        return [(path, headers.get("Authorization")) for _, path, headers, _ in self.requests]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Register a connection: a client that has failed keeps it until it is collected."""
        self._connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, *_args: object) -> None:
        """Broken connections are what these tests are about."""


def kubeconfig(path: pathlib.Path, cluster: dict[str, Any], user: dict[str, Any]) -> str:
    document = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(document))
    return str(path)


def failure(call: Callable[..., object], *arguments: Any, **options: Any) -> errors.ClusterError:
    """Return the error with which a call fails."""
    with pytest.raises(errors.ClusterError) as caught:
        call(*arguments, **options)
    return caught.value


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
    status: int, message: str = "no", *, causes: tuple[str, ...] = (), after: object = None
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


def endless(status: int, chunk: bytes, *, pause_s: float = 0.0) -> Step:
    """Send a body until the client hangs up."""

    def step(handler: Handler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(1 << 40))
        handler.end_headers()
        while not handler.server.over.wait(pause_s):
            handler.wfile.write(chunk)
            handler.wfile.flush()

    return step


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
