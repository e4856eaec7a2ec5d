"""The cluster as the sandbox's components see it: one cached copy, kept current by watches.

All components read and write here. The next read sees a write at once, so a level-triggered loop
does not do the same thing twice before the event of its own write arrives.
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
from mig_manager.sandbox.node import objects

_log = logging.getLogger(__name__)

_TIMES = watch.Times(watch_s=5.0, stall_s=7.0, steady_s=1.0, first_wait_s=0.01, longest_wait_s=0.2)
"""Short, for tests let watches stall, and the scenery must not stall for minutes then."""
_TOKEN = "sandbox-node"  # noqa: S105 - a name, no secret
"""Identifies the requests of the simulated node, as opposed to those of the agent."""
_JOIN_S = 10.0
_PARALLEL_WRITES = 4
"""Beside one watch per kind; the connection pool of the API client holds ten."""
_REMEMBERED = 1_000
"""Objects that have gone; what is still on the way of any of them comes within moments."""

_NOT_FOUND = 404
_CONFLICT = 409


class Kind(enum.Enum):
    """What is watched; the value is the path of the collection over all namespaces."""

    NODE = "/api/v1/nodes"
    POD = "/api/v1/pods"
    DAEMON_SET = "/apis/apps/v1/daemonsets"

    def collection(self, namespace: str) -> str:
        """Return the path of the collection that objects of a namespace are created in."""
        if self is Kind.NODE:
            return str(self.value)
        root, _, plural = str(self.value).rpartition("/")
        return f"{root}/namespaces/{namespace}/{plural}"

    def path(self, obj: Mapping[str, Any]) -> str:
        """Return the path of an object."""
        return f"{self.collection(objects.namespace(obj))}/{objects.name(obj)}"


_TYPES = {
    Kind.NODE: {"apiVersion": "v1", "kind": "Node"},
    Kind.POD: {"apiVersion": "v1", "kind": "Pod"},
    Kind.DAEMON_SET: {"apiVersion": "apps/v1", "kind": "DaemonSet"},
}
Listener = Callable[[Kind, objects.JsonObject], None]
Server = str | api.KubeApi
"""Where the API is: the URL of a server that takes every token, or a connection that is ready."""


class ClusterView:
    """Nodes, pods and DaemonSets of one cluster; safe to use from any thread.

    Its writes raise ``ClusterError`` where the API refuses or does not answer.

    Args:
        server: URL of the API server, or a connection to it, which is closed at the end.
    """

    def __init__(self, server: Server) -> None:
        self._api = api.KubeApi.at(server, token=_TOKEN) if isinstance(server, str) else server
        self._writing = threading.BoundedSemaphore(_PARALLEL_WRITES)
        self._lock = threading.Lock()
        self._objects: dict[Kind, dict[str, objects.JsonObject]] = {kind: {} for kind in Kind}
        # Deleted objects: older events and answers about them may still arrive.
        self._gone: collections.deque[str] = collections.deque(maxlen=_REMEMBERED)
        self._listeners: list[Listener] = []
        self._watches = [_Collection(self, self._api, kind) for kind in Kind]

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
        """Call ``listener`` for every object added, changed or deleted; return how to stop it."""
        with self._lock:
            self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def list(self, kind: Kind) -> tuple[objects.JsonObject, ...]:
        """Return all objects of a kind; they must not be changed."""
        with self._lock:
            return tuple(self._objects[kind].values())

    def node(self, name: str) -> objects.JsonObject | None:
        """Return a node; None when it is not there."""
        found = (node for node in self.list(Kind.NODE) if objects.name(node) == name)
        return next(found, None)

    def create(self, kind: Kind, obj: objects.JsonObject) -> None:
        """Create an object; done when one of its name is there."""
        with self._writing, _tolerating(_CONFLICT):
            self._put(kind, self._api.post(kind.collection(objects.namespace(obj)), obj))

    def patch(self, kind: Kind, obj: objects.JsonObject, change: Mapping[str, Any]) -> None:
        """Merge a change into an object; done when the object has gone."""
        self._merge(kind, obj, lambda: self._api.patch(kind.path(obj), change))

    def patch_status(self, kind: Kind, obj: objects.JsonObject, status: Mapping[str, Any]) -> None:
        """Merge a change into an object's status, as kubelet does: conditions by their type.

        Done when the object has gone.
        """
        path = f"{kind.path(obj)}/status"
        self._merge(kind, obj, lambda: self._api.patch_lists(path, {"status": status}))

    def bind(self, pod: objects.JsonObject, node_name: str) -> None:
        """Bind a pod to a node; done when it is bound already."""
        target = {"apiVersion": "v1", "kind": "Node", "name": node_name}
        metadata = {"name": objects.name(pod), "namespace": objects.namespace(pod)}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        path = Kind.POD.path(pod)
        with self._writing, _tolerating(_CONFLICT, _NOT_FOUND):
            self._api.post(f"{path}/binding", body)
            # The answer to a binding is a Status; the pod must be asked for.
            self._put(Kind.POD, self._api.get(path))

    def delete(self, kind: Kind, obj: objects.JsonObject, *, now: bool = False) -> None:
        """Delete an object, guarded by its UID; done when it has gone.

        ``now``: without grace, as kubelet does when the containers have ended.
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
            # The object itself answers while it is on its way but still there.
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
        self, kind: Kind, obj: objects.JsonObject, patch: Callable[[], objects.JsonObject]
    ) -> None:
        try:
            with self._writing:
                answer = patch()
        except errors.ClusterError as error:
            if error.status != _NOT_FOUND:
                raise
            # It has gone without our having heard of it.
            self._remove(kind, obj)
        else:
            self._put(kind, answer)

    def _put(self, kind: Kind, obj: objects.JsonObject) -> None:
        with self._lock:
            known = self._objects[kind].get(objects.uid(obj))
            is_old = known is not None and objects.version(known) >= objects.version(obj)
            if is_old or objects.uid(obj) in self._gone:
                return
            self._objects[kind][objects.uid(obj)] = obj
        self._notify(kind, obj)

    def _remove(self, kind: Kind, obj: objects.JsonObject) -> None:
        with self._lock:
            self._objects[kind].pop(objects.uid(obj), None)
            if objects.uid(obj) not in self._gone:
                self._gone.append(objects.uid(obj))
        self._notify(kind, obj)

    def _notify(self, kind: Kind, obj: objects.JsonObject) -> None:
        for listener in tuple(self._listeners):
            listener(kind, obj)


