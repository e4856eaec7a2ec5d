"""The Leases of one namespace: read them, age them by our own clock, write and release them."""

import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import structlog

from mig_manager import errors, reasons
from mig_manager.adapters import rest
from mig_manager.adapters.kubernetes import api
from mig_manager.core import timing
from mig_manager.core.objects import api_values, lease

_RELEASE_ATTEMPTS = 3
_RELEASE_PAUSE_S = 0.5

_log = structlog.get_logger()


class Leases:
    """The Leases that one program uses; for one thread at a time.

    Raises:
        ClusterError: From every method but ``release``: the API refused or does not answer.
    """

    def __init__(self, kube: api.KubeApi, namespace: str, clock: timing.Clock) -> None:
        self._kube = kube
        self._path = rest.api_path("/apis/coordination.k8s.io/v1/namespaces", namespace, "leases")
        self._clock = clock
        self._last: dict[str, lease.Lease] = {}
        """As last read or written, by name."""

    def list(self, is_ours: Callable[[str], bool]) -> tuple[lease.Lease, ...]:
        """Return the Leases with these names."""
        read_s = self._clock.monotonic()
        answer = self._kube.get(self._path)
        with api_values.as_cluster_error("the list of Leases"):
            items = [each for each in answer["items"] or () if is_ours(each["metadata"]["name"])]
        listed = tuple(self._parse(each, read_s) for each in items)
        self._last = {each.name: each for each in listed}
        return listed

    def read(self, name: str) -> lease.Lease:
        """Return a Lease, even if it does not exist yet."""
        read_s = self._clock.monotonic()
        try:
            item = self._kube.get(f"{self._path}/{name}")
        except errors.ClusterError as error:
            if not error.is_not_found:
                raise
            self._last.pop(name, None)
            return lease.Lease(name=name)
        return self._parse(item, read_s)

    def write(self, last: lease.Lease, holder: str, duration_s: float) -> lease.Lease | None:
        """Give a Lease to a holder, or to none, and renew it.

        Its time is for people only: no program compares the clocks of two machines.

        Returns:
            The Lease; None if it has changed since it was read, or is gone.

        Raises:
            ClusterError: It may have been written.
        """
        is_new = not last.version
        metadata = {"name": last.name, "labels": dict(api.LABELS)}
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata if is_new else metadata | {"resourceVersion": last.version},
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": round(duration_s),
                "renewTime": dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                "leaseTransitions": last.transitions
                + (not is_new and holder not in ("", last.holder)),
            },
        }
        began_s = self._clock.monotonic()
        try:
            written = (
                self._kube.post(self._path, body)
                if is_new
                else self._kube.put(f"{self._path}/{last.name}", body)
            )
        except errors.ClusterError as error:
            # Not found for a new Lease means a missing namespace: no program would ever have it.
            if error.is_conflict or (error.is_not_found and not is_new):
                return None
            raise
        return self._parse(written, began_s)

    def release(self, find: Callable[[], Iterable[lease.Lease]], duration_s: float) -> bool:
        """Let other programs take the Leases that ``find`` returns; they expire if that fails.

        A failed request may have been carried out, so ``find`` is called before each attempt.
        """
        for attempt in range(_RELEASE_ATTEMPTS):
            self._clock.wait(_RELEASE_PAUSE_S * attempt)
            try:
                for each in find():
                    if self.write(each, "", duration_s) is None:
                        _log.warning(
                            "lease_not_released",
                            reason=reasons.Reason.API_ERROR.value,
                            error=f"the Lease {each.name} has changed meanwhile",
                        )
                        break
                    _log.info("lease_released", lease=each.name, owner=each.holder)
                else:
                    return True
            except errors.ClusterError as error:
                _log.warning("lease_not_released", reason=error.reason.value, error=error.message)
        return False

    def _parse(self, item: Mapping[str, Any], read_s: float) -> lease.Lease:
        with api_values.as_cluster_error("a Lease"):
            before = self._last.get(item["metadata"]["name"])
            now = lease.parse(item, before=before, read_s=read_s, now_s=self._clock.monotonic())
        is_known = before is not None and (before.holder, before.duration_s) == (
            now.holder,
            now.duration_s,
        )
        if now.is_too_long and not is_known:
            _log.warning(
                "lease_too_long",
                lease=now.name,
                owner=now.holder,
                duration_s=now.duration_s,
                counts_as_s=lease.MAX_DURATION_S,
                hint=f"if {now.holder} is not a program of mig-manager, delete the Lease "
                f"{now.name}",
            )
        self._last[now.name] = now
        return now
