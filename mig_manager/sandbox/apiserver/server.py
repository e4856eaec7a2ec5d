"""The server: HTTP on the loopback, in a thread of its own.

    with server.serve() as running:
        running.store.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}})
        running.kubeconfig(tmp_path / "kubeconfig")

The demo, the simulated node and the tests use it instead of a cluster; ``kubectl`` works with it.
"""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
import uvicorn.protocols.http.h11_impl
import uvicorn.server
from starlette import requests, responses, types

from mig_manager.sandbox.apiserver import kinds, registry, rendering, request, store

Object = kinds.Object

_KEEP_ALIVE_S = 75
_STOP_TIMEOUT_S = 5
_END_TIMEOUT_S = 1
_BACKLOG = 1024
_DEFAULT_WATCH_S = 1800
"""Duration of a watch without ``timeoutSeconds``; the real server picks 30 to 60 minutes."""
_JSON_HEADERS = [(b"content-type", b"application/json")]
_OPENAPI_V2 = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"


class ApiServer:
    """The server; start it once.

    Args:
        bookmark_period_s: Seconds between the bookmarks of a watch that allows them.
        history_limit: Number of changes kept for watches and consistent lists.
        middleware: Wraps the ASGI application, for tests.
    """

    def __init__(
        self,
        *,
        bookmark_period_s: float = 60,
        history_limit: int = 10_000,
        middleware: Callable[[types.ASGIApp], types.ASGIApp] = lambda app: app,
    ) -> None:
        self.store = store.Store(history_limit=history_limit)
        rules = registry.Registry(self.store)
        registry.start_budget_controller(self.store)
        for name in ("default", "kube-system", "gpu-operator", "mig-manager"):
            target = request.RequestTarget(resource=kinds.NAMESPACES)
            rules.create(target, {"metadata": {"name": name}})
        self._watchers: set[store.Watcher] = set()
        self._application = middleware(
            _Application(
                rules=rules,
                objects=self.store,
                watchers=self._watchers,
                bookmark_period_s=bookmark_period_s,
            )
        )
        self._state = uvicorn.server.ServerState()
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="sandbox-apiserver", daemon=True
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self.address = ("127.0.0.1", 0)
        """Host and port; valid from the start on, also after the stop."""

    @property
    def url(self) -> str:
        """Base URL, such as ``http://127.0.0.1:40001``; valid from the start on."""
        host, port = self.address
        return f"http://{host}:{port}"

    def start(self) -> None:
        """Listen on a free port; return when the server answers."""
        # asyncio disables Nagle only for sockets of IPPROTO_TCP: 42 ms a request otherwise.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(self.address)
        self._socket.listen(_BACKLOG)
        self.address = self._socket.getsockname()
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """End all watches and connections and the thread."""
        if self._loop is not None:
            self.call_in_loop(self._stopping.set)
            self._thread.join(_STOP_TIMEOUT_S)

    def call_in_loop(self, callback: Callable[[], object]) -> None:
        """Call a function soon in the server's event loop, if the server runs."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(callback)

    def transports(self) -> list[asyncio.Transport]:
        """Return the transports of the open connections; only in the event loop."""
        return [connection.transport for connection in self._state.connections]

    def kubeconfig(self, path: pathlib.Path, *, token: str = "sandbox") -> pathlib.Path:  # noqa: S107
        """Write a kubeconfig for this server and return its path.

        The server accepts any token. ``kubectl`` sends none over plain HTTP.
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
        # A listener that is closed between accept and the transport leaks the connection:
        # asyncio's Server takes none once it is closed.
        self._loop.remove_reader(self._socket)
        for watcher in self._watchers:
            watcher.stop()
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks, timeout=_END_TIMEOUT_S)
        listener.close()
        for transport in self.transports():
            transport.close()
        await asyncio.sleep(0)
        # Unread answers keep connections open.
        for transport in self.transports():
            transport.abort()
        await asyncio.sleep(0)


