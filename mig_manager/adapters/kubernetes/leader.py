"""Leadership among the replicas of one program, by one Lease (``coordination.k8s.io/v1``).

A replica may take a Lease that has not changed for its whole duration. Every process measures this
with its own clock, so the clocks of two machines need not agree. A leader writes only while its
last renewal is recent: a request with all its retries must end before another replica may take the
Lease.
"""

import math

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, leases
from mig_manager.core import timing
from mig_manager.core.node import api_values

MAX_WRITE_S = 30.0
"""A write takes no longer, with its retries, for a client whose ``request_timeout_s`` is at most
``REQUEST_TIMEOUT_S``: 2 such times of attempts, 10 s that the server may ask to wait, and the time
of a last attempt."""
REQUEST_TIMEOUT_S = 5.0
_RENEWALS = 6
"""In the duration of a Lease."""
_RELEASE_ATTEMPTS = 3

_log = structlog.get_logger()


class Leader:
    """One replica; for one thread, which calls ``campaign`` again after ``next_in_s``."""

    def __init__(
        self,
        kube: api.KubeApi,
        *,
        namespace: str,
        name: str,
        identity: str,
        duration_s: float,
        clock: timing.Clock,
    ) -> None:
        """Prepare, without a request; no other replica may have the same identity."""
        self._kube = kube
        self._collection = leases.path(namespace)
        self._path = f"{self._collection}/{name}"
        self.namespace = namespace
        self.name = name  # of the Lease
        self._identity = identity
        self._duration_s = duration_s
        self._durations = leases.Durations()
        self._clock = clock
        self._version = ""
        """Of the Lease as last read; empty: it does not exist."""
        self._seen_s = math.inf
        """Since when it is unchanged."""
        self._renewed_s = -math.inf
        """When the last request that made it ours began; -inf: it is not ours."""
        self._campaigned_s = -math.inf
        self._transitions = 0

    @property
    def may_write(self) -> bool:
        """Whether a write that begins now ends before another replica may take the Lease."""
        age_s = self._clock.monotonic() - self._renewed_s
        return age_s < self._duration_s - MAX_WRITE_S

    @property
    def next_in_s(self) -> float:
        """How long until ``campaign`` must be called again."""
        pause_s = self._duration_s / _RENEWALS
        return max(0.0, self._campaigned_s + pause_s - self._clock.monotonic())

    def campaign(self) -> bool:
        """Renew the Lease, or take it if it may be taken; return whether this replica leads."""
        if self.next_in_s > 0:
            return self.may_write
        self._campaigned_s = self._clock.monotonic()
        was_leader = self._renewed_s > -math.inf
        try:
            if not (was_leader and self._write(self._identity)):
                self._renewed_s = -math.inf
                self._take_if_free()
        except errors.ClusterError as error:
            _log.warning("lease_not_renewed", reason=error.reason.value, detail=error.message)
        if was_leader and self._renewed_s == -math.inf:
            _log.warning("leadership_lost", identity=self._identity)
        return self.may_write

    def release(self) -> None:
        """Let another replica take the Lease at once; it expires if that fails."""
        if self._renewed_s == -math.inf:
            return
        self._renewed_s = -math.inf
        for _ in range(_RELEASE_ATTEMPTS):
            try:
                if self._write(""):
                    _log.info("leadership_released", identity=self._identity)
                    return
                # A renewal without an answer may have been carried out.
                if not self._is_ours():
                    return
            except errors.ClusterError as error:
                _log.warning("lease_not_released", detail=error.message)

    def _take_if_free(self) -> None:
        """Take the Lease if it is free, ours, or unchanged for its duration."""
        began_s = self._clock.monotonic()
        try:
            lease = self._kube.get(self._path)
        except errors.ClusterError as error:
            if not error.is_not_found:
                raise
            self._version = ""
            self._write(self._identity)
            return
        with api_values.as_cluster_error("the leader's Lease"):
            spec = lease.get("spec") or {}
            holder = str(spec.get("holderIdentity") or "")
            version = str(lease["metadata"]["resourceVersion"])
            self._transitions = int(spec.get("leaseTransitions") or 0)
            # The holder's duration may be longer than ours.
            duration_s = max(self._duration_s, self._durations.parse(lease))
        if version != self._version or self._seen_s == math.inf:
            self._version, self._seen_s = version, self._clock.monotonic()
        is_silent = began_s - self._seen_s >= duration_s
        if holder in ("", self._identity) or is_silent:
            self._transitions += holder != self._identity
            if self._write(self._identity):
                _log.info("leadership_taken", identity=self._identity, before=holder or None)

    def _write(self, holder: str) -> bool:
        """Write a holder into the Lease as last read; return False if it has changed since."""
        began_s = self._clock.monotonic()
        body = leases.lease(
            self.name,
            self._version,
            holder=holder,
            duration_s=round(self._duration_s),
            transitions=self._transitions,
        )
        lease = leases.write(self._kube, self._collection, body)
        if lease is None:
            return False
        with api_values.as_cluster_error("the leader's Lease"):
            self._version = str(lease["metadata"]["resourceVersion"])
        self._seen_s = self._clock.monotonic()
        if holder:
            # Use the time before the request: no other replica saw the change earlier.
            self._renewed_s = began_s
        return True

    def _is_ours(self) -> bool:
        """Read the Lease again; return whether it has our name."""
        lease = self._kube.get(self._path)
        with api_values.as_cluster_error("the leader's Lease"):
            self._version = str(lease["metadata"]["resourceVersion"])
            return bool((lease.get("spec") or {}).get("holderIdentity") == self._identity)
