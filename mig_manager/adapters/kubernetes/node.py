"""Our own Node object: read it, change it in one patch, publish Events on it."""

import collections
import dataclasses
import http
import threading
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api
from mig_manager.core import messages, timing
from mig_manager.core.node import cluster

_PATH = "/api/v1/namespaces/default/events"
"""Events about objects without a namespace live here, by validation of the API server."""
_MOST_WAITING = 64
"""A change publishes about ten."""
_FORBIDDEN_REST_S = 600.0
"""A missing right may be granted, and a refused token renewed, while we run."""

_log = structlog.get_logger()


class EventSender:
    """Publishes Events; none that it takes is ever an error for who hands it over."""

    def __init__(self, kube: api.KubeApi, clock: timing.Clock) -> None:
        self._kube = kube
        self._clock = clock
        self._state = threading.Condition()
        self._waiting: collections.deque[dict[str, Any]] = collections.deque()
        self._is_sending = False
        self._quiet_until_s = 0.0

    def put(self, event: dict[str, Any]) -> None:
        """Take an Event to publish; it is dropped, and logged, where too many wait."""
        with self._state:
            if self._clock.monotonic() < self._quiet_until_s:
                return
            if len(self._waiting) == _MOST_WAITING:
                _log.warning("event_dropped", event_reason=event["reason"])
                return
            self._waiting.append(event)
            if not self._is_sending:
                # It ends once nothing waits: an agent at rest has no thread for it.
                self._is_sending = True
                threading.Thread(target=self._send, name="events", daemon=True).start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until every Event is published, or was refused; return False at the time-out."""
        with self._state:
            return self._state.wait_for(lambda: not self._is_sending, timeout_s)

    def _send(self) -> None:
        while True:
            with self._state:
                if not self._waiting:
                    self._is_sending = False
                    self._state.notify_all()
                    return
                event = self._waiting.popleft()
            try:
                self._kube.post(_PATH, event)
            except errors.ClusterError as error:
                self._note(event, error)

    def _note(self, event: dict[str, Any], error: errors.ClusterError) -> None:
        """Log a refusal; without the right, which the stock GPU operator lacks, be quiet."""
        if error.reason is not errors.Reason.FORBIDDEN:
            _log.warning("event_not_published", event_reason=event["reason"], detail=error.message)
            return
        _log.info("events_forbidden", detail=error.message)
        with self._state:
            self._quiet_until_s = self._clock.monotonic() + _FORBIDDEN_REST_S
            self._waiting.clear()


_CONFLICT_ATTEMPTS = 8
_LONGEST_NODE_NAME = 220
"""Characters; with a dot and 32 hex digits an Event's name stays below the 253 of RFC 1123."""


