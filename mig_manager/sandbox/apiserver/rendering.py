"""The form of answers: JSON, or the tables that ``kubectl get`` prints.

Forms: Kubernetes documentation, "Kubernetes API Concepts", section on Tables. Columns and their
wording follow the output of ``kubectl get`` against a real server.
"""

import base64
import binascii
import dataclasses
import datetime as dt
import json
from collections.abc import Callable, Sequence
from typing import Any

from mig_manager.core import timestamps
from mig_manager.sandbox.apiserver import kinds, request, store

Object = kinds.Object

_META_VERSION = "meta.k8s.io/v1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Renderer:
    """Renders the objects of one resource in one form."""

    resource: kinds.Resource
    is_table: bool
    has_objects: bool  # whether a table's rows have the whole object; otherwise its metadata

    def item(self, obj: Object) -> Object:
        """Return one object; a Status stays unchanged."""
        if obj["kind"] == "Status" or not self.is_table:
            return obj
        return self._table([obj], {"resourceVersion": obj["metadata"]["resourceVersion"]})

    def collection(self, objects: Sequence[Object], metadata: Object) -> Object:
        """Return a list of objects with its list metadata."""
        if self.is_table:
            return self._table(objects, metadata)
        # The real server omits what the list's kind implies.
        implied = ("apiVersion", "kind")
        return {
            "kind": f"{self.resource.kind}List",
            "apiVersion": self.resource.api_version,
            "metadata": metadata,
            "items": [{k: v for k, v in obj.items() if k not in implied} for obj in objects],
        }

    def bookmark(self, version: int) -> Object:
        """Return the object of a BOOKMARK event: only a resourceVersion."""
        kind, api_version = self.resource.kind, self.resource.api_version
        metadata = {"resourceVersion": str(version)}
        return {"kind": kind, "apiVersion": api_version, "metadata": metadata}

    def _table(self, objects: Sequence[Object], metadata: Object) -> Object:
        plural = self.resource.plural
        age = () if plural in ("events", "nodes", "pods") else (_AGE,)
        columns = (_Column("Name", _at("metadata", "name")), *_COLUMNS.get(plural, ()), *age)
        definitions = [
            {
                "name": column.name,
                "type": "integer" if column.name in ("Data", "Count") else "string",
                "format": "name" if column.name == "Name" else "",
                "description": "",
                "priority": 1 if column.is_wide else 0,
            }
            for column in columns
        ]
        partial = {"kind": "PartialObjectMetadata", "apiVersion": _META_VERSION}
        rows = [
            {
                "cells": [column.value(obj) for column in columns],
                "object": obj if self.has_objects else partial | {"metadata": obj["metadata"]},
            }
            for obj in objects
        ]
        return {
            "kind": "Table",
            "apiVersion": _META_VERSION,
            "metadata": metadata,
            "columnDefinitions": definitions,
            "rows": rows,
        }


def accepts_table(accept: str) -> bool:
    """Return whether an ``Accept`` header prefers a table; 406: it accepts no form."""
    for media_range in (accept or "*/*").split(","):
        media_type, *parameters = (part.strip() for part in media_range.split(";"))
        if media_type not in ("application/json", "application/*", "*/*"):
            continue
        values = dict(part.split("=", 1) for part in parameters if "=" in part)
        if "as" not in values:
            return False
        if values["as"] == "Table" and values.get("v", "v1") == "v1":
            return True
    message = "only the following media types are accepted: application/json"
    raise kinds.StatusError(406, message)


def list_collection(objects: store.Store, info: request.RequestInfo, form: Renderer) -> Object:
    """Return the answer to a list, or a page of it; 410 if the history is too short for it."""
    selection = request.selection(info)
    at, after = None, ("", "")
    if token := info.query.get("continue", ""):
        try:
            at, *after = json.loads(base64.urlsafe_b64decode(token))
        except (binascii.Error, TypeError, ValueError) as error:
            raise kinds.bad_request("continue key is not valid") from error
    limit = request.number(info.query, "limit")
    request.number(info.query, "resourceVersion")
    with objects.lock:
        stored = objects.select(selection.plural, namespace=selection.namespace, at=at)
        version = objects.version if at is None else at
    items = [each for each in stored if selection.matches(each) and _position(each) > tuple(after)]
    metadata: Object = {"resourceVersion": str(version)}
    if limit and len(items) > limit:
        last = json.dumps([version, *_position(items[limit - 1])])
        metadata["continue"] = base64.urlsafe_b64encode(last.encode()).decode()
        items = items[:limit]
    return form.collection(items, metadata)