@contextlib.contextmanager
def serve(server: ApiServer | None = None) -> Iterator[ApiServer]:
    """Run a server, by default a plain one, in the context."""
    server = server or ApiServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Application:
    """The API over HTTP, an ASGI application: answers from the registry, and watches."""

    rules: registry.Registry
    objects: store.Store
    watchers: set[store.Watcher]  # the open watches
    bookmark_period_s: float

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        http = requests.Request(scope, receive)
        try:
            call = _HttpRequest(http=http, body=await http.body())
        except requests.ClientDisconnect:
            return
        try:
            info = request.parse(http.method, http.url.path, http.query_params)
            if info is None:
                response = self._answer_other(call)
            else:
                renderer = rendering.Renderer(
                    resource=info.target.resource,
                    is_table=rendering.accepts_table(http.headers.get("accept", "")),
                    has_objects=info.query.get("includeObject") == "Object",
                )
                if info.verb == "watch":
                    await self._watch(http, info, renderer, send)
                    return
                if info.verb == "list":
                    answer = rendering.list_collection(self.objects, info, renderer)
                else:
                    answer = renderer.item(self._perform(call, info))
                response = _json_response(answer, 201 if info.verb == "create" else 200)
        except kinds.StatusError as error:
            response = status_response(error)
        await response(scope, receive, send)

    def _perform(self, call: "_HttpRequest", info: request.RequestInfo) -> Object:
        rules = self.rules
        target = info.target
        dry_run = "All" in info.query.get("dryRun", "")
        if dry_run and target.subresource != "eviction":
            raise kinds.bad_request("the sandbox has dry runs of evictions only")
        match info.verb:
            case "get":
                return rules.get(target)
            case "create":
                if target.subresource == "eviction":
                    return rules.evict(target, call.json(), dry_run=dry_run)
                create = rules.bind if target.subresource == "binding" else rules.create
                return create(target, call.json())
            case "update":
                return rules.update(target, call.json())
            case "patch":
                return rules.patch(target, call.content_type, call.content())
            case _:
                return rules.delete(target, call.json())

    def _answer_other(self, call: "_HttpRequest") -> responses.Response:
        """Answer a review, or a request for discovery or health."""
        path = call.http.url.path
        match [part for part in path.split("/") if part]:
            case ["apis", group, "v1", plural] if (group, plural) == kinds.REVIEW:
                answer = {"kind": "SelfSubjectAccessReview", "status": {"allowed": True}}
                return _json_response(call.json() | answer, 201)
            case ["openapi", "v2"]:
                # A document without schemas, so that clients validate nothing.
                return responses.Response(b"", media_type=_OPENAPI_V2)
            case ["healthz" | "livez" | "readyz", *_]:
                return responses.PlainTextResponse("ok")
            case _:
                document = kinds.discovery_documents().get(path.rstrip("/"))
                if document is None:
                    raise kinds.no_such_path()
                return _json_response(document)

    async def _watch(
        self,
        http: requests.Request,
        info: request.RequestInfo,
        renderer: rendering.Renderer,
        send: types.Send,
    ) -> None:
        selection = request.selection(info)
        since = request.number(info.query, "resourceVersion")
        request.number(info.query, "timeoutSeconds")
        start = {"type": "http.response.start", "status": 200, "headers": _JSON_HEADERS}
        watcher = store.Watcher(self.objects, selection)
        self.watchers.add(watcher)
        try:
            with watcher.open(since) as present:
                await send(start)
                # After the body, the next message can only be the disconnect.
                disconnect = asyncio.ensure_future(http.receive())
                disconnect.add_done_callback(lambda _: watcher.stop())
                try:
                    async for chunk in self._events(watcher, present, renderer, info):
                        await send(_chunk(chunk))
                finally:
                    disconnect.cancel()
        except kinds.StatusError as error:
            # As the real server answers from its watch cache.
            await send(start)
            await send(_chunk(_line("ERROR", error.to_status())))
        finally:
            self.watchers.discard(watcher)
        await send(_chunk(b"", is_last=True))

    async def _events(
        self,
        watcher: store.Watcher,
        present: list[Object],
        renderer: rendering.Renderer,
        info: request.RequestInfo,
    ) -> AsyncIterator[bytes]:
        """Yield chunks of whole JSON lines until the watch times out or stops."""
        clock = asyncio.get_running_loop().time
        has_bookmarks = info.query.get("allowWatchBookmarks", "") in ("1", "true")
        ends = clock() + (request.number(info.query, "timeoutSeconds") or _DEFAULT_WATCH_S)
        bookmark_at = clock() + self.bookmark_period_s
        yield b"".join(_line("ADDED", renderer.item(obj)) for obj in present)
        while not watcher.is_stopped:
            watcher.awake.clear()
            lines = [_line(c.value, renderer.item(obj)) for c, obj in watcher.drain()]
            if lines:
                yield b"".join(lines)
            if clock() >= min(ends, bookmark_at):
                bookmark_at = clock() + self.bookmark_period_s
                with self.objects.lock:
                    is_current = watcher.is_empty
                    version = self.objects.version
                if has_bookmarks and is_current:
                    yield _line("BOOKMARK", renderer.bookmark(version))
            if clock() >= ends:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(min(ends, bookmark_at) - clock(), 0)):
                    await watcher.awake.wait()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _HttpRequest:
    """One HTTP request with its whole body."""

    http: requests.Request
    body: bytes

    @property
    def content_type(self) -> str:
        """Media type of the body, without parameters."""
        return self.http.headers.get("content-type", "").partition(";")[0].strip()

    def json(self) -> Any:
        """Return the content of a JSON body."""
        if self.content_type not in ("", "application/json"):
            message = "the body of the request was in an unknown format - accepted media types "
            raise kinds.StatusError(415, f"{message}include: application/json")
        return self.content()

    def content(self) -> Any:
        """Return the content of a body of any JSON type; an empty body is an object."""
        try:
            return json.loads(self.body or b"{}")
        except ValueError as error:
            raise kinds.bad_request(f"unable to decode the body: {error}") from error


def status_response(error: kinds.StatusError) -> responses.Response:
    """Return the response to a failed request."""
    return _json_response(error.to_status(), error.code)


def _json_response(content: Object, code: int = 200) -> responses.Response:
    body = json.dumps(content, separators=(",", ":")).encode() + b"\n"
    return responses.Response(body, code, media_type="application/json")


def _chunk(body: bytes, *, is_last: bool = False) -> types.Message:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}


def _line(kind: str, obj: Object) -> bytes:
    return json.dumps({"type": kind, "object": obj}, separators=(",", ":")).encode() + b"\n"
