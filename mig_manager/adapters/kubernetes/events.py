"""Events about nodes, pods and Leases, as ``kubectl describe`` finds them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mig_manager.adapters import rest
from mig_manager.core import messages
from mig_manager.core.node import well_known

_MAX_NAME = 220
"""Characters; with a dot and 24 hex digits an Event's name stays below the 253 of RFC 1123."""
_OF_THE_CLUSTER = "default"
"""Events about objects without a namespace live here, by validation of the API server."""


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
