"""Follow our own Node for as long as the agent lives."""

import http
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, watch
from mig_manager.core.node import cluster, objects

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
        pace: watch.Pace | None = None,
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
        self._watch = watch.Watch(
            kube,
            watch.Collection(path=_NODES, selector={"fieldSelector": selector}, what="node"),
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
        seen = objects.parse_node(item)
        if not self._stop.is_set():
            self._on_node(seen)
