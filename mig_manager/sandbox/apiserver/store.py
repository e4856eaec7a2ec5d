"""Objects, their versions, and the history that watches read.

One counter serves all resources, as etcd's revision behind a real API server. A write replaces the
whole object and changes none in place, so that readers in other threads and slow watchers keep a
consistent one.

Watches: Kubernetes documentation, "Kubernetes API Concepts", sections "Efficient detection of
changes", "Watch bookmarks" and "Semantics for watch". As with the real server's watch cache, an
open watch never falls out of the history, however idle it is.
"""

import asyncio
import bisect
import collections
import contextlib
import copy
import dataclasses
import datetime as dt
import enum
import threading
import uuid
from collections.abc import Callable, Iterator

from mig_manager.sandbox.apiserver import kinds, request

Object = kinds.Object
Key = tuple[str, str, str]  # plural of the resource, namespace (empty for cluster-wide ones), name


class EventType(enum.Enum):
    """A change of an object; the values are the watch event types."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One entry of the history."""

    version: int
    change: EventType
    key: Key
    obj: Object
    """The object after the change; for DELETED, its last state with the deletion's version."""
    before: Object | None  # the object before the change; None for ADDED


class Store:
    """All objects of the cluster; safe for use by any thread.

    It stores any object, also for tests and the simulated kubelet; ``registry`` has the rules of
    the API.

    Args:
        history_limit: Number of changes kept for watches and consistent lists.
    """

    def __init__(self, *, history_limit: int = 10_000) -> None:
        self.lock = threading.RLock()
        self._history_limit = history_limit
        self._objects: dict[Key, Object] = {}
        self._history: list[Record] = []
        self._listeners: list[Callable[[Record], None]] = []
        self._undelivered: collections.deque[Record] = collections.deque()
        self._is_delivering = False
        self.version = 1
        self._oldest = 1

    def subscribe(self, listener: Callable[[Record], None]) -> Callable[[], None]:
        """Call the listener after every change, in order, under the lock; it must be quick.

        It may write; its own change is delivered after the current one.

        Returns:
            A function that ends the subscription.
        """
        with self.lock:
            self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def peek(self, key: Key) -> Object | None:
        """Return the stored object itself, which must not be changed; None if missing."""
        return self._objects.get(key)

    def select(self, plural: str, *, namespace: str = "", at: int | None = None) -> list[Object]:
        """Return the stored objects themselves, now or ``at`` a version, by namespace and name."""
        with self.lock:
            objects = {key: obj for key, obj in self._objects.items() if key[0] == plural}
            for record in reversed(self.since(at) if at is not None else []):
                if record.key[0] != plural:
                    continue
                if record.before is None:
                    objects.pop(record.key, None)
                else:
                    objects[record.key] = record.before
        return [objects[key] for key in sorted(objects) if namespace in ("", key[1])]

    def since(self, version: int) -> list[Record]:
        """Return the changes after a version, oldest first; 410 if the history is shorter."""
        with self.lock:
            if version < self._oldest:
                message = f"too old resource version: {version} ({self._oldest})"
                raise kinds.StatusError(410, message)
            start = bisect.bisect_right(self._history, version, key=lambda each: each.version)
            return self._history[start:]

    def create(self, obj: Object) -> Object:
        """Store an object, fill in missing metadata, and return a copy.

        Raises:
            StatusError: 404 for an unknown kind, 409 for an existing name.
        """
        kind = obj.get("apiVersion"), obj.get("kind")
        matches = (each for each in kinds.RESOURCES if (each.api_version, each.kind) == kind)
        if (resource := next(matches, None)) is None:
            raise kinds.no_such_path()
        obj = copy.deepcopy(obj)
        metadata = obj.setdefault("metadata", {})
        if resource.is_namespaced:
            metadata.setdefault("namespace", "default")
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata.setdefault("creationTimestamp", timestamp())
        if resource.has_generation:
            metadata.setdefault("generation", 1)
        key = key_of(resource, obj)
        with self.lock:
            if key in self._objects:
                message = f'{resource.qualified} "{key[2]}" already exists'
                details = resource.details(key[2])
                raise kinds.StatusError(409, message, reason="AlreadyExists", details=details)
            return copy.deepcopy(self.write(key, obj))

    def write(self, key: Key, obj: Object) -> Object:
        """Store an object, which the caller must not change afterwards; return the stored one.

        Writing the stored content again is no change.
        """
        with self.lock:
            before = self._objects.get(key)
            if before is not None and _at_version(before, 0) == _at_version(obj, 0):
                return before
            self.version += 1
            obj["metadata"]["resourceVersion"] = str(self.version)
            self._objects[key] = obj
            self._remember(
                EventType.ADDED if before is None else EventType.MODIFIED, key, obj, before
            )
            return obj

    def remove(self, key: Key) -> Object | None:
        """Remove an object at once; return its last state, or None if missing."""
        with self.lock:
            before = self._objects.pop(key, None)
            if before is None:
                return None
            self.version += 1
            last = _at_version(before, self.version)
            self._remember(EventType.DELETED, key, last, before)
            return last

    def trim_history(self, *, keep: int) -> None:
        """Drop all but the newest changes: requests for older versions get 410."""
        with self.lock:
            excess = len(self._history) - keep
            self._oldest = self._history[excess - 1].version
            del self._history[:excess]

    def _remember(self, change: EventType, key: Key, obj: Object, before: Object | None) -> None:
        record = Record(version=self.version, change=change, key=key, obj=obj, before=before)
        self._history.append(record)
        # In chunks, because cutting the front of a list moves the rest.
        if len(self._history) > self._history_limit * 5 // 4:
            self.trim_history(keep=self._history_limit)
        # The change by a listener is delivered after this one.
        self._undelivered.append(record)
        if self._is_delivering:
            return
        self._is_delivering = True
        try:
            while self._undelivered:
                record = self._undelivered.popleft()
                for listener in tuple(self._listeners):
                    listener(record)
        finally:
            self._is_delivering = False


