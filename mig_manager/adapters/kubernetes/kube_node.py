"""Our own Node object: read it, change it in one patch, publish Events on it."""

import dataclasses
import random
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import structlog

from mig_manager import errors, reasons
from mig_manager.adapters import rest
from mig_manager.adapters.kubernetes import api, events, missing_rights
from mig_manager.core import timing
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import api_values, node_object, well_known
from mig_manager.core.records import readiness

_CONFLICTS_S = 10.0
"""How long an update is retried after it met another write. With a request of ordinary length it
ends within the rest of a slot's Lease (``leases``)."""
_CONFLICT_PAUSES = timing.Backoff(first_s=0.02, max_s=1.0, jitter=random.random)
_TRUSTED_S = 10.0
"""After the last answer or event. A connection that died unnoticed is as silent as a watch with no
events."""
_OUR_CONDITIONS = (well_known.READY_CONDITION, well_known.RECOVERY_CONDITION)

_log = structlog.get_logger()


def path(name: str) -> str:
    """Return the API path of a node."""
    return rest.api_path("/api/v1/nodes", name)


def patch_version(
    kube: api.KubeApi, name: str, version: str, patch: node_object.NodePatch
) -> dict[str, Any] | None:
    """Patch labels and annotations of one version of a node.

    Returns:
        The node afterwards; None if it has changed since, or is gone.

    Raises:
        ClusterError: The API refused, does not answer, or did not keep the patch; unless it
            refused, the patch may have been applied.
    """
    metadata = {"labels": patch.labels, "annotations": patch.annotations}
    try:
        item = kube.patch(path(name), {"metadata": {"resourceVersion": version, **metadata}})
    except errors.ClusterError as error:
        if error.is_conflict or error.is_not_found:
            return None
        raise
    node_object.require_kept(patch, item)
    return item


