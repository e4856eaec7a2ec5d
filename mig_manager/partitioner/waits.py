"""How long pods wait for room."""

import dataclasses
import datetime as dt
from collections.abc import Iterable

from mig_manager.core.partitioning import demand
from mig_manager.partitioner import metrics


class Waits:
    """Dates the pending pods of one term, and measures the waits of pods that were served."""

    def __init__(self, telemetry: metrics.PartitionerMetrics) -> None:
        self._telemetry = telemetry
        self._since: dict[str, dt.datetime] | None = None
        """By UID of a pending pod; None before the first decision."""
        self.served: set[str] = set()
        """UIDs of pending pods for which a node was changed."""

    def record_served(self, pods: Iterable[demand.PendingPod]) -> None:
        """Remember that a node was changed for these pods."""
        self.served.update(pod.uid for pod in pods)

    def measure(self, bound: Iterable[str], now: dt.datetime) -> None:
        """Measure the waits of pods, by UID, that were served and have a node now."""
        for uid in bound:
            since = (self._since or {})[uid]
            self._telemetry.wait_s.observe((now - since).total_seconds())

    def with_times(
        self, pending: Iterable[demand.PendingPod], now: dt.datetime
    ) -> tuple[demand.PendingPod, ...]:
        """Return the pods with the time since when they are pending; forget the others.

        That is their creation at the first decision. Later it is when this process saw them: a
        gate can end long after the creation.
        """
        pods = tuple(pending)
        self._since = since = {pod.uid: self._pending_since(pod, now) for pod in pods}
        self.served &= since.keys()
        return tuple(dataclasses.replace(pod, pending_since=since[pod.uid]) for pod in pods)

    def _pending_since(self, pod: demand.PendingPod, now: dt.datetime) -> dt.datetime:
        if self._since is None:
            return min(pod.created_at or now, now)
        return self._since.get(pod.uid, now)
