"""Watches: each open one is a queue that the store fills and a coroutine that empties it.

Semantics: Kubernetes documentation, "Kubernetes API Concepts", sections "Efficient detection of
changes", "Watch bookmarks", "Streaming lists" and "Semantics for watch". As with the real server's
watch cache, a watch that has begun never falls out of the history, however idle it is.
"""

import asyncio
import collections
import contextlib
import json
from collections.abc import AsyncIterator, Iterator

from mig_manager.sandbox.api import calls, faultbox, renderers, statuses, stores

Object = statuses.Object
Break = faultbox.Break
Change = stores.Change

DEFAULT_TIMEOUT_S = 1800
"""How long a watch lasts that does not say; the real server picks 30 to 60 minutes."""


class WatchBroken(Exception):  # noqa: N818 - a test asked for it
    """A watch must fail below HTTP, in the manner of ``how``."""

    def __init__(self, how: Break) -> None:
        super().__init__(how.value)
        self.how = how


class Watcher:
    """One open watch; everything but the queue belongs to the event loop."""

    def __init__(self, selection: calls.Selection) -> None:
        self.selection = selection
        self.queue: collections.deque[stores.Record] = collections.deque()
        self.awake = asyncio.Event()
        self.broken: Break | None = None

    def wants(self, record: stores.Record) -> bool:
        """Return whether a change concerns this watch."""
        selection = self.selection
        if selection.namespace not in ("", record.key[1]):
            return False
        return selection.matches(record.thing) or selection.matches(record.before)

    def stop(self, how: Break) -> None:
        """Let the watch end or fail as told."""
        self.broken = self.broken or how
        self.awake.set()


class Feed:
    """Hands each change of the store to the watches that want it."""

    def __init__(self, store: stores.Store) -> None:
        self._store = store
        self._watchers: dict[str, set[Watcher]] = collections.defaultdict(set)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsubscribe = store.subscribe(self._follow)

    @property
    def size(self) -> int:
        """Number of open watches."""
        return sum(len(watchers) for watchers in self._watchers.values())

    def close(self) -> None:
        """End all watches cleanly and follow the store no longer; only in the event loop."""
        self._unsubscribe()
        self.stop_all(Break.CLOSE)

    def stop_all(self, how: Break) -> None:
        """Let every open watch end or fail; only in the event loop."""
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.stop(how)

    @contextlib.contextmanager
    def open(
        self, selection: calls.Selection, since: int | None
    ) -> Iterator[tuple[Watcher, list[Object]]]:
        """Begin a watch without losing or repeating a change; only in the event loop.

        Args:
            selection: What to watch.
            since: The version after which to begin; None for the present state.

        Yields:
            The watch, and the present objects when it begins with the present state.

        Raises:
            ApiError: 410, the version has been forgotten.
        """
        self._loop = asyncio.get_running_loop()
        watcher = Watcher(selection)
        watchers = self._watchers[selection.storage]
        with self._store.lock:
            present: list[Object] = []
            if since is None:
                things = self._store.select(selection.storage, namespace=selection.namespace)
                present = [each for each in things if selection.matches(each)]
            else:
                watcher.queue.extend(
                    record
                    for record in self._store.since(since)
                    if record.key[0] == selection.storage and watcher.wants(record)
                )
            watchers.add(watcher)
        try:
            yield watcher, present
        finally:
            with self._store.lock:
                watchers.discard(watcher)

    def _follow(self, record: stores.Record) -> None:
        for watcher in self._watchers.get(record.key[0], ()):
            if watcher.wants(record) and self._loop is not None:
                watcher.queue.append(record)
                self._loop.call_soon_threadsafe(watcher.awake.set)


