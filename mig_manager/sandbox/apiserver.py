"""An embedded Kubernetes API server: real HTTP on the loopback, in a thread of its own.

    with apiserver.serve() as server:
        server.store.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}})
        server.kubeconfig(tmp_path / "kubeconfig")

The demo, the simulated node and the tests use it in place of a cluster; ``kubectl`` works with
it. The modules of the folder ``api`` are its parts: store, registry, watches, and so on.
"""

import asyncio
import contextlib
import json
import pathlib
import socket
import struct
import threading
from collections.abc import Iterator

import uvicorn
import uvicorn.protocols.http.h11_impl
import uvicorn.server

from mig_manager.sandbox.api import (
    access,
    asgi,
    budgets,
    calls,
    faultbox,
    registries,
    resources,
    stores,
    watches,
)

Fault = faultbox.Fault
Break = faultbox.Break
Access = access.Access

_KEEP_ALIVE_S = 75
_STOP_TIMEOUT_S = 5
_BACKLOG = 1024
_CONTEXT = "sandbox"
_NAMESPACES = ("default", "kube-system")


class ApiServer:
    """The server; it can be started once.

    Args:
        authorizer: Decides who may do what; by default all may do all.
        bookmark_period_s: Seconds between the bookmarks of a watch that allows them.
        history_limit: Number of changes kept for watches and consistent lists.
        refuses_expired_watches: Answer a watch of a forgotten version with HTTP 410, in place of
            an ERROR event in the stream; real servers do either.

    Attributes:
        store: All objects, for putting the world in place and for looking at it.
        registry: The same with the API's rules, without HTTP.
        log: What clients have asked.
        budgets: Keeps the status of PodDisruptionBudgets; can be paused.
    """

    def __init__(
        self,
        *,
        authorizer: access.Authorizer = lambda _access: True,
        bookmark_period_s: float = 60,
        history_limit: int = 10_000,
        refuses_expired_watches: bool = False,
    ) -> None:
        self.store = stores.Store(history_limit=history_limit)
        self.registry = registries.Registry(self.store)
        self.log = faultbox.RequestLog()
        self.budgets = budgets.BudgetController(self.store)
        for name in _NAMESPACES:
            self.registry.create(
                calls.Target(resource=resources.NAMESPACES), {"metadata": {"name": name}}
            )
        self._faults = faultbox.FaultBox()
        self._feed = watches.Feed(self.store)
        self._backend = asgi.Backend(
            store=self.store,
            registry=self.registry,
            feed=self._feed,
            faults=self._faults,
            log=self.log,
            authorizer=authorizer,
            bookmark_period_s=bookmark_period_s,
            refuses_expired_watches=refuses_expired_watches,
            drop=self._drop,
        )
        # asyncio switches Nagle off only where it sees TCP by name: 42 ms a request otherwise.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._address = ("127.0.0.1", 0)
        self._state = uvicorn.server.ServerState()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sandbox-apiserver", daemon=True)
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
        """Number of watches that are open."""
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
        if self._loop is None or self._stopping is None or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_TIMEOUT_S)

    def inject(self, fault: faultbox.Fault) -> None:
        """Let a fault strike matching requests from now on."""
        self._faults.inject(fault)

    def clear_faults(self) -> None:
        """Forget all faults that still wait."""
        self._faults.clear()

    def faults_waiting(self) -> int:
        """Return how many of the faults have strikes left."""
        return self._faults.waiting()

    def break_watches(self, how: faultbox.Break) -> None:
        """Let every watch that is open now end or fail; those begun later are well."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._feed.stop_all, how)

    def kubeconfig(self, path: pathlib.Path, *, token: str = "sandbox") -> pathlib.Path:  # noqa: S107
        """Write a kubeconfig for this server and return its path.

        The token is one of the caller's choosing: it tells clients apart in ``log`` and to the
        authorizer. ``kubectl`` does not send it, because the server speaks plain HTTP.
        """
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": _CONTEXT, "cluster": {"server": self.url}}],
            "users": [{"name": _CONTEXT, "user": {"token": token}}],
            "contexts": [{"name": _CONTEXT, "context": {"cluster": _CONTEXT, "user": _CONTEXT}}],
            "current-context": _CONTEXT,
        }
        path.write_text(json.dumps(document, indent=2))
        path.chmod(0o600)
        return path

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        application = asgi.Application(self._backend)
        config = uvicorn.Config(
            application,
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
        application.close()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=1)
        for connection in tuple(self._state.connections):
            connection.transport.close()
        await asyncio.sleep(0)

    def _drop(self, client: tuple[str, int], how: faultbox.Break) -> None:
        for connection in tuple(self._state.connections):
            transport = connection.transport
            if transport.get_extra_info("peername") != client:
                continue
            if how is faultbox.Break.RESET:
                # Lingering for zero seconds makes the kernel send RST in place of FIN.
                linger = struct.pack("ii", 1, 0)
                transport.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
                transport.abort()
            transport.close()


@contextlib.contextmanager
def serve(server: ApiServer | None = None) -> Iterator[ApiServer]:
    """Start a server (by default a plain one) and stop it at the end of the ``with`` block."""
    server = server or ApiServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()
