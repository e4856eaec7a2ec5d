"""The sandbox components' view of the cluster: a cached copy that watches keep current.

All components read and write here. The next read sees a write at once, so a level-triggered loop
does not repeat an action before the event of its own write arrives.
"""

import collections
import contextlib
import enum
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, watch
from mig_manager.core import timing
from mig_manager.sandbox.node import objects

_log = logging.getLogger(__name__)

_TIMES = watch.WatchTimes(
    watch_s=5.0,
    stall_s=7.0,
    steady_s=1.0,
    pauses=timing.Backoff(first_s=0.01, max_s=0.2, factor=2.0),
)
"""Short, because tests stall watches and the simulated components must go on within seconds."""
_TOKEN = "sandbox-node"  # noqa: S105 - a name, no secret
"""Marks the requests of the simulated node, not of the agent."""
_JOIN_S = 10.0
_PARALLEL_WRITES = 4  # beside one watch per kind; the connection pool of the API client holds ten
_REMEMBERED = 1_000  # deleted objects, whose last events arrive within moments

_NOT_FOUND = 404
_CONFLICT = 409


class WatchedKind(enum.Enum):
    """A watched kind; the value is the path of the collection over all namespaces."""

    NODE = "/api/v1/nodes"
    POD = "/api/v1/pods"
    DAEMON_SET = "/apis/apps/v1/daemonsets"

    def collection(self, namespace: str) -> str:
        """Return the path of the collection of a namespace."""
        if self is WatchedKind.NODE:
            return str(self.value)
        root, _, plural = str(self.value).rpartition("/")
        return f"{root}/namespaces/{namespace}/{plural}"

    def path(self, obj: Mapping[str, Any]) -> str:
        """Return the path of an object."""
        return f"{self.collection(objects.namespace(obj))}/{objects.name(obj)}"


_TYPES = {
    WatchedKind.NODE: {"apiVersion": "v1", "kind": "Node"},
    WatchedKind.POD: {"apiVersion": "v1", "kind": "Pod"},
    WatchedKind.DAEMON_SET: {"apiVersion": "apps/v1", "kind": "DaemonSet"},
}
Listener = Callable[[WatchedKind, objects.JsonObject], None]
Server = str | api.KubeApi
"""The URL of an API server that accepts every token, or a connection to any API server."""


