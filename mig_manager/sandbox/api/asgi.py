"""HTTP over the registry: one ASGI application that answers, streams, and fails when told to."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from starlette import requests, types

from mig_manager.sandbox.api import (
    access,
    calls,
    exchanges,
    faultbox,
    registries,
    statuses,
    stores,
    verbs,
    watches,
)

Object = statuses.Object

_HALF_A_LINE = b'{"type":"MODIFIED","object":{"kind":"No'
_PROXY_PAGE = b"<html><body><h1>It works!</h1></body></html>\n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What the application serves and how."""

    store: stores.Store
    registry: registries.Registry
    feed: watches.Feed
    faults: faultbox.FaultBox
    log: faultbox.RequestLog
    authorizer: access.Authorizer
    bookmark_period_s: float
    refuses_expired_watches: bool
    drop: Callable[[tuple[str, int], faultbox.Break], None]
    """Ends a client's connection at the transport: RESET at once, TRUNCATE after what is sent."""


class Application:
    """The ASGI application."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._verbs = verbs.Verbs(backend.store, backend.registry, backend.authorizer)
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End what hangs; only in the event loop."""
        self._closing.set()

    async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
        """Answer one request, as ASGI has it."""
        request = requests.Request(scope, receive)
        try:
            body = await request.body()
        except requests.ClientDisconnect:
            return
        try:
            call = calls.parse(request.method, request.url.path, request.query_params)
            failure = None
        except statuses.ApiError as error:
            call, failure = None, error
        exchange = exchanges.Exchange(
            request=request, body=body, call=call, receive=receive, send=send
        )
        asked = _asked(exchange)
        self._backend.log.add(asked)
        fault = self._backend.faults.take(asked, _target(request))
        try:
            if fault is not None and await self._strike(exchange, fault):
                return
            if failure is not None:
                raise failure
            await self._answer(exchange)
        except statuses.ApiError as error:
            await exchange.respond(exchanges.status_response(error))

    async def _answer(self, exchange: exchanges.Exchange) -> None:
        if exchange.call is not None and exchange.call.verb == "watch":
            await self._watch(exchange, exchange.call)
        else:
            await exchange.respond(self._verbs.perform(exchange))

    async def _strike(self, exchange: exchanges.Exchange, fault: faultbox.Fault) -> bool:
        """Return whether the fault has taken the place of the answer."""
        if fault.hang_s:
            await self._linger(exchange, fault.hang_s)
        if fault.is_carried_out and exchange.call_verb != "watch":
            self._verbs.perform(exchange)
        if fault.status is not None:
            retry_after_s = fault.retry_after_s
            raise statuses.ApiError(fault.status, fault.message, retry_after_s=retry_after_s)
        if fault.reset:
            await self._drop(exchange, faultbox.Break.RESET)
        elif fault.truncate:
            await self._truncate(exchange)
        elif fault.garbles:
            await exchange.begin()
            await exchange.write(_PROXY_PAGE, is_last=True)
        elif fault.stall:
            await self._stall(exchange)
        else:
            return False
        return True

    async def _truncate(self, exchange: exchanges.Exchange) -> None:
        if exchange.call_verb == "watch":
            await exchange.begin()
            await exchange.write(_HALF_A_LINE)
        else:
            whole = bytes(self._verbs.perform(exchange).body)
            await exchange.begin(length=len(whole))
            await exchange.write(whole[: len(whole) // 2])
        await self._drop(exchange, faultbox.Break.TRUNCATE)

    async def _stall(self, exchange: exchanges.Exchange) -> None:
        if exchange.call_verb == "watch":
            await exchange.begin()
            await exchange.write(b"")
        await self._linger(exchange, None)
        await self._drop(exchange, faultbox.Break.RESET)

    async def _linger(self, exchange: exchanges.Exchange, seconds: float | None) -> None:
        """Do nothing for a time, or (None) until the client leaves or the server stops."""
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._closing.wait()),
            asyncio.ensure_future(exchange.receive()),
        ]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _drop(self, exchange: exchanges.Exchange, how: faultbox.Break) -> None:
        client = exchange.request.scope["client"]
        self._backend.drop((client[0], client[1]), how)
        await exchange.receive()

    async def _watch(self, exchange: exchanges.Exchange, call: calls.Call) -> None:
        backend = self._backend
        access.check(backend.authorizer, access.access_of(call, exchange.token))
        renderer = exchange.renderer(call)
        selection = calls.selection(call)
        since = watches.starting_version(call)
        calls.number(call.query, "timeoutSeconds")
        try:
            with backend.feed.open(selection, since) as (watcher, present):
                stream = watches.Stream(
                    backend.store,
                    watcher,
                    renderer=renderer,
                    call=call,
                    bookmark_period_s=backend.bookmark_period_s,
                )
                await self._stream(exchange, watcher, stream, present)
        except statuses.ApiError as error:
            # The real server tells of a version that is too old inside the stream when its
            # watch cache serves the watch, and as the answer's status when etcd does.
            if backend.refuses_expired_watches:
                raise
            await exchange.begin()
            await exchange.write(watches.error_line(error), is_last=True)

    async def _stream(
        self,
        exchange: exchanges.Exchange,
        watcher: watches.Watcher,
        stream: watches.Stream,
        present: list[Object],
    ) -> None:
        await exchange.begin()
        # After the body the next message can only be the disconnect.
        gone = asyncio.ensure_future(exchange.receive())
        gone.add_done_callback(lambda _gone: watcher.stop(faultbox.Break.CLOSE))
        try:
            async for chunk in stream.lines(present):
                await exchange.write(chunk)
            await exchange.write(b"", is_last=True)
        except watches.WatchBroken as broken:
            await self._break(exchange, broken.how)
        finally:
            gone.cancel()

    async def _break(self, exchange: exchanges.Exchange, how: faultbox.Break) -> None:
        if how is faultbox.Break.STALL:
            await self._linger(exchange, None)
        if how is faultbox.Break.TRUNCATE:
            await exchange.write(_HALF_A_LINE)
        await self._drop(exchange, how)


def _asked(exchange: exchanges.Exchange) -> faultbox.Asked:
    request, call = exchange.request, exchange.call
    return faultbox.Asked(
        method=request.method,
        path=request.url.path,
        query=dict(request.query_params),
        verb=exchange.call_verb,
        resource=call.target.resource_and_subresource if call else "",
        user_agent=request.headers.get("user-agent", ""),
        token=exchange.token,
        content_type=exchange.content_type,
    )


def _target(request: requests.Request) -> str:
    return f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path
