"""The server: HTTP on the loopback, in a thread of its own.

    with server.serve() as running:
        running.store.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}})
        running.kubeconfig(tmp_path / "kubeconfig")

The demo, the simulated node and the tests use it in place of a cluster; ``kubectl`` works with
it.
"""

import asyncio
import contextlib
import json
import pathlib
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
import uvicorn.protocols.http.h11_impl
import uvicorn.server
from starlette import types

from mig_manager.sandbox.apiserver import (
    access,
    application,
    budgets,
    registry,
    request,
    resources,
    store,
)

_KEEP_ALIVE_S = 75
_STOP_TIMEOUT_S = 5
_BACKLOG = 1024


class ApiServer:
    """The server; it can be started once.

    Args:
        authorizer: Decides who may do what; by default everybody may do everything.
        bookmark_period_s: Seconds between the bookmarks of a watch that allows them.
        history_limit: Number of changes kept for watches and consistent lists.
        middleware: Wraps the ASGI application, for tests.

    Attributes:
        store: All objects.
        stop_budget_controller: Stops updating the status of PodDisruptionBudgets.
    """

    def __init__(
        self,
        *,
        authorizer: access.Authorizer = lambda _access: True,
        bookmark_period_s: float = 60,
        history_limit: int = 10_000,
        middleware: Callable[[types.ASGIApp], types.ASGIApp] = lambda app: app,
    ) -> None:
        self.store = store.Store(history_limit=history_limit)
        rules = registry.Registry(self.store)
        self.stop_budget_controller = budgets.start_controller(self.store)
        for name in ("default", "kube-system"):
            target = request.Target(resource=resources.NAMESPACES)
            rules.create(target, {"metadata": {"name": name}})
        self._feed = store.Feed(self.store)
        self._application = middleware(
            application.Application(
                objects=self.store,
                rules=rules,
                feed=self._feed,
                authorizer=authorizer,
                bookmark_period_s=bookmark_period_s,
            )
        )
        # asyncio switches Nagle off only where it sees TCP by name: 42 ms a request otherwise.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._address = ("127.0.0.1", 0)
        self._state = uvicorn.server.ServerState()
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="sandbox-apiserver", daemon=True
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; known once the server is started, also after it has stopped."""
        return self._address

    @property
    def url(self) -> str:
        """Base URL, such as ``http://127.0.0.1:40001``; known once the server is started."""
        host, port = self._address
        return f"http://{host}:{port}"

    @property
    def watch_count(self) -> int:
        """Number of open watches."""
        return self._feed.size

    def start(self) -> None:
        """Listen on a free port; return when requests are answered."""
        self._socket.bind(self._address)
        self._socket.listen(_BACKLOG)
        self._address = self._socket.getsockname()
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """End all watches and connections and the thread."""
        if self._stopping is not None:
            self.call_in_loop(self._stopping.set)
            self._thread.join(_STOP_TIMEOUT_S)

    def call_in_loop(self, callback: Callable[[], object]) -> None:
        """Call something soon in the server's event loop; ignored unless the server runs."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(callback)

    def transports(self) -> list[asyncio.Transport]:
        """Return the transports of the open connections; only in the event loop."""
        return [connection.transport for connection in self._state.connections]

    def kubeconfig(self, path: pathlib.Path, *, token: str = "sandbox") -> pathlib.Path:  # noqa: S107
        """Write a kubeconfig for this server and return its path.

        Any token is accepted: it identifies the client to the authorizer. ``kubectl`` does not
        send it, because the server speaks plain HTTP.
        """
        name = "sandbox"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": {"server": self.url}}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
        }
        path.write_text(json.dumps(document, indent=2))
        path.chmod(0o600)
        return path

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        config = uvicorn.Config(
            self._application,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        config.load()
        # uvicorn's protocol without uvicorn's Server, whose loop polls ten times a second.
        listener = await self._loop.create_server(
            lambda: uvicorn.protocols.http.h11_impl.H11Protocol(
                config=config, server_state=self._state, app_state={}
            ),
            sock=self._socket,
        )
        self._ready.set()
        await self._stopping.wait()
        listener.close()
        self._feed.close()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=1)
        for transport in self.transports():
            transport.close()
        await asyncio.sleep(0)


@contextlib.contextmanager
def serve(server: ApiServer | None = None) -> Iterator[ApiServer]:
    """Start a server (by default a plain one) and stop it at the end of the ``with`` block."""
    server = server or ApiServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()
