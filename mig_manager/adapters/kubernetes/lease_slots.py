"""Slots for nodes under change, stored as Leases (``coordination.k8s.io/v1``) in one namespace.

Another node may take an expired slot, unless the slot's node still carries the marks of a change.
That node is unavailable even if its agent is dead, and reusing its slot would disrupt one node
more than allowed. The slot is free again once the agent has finished the change, or once the Node
or the Lease is deleted.

A failed request may have been applied. The next list shows it, because the owner's name is written
in the slot.
"""

import random
import threading
from collections.abc import Callable, Sequence

import structlog

from mig_manager import errors, reasons
from mig_manager.adapters.kubernetes import api, kube_node, leases
from mig_manager.core import timing
from mig_manager.core.fleet import slots
from mig_manager.core.objects import lease, node_object

_LEASE_S = 90  # how long a node keeps a slot without renewing it
_FRESH_S = 45.0
"""The age limit of the last renewal when the node is cordoned. The rest of the lease is longer
than a request with all of its retries, so that no other node can have the slot then."""

_log = structlog.get_logger()


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
        pick: Callable[[Sequence[lease.Lease]], lease.Lease] = random.choice,
    ) -> None:
        """Prepare, without a request.

        ``limit`` nodes may change at once. ``pick`` chooses among free slots, at random, so that
        nodes try different ones.
        """
        self._kube = kube
        self._leases = leases.Leases(kube, namespace, clock)
        self._node = node_name
        self._limit = limit
        self._clock = clock
        self._renew_s = renew_s
        self._pick = pick
        self._lock = threading.RLock()
        self._lease: lease.Lease | None = None
        self._may_own = True
        """Whether a slot may be ours: from before a restart, or by a write with a lost answer."""
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
            last = self._lease if self._is_fresh else None
            try:
                # A second agent of this node shares the slot, and may have released it.
                is_kept = last is not None and (self._write(last) or self._take() is None)
            except errors.ClusterError:
                is_kept = self._is_fresh
            if not is_kept:
                raise errors.NotReadyError(
                    "the node has no slot for nodes under change, or renewed it last more than "
                    f"{_FRESH_S:g} s ago; nothing was touched",
                    reason=reasons.Reason.SLOTS_TAKEN,
                )

    def release(self) -> None:
        if self._stop is not None:
            self._stop.set()
            self._stop = None
        with self._lock:
            self._lease = None
            if self._may_own:
                self._may_own = not self._leases.release(lambda: self._list().mine, _LEASE_S)

    @property
    def _is_fresh(self) -> bool:
        # No other node can have seen the change before the request began.
        return self._lease is not None and self._clock.monotonic() - self._lease.read_s < _FRESH_S

    def _take(self) -> slots.Denial | None:
        self._lease = None
        state = self._list()
        for slot in state.mine:
            if self._write(slot):
                return None
        interrupted = tuple(slot for slot in state.silent if self._is_disrupted(slot.holder))
        occupied = (*state.occupied, *interrupted)
        takeable = [
            slot
            for slot in (*state.free, *state.silent)
            if slot not in interrupted and slots.index_of(slot.name) in range(self._limit)
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

    def _list(self) -> slots.SlotUse:
        listed = self._leases.list(lambda name: slots.index_of(name) is not None)
        return slots.classify(listed, node=self._node, limit=self._limit)

    def _is_disrupted(self, name: str) -> bool:
        try:
            return slots.is_disrupted(node_object.parse_node(self._kube.get(kube_node.path(name))))
        except errors.ClusterError as error:
            if error.is_not_found:
                return False
            _log.warning("slot_owner_not_seen", node=name, error=error.message)
            return True

    def _write(self, slot: lease.Lease) -> bool:
        """Write our name into a slot; return whether it is ours now.

        Raises:
            ClusterError: The API refused or does not answer; the slot may be ours anyway.
        """
        self._may_own = True
        written = self._leases.write(slot, self._node, _LEASE_S)
        if written is None:
            return False
        self._lease = written
        if slot.holder != self._node:
            _log.info("slot_taken", slot=slot.name, before=slot.holder or None)
        return True

    def _renew_until(self, stop: threading.Event) -> None:
        while not stop.wait(self._renew_s):
            with self._lock:
                if stop.is_set():
                    return
                try:
                    if self._lease is not None and self._write(self._lease):
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
