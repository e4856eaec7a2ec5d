"""Slots for nodes under change, kept as Leases (``coordination.k8s.io/v1``) in one namespace.

A slot that is not renewed for the time it is leased for may be taken by others, unless its node
still has the marks of a change: that node is unavailable, whether its agent lives or not, and to
give its slot away would be to disrupt one node more than the owner allowed. Such a slot is free
again once the node's agent has come back and finished, or once the Node or the Lease is deleted.

No answer is believed to be the last word: whatever a request that failed has done is seen by the
next look, because a slot is ours by the name that stands in it.
"""

import dataclasses
import datetime as dt
import http
import random
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, node
from mig_manager.core import timing
from mig_manager.core.fleet import slots
from mig_manager.core.node import cluster

_log = structlog.get_logger()

_RELEASE_TRIES = 3
_RELEASE_PAUSE_S = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long a slot lasts; seconds."""

    lease_s: int = 90
    """How long a silent holder keeps it."""
    renew_s: float = 15.0
    """Pause between two renewals."""
    fresh_s: float = 45.0
    """How old the last renewal may be when the node is cordoned. What is left of the lease is
    longer than a request with all of its repetitions, so that no other can have the slot then."""


class LeaseSlots:
    """Implements ``ports.Slots`` on the Kubernetes API; one object for one node's agent."""

    def __init__(  # noqa: PLR0913 - a clock and a die beside what it is about
        self,
        kube: api.KubeApi,
        *,
        namespace: str,
        node_name: str,
        limit: int,
        clock: timing.Clock,
        times: Times | None = None,
        pick: Callable[[Sequence[slots.Slot]], slots.Slot] = random.choice,
    ) -> None:
        """Prepare; nothing is sent yet.

        Args:
            kube: The API.
            namespace: Where the Leases are.
            node_name: Under which name slots are held.
            limit: How many nodes may be under change at once.
            clock: For the age of what was seen.
            times: None for the default.
            pick: Chooses among free slots, lest all nodes of a cluster want the same.
        """
        self._kube = kube
        self._path = (
            "/apis/coordination.k8s.io/v1/namespaces/"
            f"{urllib.parse.quote(namespace, safe='')}/leases"
        )
        self._node = node_name
        self._limit = limit
        self._clock = clock
        self._times = times or Times()
        self._pick = pick
        self._lock = threading.RLock()
        self._seen: dict[int, slots.Seen] = {}
        self._held: slots.Slot | None = None
        self._renewed_s = 0.0
        self._is_clean = False
        """Whether we know that no slot is ours; a predecessor may have left one."""
        self._stop: threading.Event | None = None

    def take(self) -> str:
        """Take a slot if one is to be had; see ``ports.Slots``."""
        with self._lock:
            denial = None if self._is_fresh else self._take()
            if denial is None:
                self._keep_renewing()
            return str(denial or "")

    def check(self) -> None:
        """Raise unless our slot is surely still ours; see ``ports.Slots``."""
        with self._lock:
            if not self._is_fresh:
                raise errors.NotReadyError(
                    "the slot for nodes under change is not held any more, or the API has not "
                    f"let it be renewed for {self._times.fresh_s:g} s; nothing was touched",
                    reason=errors.Reason.SLOTS_TAKEN,
                )

    def release(self) -> None:
        """Give our slot back; see ``ports.Slots``."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
        with self._lock:
            self._held = None
            for turn in range(_RELEASE_TRIES):
                if self._is_clean:
                    return
                self._clock.wait(_RELEASE_PAUSE_S * turn)
                try:
                    self._give_back()
                except errors.ClusterError as error:
                    # If it was the last try: nobody renews it any more, and so it expires.
                    _log.warning("slot_not_released", node=self._node, error=error.message)

    @property
    def _is_fresh(self) -> bool:
        age_s = self._clock.monotonic() - self._renewed_s
        return self._held is not None and age_s < self._times.fresh_s

    def _take(self) -> slots.Denial | None:
        self._held = None
        found = self._look()
        for slot in found.mine:
            if self._write(slot):
                return None
        stuck = tuple(slot for slot in found.silent if self._is_disrupted(slot.holder))
        held = (*found.held, *stuck)
        takeable = [slot for slot in (*found.free, *found.silent) if slot not in stuck]
        takeable = [slot for slot in takeable if slot.index < self._limit]
        while takeable and len(held) < self._limit:
            slot = self._pick(takeable)
            takeable.remove(slot)
            if self._write(slot):
                return None
        return slots.Denial(
            limit=self._limit,
            holders=tuple(slot.holder for slot in found.held),
            silent=tuple(slot.holder for slot in stuck),
        )

    def _look(self) -> slots.Judgement:
        found = self._list()
        now_s = self._clock.monotonic()
        self._seen = slots.remember(self._seen, found, now_s)
        return slots.judge(found, self._seen, now_s, node=self._node, limit=self._limit)

    def _list(self) -> tuple[slots.Slot, ...]:
        answer = self._kube.get(self._path)
        with cluster.understood("the list of Leases"):
            found = [_slot(item) for item in answer["items"] or ()]
        return tuple(slot for slot in found if slot is not None)

    def _is_disrupted(self, holder: str) -> bool:
        try:
            return slots.is_disrupted(cluster.parse_node(self._kube.get(node.path(holder))))
        except errors.ClusterError as error:
            if error.status == http.HTTPStatus.NOT_FOUND:
                return False
            _log.warning("holder_not_seen", node=holder, error=error.message)
            return True

    def _write(self, slot: slots.Slot) -> bool:
        """Write our name into a slot; tell whether it is ours then.

        Raises:
            ClusterError: The API refused or does not answer; it may be ours all the same.
        """
        began_s = self._clock.monotonic()
        self._is_clean = False
        body = self._body(slot, holder=self._node)
        try:
            if slot.version:
                answer = self._kube.put(f"{self._path}/{slot.name}", body)
            else:
                answer = self._kube.post(self._path, body)
        except errors.ClusterError as error:
            is_gone = bool(slot.version) and error.status == http.HTTPStatus.NOT_FOUND
            if error.status == http.HTTPStatus.CONFLICT or is_gone:
                return False
            raise
        with cluster.understood("a Lease"):
            self._held = _slot(answer)
        if slot.holder != self._node:
            _log.info("slot_taken", slot=slot.name, before=slot.holder or None)
        # From before the request: nobody can have seen it change earlier.
        self._renewed_s = began_s
        return True

    def _body(self, slot: slots.Slot, *, holder: str) -> dict[str, Any]:
        metadata: dict[str, Any] = {"name": slot.name, "labels": {_LABEL: "mig-manager"}}
        if slot.version:
            metadata["resourceVersion"] = slot.version
        now = dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: dict[str, Any] = {
            "holderIdentity": holder,
            "leaseDurationSeconds": self._times.lease_s,
            "renewTime": now,
            "leaseTransitions": slot.transitions + (holder not in ("", slot.holder)),
        }
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }

    def _give_back(self) -> None:
        left = self._look().mine
        for slot in left:
            body = self._body(slot, holder="")
            self._kube.put(f"{self._path}/{slot.name}", body)
            _log.info("slot_released", slot=slot.name)
        self._is_clean = True

    def _keep_renewing(self) -> None:
        if self._stop is not None:
            return
        self._stop = threading.Event()
        threading.Thread(
            target=self._renew_until, args=(self._stop,), name="slot-renewal", daemon=True
        ).start()

    def _renew_until(self, stop: threading.Event) -> None:
        while not stop.wait(self._times.renew_s):
            with self._lock:
                if stop.is_set():
                    return
                try:
                    self._renew()
                except errors.ClusterError as error:
                    _log.warning(
                        "slot_not_renewed", reason=error.reason.value, error=error.message
                    )
                except Exception:  # noqa: BLE001 - a bug must not end it without a word
                    _log.exception("slot_renewal_error")

    def _renew(self) -> None:
        if self._held is not None and self._write(self._held):
            return
        denial = self._take()
        if denial is not None:
            # A person has taken it away, or the API was silent for long.
            _log.warning("slot_lost", node=self._node, holders=denial.holders)


_LABEL = "app.kubernetes.io/name"


def _slot(item: dict[str, Any]) -> slots.Slot | None:
    metadata, spec = item["metadata"], item.get("spec") or {}
    index = slots.index_of(str(metadata["name"]))
    if index is None:
        return None
    return slots.Slot(
        index=index,
        holder=str(spec.get("holderIdentity") or ""),
        version=str(metadata["resourceVersion"]),
        duration_s=float(spec.get("leaseDurationSeconds") or 0),
        transitions=int(spec.get("leaseTransitions") or 0),
    )