class Stream:
    """The lines of one watch.

    Args:
        store: Tells the version for bookmarks.
        watcher: The open watch.
        renderer: The form of the objects.
        query: The parameters of the request.
        bookmark_period_s: Seconds between bookmarks, for a client that allows them.
    """

    def __init__(
        self,
        store: stores.Store,
        watcher: Watcher,
        *,
        renderer: renderers.Renderer,
        call: calls.Call,
        bookmark_period_s: float,
    ) -> None:
        self._store = store
        self._watcher = watcher
        self._renderer = renderer
        self._query = call.query
        self._bookmark_period_s = bookmark_period_s
        self._has_bookmarks = _is_true(call.query.get("allowWatchBookmarks", ""))

    async def lines(self, present: list[Object]) -> AsyncIterator[bytes]:
        """Yield chunks of whole JSON lines until the watch times out or is stopped.

        Raises:
            WatchBroken: The connection itself must fail.
        """
        clock = asyncio.get_running_loop().time
        ends = clock() + (calls.number(self._query, "timeoutSeconds") or DEFAULT_TIMEOUT_S)
        yield self._initial(present)
        bookmark_at = clock() + self._bookmark_period_s
        while self._watcher.broken is None:
            self._watcher.awake.clear()
            chunk = b"".join(self._drain())
            if chunk:
                yield chunk
            if clock() >= min(ends, bookmark_at):
                yield self._bookmark()
                bookmark_at = clock() + self._bookmark_period_s
            if clock() >= ends:
                return
            await self._sleep(min(ends, bookmark_at) - clock())
        if self._watcher.broken is Break.EXPIRE:
            yield error_line(statuses.expired("The resourceVersion for the watch is too old."))
        elif self._watcher.broken is not Break.CLOSE:
            raise WatchBroken(self._watcher.broken)

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0)):
                await self._watcher.awake.wait()

    def _initial(self, present: list[Object]) -> bytes:
        lines = [_line(Change.ADDED.value, self._renderer.item(thing)) for thing in present]
        if _is_true(self._query.get("sendInitialEvents", "")) and self._has_bookmarks:
            bookmark = self._renderer.bookmark(self._store.version, ends_initial=True)
            lines.append(_line("BOOKMARK", bookmark))
        return b"".join(lines)

    def _drain(self) -> Iterator[bytes]:
        selection = self._watcher.selection
        while self._watcher.queue:
            record = self._watcher.queue.popleft()
            was = selection.matches(record.before)
            is_now = record.change is not Change.DELETED and selection.matches(record.thing)
            thing = record.thing
            if was and is_now:
                change = Change.MODIFIED
            elif is_now:
                change = Change.ADDED
            else:
                # What leaves the selection is shown as it was while it was in it.
                change, thing = Change.DELETED, _at_version(record.before or thing, record.version)
            yield _line(change.value, self._renderer.item(thing))

    def _bookmark(self) -> bytes:
        if not self._has_bookmarks:
            return b""
        with self._store.lock:
            if self._watcher.queue:
                return b""
            version = self._store.version
        return _line("BOOKMARK", self._renderer.bookmark(version))


def error_line(error: statuses.ApiError) -> bytes:
    """Return the ERROR event that carries a failure inside a watch."""
    return _line("ERROR", error.to_status())


def starting_version(call: calls.Call) -> int | None:
    """Return the version after which a watch begins; None for the present state.

    Raises:
        ApiError: 400 or 422 for parameters that do not go together.
    """
    wants_initial = call.query.get("sendInitialEvents", "")
    if wants_initial and call.query.get("resourceVersionMatch") != "NotOlderThan":
        cause = statuses.Cause(
            reason="FieldValueForbidden",
            field="resourceVersionMatch",
            message="Forbidden: sendInitialEvents requires setting resourceVersionMatch to "
            "NotOlderThan",
        )
        raise statuses.invalid("meta.k8s.io", "ListOptions", "", [cause])
    version = calls.version(call.query)
    return None if _is_true(wants_initial) else version or None


def _is_true(text: str) -> bool:
    return text in ("1", "true")


def _line(kind: str, thing: Object) -> bytes:
    return json.dumps({"type": kind, "object": thing}, separators=(",", ":")).encode() + b"\n"


def _at_version(thing: Object, version: int) -> Object:
    return thing | {"metadata": thing["metadata"] | {"resourceVersion": str(version)}}