class KubeNode:
    """Implements ``ports.Node`` on the Kubernetes API."""

    def __init__(
        self,
        kube: api.KubeApi,
        *,
        name: str,
        clock: timing.Clock,
        component: str = "mig-manager",
    ) -> None:
        """Stand for one node.

        Args:
            kube: The API.
            name: The node's name.
            clock: Dates the Events.
            component: Who the Events are from.
        """
        self._kube = kube
        self._name = name
        self._clock = clock
        self._component = component
        self._path = path(name)
        self._events = EventSender(kube, clock)
        self._announcing: threading.Thread | None = None
        self._seen: _Seen | None = None

    def read(self) -> cluster.NodeView:
        """Return the node as the API has it now; see ``ports.Node``."""
        self._settle()
        return self._remember(self._kube.get(self._path)).view

    def patch(self, change: cluster.NodePatch) -> cluster.NodeView:
        """Write what only we write, in one request; see ``ports.Node``."""
        self._settle()
        return self._send(_metadata(change))

    def announce(self, change: cluster.NodePatch) -> None:
        """Write what only we write, beside whatever goes on; see ``ports.Node``."""
        self._settle()
        self._announcing = threading.Thread(
            target=self._announce, args=(change,), name="announcement", daemon=True
        )
        self._announcing.start()

    def _announce(self, change: cluster.NodePatch) -> None:
        try:
            self._send(_metadata(change))
        except errors.ClusterError as error:
            _log.warning("announcement_not_published", detail=error.message)

    def _settle(self) -> None:
        """Wait for an announcement; the time-outs of its request bound the wait."""
        if self._announcing is not None:
            self._announcing.join()
            self._announcing = None

    def update(self, decide: Callable[[cluster.NodeView], cluster.NodePatch]) -> cluster.NodeView:
        """Write what depends on the node, in one request; see ``ports.Node``.

        The request carries the ``resourceVersion`` of the node that it was decided for, so the
        API server answers 409 where anybody has written since. It begins with the node as we
        saw it last: an old picture costs a request, and no other harm.
        """
        self._settle()
        seen = self._seen or self._remember(self._kube.get(self._path))
        for _ in range(_CONFLICT_ATTEMPTS):
            change = decide(seen.view)
            try:
                return self._send(_body(change, seen))
            except errors.ClusterError as err:
                if err.status != http.HTTPStatus.CONFLICT:
                    raise
            seen = self._remember(self._kube.get(self._path))
            # Our own write may be the other one: its answer was lost, and it was sent again.
            if change.is_in(seen.view):
                return seen.view
        raise errors.ClusterError(
            f"node {self._name} changes faster than it can be written",
            reason=errors.Reason.API_UNAVAILABLE,
        )

    def emit(self, *, reason: str, message: str, is_warning: bool) -> None:
        """Hand over an Event; see ``ports.Node``."""
        self._events.put(self._event(reason=reason, message=message, is_warning=is_warning))

    def flush_events(self, timeout_s: float) -> bool:
        """Wait for Events to be published; see ``ports.Node``."""
        return self._events.flush(timeout_s)

    def _send(self, body: dict[str, Any]) -> cluster.NodeView:
        # A merge patch (RFC 7386) says all of this without depending on merge keys.
        return self._remember(self._kube.patch(self._path, body, kind=api.PatchType.MERGE)).view

    def _remember(self, node: Mapping[str, Any]) -> "_Seen":
        view = cluster.parse_node(node)
        with cluster.understood(f"node {self._name}"):
            self._seen = _Seen(
                view=view,
                version=str(node["metadata"].get("resourceVersion") or ""),
                taints=tuple((node.get("spec") or {}).get("taints") or ()),
            )
        return self._seen

    def _event(self, *, reason: str, message: str, is_warning: bool) -> dict[str, Any]:
        now = self._clock.now_iso()
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{self._name[:_LONGEST_NODE_NAME]}.{uuid.uuid4().hex}",
                "namespace": "default",
            },
            # 'kubectl describe node' looks for events whose involvedObject.uid is the node's
            # name, as kubelet writes them (newer versions look for the real uid as well), and
            # whose involvedObject.namespace is empty.
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Node",
                "name": self._name,
                "uid": self._name,
            },
            "reason": reason,
            "message": messages.fit(message, messages.LONGEST_EVENT_BYTES),
            "type": "Warning" if is_warning else "Normal",
            "source": {"component": self._component, "host": self._name},
            "reportingComponent": self._component,
            "reportingInstance": self._name,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A node as an answer of the API showed it."""

    view: cluster.NodeView
    version: str
    taints: tuple[Mapping[str, Any], ...]


def _metadata(change: cluster.NodePatch) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if change.labels:
        metadata["labels"] = dict(change.labels)
    if change.annotations:
        metadata["annotations"] = dict(change.annotations)
    return {"metadata": metadata}


def _body(change: cluster.NodePatch, seen: _Seen) -> dict[str, Any]:
    """Return the merge patch, valid only for the version that was seen.

    ``spec.taints`` has no merge key (unlike a container's ports, its declaration in
    k8s.io/api/core/v1 names no patchStrategy), so a patch replaces the whole list. It is written
    only where it has to change.
    """
    metadata: dict[str, Any] = {"resourceVersion": seen.version}
    spec: dict[str, Any] = {}
    if change.labels:
        metadata["labels"] = dict(change.labels)
    if change.annotations:
        metadata["annotations"] = dict(change.annotations)
    if change.unschedulable is not None:
        spec["unschedulable"] = change.unschedulable
    if change.hold_taint not in (None, cluster.HOLD_TAINT in seen.view.taint_keys):
        others = [taint for taint in seen.taints if taint["key"] != cluster.HOLD_TAINT]
        hold = [{"key": cluster.HOLD_TAINT, "effect": "NoSchedule"}] if change.hold_taint else []
        spec["taints"] = [*others, *hold]
    return {"metadata": metadata, "spec": spec} if spec else {"metadata": metadata}


def path(name: str) -> str:
    """Return the API path of a node."""
    return f"/api/v1/nodes/{urllib.parse.quote(name, safe='')}"
