"""Log the requests of the embedded API server and inject faults into it, as ASGI middleware."""

import asyncio
import collections
import contextlib
import dataclasses
import enum
import json
import math
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from starlette import requests, responses, types

from mig_manager.sandbox.apiserver import kinds, request, server
from testkit import authorization, stored_objects

Access = authorization.Access

_LOG_LIMIT = 10_000
_HALF_A_LINE = b'{"type":"MODIFIED","object":{"kind":"No'
_PROXY_PAGE = b"<html><body><h1>It works!</h1></body></html>\n"


class Break(enum.Enum):
    """How an open watch ends or fails."""

    CLOSE = "close"  # cleanly, as at its time-out
    EXPIRE = "expire"  # with an ERROR event that carries 410
    RESET = "reset"
    TRUNCATE = "truncate"  # in the middle of a JSON line
    STALL = "stall"  # not at all: the connection stays open and silent, as behind a dead NAT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault to inject, and the requests that it strikes.

    Without ``status``, ``reset``, ``truncate``, ``garbles``, ``reverts`` and ``stall`` the request
    is only delayed by ``hang_s``. An empty word selects any request.
    """

    method: str = ""
    verb: str = ""
    resource: str = ""  # such as ``nodes`` or ``pods/eviction``
    path: str = ""  # regular expression searched for in path and query
    token: str = ""
    skip: int = 0  # number of such requests that pass first
    times: int | None = 1  # number of such requests that it strikes; None for all
    hang_s: float = 0  # delay before all other effects
    status: int | None = None  # HTTP status to answer with, in a fitting Status object
    retry_after_s: int | None = None
    message: str = "injected fault"
    reset: bool = False  # reset the connection in place of an answer
    truncate: bool = False
    """Close the connection in the middle of the answer; of a watch, in its first line."""
    garbles: bool = False
    """Answer 200 with the page of a proxy in place of JSON; of a watch, as its first line."""
    reverts: bool = False  # carry out an empty patch, as if a webhook had reverted each field
    stall: bool = False  # never answer; of a watch, send only the headers, and end it in time
    is_carried_out: bool = False
    """Whether the request has its effect, and the fault replaces only its answer."""

    def matches(self, logged: "LoggedRequest", target: str) -> bool:
        """Return whether to strike or to skip a request with this path and query."""
        return (
            self.method in ("", logged.method)
            and self.verb in ("", logged.verb)
            and self.resource in ("", logged.resource)
            and self.token in ("", logged.token)
            and re.search(self.path, target) is not None
        )


FAULTS: Mapping[str, Fault] = {
    **{str(code): Fault(status=code) for code in (401, 403, 404, 409, 410, 429, 500, 503)},
    "429-retry-after": Fault(status=429, retry_after_s=1),
    "429-retry-much-later": Fault(status=429, retry_after_s=60),
    "reset": Fault(reset=True),
    "reset-when-done": Fault(reset=True, is_carried_out=True),
    "500-when-done": Fault(status=500, is_carried_out=True),
    "no-answer": Fault(stall=True),
    "no-answer-when-done": Fault(stall=True, is_carried_out=True),
    "cut-off": Fault(truncate=True),
    "garbage": Fault(garbles=True),
}
"""Faults by name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """A request as it arrived."""

    method: str
    path: str
    query: Mapping[str, str]
    verb: str  # Kubernetes verb; empty for discovery and health
    resource: str  # such as ``nodes`` or ``pods/eviction``; empty for discovery and health
    token: str  # bearer token; empty without one


