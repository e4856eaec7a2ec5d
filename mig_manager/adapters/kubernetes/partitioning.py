"""The partitioner's view of the cluster: all nodes, all pods, one write, and Events.

Watches keep only the facts that a decision needs, and drop most objects. Facts are trusted only
while their watch works: if a watch is lost, ``current`` says so.
"""

import dataclasses
import hashlib
import http
import math
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Generic, TypeVar

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, events, node, watch
from mig_manager.core import timing
from mig_manager.core.fleet import demand, partitioned, partitioning
from mig_manager.core.node import api_values, well_known

_Item = TypeVar("_Item")
_NAME_DIGITS = 24

_log = structlog.get_logger()


class Collection(watch.Watch, Generic[_Item]):
    """All objects of one kind, converted by ``parse``; objects that become None are left out.

    Malformed objects are left out too: a pod with an absurd request must not stop the work for
    all others.

    ``on_change`` is called in the watch's thread with an object's old and new value; None for an
    object that was or is left out.
    """

    def __init__(
        self,
        kube: api.KubeApi,
        plural: str,
        parse: Callable[[Mapping[str, Any]], _Item | None],
        on_change: Callable[[_Item | None, _Item | None], None],
        *,
        times: watch.Times | None = None,
    ) -> None:
        super().__init__(kube, f"/api/v1/{plural}", {}, name=f"{plural}-watch", times=times)
        self._parse = parse
        self._on_change = on_change
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str], _Item] = {}
        self._malformed: set[tuple[str, str]] = set()
        """Keys of malformed objects, which are logged once."""
        self.is_current = False
        self._lost_s = -math.inf
        """Since when changes do not arrive; -inf: they never did."""

    @property
    def last_contact_s(self) -> float:
        """How many seconds ago the API server last sent a change; inf if it never did.

        Lists do not count: a watch that is refused repeatedly lists every time.
        """
        now_s = time.monotonic()
        return super().last_contact_s if self.is_current else now_s - self._lost_s

    def items(self) -> tuple[_Item, ...]:
        """Return the objects as last reported."""
        with self._lock:
            return tuple(self._kept.values())

    def listed(self, items: Iterable[Mapping[str, Any]]) -> None:
        known, self._malformed = self._malformed, set()
        parsed = ((key := _key(item), self._parsed(key, item, known)) for item in items)
        now = {key: item for key, item in parsed if item is not None}
        with self._lock:
            before, self._kept = self._kept, now
        for key in before.keys() | now.keys():
            self._report(before.get(key), now.get(key))

    def changed(self, kind: str, item: Mapping[str, Any]) -> None:
        key = _key(item)
        known = self._malformed & {key}
        self._malformed.discard(key)
        now = None if kind == "DELETED" else self._parsed(key, item, known)
        with self._lock:
            before = self._kept.pop(key, None)
            if now is not None:
                self._kept[key] = now
        self._report(before, now)

    def opened(self) -> None:
        self.is_current = True

    def lost(self, error: Exception) -> None:
        if self.is_current:
            self._lost_s = time.monotonic()
        self.is_current = False
        if not isinstance(error, errors.ClusterError):
            _log.exception("collection_watch_error")
        elif error.status != http.HTTPStatus.GONE:
            _log.warning("collection_watch_lost", of=self._plural, detail=error.message)

    def _parsed(
        self, key: tuple[str, str], item: Mapping[str, Any], known: Container[tuple[str, str]]
    ) -> _Item | None:
        try:
            return self._parse(item)
        except errors.ClusterError as error:
            if key not in known:
                _log.warning(
                    "object_left_out", name="/".join(filter(None, key)), detail=error.message
                )
            self._malformed.add(key)
            return None

    def _report(self, before: _Item | None, now: _Item | None) -> None:
        if before != now:
            self._on_change(before, now)