class ClusterView:
    """Nodes, pods and DaemonSets of one cluster; safe to use from any thread.

    Its writes raise ``ClusterError`` if the API refuses or does not answer.

    Args:
        server: URL of the API server, or a connection to it, which is closed at the end.
    """

    def __init__(self, server: Server) -> None:
        self._api = api.KubeApi.at(server, token=_TOKEN) if isinstance(server, str) else server
        self._writing = threading.BoundedSemaphore(_PARALLEL_WRITES)
        self._lock = threading.Lock()
        self._objects: dict[WatchedKind, dict[str, objects.JsonObject]] = {
            kind: {} for kind in WatchedKind
        }
        # Older events of deleted objects, and answers with them, may still arrive.
        self._deleted: collections.deque[str] = collections.deque(maxlen=_REMEMBERED)
        self._listeners: list[Listener] = []
        self._watches = [_KindWatch(self, self._api, kind) for kind in WatchedKind]

    def __enter__(self) -> Self:
        """Read every collection once, then watch them.

        Raises:
            ClusterError: The API server refused or does not answer.
        """
        try:
            for each in self._watches:
                each.list()
        except errors.ClusterError:
            self._api.close()
            raise
        for each in self._watches:
            each.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        for each in self._watches:
            each.end(timeout_s=_JOIN_S)
        self._api.close()

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` for every added, changed or deleted object; return how to stop it."""
        with self._lock:
            self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def list(self, kind: WatchedKind) -> tuple[objects.JsonObject, ...]:
        """Return all objects of a kind; they must not be changed."""
        with self._lock:
            return tuple(self._objects[kind].values())

    def node(self, name: str) -> objects.JsonObject | None:
        """Return a node; None if it does not exist."""
        nodes = (node for node in self.list(WatchedKind.NODE) if objects.name(node) == name)
        return next(nodes, None)

    def create(self, kind: WatchedKind, obj: objects.JsonObject) -> None:
        """Create an object, unless its name exists."""
        with self._writing, _tolerating(_CONFLICT):
            self._put(kind, self._api.post(kind.collection(objects.namespace(obj)), obj))

    def patch(self, kind: WatchedKind, obj: objects.JsonObject, change: Mapping[str, Any]) -> None:
        """Merge a change into an object, if it still exists."""
        self._merge(kind, obj, lambda: self._api.patch(kind.path(obj), change))

    def patch_status(
        self, kind: WatchedKind, obj: objects.JsonObject, status: Mapping[str, Any]
    ) -> None:
        """Merge a change into an object's status, if it still exists; conditions by their type."""
        path = f"{kind.path(obj)}/status"
        self._merge(kind, obj, lambda: self._api.patch_lists(path, {"status": status}))

    def bind(self, pod: objects.JsonObject, node_name: str) -> None:
        """Bind a pod to a node, unless it is bound."""
        target = {"apiVersion": "v1", "kind": "Node", "name": node_name}
        metadata = {"name": objects.name(pod), "namespace": objects.namespace(pod)}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        path = WatchedKind.POD.path(pod)
        with self._writing, _tolerating(_CONFLICT, _NOT_FOUND):
            self._api.post(f"{path}/binding", body)
            # The answer to a binding is a Status, not the pod.
            self._put(WatchedKind.POD, self._api.get(path))

    def delete(self, kind: WatchedKind, obj: objects.JsonObject, *, now: bool = False) -> None:
        """Delete an object by its UID, if it still exists.

        ``now``: without grace, as kubelet does after the end of the containers.
        """
        options: objects.JsonObject = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": objects.uid(obj)},
        }
        if now:
            options["gracePeriodSeconds"] = 0
        with self._writing, _tolerating(_CONFLICT, _NOT_FOUND):
            answer = self._api.delete(kind.path(obj), options)
            metadata = answer.get("metadata") or {}
            # The answer is the object itself while it terminates.
            if (
                not now
                and metadata.get("uid") == objects.uid(obj)
                and metadata.get("deletionTimestamp") is not None
                and metadata.get("deletionGracePeriodSeconds") != 0
            ):
                self._put(kind, answer)
                return
        self._remove(kind, obj)

    def _merge(
        self, kind: WatchedKind, obj: objects.JsonObject, patch: Callable[[], objects.JsonObject]
    ) -> None:
        try:
            with self._writing:
                answer = patch()
        except errors.ClusterError as error:
            if not error.is_not_found:
                raise
            # The event of its deletion has not arrived.
            self._remove(kind, obj)
        else:
            self._put(kind, answer)

    def _put(self, kind: WatchedKind, obj: objects.JsonObject) -> None:
        with self._lock:
            former = self._objects[kind].get(objects.uid(obj))
            is_old = former is not None and objects.version(former) >= objects.version(obj)
            if is_old or objects.uid(obj) in self._deleted:
                return
            self._objects[kind][objects.uid(obj)] = obj
        self._notify(kind, obj)

    def _remove(self, kind: WatchedKind, obj: objects.JsonObject) -> None:
        with self._lock:
            self._objects[kind].pop(objects.uid(obj), None)
            if objects.uid(obj) not in self._deleted:
                self._deleted.append(objects.uid(obj))
        self._notify(kind, obj)

    def _notify(self, kind: WatchedKind, obj: objects.JsonObject) -> None:
        for listener in tuple(self._listeners):
            listener(kind, obj)


class _KindWatch(watch.Watch):
    """Keeps the objects of one kind in the view."""

    def __init__(self, view: ClusterView, kube: api.KubeApi, kind: WatchedKind) -> None:
        name = f"sandbox-watch-{kind.name.lower()}"
        super().__init__(kube, kind.value, {}, name=name, times=_TIMES)
        self._view = view
        self._kind = kind

    def on_list(self, items: Iterable[Mapping[str, Any]]) -> None:
        # Before the list is requested: it lacks our writes after this.
        before = self._view.list(self._kind)
        # Real API servers omit the type of a list's items.
        present = [{**_TYPES[self._kind], **item} for item in items]
        uids = set(map(objects.uid, present))
        for obj in before:
            if objects.uid(obj) not in uids:
                self._view._remove(self._kind, obj)  # noqa: SLF001 - a part of the view
        for obj in present:
            self._view._put(self._kind, obj)  # noqa: SLF001

    def on_change(self, kind: str, item: Mapping[str, Any]) -> None:
        apply = self._view._remove if kind == "DELETED" else self._view._put  # noqa: SLF001
        apply(self._kind, dict(item))

    def lost(self, error: Exception) -> None:
        _log.debug("sandbox lists %s again: %s", self._kind.name, error)


@contextlib.contextmanager
def _tolerating(*statuses: int) -> Iterator[None]:
    """Ignore refusals that only report a newer state, which the watch delivers."""
    try:
        yield
    except errors.ClusterError as error:
        if error.status not in statuses:
            raise