class RequestLog:
    """The requests so far, oldest first; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: collections.deque[LoggedRequest] = collections.deque(maxlen=_LOG_LIMIT)
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()

    def add(self, logged: LoggedRequest) -> None:
        """Append a request."""
        with self._lock:
            self._requests.append(logged)
            self._counts[logged.verb, logged.resource] += 1

    def requests(self, *, verb: str = "", resource: str = "") -> list[LoggedRequest]:
        """Return the requests of a verb and resource; empty words select all."""
        with self._lock:
            return [
                each
                for each in self._requests
                if verb in ("", each.verb) and resource in ("", each.resource)
            ]

    def count(self, verb: str, resource: str) -> int:
        """Return the number of requests of a verb for a resource, such as ``pods/eviction``."""
        with self._lock:
            return self._counts[verb, resource]

    def clear(self) -> None:
        """Drop all requests and counts."""
        with self._lock:
            self._requests.clear()
            self._counts.clear()


class ApiServer(stored_objects.StoredObjects, server.ApiServer):
    """The server with a request log and fault injection; safe to use from any thread."""

    def __init__(
        self,
        *,
        authorizer: authorization.Authorizer = lambda _access: True,
        bookmark_period_s: float = 60,
        history_limit: int = 10_000,
    ) -> None:
        self.log = RequestLog()
        self._faults_lock = threading.Lock()
        self._faults: list[_InjectedFault] = []
        self.closing = asyncio.Event()
        self._watches: set[_OpenWatch] = set()
        super().__init__(
            bookmark_period_s=bookmark_period_s,
            history_limit=history_limit,
            middleware=lambda app: _Middleware(
                authorization.AuthorizedApp(app, authorizer), self, self._watches
            ),
        )

    @property
    def watch_count(self) -> int:
        """Number of open watches."""
        return len(self._watches)

    def stop(self) -> None:
        """End all requests, connections and the thread."""
        self.call_in_loop(self.closing.set)
        super().stop()

    def inject(self, fault: Fault) -> None:
        """Strike matching requests from now on; older faults strike first."""
        with self._faults_lock:
            self._faults.append(_InjectedFault(fault))

    def clear_faults(self) -> None:
        """Drop all faults."""
        with self._faults_lock:
            self._faults.clear()

    def faults_waiting(self) -> int:
        """Return the number of faults that can still strike."""
        with self._faults_lock:
            return sum(injected.matches < injected.last for injected in self._faults)

    def take_fault(self, logged: LoggedRequest, target: str) -> Fault | None:
        """Return the fault that strikes a request, and count it."""
        with self._faults_lock:
            for injected in self._faults:
                if injected.fault.matches(logged, target):
                    injected.matches += 1
                    if injected.fault.skip < injected.matches <= injected.last:
                        return injected.fault
        return None

    def break_watches(self, how: Break) -> None:
        """End or fail all open watches; later watches work."""

        def stop_all() -> None:
            for watch in self._watches:
                watch.how = watch.how or how
                watch.stop.set()

        self.call_in_loop(stop_all)


@contextlib.contextmanager
def serve(api_server: ApiServer | None = None) -> Iterator[ApiServer]:
    """Run a server, by default a plain one, during the ``with`` block."""
    with server.serve(api_server := api_server or ApiServer()):
        yield api_server


@dataclasses.dataclass
class _InjectedFault:
    fault: Fault
    matches: int = 0  # number of requests so far that it struck or skipped

    @property
    def last(self) -> float:
        """Number of the last request that it strikes."""
        return math.inf if self.fault.times is None else self.fault.skip + self.fault.times


@dataclasses.dataclass(eq=False)
class _OpenWatch:
    how: Break | None = None
    stop: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


class _Middleware:
    """Logs requests and injects the faults; the ASGI application of the server."""

    def __init__(
        self, app: types.ASGIApp, api_server: ApiServer, watches: set[_OpenWatch]
    ) -> None:
        self._app = app
        self._server = api_server
        self._watches = watches

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        http = requests.Request(scope, receive)
        try:
            body = await http.body()
        except requests.ClientDisconnect:
            return
        call = _Call(self._app, http, body, receive, send)
        self._server.log.add(call.log_entry)
        target = f"{http.url.path}?{http.url.query}".removesuffix("?")
        fault = self._server.take_fault(call.log_entry, target)
        if fault is not None and fault.reverts:
            call.body = b"{}"
        elif fault is not None and await self._strike(call, fault):
            return
        if call.is_watch:
            await self._watch(call)
        else:
            await call.forward(send)

    async def _strike(self, call: "_Call", fault: Fault) -> bool:
        if fault.hang_s:
            await self._linger(call, fault.hang_s)
        if fault.is_carried_out and not call.is_watch:
            await call.answer()
        if fault.status is not None:
            await _refusal(fault.status, fault)(call.http.scope, call.receive, call.send)
        elif fault.reset:
            await self._drop(call, is_reset=True)
        elif fault.truncate and call.is_watch:
            await call.begin()
            await self._break(call, Break.TRUNCATE)
        elif fault.truncate:
            whole = await call.answer()
            await call.begin(length=len(whole))
            await call.write(whole[: len(whole) // 2])
            await self._drop(call, is_reset=False)
        elif fault.garbles:
            await call.begin()
            await call.write(_PROXY_PAGE, is_last=True)
        elif fault.stall:
            if call.is_watch:
                await call.begin()
                await call.write(b"")
                await self._linger(call, float(call.http.query_params["timeoutSeconds"]))
                await self._break(call, Break.CLOSE)
            else:
                await self._break(call, Break.STALL)
        else:
            return False
        return True

    async def _watch(self, call: "_Call") -> None:
        watch = _OpenWatch()
        self._watches.add(watch)
        running = asyncio.ensure_future(call.forward(call.send))
        stopped = asyncio.ensure_future(watch.stop.wait())
        try:
            await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
            if watch.how is None or running.done():
                await running
                return
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await self._break(call, watch.how)
        finally:
            stopped.cancel()
            self._watches.discard(watch)

    async def _break(self, call: "_Call", how: Break) -> None:
        match how:
            case Break.CLOSE:
                await call.write(b"", is_last=True)
            case Break.EXPIRE:
                error = kinds.StatusError(410, "The resourceVersion for the watch is too old.")
                line = json.dumps({"type": "ERROR", "object": error.to_status()}) + "\n"
                await call.write(line.encode(), is_last=True)
            case Break.RESET:
                await self._drop(call, is_reset=True)
            case Break.TRUNCATE:
                await call.write(_HALF_A_LINE)
                await self._drop(call, is_reset=False)
            case Break.STALL:
                await self._linger(call, None)
                await self._drop(call, is_reset=True)

    async def _linger(self, call: "_Call", seconds: float | None) -> None:
        """Wait for a time, or (None) until the client leaves or the server stops."""
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._server.closing.wait()),
            asyncio.ensure_future(call.receive()),
        ]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _drop(self, call: "_Call", *, is_reset: bool) -> None:
        """End the client's connection: at once with a reset, or after the bytes written so far."""
        client = tuple(call.http.scope["client"])
        for transport in self._server.transports():
            if transport.get_extra_info("peername") != client:
                continue
            if is_reset:
                # With a linger of zero seconds the kernel sends RST in place of FIN.
                transport.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
                transport.abort()
            transport.close()
        await call.receive()