class Cluster:
    """The partitioner's access to the cluster; its methods are for one thread.

    ``on_demand`` is called in a watch's thread when the pods' demand, or a node with MIG devices,
    has changed.
    """

    def __init__(
        self,
        kube: api.KubeApi,
        *,
        clock: timing.Clock,
        reporter: str,
        on_demand: Callable[[], None],
        times: watch.Times | None = None,
    ) -> None:
        """Prepare, without a request; Events name the ``reporter``."""
        self._kube = kube
        self._clock = clock
        self._reporter = reporter
        self._on_demand = on_demand
        self._nodes: Collection[partitioned.PartitionedNode] = Collection(
            kube, "nodes", partitioned.parse, self._node_changed, times=times
        )
        self._pods: Collection[demand.Pending | demand.Bound] = Collection(
            kube, "pods", demand.parse, self._pod_changed, times=times
        )
        self._written: dict[str, tuple[str, partitioned.PartitionedNode]] = {}
        """By name: the version that a node had before our last write, and the node after it."""

    def start(self) -> None:
        """List and watch from now on."""
        self._nodes.start()
        self._pods.start()

    def close(self) -> None:
        """Stop watching."""
        self._nodes.end(timeout_s=0.0)
        self._pods.end(timeout_s=0.0)

    @property
    def is_current(self) -> bool:
        """Whether changes of nodes and pods arrive."""
        return self._nodes.is_current and self._pods.is_current

    @property
    def last_contact_s(self) -> float:
        """How long ago the API server last sent data about nodes or pods."""
        return max(self._nodes.last_contact_s, self._pods.last_contact_s)

    def nodes(self) -> tuple[partitioned.PartitionedNode, ...]:
        """Return the nodes as last reported, or as changed by our own write."""
        nodes = {each.name: each for each in self._nodes.items()}
        # A write requires the reported version, so the next reported version includes it.
        self._written = {
            name: (before, after)
            for name, (before, after) in self._written.items()
            if name in nodes and nodes[name].version == before
        }
        return tuple(
            (nodes | {name: after for name, (_, after) in self._written.items()}).values()
        )

    def pods(self) -> tuple[demand.Pending | demand.Bound, ...]:
        """Return the pods that wait for MIG devices, and the pods that have a node."""
        return self._pods.items()

    def request(self, change: partitioning.Change) -> bool:
        """Request a layout of a node; return False if the node has changed since, or is gone.

        Raises:
            ClusterError: The API refused or does not answer; the layout may have been requested.
        """
        metadata = {
            "labels": {well_known.CONFIG_LABEL: well_known.CUSTOM_LAYOUT},
            "annotations": {well_known.LAYOUT_ANNOTATION: change.layout},
        }
        item = node.patch_version(self._kube, change.node, change.version, metadata)
        if item is None:
            return False
        after = partitioned.parse(item)
        if after is not None and after.version != change.version:
            self._written[change.node] = change.version, after
        return True

    def publish(self, event: events.Event, *, about: str) -> None:
        """Publish an Event, unless a replica has published an equal one with this ``about``.

        Raises:
            ClusterError: The API refused or does not answer; it may have been published.
        """
        parts = (event.subject.uid, event.reason, about)
        unique = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_NAME_DIGITS]
        body = event.body(unique, now=self._clock.now_iso(), host=self._reporter)
        try:
            self._kube.post(events.path(body), body)
        except errors.ClusterError as error:
            if not error.is_conflict:
                raise

    def _node_changed(
        self,
        before: partitioned.PartitionedNode | None,
        now: partitioned.PartitionedNode | None,
    ) -> None:
        # Kubelet writes a node every few minutes without changing anything.
        if (
            before is None
            or now is None
            or before != dataclasses.replace(now, version=before.version)
        ):
            self._on_demand()

    def _pod_changed(
        self,
        before: demand.Pending | demand.Bound | None,
        now: demand.Pending | demand.Bound | None,
    ) -> None:
        # A pod that was bound, or has ended, is no new demand.
        if isinstance(now, demand.Pending):
            self._on_demand()


def _key(item: Mapping[str, Any]) -> tuple[str, str]:
    with api_values.as_cluster_error("an object of a watch"):
        metadata = item["metadata"]
        return str(metadata.get("namespace") or ""), str(metadata["name"])
