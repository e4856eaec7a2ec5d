"""Leadership among the replicas of one program, by one Lease (``coordination.k8s.io/v1``).

A leader writes only while its last renewal is recent: a request with all its retries must end
before another replica may take the Lease.
"""

import math
from collections.abc import Iterable

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import api, leases
from mig_manager.core import timing
from mig_manager.core.objects import lease

MAX_WRITE_S = 30.0
"""The longest write with its retries, by a client with ``REQUEST_TIMEOUT_S`` or less: two
attempts, 10 s that the server may ask to wait, and a last attempt."""
REQUEST_TIMEOUT_S = 5.0
_RENEWALS = 6  # in the duration of a Lease

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
        self._leases = leases.Leases(kube, namespace, clock)
        self.namespace = namespace
        self.name = name  # the Lease's name
        self._identity = identity
        self._duration_s = duration_s
        self._clock = clock
        self._lease: lease.Lease | None = None
        """The Lease as last written, unless another replica has it."""
        self._may_own = False
        """Whether this replica wrote the Lease since it released it; an answer may be lost."""
        self._campaigned_s = -math.inf

    @property
    def may_write(self) -> bool:
        """Whether a write that begins now ends before another replica may take the Lease."""
        # No other replica saw the change before the request began.
        until_s = self._lease.read_s + self._duration_s - MAX_WRITE_S if self._lease else -math.inf
        return self._clock.monotonic() < until_s

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
        before = self._lease
        try:
            if before:
                self._lease = self._renew(before)
            if self._lease is None:
                self._take_if_free()
        except errors.ClusterError as error:
            _log.warning("lease_not_renewed", reason=error.reason.value, detail=error.message)
        if before and not self._lease:
            _log.warning("leadership_lost", identity=self._identity)
        return self.may_write

    def release(self) -> None:
        """Let another replica take the Lease at once; it expires if that fails."""
        self._lease = None
        if self._may_own:
            self._may_own = not self._leases.release(self._find_own, self._duration_s)

    def _find_own(self) -> Iterable[lease.Lease]:
        last = self._leases.read(self.name)
        return [last] if last.holder == self._identity else []

    def _take_if_free(self) -> None:
        """Take the Lease if it is free, ours, or silent: the holder's duration may be longer."""
        last = self._leases.read(self.name)
        is_ours = last.holder in ("", self._identity)
        if is_ours or last.is_silent(self._duration_s):
            self._lease = self._renew(last)
        if self._lease:
            _log.info("leadership_taken", identity=self._identity, before=last.holder or None)

    def _renew(self, last: lease.Lease) -> lease.Lease | None:
        self._may_own = True
        return self._leases.write(last, self._identity, self._duration_s)
