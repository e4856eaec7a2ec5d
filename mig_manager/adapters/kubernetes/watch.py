"""List and watch a collection for as long as the process lives: the only such loop."""

import abc
import contextlib
import dataclasses
import http
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import structlog

from mig_manager import errors, reasons
from mig_manager.adapters import rest
from mig_manager.adapters.kubernetes import api, responses
from mig_manager.core import timing
from mig_manager.core.objects import api_values, node_object

_JOIN_S = 1.0
_MAX_FACTOR = 1.2
"""Of the length of a watch: random, so that not all nodes of a cluster renew together."""
_CHANGES = ("ADDED", "MODIFIED", "DELETED")
_PAUSES = timing.Backoff(first_s=0.5, max_s=30.0, factor=2.0, jitter=random.random)

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WatchTimes:
    """How long a watch lasts and how its loop backs off; seconds."""

    watch_s: float = 300.0  # after about this time the server ends a watch in an orderly way
    stall_s: float = 90.0
    """After this silence a watch counts as dead. The API server sends a bookmark each minute
    (KEP-956)."""
    steady_s: float = 10.0
    """A watch that ends earlier counts as a failure, or it would be renewed without a pause."""
    pauses: timing.Backoff = _PAUSES  # after consecutive failures

    @property
    def silence_s(self) -> float:
        """A watch that ends after such a silence is not believed.

        The API server also sends a bookmark two seconds before it ends a watch.
        """
        return min(self.stall_s, self.watch_s / 2)


