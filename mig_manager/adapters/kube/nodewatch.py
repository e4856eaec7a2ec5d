"""Follow our own Node for as long as the agent lives.

The client library's own watch has no time-out for a silent connection, hurries to reconnect
without a pause, and gives up when its resource version is too old; each of these has taken agents
out of service. Here the loop is level-triggered: whatever goes wrong, the node is listed again
and delivered again.
"""

import dataclasses
import http
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.adapters.kube import api, stream
from mig_manager.adapters.kubejson import fields, nodereading
from mig_manager.core import cluster

_log = structlog.get_logger()

_NODES = "/api/v1/nodes"
_STOP_S = 1.0
_SPREAD = 0.2
"""Part of the watch's length that is random, lest all nodes of a cluster renew together."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long the watch lasts and how it waits; times are in seconds."""

    watch_s: float = 300.0
    """After about this long the server ends a watch in an orderly way."""
    steady_s: float = 10.0
    """A watch that ends earlier counts as a failure, or it would be renewed without a pause."""
    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0
    idle_margin_s: float = 30.0
    """How long after the end that was asked for a silent watch counts as dead."""

    def wait_s(self, failures: int, chance: float) -> float:
        """Return the pause after some failures in a row, the later half of it left to chance."""
        doubled = self.first_wait_s * 2.0 ** min(failures - 1, 16)
        return min(doubled, self.longest_wait_s) * (1 + chance) / 2


class NodeWatch:
    """Delivers our node after each change; ``run`` is for a thread of its own."""

    def __init__(  # noqa: PLR0913 - a clock and a die beside what it is about
        self,
        kube: api.KubeApi,
        *,
        name: str,
        on_node: Callable[[cluster.NodeView], None],
        stop: threading.Event,
        pace: Pace | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Prepare to follow a node; nothing is sent yet.

        Args:
            kube: The API.
            name: The node's name.
            on_node: Called with the newest node after each change and each new list, also when
                nothing in it has changed; in a thread of ours, and never after ``stop``.
            stop: Ends ``run``.
            pace: None for the default.
            monotonic: Seconds from some fixed point.
            chance: A random number in [0, 1).
        """
        self._kube = kube
        self._selector = {"fieldSelector": f"metadata.name={name}"}
        self._on_node = on_node
        self._stop = stop
        self._pace = pace or Pace()
        self._monotonic = monotonic
        self._chance = chance
        self._version = ""
        self._contact = -math.inf
        self._watching_since = math.inf
        self._failures = 0
        self._stream: stream.WatchStream | None = None

    @property
    def last_contact_s(self) -> float:
        """How many seconds ago the API server last sent us anything; inf if it never did.

        An idle watch that is well is renewed within 1.2 times ``Pace.watch_s``.
        """
        return self._monotonic() - self._contact

    def run(self) -> None:
        """Follow the node until ``stop`` is set, and return within about a second after that.

        The reading happens in a daemon thread beside the caller's, because a read that waits for
        the server's first byte cannot be ended from outside; it is left behind instead.
        """
        reader = threading.Thread(target=self._follow, name="node-watch-reader", daemon=True)
        reader.start()
        self._stop.wait()
        opened = self._stream
        if opened is not None:
            opened.interrupt()
        reader.join(_STOP_S)

    def _follow(self) -> None:
        while not self._stop.is_set():
            self._watching_since = math.inf
            try:
                self._list_and_watch()
            except errors.ClusterError as err:
                self._note_loss(err)
            except Exception:  # noqa: BLE001 - a bug, here or in on_node, must not deafen the agent
                _log.exception("node_watch_error")
                self._version = ""
            was_steady = self._monotonic() - self._watching_since >= self._pace.steady_s
            self._failures = 1 if was_steady else self._failures + 1
            self._stop.wait(self._pace.wait_s(self._failures, self._chance()))

    def _list_and_watch(self) -> None:
        if not self._version:
            self._list()
        watch_s = self._pace.watch_s * (1 + _SPREAD * self._chance())
        opened = self._kube.watch(
            _NODES,
            query={**self._selector, "resourceVersion": self._version},
            timeout_s=watch_s,
            idle_timeout_s=watch_s + self._pace.idle_margin_s,
        )
        self._contact = self._watching_since = self._monotonic()
        with opened:
            # In this order: run() sets stop before it looks for a stream to interrupt.
            self._stream = opened
            if self._stop.is_set():
                return
            for event in opened:
                self._take(event)

    def _list(self) -> None:
        """Begin anew from what the API has now; this is a read of etcd, not of a stale cache."""
        found = self._kube.get(_NODES, self._selector)
        self._contact = self._monotonic()
        with fields.understood("the list of nodes"):
            items = list(found["items"] or ())
            version = str(found["metadata"]["resourceVersion"])
        if not items:
            _log.warning("node_not_found", selector=self._selector["fieldSelector"])
        for item in items:
            self._deliver(item)
        # Only now: a node that could not be delivered is listed again.
        self._version = version

    def _take(self, event: dict[str, Any]) -> None:
        self._contact = self._monotonic()
        kind, item = event.get("type"), event["object"]
        if kind in ("ADDED", "MODIFIED"):
            self._deliver(item)
        elif kind == "DELETED":
            _log.warning("node_deleted", selector=self._selector["fieldSelector"])
        with fields.understood("an event of the node"):
            self._version = str(item["metadata"]["resourceVersion"])

    def _deliver(self, item: dict[str, Any]) -> None:
        seen = nodereading.view(item)
        if not self._stop.is_set():
            self._on_node(seen)

    def _note_loss(self, err: errors.ClusterError) -> None:
        if err.status == http.HTTPStatus.GONE:
            _log.info("node_watch_expired")
        elif not self._stop.is_set():
            _log.warning(
                "node_watch_lost",
                reason=err.reason.value,
                status=err.status,
                detail=err.message,
            )
        if err.status is not None or err.reason is errors.Reason.API_ERROR:
            # 410, or an answer we do not understand: what we hold may be the cause.
            self._version = ""
