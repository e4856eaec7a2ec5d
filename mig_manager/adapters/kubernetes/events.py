"""Events about nodes, pods and Leases, as ``kubectl describe`` finds them."""

import collections
import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.adapters import rest
from mig_manager.adapters.kubernetes import api, missing_rights
from mig_manager.core import messages, timing
from mig_manager.core.objects import well_known

_MAX_NAME = 220
"""Characters; with a dot and 24 hex digits an Event's name stays below the 253 of RFC 1123."""
_MAX_QUEUED = 64  # a change publishes about ten
_OF_THE_CLUSTER = "default"
"""Events about objects without a namespace live here, by validation of the API server."""

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EventSubject:
    """The object that an Event is about."""

    kind: str
    name: str
    uid: str
    namespace: str = ""
    api_version: str = "v1"

    @staticmethod
    def node(name: str) -> "EventSubject":
        """Return a node.

        'kubectl describe node' looks for Events whose involvedObject.uid is the node's name, as
        kubelet writes them (newer versions look for the real uid as well), and whose
        involvedObject.namespace is empty.
        """
        return EventSubject(kind="Node", name=name, uid=name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What to publish about an object."""

    subject: EventSubject
    reason: str
    message: str
    is_warning: bool

    def body(self, unique: str, *, now: str, host: str) -> dict[str, Any]:
        """Return the API's object; ``unique`` ends its name, ``host`` is where it is reported."""
        subject = self.subject
        involved = {"kind": subject.kind, "name": subject.name, "uid": subject.uid}
        if subject.namespace:
            involved["namespace"] = subject.namespace
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{subject.name[:_MAX_NAME]}.{unique}",
                "namespace": subject.namespace or _OF_THE_CLUSTER,
            },
            "involvedObject": {"apiVersion": subject.api_version, **involved},
            "reason": self.reason,
            "message": messages.fit(self.message, messages.MAX_EVENT_BYTES),
            "type": "Warning" if self.is_warning else "Normal",
            "source": {"component": well_known.EVENT_COMPONENT, "host": host},
            "reportingComponent": well_known.EVENT_COMPONENT,
            "reportingInstance": host,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }


def path(event: Mapping[str, Any]) -> str:
    """Return the path to create an Event at."""
    return rest.api_path("/api/v1/namespaces", event["metadata"]["namespace"], "events")


class EventQueue:
    """Publishes Events in the background; a refusal is logged and never raised."""

    def __init__(self, kube: api.KubeApi, clock: timing.Clock) -> None:
        self._kube = kube
        self._state = threading.Condition()
        self._queue: collections.deque[dict[str, Any]] = collections.deque()
        self._is_sending = False
        self._right = missing_rights.MissingRight(
            clock, lambda error: _log.info("events_forbidden", detail=error.message)
        )

    def put(self, event: dict[str, Any]) -> None:
        """Queue an Event; it is dropped, and logged, when the queue is full."""
        with self._state:
            if self._right.is_missing:
                return
            if len(self._queue) == _MAX_QUEUED:
                _log.warning("event_dropped", event_reason=event["reason"])
                return
            self._queue.append(event)
            if not self._is_sending:
                # It ends with the queue: an agent at rest has no thread for it.
                self._is_sending = True
                threading.Thread(target=self._send, name="events", daemon=True).start()

    def flush(self, timeout_s: float) -> bool:
        """Wait until every Event is published, or was refused; return False at the time-out."""
        with self._state:
            return self._state.wait_for(lambda: not self._is_sending, timeout_s)

    def _send(self) -> None:
        while True:
            with self._state:
                if not self._queue:
                    self._is_sending = False
                    self._state.notify_all()
                    return
                event = self._queue.popleft()
            try:
                self._kube.post(path(event), event)
            except errors.ClusterError as error:
                with self._state:
                    if self._right.is_refusal(error):
                        self._queue.clear()
                        continue
                _log.warning(
                    "event_not_published", event_reason=event["reason"], detail=error.message
                )
