"""The columns that ``kubectl get`` shows; the server computes them.

Columns and their wording follow the output of ``kubectl get`` against a real server.
"""

import dataclasses
import datetime as dt
from collections.abc import Callable, Iterable
from typing import Any

from mig_manager.sandbox.api import resources, statuses

Object = statuses.Object

_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86400, 365 * 86400


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table."""

    name: str
    value: Callable[[Object], Any]
    type: str = "string"
    is_wide: bool = False
    """Shown with ``-o wide`` only."""

    def definition(self) -> Object:
        """Return the ``TableColumnDefinition``."""
        return {
            "name": self.name,
            "type": self.type,
            "format": "name" if self.name == "Name" else "",
            "description": "",
            "priority": 1 if self.is_wide else 0,
        }


def definitions(resource: resources.Resource) -> list[Object]:
    """Return the column definitions of a resource."""
    return [column.definition() for column in _columns(resource)]


def cells(resource: resources.Resource, thing: Object) -> list[Any]:
    """Return the cells of an object's row."""
    return [column.value(thing) for column in _columns(resource)]


def age(since: str | None) -> str:
    """Return the time since a timestamp as ``kubectl`` writes it, such as ``5m30s`` or ``3d``."""
    if not since:
        return "<unknown>"
    then = dt.datetime.fromisoformat(since)
    return duration(int((dt.datetime.now(dt.UTC) - then).total_seconds()))


def duration(seconds: int) -> str:
    """Return a duration in the one or two units that matter at its size."""
    steps = (
        (2 * _MINUTE, 1, "s", 0, ""),
        (10 * _MINUTE, _MINUTE, "m", 1, "s"),
        (3 * _HOUR, _MINUTE, "m", 0, ""),
        (8 * _HOUR, _HOUR, "h", _MINUTE, "m"),
        (2 * _DAY, _HOUR, "h", 0, ""),
        (8 * _DAY, _DAY, "d", _HOUR, "h"),
        (2 * _YEAR, _DAY, "d", 0, ""),
    )
    seconds = max(seconds, 0)
    for limit, unit, suffix, rest_unit, rest_suffix in steps:
        if seconds < limit:
            rest = seconds % unit // rest_unit if rest_unit else 0
            return f"{seconds // unit}{suffix}" + (f"{rest}{rest_suffix}" if rest else "")
    return f"{seconds // _YEAR}y"


def _columns(resource: resources.Resource) -> tuple[Column, ...]:
    return (_NAME, *_COLUMNS.get(resource.storage, ()), *_age_of(resource))


def _age_of(resource: resources.Resource) -> tuple[Column, ...]:
    return () if resource.storage in _WITHOUT_AGE else (_AGE,)


def _at(*path: str, default: Any = "") -> Callable[[Object], Any]:
    def value(thing: Object) -> Any:
        found: Any = thing
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return default if found is None else found

    return value


def _node_status(node: Object) -> str:
    conditions = _at("status", "conditions", default=())(node)
    ready = next((each["status"] for each in conditions if each["type"] == "Ready"), None)
    word = {"True": "Ready", None: "Unknown"}.get(ready, "NotReady")
    return f"{word},SchedulingDisabled" if _at("spec", "unschedulable")(node) else word


def _roles(node: Object) -> str:
    prefix = "node-role.kubernetes.io/"
    labels = node["metadata"].get("labels") or {}
    return _joined(key.removeprefix(prefix) for key in labels if key.startswith(prefix))


def _joined(words: Iterable[str]) -> str:
    return ",".join(sorted(words)) or "<none>"


def _address(kind: str) -> Callable[[Object], str]:
    def value(node: Object) -> str:
        addresses = _at("status", "addresses", default=())(node)
        return next((each["address"] for each in addresses if each["type"] == kind), "<none>")

    return value


def _containers(pod: Object) -> list[Object]:
    return list(_at("status", "containerStatuses", default=())(pod))


def _pod_ready(pod: Object) -> str:
    ready = sum(bool(each.get("ready")) for each in _containers(pod))
    return f"{ready}/{len(_at('spec', 'containers', default=())(pod))}"


def _pod_status(pod: Object) -> str:
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating"
    for container in _containers(pod):
        state = container.get("state") or {}
        for kind in ("waiting", "terminated"):
            reason = (state.get(kind) or {}).get("reason")
            if reason:
                return str(reason)
    status = pod.get("status") or {}
    return str(status.get("reason") or status.get("phase") or "Unknown")