class _Collection(watch.Watch):
    """Keeps the objects of one kind in the view."""

    def __init__(self, view: ClusterView, kube: api.KubeApi, kind: Kind) -> None:
        name = f"sandbox-watch-{kind.name.lower()}"
        super().__init__(kube, kind.value, {}, name=name, times=_TIMES)
        self._view = view
        self._kind = kind

    def listed(self, items: Iterable[Mapping[str, Any]]) -> None:
        # Before the list is requested: what we write meanwhile is not in it.
        before = self._view.list(self._kind)
        # Real API servers leave the type out of a list's items.
        found = [{**_TYPES[self._kind], **item} for item in items]
        present = {objects.uid(obj) for obj in found}
        for obj in before:
            if objects.uid(obj) not in present:
                self._view._remove(self._kind, obj)  # noqa: SLF001 - a part of the view
        for obj in found:
            self._view._put(self._kind, obj)  # noqa: SLF001

    def changed(self, kind: str, item: Mapping[str, Any]) -> None:
        keep = self._view._remove if kind == "DELETED" else self._view._put  # noqa: SLF001
        keep(self._kind, dict(item))

    def lost(self, error: Exception) -> None:
        _log.debug("sandbox reads %s again: %s", self._kind.name, error)


@contextlib.contextmanager
def _tolerating(*statuses: int) -> Iterator[None]:
    """Ignore answers that only report a newer state, which the watch delivers."""
    try:
        yield
    except errors.ClusterError as error:
        if error.status not in statuses:
            raise
