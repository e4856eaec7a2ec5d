"""Serve a few small pages over HTTP, for probes and scrapes; no client can starve the others."""

import contextlib
import dataclasses
import http
import http.server
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.core import liveness

TEXT = "text/plain; charset=utf-8"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
_MAX_CONNECTIONS = 16
_CONNECTION_S = 10.0
"""Limit of one connection: a scrape takes milliseconds, a slow client could take for ever."""
_POLL_S = 1.0

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The response to a path."""

    body: bytes
    is_good: bool = True  # False is sent as 503
    content_type: str = TEXT


class WebServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves pages, each connection in a thread; with too many, the oldest is closed.

    Port 0 is any free port; an empty address listens everywhere, IPv6 included where available.
    OSError if the address cannot be used.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self, pages: Mapping[str, Callable[[], Page]], *, address: str, port: int
    ) -> None:
        self.pages = pages
        self._opened: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        has_both = not address and socket.has_dualstack_ipv6()
        is_ipv6 = has_both or ":" in address
        self.address_family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        super().__init__((address, port), _Handler, bind_and_activate=False)
        try:
            if has_both:
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self.server_bind()
            self.server_activate()
        except BaseException:
            self.server_close()
            raise

    @property
    def port(self) -> int:
        """The port of the server."""
        return int(self.server_address[1])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Serve in a thread for the body; connections that last longer are closed."""
        thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_S,), name="webserver", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            # Wakes the thread at once, before its next poll.
            self.socket.shutdown(socket.SHUT_RDWR)
            self.shutdown()
            self._close_connections(lambda _since: True)
            self.server_close()

    # -- socketserver's hooks ------------------------------------------------------------

    def process_request(self, request: Any, client_address: object) -> None:
        """Register an accepted connection."""
        with self._lock:
            oldest = min(self._opened.values(), default=0.0)
            is_full = len(self._opened) >= _MAX_CONNECTIONS
            self._opened[request] = time.monotonic()
        if is_full:
            self._close_connections(lambda since: since <= oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a finished connection."""
        with self._lock:
            self._opened.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that last too long; called about once a second."""
        now = time.monotonic()
        self._close_connections(lambda since: now - since > _CONNECTION_S)

    def handle_error(self, request: Any, client_address: object) -> None:
        """Log an error; most often the client has disconnected."""
        _log.debug("http_request_failed", exc_info=True)

    def _close_connections(self, must_close: Callable[[float], bool]) -> None:
        """Close connections by when they were opened; their threads then end by themselves."""
        with self._lock:
            for connection, since in self._opened.items():
                if must_close(since):
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def served(
    health: liveness.Health, exposition: Callable[[], bytes], *, address: str, port: int
) -> Iterator[int]:
    """Serve ``/healthz``, ``/readyz`` and ``/metrics``; yield the port (0: any free one).

    Raises:
        UsageError: The port is taken, or not permitted.
    """

    def page(why: str) -> Page:
        return Page(body=f"{why or 'ok'}\n".encode(), is_good=not why)

    pages = {
        "/healthz": lambda: page(health.why_dead()),
        "/readyz": lambda: page(health.why_unready()),
        "/metrics": lambda: Page(body=exposition(), content_type=METRICS),
    }
    try:
        server = WebServer(pages, address=address, port=port)
    except OSError as error:
        raise errors.UsageError(
            f"cannot listen on {address or '*'}:{port}: {error.strerror or error}"
        ) from error
    with server.running():
        _log.info("health_served", address=address or "*", port=server.port)
        yield server.port


class _Handler(http.server.BaseHTTPRequestHandler):
    server: WebServer
    timeout = _CONNECTION_S

    def do_GET(self) -> None:
        make = self.server.pages.get(self.path.partition("?")[0])
        if make is None:
            self._send(http.HTTPStatus.NOT_FOUND, Page(body=b"no such page\n"))
            return
        page = make()
        status = http.HTTPStatus.OK if page.is_good else http.HTTPStatus.SERVICE_UNAVAILABLE
        self._send(status, page)

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def _refuse(self) -> None:
        page = Page(body=b"only GET and HEAD\n")
        self._send(http.HTTPStatus.METHOD_NOT_ALLOWED, page, Allow="GET, HEAD")

    do_DELETE = do_OPTIONS = do_PATCH = do_POST = do_PUT = _refuse  # noqa: N815 - http.server's names

    def _send(self, status: http.HTTPStatus, page: Page, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    def version_string(self) -> str:
        """Hide versions."""
        return "mig-manager"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Write nothing: probes would fill the log."""