def _position(obj: Object) -> tuple[str, str]:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


# -- columns ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Column:
    name: str
    value: Callable[[Object], Any]
    is_wide: bool = False  # shown with ``-o wide`` only


def _at(*path: str, default: Any = "") -> Callable[[Object], Any]:
    return lambda obj: kinds.at(obj, *path, default=default)


def _age(since: str | None) -> str:
    when = timestamps.parse(since)
    return timestamps.age(when, dt.datetime.now(dt.UTC)) if when else "<unknown>"


def _node_status(node: Object) -> str:
    conditions = kinds.at(node, "status", "conditions", default=())
    ready = next((each["status"] for each in conditions if each["type"] == "Ready"), None)
    word = {"True": "Ready", None: "Unknown"}.get(ready, "NotReady")
    is_cordoned = kinds.at(node, "spec", "unschedulable", default=False)
    return f"{word},SchedulingDisabled" if is_cordoned else word


def _containers(pod: Object) -> list[Object]:
    return list(kinds.at(pod, "status", "containerStatuses", default=()))


def _pod_ready(pod: Object) -> str:
    ready = sum(bool(each.get("ready")) for each in _containers(pod))
    return f"{ready}/{len(kinds.at(pod, 'spec', 'containers', default=()))}"


def _pod_status(pod: Object) -> str:
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating"
    for container in _containers(pod):
        for kind in ("waiting", "terminated"):
            if reason := kinds.at(container, "state", kind, "reason", default=""):
                return str(reason)
    now = pod.get("status") or {}
    return str(now.get("reason") or now.get("phase") or "Unknown")


def _event_object(event: Object) -> str:
    involved = event.get("involvedObject") or {}
    return f"{involved.get('kind', '').lower()}/{involved.get('name', '')}"


def _node_selector(daemon_set: Object) -> str:
    path = ("spec", "template", "spec", "nodeSelector")
    selector = kinds.at(daemon_set, *path, default={})
    return ",".join(sorted(f"{key}={value}" for key, value in selector.items())) or "<none>"


_AGE = _Column("Age", lambda obj: _age(obj["metadata"].get("creationTimestamp")))
_COLUMNS: dict[str, tuple[_Column, ...]] = {
    "nodes": (
        _Column("Status", _node_status),
        _Column("Roles", lambda _node: "<none>"),
        _AGE,
        _Column("Version", _at("status", "nodeInfo", "kubeletVersion")),
    ),
    "pods": (
        _Column("Ready", _pod_ready),
        _Column("Status", _pod_status),
        _Column(
            "Restarts", lambda pod: sum(int(c.get("restartCount", 0)) for c in _containers(pod))
        ),
        _AGE,
        _Column("IP", _at("status", "podIP", default="<none>"), is_wide=True),
        _Column("Node", _at("spec", "nodeName", default="<none>"), is_wide=True),
    ),
    "events": (
        _Column("Last Seen", lambda event: _age(event.get("lastTimestamp"))),
        _Column("Type", _at("type")),
        _Column("Reason", _at("reason")),
        _Column("Object", _event_object),
        _Column("Message", lambda event: str(event.get("message", "")).strip()),
    ),
    "namespaces": (_Column("Status", _at("status", "phase")),),
    "configmaps": (_Column("Data", lambda obj: len(obj.get("data") or {})),),
    "daemonsets": (
        _Column("Desired", _at("status", "desiredNumberScheduled", default=0)),
        _Column("Current", _at("status", "currentNumberScheduled", default=0)),
        _Column("Ready", _at("status", "numberReady", default=0)),
        _Column("Up-to-date", _at("status", "updatedNumberScheduled", default=0)),
        _Column("Available", _at("status", "numberAvailable", default=0)),
        _Column("Node Selector", _node_selector),
    ),
    "leases": (_Column("Holder", _at("spec", "holderIdentity")),),
    "poddisruptionbudgets": (
        _Column("Min Available", _at("spec", "minAvailable", default="N/A")),
        _Column("Max Unavailable", _at("spec", "maxUnavailable", default="N/A")),
        _Column("Allowed Disruptions", _at("status", "disruptionsAllowed", default=0)),
    ),
}