class KubeNode:
    """Implements ``ports.Node`` on the Kubernetes API."""

    def __init__(
        self,
        kube: api.KubeApi,
        *,
        name: str,
        clock: timing.Clock,
        watched: Callable[[], Mapping[str, Any] | None] = lambda: None,
    ) -> None:
        self._kube = kube
        self._name = name
        self._clock = clock
        self._watched = watched
        """Returns the node as a watch last reported it; None: no watch is up to date."""
        self._path = path(name)
        self._events = events.EventQueue(kube, clock)
        self._announcing: threading.Thread | None = None
        self._last: _Node | None = None
        self._unwritten: dict[str, readiness.Condition] = {}
        """The newest condition of each type, until it is written."""
        self._status_right = missing_rights.MissingRight(
            clock, lambda error: _log.info("status_forbidden", detail=error.message)
        )

    def read(self) -> node_object.NodeView:
        self._join_announcement()
        return self._get().view

    def latest(self, *, is_at_rest: bool = False) -> node_object.NodeView:
        self._join_announcement()
        is_watched = self._take_watched()
        last = self._last
        if last is None or is_watched is None:
            return self._get().view
        is_recent = self._clock.monotonic() - last.reported_s < _TRUSTED_S
        # A watch that lags behind our write for long belongs to a restored etcd.
        is_trusted = is_recent or (is_at_rest and is_watched)
        return (last if is_trusted else self._get()).view

    def patch(self, change: node_object.NodePatch) -> node_object.NodeView:
        self._join_announcement()
        return self._patch(change)

    def announce(self, change: node_object.NodePatch) -> None:
        self._join_announcement()

        def write() -> None:
            try:
                self._patch(change)
            except errors.ClusterError as error:
                _log.warning("announcement_not_published", detail=error.message)

        self._announcing = threading.Thread(target=write, name="announcement", daemon=True)
        self._announcing.start()

    def update(
        self, decide: Callable[[node_object.NodeView], node_object.NodePatch]
    ) -> node_object.NodeView:
        """Decide on a change of the node and write it in one request.

        The request carries the ``resourceVersion`` that the decision is based on, so the API
        server answers 409 after another write. The first attempt uses the node as last reported:
        if that is outdated, it costs one request. Partly random pauses between attempts let
        several writers of one node pass each other.
        """
        self._join_announcement()
        wait = timing.Wait(clock=self._clock, timeout_s=_CONFLICTS_S, backoff=_CONFLICT_PAUSES)
        self._take_watched()
        node = self._last or self._get()
        change = None
        for _ in wait.tries():
            if change is not None:
                # Read after the pause, to be as close as possible to the next attempt.
                node = self._get()
                # The other write may be our own: its answer was lost, and it was retried.
                if change.is_in(node.view):
                    return node.view
            change = decide(node.view)
            try:
                return self._patch(change, version=node.version, spec=_spec(change, node))
            except errors.ClusterError as error:
                if not error.is_conflict:
                    raise
        node = self._get()
        if change is not None and change.is_in(node.view):
            return node.view
        raise errors.ClusterError(
            f"node {self._name} changes faster than it can be written",
            reason=reasons.Reason.API_UNAVAILABLE,
        )

    def hide_devices(self) -> None:
        # Kubelet's next heartbeat, after up to 10 s, would report the same of a stopped plugin,
        # with the whole list. Until then the scheduler binds pods to devices that are gone, and
        # kubelet fails these pods.
        self._join_announcement()
        try:
            allocatable = (self._last or self._get()).view.allocatable
            # Other resources belong to other plugins, such as ``nvidia.com/hostdev``: NVIDIA's
            # device plugin ignores other names in its config (``DisableResourceNamingInConfig``).
            if stale := resources.devices_of(allocatable):
                body = {"status": {"allocatable": dict.fromkeys(stale, "0")}}
                self._parse(self._kube.patch(f"{self._path}/status", body))
        except errors.ClusterError as error:
            # The stock GPU operator does not grant the right.
            _log.info("devices_not_withdrawn", reason=error.reason.value, detail=error.message)

    def report_devices(self, counts: Mapping[str, int]) -> None:
        if self._status_right.is_missing:
            return
        self._join_announcement()
        allocatable = {name: str(count) for name, count in counts.items()}
        # Kubelet keeps the capacity of devices that are gone for five minutes.
        capacity = {name: count for name, count in allocatable.items() if counts[name]}
        status = {"capacity": capacity, "allocatable": allocatable}
        try:
            self._parse(self._kube.patch(f"{self._path}/status", {"status": status}))
        except errors.ClusterError as error:
            if not self._status_right.is_refusal(error):
                _log.warning("devices_not_reported", detail=error.message)

    def remove_resources(self, names: Collection[str]) -> node_object.NodeView:
        self._join_announcement()
        gone = dict.fromkeys(names)
        body = {"status": {"capacity": gone, "allocatable": gone}}
        return self._parse(self._kube.patch(f"{self._path}/status", body)).view

    @property
    def has_unwritten_condition(self) -> bool:
        return bool(self._unwritten)

    def set_condition(self, condition: readiness.Condition) -> None:
        self._unwritten[condition.type] = condition
        if self._status_right.is_missing:
            return
        self._join_announcement()
        try:
            present = (self._last or self._get()).conditions.get(condition.type)
            entry = condition.entry(present, self._clock.now_iso())
            if entry is not None:
                body = {"status": {"conditions": [entry]}}
                self._parse(self._kube.patch_lists(f"{self._path}/status", body))
            del self._unwritten[condition.type]
        except errors.ClusterError as error:
            if not self._status_right.is_refusal(error):
                _log.warning("condition_not_written", detail=error.message)

    def retry_condition(self) -> None:
        for condition in list(self._unwritten.values()):
            self.set_condition(condition)

    def emit(self, *, reason: str, message: str, is_warning: bool) -> None:
        about = events.EventSubject.node(self._name)
        event = events.Event(subject=about, reason=reason, message=message, is_warning=is_warning)
        # Sorts by time: kubectl shows events of one second by name.
        unique = f"{time.time_ns():016x}{secrets.token_hex(4)}"
        self._events.put(event.body(unique, now=self._clock.now_iso(), host=self._name))

    def flush_events(self, timeout_s: float) -> bool:
        return self._events.flush(timeout_s)

    def _join_announcement(self) -> None:
        # The time-outs of its request bound the wait.
        if self._announcing is not None:
            self._announcing.join()
            self._announcing = None

    def _take_watched(self) -> bool | None:
        """Take the node as the watch shows it, if that is newer.

        Versions of one resource are comparable as numbers (KEP-5504).

        Returns:
            Whether the watch shows the node as last known; None: the two are not comparable.
        """
        item = self._watched()
        if item is None:
            return None
        versions = [str(item["metadata"].get("resourceVersion"))]
        versions += [self._last.version] if self._last else []
        if not all(version.isdecimal() for version in versions):
            return None
        if len(versions) == 1 or int(versions[0]) > int(versions[1]):
            self._parse(item)
            return True
        return versions[0] == versions[1]

    def _get(self) -> "_Node":
        return self._parse(self._kube.get(self._path))

    def _patch(
        self,
        change: node_object.NodePatch,
        *,
        version: str = "",
        spec: Mapping[str, Any] | None = None,
    ) -> node_object.NodeView:
        parts = {"labels": dict(change.labels), "annotations": dict(change.annotations)}
        metadata = {"resourceVersion": version, **parts}
        body: dict[str, Any] = {"metadata": {key: part for key, part in metadata.items() if part}}
        if spec:
            body["spec"] = spec
        return self._parse(self._kube.patch(self._path, body)).view

    def _parse(self, node: Mapping[str, Any]) -> "_Node":
        view = node_object.parse_node(node)
        with api_values.as_cluster_error(f"node {self._name}"):
            conditions = (node.get("status") or {}).get("conditions") or ()
            self._last = _Node(
                view=view,
                reported_s=self._clock.monotonic(),
                version=str(node["metadata"].get("resourceVersion") or ""),
                taints=tuple((node.get("spec") or {}).get("taints") or ()),
                conditions={
                    each["type"]: each for each in conditions if each["type"] in _OUR_CONDITIONS
                },
            )
        return self._last


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A node as the API last showed it."""

    view: node_object.NodeView
    reported_s: float  # when the API reported it
    version: str
    taints: tuple[Mapping[str, Any], ...]
    conditions: Mapping[str, Mapping[str, Any]]  # the agent's own, by type


def _spec(change: node_object.NodePatch, node: _Node) -> dict[str, Any]:
    """Return what has to change of the spec of this version of the node.

    ``spec.taints`` has no merge key (unlike a container's ports, its declaration in
    k8s.io/api/core/v1 names no patchStrategy), so a patch replaces the whole list.
    """
    present = node.view.taint_keys
    removed = change.removed_taints
    taints = [taint for taint in node.taints if taint["key"] not in removed]
    if change.reconfiguring_taint not in (None, well_known.RECONFIGURING_TAINT in present):
        taints = [taint for taint in taints if taint["key"] != well_known.RECONFIGURING_TAINT]
        if change.reconfiguring_taint:
            taints.append({"key": well_known.RECONFIGURING_TAINT, "effect": "NoSchedule"})
    return {} if taints == list(node.taints) else {"taints": taints}
