"""Objects, their versions, and the history that watches read.

One counter serves all resources, as etcd's revision does behind a real API server. Objects in the
store are never changed in place: a write replaces the whole object, so that readers in other
threads and slow watchers keep a consistent one.
"""

import bisect
import collections
import copy
import dataclasses
import datetime as dt
import enum
import threading
import uuid
from collections.abc import Callable

from mig_manager.sandbox.api import resources, statuses

Object = statuses.Object
Key = tuple[str, str, str]
"""Storage key of the resource, namespace (empty for cluster-wide ones), name."""


class Change(enum.Enum):
    """What happened to an object; the values are the watch event types."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One entry of the history."""

    version: int
    change: Change
    key: Key
    thing: Object
    """The object after the change; for DELETED its last state with the deletion's version."""
    before: Object | None
    """The object before the change; None for ADDED."""


def timestamp(moment: dt.datetime | None = None, *, micro: bool = False) -> str:
    """Return a time, by default now, in the API's format: RFC 3339 in UTC."""
    moment = moment or dt.datetime.now(dt.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")


class Store:
    """All objects of the cluster; safe to use from any thread.

    This layer knows no rules: tests and the simulated kubelet use it to put the world in place.
    The rules of the API are in ``registries``.

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
        self._version = 1
        self._oldest = 1

    @property
    def version(self) -> int:
        """The version of the newest change."""
        return self._version

    def subscribe(self, listener: Callable[[Record], None]) -> Callable[[], None]:
        """Call the listener after each change, in order, with the lock held; it must be quick.

        It may write; what it writes is told after the change it was called for.

        Returns:
            A function that ends the subscription.
        """
        with self.lock:
            self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def peek(self, key: Key) -> Object | None:
        """Return the stored object itself, which must not be changed, or None."""
        return self._objects.get(key)

    def get(self, resource: resources.Resource, name: str, namespace: str = "") -> Object:
        """Return a copy of an object.

        Raises:
            ApiError: 404, it is not there.
        """
        thing = self._objects.get((resource.storage, namespace, name))
        if thing is None:
            raise statuses.not_found(resource.group, resource.plural, name)
        return copy.deepcopy(thing)

    def find(self, resource: resources.Resource, name: str, namespace: str = "") -> bool:
        """Return whether an object is there."""
        return (resource.storage, namespace, name) in self._objects

    def objects(self, resource: resources.Resource, namespace: str = "") -> list[Object]:
        """Return copies of the objects of a namespace, or of all when it is empty."""
        return [
            copy.deepcopy(thing) for thing in self.select(resource.storage, namespace=namespace)
        ]

    def select(self, storage: str, *, namespace: str = "", at: int | None = None) -> list[Object]:
        """Return the stored objects themselves, by namespace and name.

        Args:
            storage: Storage key of the resource.
            namespace: Empty for all namespaces.
            at: Version to go back to; None for now.

        Raises:
            ApiError: 410, the history does not reach back to that version.
        """
        with self.lock:
            objects = {key: thing for key, thing in self._objects.items() if key[0] == storage}
            for record in reversed(self.since(at) if at is not None else []):
                if record.key[0] == storage and record.before is None:
                    objects.pop(record.key, None)
                elif record.key[0] == storage and record.before is not None:
                    objects[record.key] = record.before
        return [objects[key] for key in sorted(objects) if namespace in ("", key[1])]

    def since(self, version: int) -> list[Record]:
        """Return the changes after a version, oldest first.

        Raises:
            ApiError: 410, some of them have been forgotten.
        """
        with self.lock:
            if version < self._oldest:
                message = f"too old resource version: {version} ({self._oldest})"
                raise statuses.expired(message)
            start = bisect.bisect_right(self._history, version, key=lambda each: each.version)
            return self._history[start:]

    def compact(self) -> None:
        """Forget the history: every older resourceVersion is now answered with 410."""
        with self.lock:
            self._history.clear()
            self._oldest = self._version

    def create(self, thing: Object) -> Object:
        """Store an object as given, with missing metadata filled in; return a copy.

        Raises:
            ApiError: 404 for an unknown kind, 409 when the name is taken.
        """
        resource = resource_of(thing)
        thing = self.stamped(thing, resource)
        key = key_of(resource, thing)
        with self.lock:
            if key in self._objects:
                raise statuses.already_exists(resource.group, resource.plural, key[2])
            return copy.deepcopy(self.write(key, thing))

    def replace(self, thing: Object) -> Object:
        """Store an object over the one of that name, whatever its version; return a copy.

        Raises:
            ApiError: 404, the kind is unknown or there is no such object.
        """
        resource = resource_of(thing)
        key = key_of(resource, thing)
        with self.lock:
            if key not in self._objects:
                raise statuses.not_found(resource.group, resource.plural, key[2])
            return copy.deepcopy(self.write(key, copy.deepcopy(thing)))

    def modify(
        self,
        resource: resources.Resource,
        name: str,
        change: Callable[[Object], None],
        *,
        namespace: str = "",
    ) -> Object:
        """Let a function change a copy of an object and store it, in one step.

        Raises:
            ApiError: 404, it is not there.
        """
        with self.lock:
            thing = self.get(resource, name, namespace)
            change(thing)
            return self.replace(thing)

    def delete(self, resource: resources.Resource, name: str, namespace: str = "") -> None:
        """Remove an object at once, whatever its grace period and finalizers.

        Raises:
            ApiError: 404, it is not there.
        """
        if self.remove((resource.storage, namespace, name)) is None:
            raise statuses.not_found(resource.group, resource.plural, name)

    def write(self, key: Key, thing: Object) -> Object:
        """Store an object that the caller gives away; return the stored one.

        An object that says what the stored one says already is no change.
        """
        with self.lock:
            before = self._objects.get(key)
            if before is not None and _same(before, thing):
                return before
            self._version += 1
            thing["metadata"]["resourceVersion"] = str(self._version)
            self._objects[key] = thing
            change = Change.ADDED if before is None else Change.MODIFIED
            self._remember(change, key, thing, before)
            return thing

    def remove(self, key: Key) -> Object | None:
        """Remove an object at once; return its last state, or None when it is not there."""
        with self.lock:
            before = self._objects.pop(key, None)
            if before is None:
                return None
            self._version += 1
            metadata = before["metadata"] | {"resourceVersion": str(self._version)}
            last = before | {"metadata": metadata}
            self._remember(Change.DELETED, key, last, before)
            return last

    def stamped(self, thing: Object, resource: resources.Resource) -> Object:
        """Return a copy with the metadata that the server gives to a new object."""
        thing = copy.deepcopy(thing)
        metadata = thing.setdefault("metadata", {})
        if resource.is_namespaced:
            metadata.setdefault("namespace", "default")
        metadata.setdefault("uid", str(uuid.uuid4()))
        metadata.setdefault("creationTimestamp", timestamp())
        if resource.has_generation:
            metadata.setdefault("generation", 1)
        return thing

    def _remember(self, change: Change, key: Key, thing: Object, before: Object | None) -> None:
        record = Record(version=self._version, change=change, key=key, thing=thing, before=before)
        self._history.append(record)
        # Trimmed in chunks, because cutting the front of a list moves all the rest.
        if len(self._history) > self._history_limit * 5 // 4:
            excess = len(self._history) - self._history_limit
            self._oldest = self._history[excess - 1].version
            del self._history[:excess]
        self._undelivered.append(record)
        if not self._is_delivering:
            self._deliver()

    def _deliver(self) -> None:
        """Tell the listeners, who may themselves write: each sees all changes in their order."""
        self._is_delivering = True
        try:
            while self._undelivered:
                record = self._undelivered.popleft()
                for listener in tuple(self._listeners):
                    listener(record)
        finally:
            self._is_delivering = False


def resource_of(thing: Object) -> resources.Resource:
    """Return the resource that an object belongs to.

    Raises:
        ApiError: 404, no resource has this ``apiVersion`` and ``kind``.
    """
    resource = resources.of_kind(thing.get("apiVersion", ""), thing.get("kind", ""))
    if resource is None:
        raise statuses.no_such_path()
    return resource


def key_of(resource: resources.Resource, thing: Object) -> Key:
    """Return the key of an object that has its metadata."""
    metadata = thing["metadata"]
    namespace = metadata.get("namespace", "default") if resource.is_namespaced else ""
    return resource.storage, namespace, metadata["name"]


def _same(one: Object, other: Object) -> bool:
    def content(thing: Object) -> Object:
        return thing | {"metadata": thing["metadata"] | {"resourceVersion": ""}}

    return content(one) == content(other)