class Watch(abc.ABC):
    """Lists a collection, then watches it, in a daemon thread of its own.

    The methods of a subclass receive the collection in that thread, until its end. An error that
    they raise is reported to ``lost``, and the collection is listed again. A read that waits for
    the server's first byte cannot be ended from outside; such a thread is abandoned.

    ``selector`` has a ``fieldSelector`` or ``labelSelector``, ``name`` is the thread's. ``stop``
    ends the loop before its next request; ``end`` sets it and ends the loop at once.
    """

    def __init__(
        self,
        kube: api.KubeApi,
        path: str,
        selector: Mapping[str, str],
        *,
        name: str,
        stop: threading.Event | None = None,
        times: WatchTimes | None = None,
    ) -> None:
        self._kube = kube
        self._path = path
        self._plural = path.rpartition("/")[2]
        self._selector = selector
        self._stop = stop or threading.Event()
        self._times = times or WatchTimes()
        self.version = ""  # as last listed or reported; empty: list again
        self._listed_version = ""
        self._contact_s = -math.inf
        self._opened_s = math.inf
        self._stream: responses.WatchStream | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abc.abstractmethod
    def on_list(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Receive all objects; iterating requests the pages, and may raise ``ClusterError``."""

    @abc.abstractmethod
    def on_change(self, kind: str, item: Mapping[str, Any]) -> None:
        """Receive a change: ``ADDED``, ``MODIFIED`` or ``DELETED``."""

    @abc.abstractmethod
    def lost(self, error: Exception) -> None:
        """Receive the reason why changes do not arrive now, within the error's handler."""

    def on_open(self) -> None:  # noqa: B027 - not every subclass needs to know
        """Receive the message that changes arrive from now on."""

    @property
    def last_contact_s(self) -> float:
        """How many seconds ago the API server last sent anything; inf if it never did.

        A healthy idle watch is renewed within ``WatchTimes.stall_s``.
        """
        return time.monotonic() - self._contact_s

    def list(self) -> None:
        """List the collection in the caller's thread, to learn of errors before ``start``.

        Raises:
            ClusterError: The API refused or does not answer.
        """
        self.on_list(self._items())
        # Only now: the list is repeated if the listener failed.
        self.version = self._listed_version

    def start(self) -> None:
        self._thread.start()

    @property
    def is_started(self) -> bool:
        """Whether ``start`` was called."""
        return self._thread.ident is not None

    def end(self, *, timeout_s: float = _JOIN_S) -> None:
        """Stop watching, and wait for the thread up to a time-out."""
        # In this order: the thread checks for the stop once it has a stream to interrupt.
        self._stop.set()
        stream = self._stream
        if stream is not None:
            stream.interrupt()
        if timeout_s and self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            self._opened_s = math.inf
            try:
                self._list_and_watch()
            except Exception as error:  # noqa: BLE001 - a bug, also of the listener, must not end it
                match error:
                    case errors.ClusterError(status=None, reason=reasons.Reason.API_UNAVAILABLE):
                        pass
                    case _:
                        # 410, or a malformed answer: our version may be the cause.
                        self.version = ""
                if not self._stop.is_set():
                    with contextlib.suppress(Exception):
                        self.lost(error)
            if time.monotonic() - self._contact_s >= self._times.silence_s:
                # After a restore of etcd our version may lie in the future: no change is sent
                # until the cluster reaches it (kubernetes/kubernetes#107457).
                self.version = ""
            was_steady = time.monotonic() - self._opened_s >= self._times.steady_s
            failures = 1 if was_steady else failures + 1
            self._stop.wait(self._times.pauses.delay_s(failures - 1))

    def _list_and_watch(self) -> None:
        if not self.version:
            self.list()
        version = {"resourceVersion": self.version} if self.version else {}
        stream = self._kube.watch(
            self._path,
            query={**self._selector, **version},
            timeout_s=self._times.watch_s * random.uniform(1.0, _MAX_FACTOR),  # noqa: S311
            idle_timeout_s=self._times.stall_s,
        )
        self._contact_s = self._opened_s = time.monotonic()
        with stream:
            self._stream = stream
            if self._stop.is_set():
                return
            self.on_open()
            for event in stream:
                self._contact_s = time.monotonic()
                kind, item = str(event.get("type")), event["object"]
                if kind in _CHANGES and not self._stop.is_set():
                    self.on_change(kind, item)
                with api_values.as_cluster_error(f"an event of the {self._plural}"):
                    self.version = str(item["metadata"]["resourceVersion"])

    def _items(self) -> Iterator[Mapping[str, Any]]:
        """Yield the objects while their pages arrive; keep the version of the last page.

        They are no list, because a listener reduces a page to facts before the next is read:
        5,000 pods take about 180 MB as JSON objects, a page of 500 takes 18 MB.
        """
        what = f"the list of {self._plural}"
        for page in rest.pages(self._kube.get, self._path, self._selector, what=what):
            self._contact_s = time.monotonic()
            with api_values.as_cluster_error(what):
                items = tuple(page["items"] or ())
                self._listed_version = str(page["metadata"]["resourceVersion"])
            yield from items


class NodeWatch(Watch):
    """Delivers one node after each change.

    ``on_node`` is called in the watch's thread with the node after each change and each list, even
    if it is unchanged, and never after ``stop``.
    """

    def __init__(
        self,
        kube: api.KubeApi,
        *,
        name: str,
        on_node: Callable[[node_object.NodeView], None],
        stop: threading.Event | None = None,
        times: WatchTimes | None = None,
    ) -> None:
        selector = {"fieldSelector": f"metadata.name={name}"}
        thread_name = "node-watch"
        super().__init__(kube, "/api/v1/nodes", selector, name=thread_name, stop=stop, times=times)
        self._on_node = on_node
        self.latest: Mapping[str, Any] | None = None
        """The node as last reported; None while the watch is not up to date."""

    def on_list(self, items: Iterable[Mapping[str, Any]]) -> None:
        nodes = list(items)
        if not nodes:
            _log.warning("node_not_found", selector=self._selector["fieldSelector"])
        for item in nodes:
            self.on_change("MODIFIED", item)

    def on_change(self, kind: str, item: Mapping[str, Any]) -> None:
        if kind == "DELETED":
            self.latest = None
            _log.warning("node_deleted", selector=self._selector["fieldSelector"])
            return
        view = node_object.parse_node(item)
        self.latest = item
        if not self._stop.is_set():
            self._on_node(view)

    def lost(self, error: Exception) -> None:
        self.latest = None
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