def _refusal(status: int, fault: Fault) -> responses.Response:
    delay_s = fault.retry_after_s
    details = {"retryAfterSeconds": delay_s} if delay_s else None
    refusal = server.status_response(kinds.StatusError(status, fault.message, details=details))
    if delay_s:
        refusal.headers["Retry-After"] = str(delay_s)
    return refusal


@dataclasses.dataclass
class _Call:
    """One request and the ways to answer it."""

    app: types.ASGIApp
    http: requests.Request
    body: bytes
    receive: types.Receive
    send: types.Send

    def __post_init__(self) -> None:
        self.log_entry = _log_entry(self.http)

    @property
    def is_watch(self) -> bool:
        return self.log_entry.verb == "watch"

    async def forward(self, send: Callable[[types.Message], Any]) -> None:
        is_read = False

        async def receive() -> types.Message:
            nonlocal is_read
            if is_read:
                return await self.receive()
            is_read = True
            return {"type": "http.request", "body": self.body, "more_body": False}

        await self.app(self.http.scope, receive, send)

    async def answer(self) -> bytes:
        """Forward the request; return the body of the server's answer."""
        chunks: list[bytes] = []

        async def keep(message: types.Message) -> None:
            chunks.append(message.get("body", b""))

        await self.forward(keep)
        return b"".join(chunks)

    async def begin(self, *, length: int | None = None) -> None:
        """Send the headers of an answer; ``length`` is None if unknown."""
        headers = [(b"content-type", b"application/json")]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, chunk: bytes, *, is_last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": chunk, "more_body": not is_last})


def _log_entry(http: requests.Request) -> LoggedRequest:
    try:
        info = request.parse(http.method, http.url.path, http.query_params)
    except kinds.StatusError:
        info = None
    target = info.target if info else None
    return LoggedRequest(
        method=http.method,
        path=http.url.path,
        query=dict(http.query_params),
        verb=info.verb if info else "",
        resource=authorization.full_resource(target.resource.plural, target.subresource)
        if target
        else "",
        token=authorization.bearer_token(http),
    )
