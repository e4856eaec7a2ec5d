"""Slots for nodes under change, stored as Leases (``coordination.k8s.io/v1``) in one namespace.

Another node may take an expired slot, unless the slot's node still carries the marks of a change.
That node is unavailable even if its agent is dead, and reusing its slot would disrupt one node
more than allowed. The slot is free again once the agent has finished the change, or once the Node
or the Lease is deleted.

A failed request may have been applied. The next list shows it, because the owner's name is written
in the slot.
"""

import datetime as dt
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.adapters import rest
from mig_manager.adapters.kubernetes import api, node
from mig_manager.core import timing
from mig_manager.core.fleet import slots
from mig_manager.core.node import api_values, node_object

_LEASE_S = 90
"""How long a node keeps a slot without renewing it."""
_FRESH_S = 45.0
"""The age limit of the last renewal when the node is cordoned. The rest of the lease is longer
than a request with all of its retries, so that no other node can have the slot then."""
_RELEASE_ATTEMPTS = 3
_RELEASE_PAUSE_S = 0.5

_log = structlog.get_logger()


class Durations:
    """Parses the durations of Leases, up to ``MAX_LEASE_S``; logs a longer one once."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def parse(self, lease: Mapping[str, Any]) -> float:
        """Return after how many seconds without a change another program may take a Lease."""
        metadata, spec = lease["metadata"], lease.get("spec") or {}
        duration_s = float(spec.get("leaseDurationSeconds") or 0)
        name, owner = str(metadata["name"]), str(spec.get("holderIdentity") or "")
        if duration_s > timing.MAX_LEASE_S and owner and (name, owner) not in self._logged:
            self._logged.add((name, owner))
            _log.warning(
                "lease_too_long",
                lease=name,
                owner=owner,
                duration_s=duration_s,
                counts_as_s=timing.MAX_LEASE_S,
                hint=f"if {owner} is not a program of mig-manager, delete the Lease {name}",
            )
        return min(duration_s, timing.MAX_LEASE_S)


class LeaseSlots:
    """Implements ``ports.Slots`` on the Kubernetes API; one object for one node's agent."""

    def __init__(  # noqa: PLR0913 - the last two have defaults for all but tests
        self,
        kube: api.KubeApi,
        *,
        namespace: str,
        node_name: str,
        limit: int,
        clock: timing.Clock,
        renew_s: float = 15.0,
        pick: Callable[[Sequence[slots.Slot]], slots.Slot] = random.choice,
    ) -> None:
        """Prepare, without a request.

        ``limit`` nodes may change at once. ``pick`` chooses among free slots, at random, so that
        nodes try different ones.
        """
        self._kube = kube
        self._path = path(namespace)
        self._node = node_name
        self._limit = limit
        self._clock = clock
        self._renew_s = renew_s
        self._durations = Durations()
        self._pick = pick
        self._lock = threading.RLock()
        self._sightings: dict[int, slots.Sighting] = {}
        self._own: slots.Slot | None = None
        self._renewed_s = 0.0
        self._owns_none = False
        """Whether we certainly own no slot; we may still own one from before a restart."""
        self._stop: threading.Event | None = None

    def take(self) -> slots.Denial | None:
        with self._lock:
            denial = None if self._is_fresh else self._take()
            if denial is None and self._stop is None:
                self._stop = threading.Event()
                threading.Thread(
                    target=self._renew_until, args=(self._stop,), name="slot-renewal", daemon=True
                ).start()
            return denial

    def check(self) -> None:
        with self._lock:
            if not self._is_fresh:
                raise errors.NotReadyError(
                    "the node has no slot for nodes under change, or renewed it last more than "
                    f"{_FRESH_S:g} s ago; nothing was touched",
                    reason=errors.Reason.SLOTS_TAKEN,
                )

    def release(self) -> None:
        if self._stop is not None:
            self._stop.set()
            self._stop = None
        with self._lock:
            self._own = None
            for attempt in range(_RELEASE_ATTEMPTS):
                if self._owns_none:
                    return
                self._clock.wait(_RELEASE_PAUSE_S * attempt)
                try:
                    for slot in self._list().mine:
                        self._kube.put(f"{self._path}/{slot.name}", self._lease(slot, holder=""))
                        _log.info("slot_released", slot=slot.name)
                    self._owns_none = True
                except errors.ClusterError as error:
                    # After the last attempt the Lease expires without renewal.
                    _log.warning("slot_not_released", node=self._node, error=error.message)

    @property
    def _is_fresh(self) -> bool:
        age_s = self._clock.monotonic() - self._renewed_s
        return self._own is not None and age_s < _FRESH_S

    def _take(self) -> slots.Denial | None:
        self._own = None
        state = self._list()
        for slot in state.mine:
            if self._write(slot):
                return None
        interrupted = tuple(slot for slot in state.silent if self._is_disrupted(slot.holder))
        occupied = (*state.occupied, *interrupted)
        takeable = [
            slot
            for slot in (*state.free, *state.silent)
            if slot not in interrupted and slot.index < self._limit
        ]
        while takeable and len(occupied) < self._limit:
            slot = self._pick(takeable)
            takeable.remove(slot)
            if self._write(slot):
                return None
        return slots.Denial(
            limit=self._limit,
            changing=tuple(slot.holder for slot in state.occupied),
            silent=tuple(slot.holder for slot in interrupted),
        )

    def _list(self) -> slots.Judgement:
        leases = self._kube.get(self._path)
        with api_values.as_cluster_error("the list of Leases"):
            listed = list(filter(None, map(self._slot, leases["items"] or ())))
        now_s = self._clock.monotonic()
        self._sightings = slots.remember(self._sightings, listed, now_s)
        return slots.judge(listed, self._sightings, now_s, node=self._node, limit=self._limit)

    def _is_disrupted(self, name: str) -> bool:
        try:
            return slots.is_disrupted(node_object.parse_node(self._kube.get(node.path(name))))
        except errors.ClusterError as error:
            if error.is_not_found:
                return False
            _log.warning("slot_owner_not_seen", node=name, error=error.message)
            return True

    def _write(self, slot: slots.Slot) -> bool:
        """Write our name into a slot; return whether it is ours now.

        Raises:
            ClusterError: The API refused or does not answer; the slot may be ours anyway.
        """
        began_s = self._clock.monotonic()
        self._owns_none = False
        written = write(self._kube, self._path, self._lease(slot, holder=self._node))
        if written is None:
            return False
        with api_values.as_cluster_error("a Lease"):
            self._own = self._slot(written)
        if slot.holder != self._node:
            _log.info("slot_taken", slot=slot.name, before=slot.holder or None)
        # The time before the request: no other node can have seen the change earlier.
        self._renewed_s = began_s
        return True

    def _lease(self, slot: slots.Slot, *, holder: str) -> dict[str, Any]:
        return lease(
            slot.name,
            slot.version,
            holder=holder,
            duration_s=_LEASE_S,
            transitions=slot.transitions + (holder not in ("", slot.holder)),
        )

    def _slot(self, item: Mapping[str, Any]) -> slots.Slot | None:
        metadata, spec = item["metadata"], item.get("spec") or {}
        index = slots.index_of(str(metadata["name"]))
        if index is None:
            return None
        return slots.Slot(
            index=index,
            holder=str(spec.get("holderIdentity") or ""),
            version=str(metadata["resourceVersion"]),
            duration_s=self._durations.parse(item),
            transitions=int(spec.get("leaseTransitions") or 0),
        )

    def _renew_until(self, stop: threading.Event) -> None:
        while not stop.wait(self._renew_s):
            with self._lock:
                if stop.is_set():
                    return
                try:
                    if self._own is not None and self._write(self._own):
                        continue
                    denial = self._take()
                    if denial is not None:
                        # Edited by a person, or the API was unreachable for long.
                        _log.warning("slot_lost", node=self._node, owners=denial.changing)
                except errors.ClusterError as error:
                    _log.warning(
                        "slot_not_renewed", reason=error.reason.value, error=error.message
                    )
                except Exception:  # noqa: BLE001 - a bug must be logged and not end the renewal
                    _log.exception("slot_renewal_error")


def path(namespace: str) -> str:
    """Return the path of the Leases in a namespace."""
    return rest.api_path("/apis/coordination.k8s.io/v1/namespaces", namespace, "leases")


def write(kube: api.KubeApi, path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Create or replace a Lease; return None if it has changed since its version, or is gone.

    Raises:
        ClusterError: The API refused or does not answer; it may have been written.
    """
    metadata = body["metadata"]
    is_new = "resourceVersion" not in metadata
    try:
        return kube.post(path, body) if is_new else kube.put(f"{path}/{metadata['name']}", body)
    except errors.ClusterError as error:
        # Not found for a new Lease means a missing namespace: no program would ever have it.
        if error.is_conflict or (error.is_not_found and not is_new):
            return None
        raise


def lease(
    name: str, version: str, *, holder: str, duration_s: int, transitions: int
) -> dict[str, Any]:
    """Return a Lease renewed now, which replaces this ``version``; a new one if it is empty.

    Its time is for people only: no program compares the clocks of two machines.
    """
    metadata: dict[str, Any] = {"name": name, "labels": dict(api.LABELS)}
    if version:
        metadata["resourceVersion"] = version
    now = dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata,
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": duration_s,
            "renewTime": now,
            "leaseTransitions": transitions,
        },
    }
