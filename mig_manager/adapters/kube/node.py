"""Our own Node object: read it, change it in one patch, publish Events on it."""

import http
import urllib.parse
import uuid
from typing import Any

import structlog

from mig_manager import clocks, errors
from mig_manager.adapters.kube import api
from mig_manager.adapters.kubejson import fields, nodereading
from mig_manager.core import cluster

_log = structlog.get_logger()

_CONFLICT_ATTEMPTS = 8
_LONGEST_MESSAGE = 1024
"""Characters; what the newer events API accepts (``note`` of events.k8s.io/v1)."""
_LONGEST_NODE_NAME = 220
"""Characters; with a dot and 32 hex digits an Event's name stays below the 253 of RFC 1123."""
_EVENTS = "/api/v1/namespaces/default/events"
"""Events about objects without a namespace live here, by validation of the API server."""


class KubeNode:
    """Implements ``ports.Node`` on the Kubernetes API."""

    def __init__(
        self,
        kube: api.KubeApi,
        *,
        name: str,
        clock: clocks.Clock,
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
        self._may_emit = True

    def read(self) -> cluster.NodeView:
        """Return the node as the API has it now; see ``ports.Node``."""
        return nodereading.view(self._kube.get(self._path))

    def patch(self, change: cluster.NodePatch) -> cluster.NodeView:
        """Write a change in one request; see ``ports.Node``.

        ``spec.taints`` has no merge key (unlike a container's ports, its declaration in
        k8s.io/api/core/v1 names no patchStrategy), so a patch replaces the whole list. We write
        it only when it has to change, computed from a fresh read and guarded by its
        ``resourceVersion``: the node lifecycle controller writes taints too, and a cordon makes
        it do so just then.
        """
        for _ in range(_CONFLICT_ATTEMPTS):
            try:
                return nodereading.view(self._patch_once(change))
            except errors.ClusterError as err:
                if err.status != http.HTTPStatus.CONFLICT or change.hold_taint is None:
                    raise
        raise errors.ClusterError(
            f"node {self._name} changes faster than its taints can be written",
            reason=errors.Reason.API_UNAVAILABLE,
            status=http.HTTPStatus.CONFLICT,
        )

    def emit(self, *, reason: str, message: str, is_warning: bool) -> None:
        """Publish an Event; see ``ports.Node``.

        Without the permission, which the stock GPU operator does not give, it says so once.
        """
        if not self._may_emit:
            return
        event = self._event(reason=reason, message=message, is_warning=is_warning)
        try:
            self._kube.post(_EVENTS, event)
        except errors.ClusterError as err:
            if err.reason is errors.Reason.FORBIDDEN:
                self._may_emit = False
                _log.info("events_forbidden", detail=err.message)
            else:
                _log.warning("event_not_published", event_reason=reason, detail=err.message)

    def _patch_once(self, change: cluster.NodePatch) -> dict[str, Any]:
        body: dict[str, Any] = {}
        metadata: dict[str, Any] = {}
        spec: dict[str, Any] = {}
        if change.labels:
            metadata["labels"] = dict(change.labels)
        if change.annotations:
            metadata["annotations"] = dict(change.annotations)
        if change.unschedulable is not None:
            spec["unschedulable"] = change.unschedulable
        if change.hold_taint is not None:
            self._add_taints(metadata, spec, is_held=change.hold_taint)
        if metadata:
            body["metadata"] = metadata
        if spec:
            body["spec"] = spec
        # A merge patch (RFC 7386) says all of this without depending on merge keys.
        return self._kube.patch(self._path, body, kind=api.PatchType.MERGE)

    def _add_taints(
        self, metadata: dict[str, Any], spec: dict[str, Any], *, is_held: bool
    ) -> None:
        node = self._kube.get(self._path)
        with fields.understood(f"node {self._name}"):
            taints = list((node.get("spec") or {}).get("taints") or ())
            others = [taint for taint in taints if taint["key"] != cluster.HOLD_TAINT]
            version = node["metadata"]["resourceVersion"]
        if is_held is (len(others) < len(taints)):
            return
        hold = [{"key": cluster.HOLD_TAINT, "effect": "NoSchedule"}] if is_held else []
        spec["taints"] = [*others, *hold]
        metadata["resourceVersion"] = version

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
            "message": message[:_LONGEST_MESSAGE],
            "type": "Warning" if is_warning else "Normal",
            "source": {"component": self._component, "host": self._name},
            "reportingComponent": self._component,
            "reportingInstance": self._name,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }


def path(name: str) -> str:
    """Return the API path of a node."""
    return f"/api/v1/nodes/{urllib.parse.quote(name, safe='')}"
