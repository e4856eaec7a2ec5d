"""Follow our own Node for as long as the agent lives."""

import contextlib
import dataclasses
import http
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, stream
from mig_manager.core.node import cluster

_PAGE = 500
_MOST_PAGES = 1000
"""More pages than this are a server that repeats itself."""
_END_S = 1.0
_SPREAD = 0.2
"""Part of the watch's length that is random, so that not all nodes of a cluster renew together."""
_CHANGES = ("ADDED", "MODIFIED", "DELETED")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long the watch lasts and how it waits; times are in seconds."""

    watch_s: float = 300.0
    """After about this long the server ends a watch in an orderly way."""
    stall_s: float = 90.0
    """After this much silence a watch counts as dead. The API server sends a bookmark each minute
    (KEP-956); one that sends none costs a request each time, and no list."""
    steady_s: float = 10.0
    """A watch that ends earlier counts as a failure, or it would be renewed without a pause."""
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0

    def wait_s(self, failures: int, chance: float) -> float:
        """Return the pause after some failures in a row, the later half of it left to chance."""
        doubled = self.first_wait_s * 2.0 ** min(failures - 1, 16)
        return min(doubled, self.longest_wait_s) * (1 + chance) / 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What is followed."""

    path: str
    selector: Mapping[str, str]
    """``fieldSelector`` or ``labelSelector``, as the API takes them."""
    what: str
    """Names one of its objects in errors, such as ``node``."""