def key_of(resource: kinds.Resource, obj: Object) -> Key:
    """Return the key of an object."""
    metadata = obj["metadata"]
    namespace = metadata.get("namespace", "default") if resource.is_namespaced else ""
    return resource.plural, namespace, metadata["name"]


def timestamp(moment: dt.datetime | None = None) -> str:
    """Return a time, by default now, in the API's format: RFC 3339 in UTC."""
    return (moment or dt.datetime.now(dt.UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _at_version(obj: Object, version: int) -> Object:
    return obj | {"metadata": obj["metadata"] | {"resourceVersion": str(version)}}


# -- watches ---------------------------------------------------------------------------------


class Watcher:
    """An open watch, for one event loop; changes arrive from any thread."""

    def __init__(self, objects: Store, selection: request.Selection) -> None:
        self._store = objects
        self._selection = selection
        self._queue: collections.deque[Record] = collections.deque()
        self._loop = asyncio.get_running_loop()
        self.awake = asyncio.Event()
        self.is_stopped = False

    @contextlib.contextmanager
    def open(self, since: int) -> Iterator[list[Object]]:
        """Queue the changes after version ``since``, without losing or repeating one.

        Yields:
            The present objects, if ``since`` is 0.

        Raises:
            StatusError: 410: the history does not go back to that version.
        """
        present: list[Object] = []
        selection = self._selection
        with self._store.lock:
            if since:
                for record in self._store.since(since):
                    self._receive(record)
            else:
                objects = self._store.select(selection.plural, namespace=selection.namespace)
                present = [each for each in objects if selection.matches(each)]
            unsubscribe = self._store.subscribe(self._receive)
        try:
            yield present
        finally:
            unsubscribe()

    @property
    def is_empty(self) -> bool:
        """Whether no change is queued."""
        return not self._queue

    def drain(self) -> Iterator[tuple[EventType, Object]]:
        """Yield the queued changes for a client that knows only this selection."""
        while self._queue:
            record = self._queue.popleft()
            was_in = self._selection.matches(record.before)
            is_in = record.change is not EventType.DELETED and self._selection.matches(record.obj)
            if is_in:
                yield (EventType.MODIFIED if was_in else EventType.ADDED), record.obj
            else:
                # An object that leaves the selection appears in its last state within it.
                yield EventType.DELETED, _at_version(record.before or record.obj, record.version)

    def stop(self) -> None:
        """End the watch."""
        self.is_stopped = True
        self.awake.set()

    def _receive(self, record: Record) -> None:
        """Queue a change if it concerns this watch."""
        selection, (plural, namespace, _) = self._selection, record.key
        if (
            plural == selection.plural
            and selection.namespace in ("", namespace)
            and (selection.matches(record.obj) or selection.matches(record.before))
            and not self.is_stopped
        ):
            self._queue.append(record)
            self._loop.call_soon_threadsafe(self.awake.set)