def _restarts(pod: Object) -> int:
    return sum(int(each.get("restartCount", 0)) for each in _containers(pod))


def _last_seen(event: Object) -> str:
    series = event.get("series") or {}
    moments = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return age(next((each for each in moments if each), None))


def _event_object(event: Object) -> str:
    involved = event.get("involvedObject") or {}
    return f"{involved.get('kind', '').lower()}/{involved.get('name', '')}"


def _source(event: Object) -> str:
    source = event.get("source") or {}
    parts = (source.get("component") or event.get("reportingComponent", ""), source.get("host"))
    return ", ".join(part for part in parts if part)


def _node_selector(daemon_set: Object) -> str:
    selector = _at("spec", "template", "spec", "nodeSelector", default={})(daemon_set)
    return _joined(f"{key}={value}" for key, value in selector.items())


_NAME = Column(name="Name", value=_at("metadata", "name"))
_AGE = Column(name="Age", value=lambda thing: age(thing["metadata"].get("creationTimestamp")))
_WITHOUT_AGE = frozenset({"events", "nodes", "pods"})
"""Resources whose age is not the last column, or not shown."""

_COLUMNS: dict[str, tuple[Column, ...]] = {
    "nodes": (
        Column(name="Status", value=_node_status),
        Column(name="Roles", value=_roles),
        _AGE,
        Column(name="Version", value=_at("status", "nodeInfo", "kubeletVersion")),
        Column(name="Internal-IP", value=_address("InternalIP"), is_wide=True),
        Column(name="External-IP", value=_address("ExternalIP"), is_wide=True),
        Column(
            name="OS-Image",
            value=_at("status", "nodeInfo", "osImage", default="<unknown>"),
            is_wide=True,
        ),
        Column(
            name="Kernel-Version",
            value=_at("status", "nodeInfo", "kernelVersion", default="<unknown>"),
            is_wide=True,
        ),
        Column(
            name="Container-Runtime",
            value=_at("status", "nodeInfo", "containerRuntimeVersion", default="<unknown>"),
            is_wide=True,
        ),
    ),
    "pods": (
        Column(name="Ready", value=_pod_ready),
        Column(name="Status", value=_pod_status),
        Column(name="Restarts", value=_restarts),
        _AGE,
        Column(name="IP", value=_at("status", "podIP", default="<none>"), is_wide=True),
        Column(name="Node", value=_at("spec", "nodeName", default="<none>"), is_wide=True),
        Column(
            name="Nominated Node",
            value=_at("status", "nominatedNodeName", default="<none>"),
            is_wide=True,
        ),
        Column(name="Readiness Gates", value=lambda _pod: "<none>", is_wide=True),
    ),
    "events": (
        Column(name="Last Seen", value=_last_seen),
        Column(name="Type", value=_at("type")),
        Column(name="Reason", value=_at("reason")),
        Column(name="Object", value=_event_object),
        Column(name="Source", value=_source, is_wide=True),
        Column(name="Message", value=lambda event: str(event.get("message", "")).strip()),
        Column(name="Count", value=_at("count", default=1), type="integer", is_wide=True),
    ),
    "namespaces": (Column(name="Status", value=_at("status", "phase")),),
    "configmaps": (
        Column(name="Data", value=lambda thing: len(thing.get("data") or {}), type="integer"),
    ),
    "daemonsets": (
        Column(name="Desired", value=_at("status", "desiredNumberScheduled", default=0)),
        Column(name="Current", value=_at("status", "currentNumberScheduled", default=0)),
        Column(name="Ready", value=_at("status", "numberReady", default=0)),
        Column(name="Up-to-date", value=_at("status", "updatedNumberScheduled", default=0)),
        Column(name="Available", value=_at("status", "numberAvailable", default=0)),
        Column(name="Node Selector", value=_node_selector),
    ),
    "replicasets": (
        Column(name="Desired", value=_at("spec", "replicas", default=1)),
        Column(name="Current", value=_at("status", "replicas", default=0)),
        Column(name="Ready", value=_at("status", "readyReplicas", default=0)),
    ),
    "leases": (Column(name="Holder", value=_at("spec", "holderIdentity")),),
    "poddisruptionbudgets": (
        Column(name="Min Available", value=_at("spec", "minAvailable", default="N/A")),
        Column(name="Max Unavailable", value=_at("spec", "maxUnavailable", default="N/A")),
        Column(name="Allowed Disruptions", value=_at("status", "disruptionsAllowed", default=0)),
    ),
}