class Listener(Protocol):
    """Told of the collection, in the watch's thread, and of nothing after its end.

    An error in here is reported to ``lost`` like any other, and the collection is delivered again.
    """

    def listed(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Take all objects as they are now; reading on may raise ``ClusterError``."""

    def changed(self, kind: str, item: Mapping[str, Any]) -> None:
        """Take a change: ``ADDED``, ``MODIFIED`` or ``DELETED``."""

    def opened(self) -> None:
        """Know that changes arrive from now on."""

    def lost(self, error: Exception) -> None:
        """Know why changes do not arrive for a while; called within the error's handler."""


class Watch:
    """Lists a collection, and watches it from then on, in a daemon thread of its own.

    A read that waits for the server's first byte cannot be ended from outside; the thread is left
    behind then.
    """

    def __init__(  # noqa: PLR0913 - the last three have defaults for all but tests
        self,
        kube: api.KubeApi,
        collection: Collection,
        listener: Listener,
        *,
        name: str,
        stop: threading.Event | None = None,
        pace: Pace | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Prepare; nothing is sent yet.

        Args:
            kube: The API.
            collection: What to follow.
            listener: Who is told.
            name: Of the thread.
            stop: Ends the loop at its next turn; ``end`` sets it and ends the loop at once.
            pace: None for the default.
            monotonic: Seconds from some fixed point.
            chance: A random number in [0, 1).
        """
        self._kube = kube
        self._collection = collection
        self._listener = listener
        self._stop = stop or threading.Event()
        self._pace = pace or Pace()
        self._monotonic = monotonic
        self._chance = chance
        self._version = ""
        self._listed_version = ""
        self._contact = -math.inf
        self._watching_since = math.inf
        self._failures = 0
        self._stream: stream.WatchStream | None = None
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)

    @property
    def last_contact_s(self) -> float:
        """How many seconds ago the API server last sent us anything; inf if it never did.

        An idle watch that is well is renewed within ``Pace.stall_s``.
        """
        return self._monotonic() - self._contact

    def list(self) -> None:
        """List the collection in the caller's thread, to know of errors before ``start``.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        items = self._items()
        self._listener.listed(items)
        for _unread in items:
            pass
        # Only now: what could not be delivered is listed again.
        self._version = self._listed_version

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def end(self, *, patience_s: float = _END_S) -> None:
        """Follow no longer, and wait so long for the thread to end."""
        # In this order: the thread looks whether to stop once it has a stream to interrupt.
        self._stop.set()
        opened = self._stream
        if opened is not None:
            opened.interrupt()
        if patience_s and self._thread.is_alive():
            self._thread.join(patience_s)

    def _follow(self) -> None:
        while not self._stop.is_set():
            self._watching_since = math.inf
            try:
                self._list_and_watch()
            except Exception as error:  # noqa: BLE001 - a bug, also of the listener, must not end it
                self._note(error)
            was_steady = self._monotonic() - self._watching_since >= self._pace.steady_s
            self._failures = 1 if was_steady else self._failures + 1
            self._stop.wait(self._pace.wait_s(self._failures, self._chance()))

    def _note(self, error: Exception) -> None:
        if not (
            isinstance(error, errors.ClusterError)
            and error.status is None
            and error.reason is errors.Reason.API_UNAVAILABLE
        ):
            # 410, or an answer that is not understood: what we hold may be the cause.
            self._version = ""
        if not self._stop.is_set():
            with contextlib.suppress(Exception):
                self._listener.lost(error)

    def _list_and_watch(self) -> None:
        if not self._version:
            self.list()
        watch_s = self._pace.watch_s * (1 + _SPREAD * self._chance())
        version = {"resourceVersion": self._version} if self._version else {}
        opened = self._kube.watch(
            self._collection.path,
            query={**self._collection.selector, **version},
            timeout_s=watch_s,
            idle_timeout_s=self._pace.stall_s,
        )
        self._contact = self._watching_since = self._monotonic()
        with opened:
            self._stream = opened
            if self._stop.is_set():
                return
            self._listener.opened()
            for event in opened:
                self._take(event)

    def _items(self) -> Iterator[Mapping[str, Any]]:
        """Give each object of a list: a read of etcd, not of a stale cache."""
        query = {**self._collection.selector, "limit": str(_PAGE)}
        what = f"the list of {self._collection.what}s"
        for _ in range(_MOST_PAGES):
            page = self._kube.get(self._collection.path, query)
            self._contact = self._monotonic()
            with cluster.understood(what):
                items = list(page["items"] or ())
                self._listed_version = str(page["metadata"]["resourceVersion"])
                token = page["metadata"].get("continue")
            yield from items
            if not token:
                return
            query["continue"] = str(token)
        raise errors.ClusterError(f"{what} does not end", reason=errors.Reason.API_ERROR)

    def _take(self, event: Mapping[str, Any]) -> None:
        self._contact = self._monotonic()
        kind, item = str(event.get("type")), event["object"]
        if kind in _CHANGES and not self._stop.is_set():
            self._listener.changed(kind, item)
        with cluster.understood(f"an event of the {self._collection.what}"):
            self._version = str(item["metadata"]["resourceVersion"])


_log = structlog.get_logger()

_NODES = "/api/v1/nodes"


class NodeWatch:
    """Delivers our node after each change; ``run`` is for a thread of its own."""

    def __init__(
        self,
        kube: api.KubeApi,
        *,
        name: str,
        on_node: Callable[[cluster.NodeView], None],
        stop: threading.Event,
        pace: Pace | None = None,
    ) -> None:
        """Prepare to follow a node; nothing is sent yet.

        Args:
            kube: The API.
            name: The node's name.
            on_node: Called with the newest node after each change and each new list, also when
                nothing in it has changed; in a thread of ours, and never after ``stop``.
            stop: Ends ``run``.
            pace: None for the default.
        """
        selector = f"metadata.name={name}"
        self._stop = stop
        self._watch = Watch(
            kube,
            Collection(path=_NODES, selector={"fieldSelector": selector}, what="node"),
            _Listener(selector, on_node, stop),
            name="node-watch-reader",
            stop=stop,
            pace=pace,
        )

    @property
    def last_contact_s(self) -> float:
        """How many seconds ago the API server last sent us anything; inf if it never did."""
        return self._watch.last_contact_s

    def run(self) -> None:
        """Follow the node until ``stop`` is set, and return within about a second after that."""
        self._watch.start()
        self._stop.wait()
        self._watch.end()


class _Listener:
    """Implements ``watch.Listener`` for one node."""

    def __init__(
        self,
        selector: str,
        on_node: Callable[[cluster.NodeView], None],
        stop: threading.Event,
    ) -> None:
        self._selector = selector
        self._on_node = on_node
        self._stop = stop

    def listed(self, items: Iterable[Mapping[str, Any]]) -> None:
        nodes = list(items)
        if not nodes:
            _log.warning("node_not_found", selector=self._selector)
        for item in nodes:
            self._deliver(item)

    def changed(self, kind: str, item: Mapping[str, Any]) -> None:
        if kind == "DELETED":
            _log.warning("node_deleted", selector=self._selector)
        else:
            self._deliver(item)

    def opened(self) -> None:
        pass

    def lost(self, error: Exception) -> None:
        if not isinstance(error, errors.ClusterError):
            _log.exception("node_watch_error")
        elif error.status == http.HTTPStatus.GONE:
            _log.info("node_watch_expired")
        else:
            _log.warning(
                "node_watch_lost",
                reason=error.reason.value,
                status=error.status,
                detail=error.message,
            )

    def _deliver(self, item: Mapping[str, Any]) -> None:
        seen = cluster.parse_node(item)
        if not self._stop.is_set():
            self._on_node(seen)
