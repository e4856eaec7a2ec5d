"""Events of the partitioner: its requests to nodes, and why no node can serve a pod.

What concerns no single node or pod is about the Lease: sums of recommendations, and stops.

Events about the same fact have the same name, so that a new leader repeats none. The rate limit,
20 at once and ten a minute, is against storms of pods.
"""

import math

import structlog

from mig_manager import errors, reasons
from mig_manager.adapters.kubernetes import events, leader, partitioner_cluster
from mig_manager.core import messages, timing
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.decision import decisions

_AT_ONCE = 20
_PAUSE_S = 6.0
_REPEAT_AFTER_S = 600.0
"""Minimum time between Events about one pod; the next Event needs another message."""
_RETRY_S = 10.0

_log = structlog.get_logger()


class Announcer:
    """Publishes Events while its replica leads."""

    def __init__(
        self,
        cluster: partitioner_cluster.PartitionerCluster,
        leadership: leader.Leader,
        clock: timing.Clock,
    ) -> None:
        self._cluster = cluster
        self._leader = leadership
        self._clock = clock
        self._allowance = timing.TokenBucket(burst=_AT_ONCE, pause_s=_PAUSE_S)
        self._resume_s = -math.inf
        """When to publish again after a failure of the API."""
        self._published: dict[str, tuple[int, str, float]] = {}
        """By UID of a pending pod: the number of its Events, message and time of the last."""

    def announce_request(self, change: decisions.NodeChange) -> None:
        """Publish an Event on a node about its requested layout; the log has every request."""
        if self._allowance.take(self._clock.monotonic()):
            self._emit(
                events.EventSubject.node(change.node),
                reason="RepartitioningRequested",
                message=summary(change),
                is_warning=False,
                about=change.version,
            )

    def announce(self, reason: str, message: str, *, is_warning: bool = False) -> bool:
        """Publish an Event on the Lease; return False if it should be retried."""
        return self._emit(
            events.EventSubject(
                kind="Lease",
                api_version="coordination.k8s.io/v1",
                name=self._leader.name,
                namespace=self._leader.namespace,
                uid="",
            ),
            reason=reason,
            message=messages.with_full_stop(message),
            is_warning=is_warning,
            about=self._clock.now_iso(),
        )

    def announce_unmet(
        self, unmet: tuple[decisions.Unmet, ...], pending: tuple[demand.PendingPod, ...]
    ) -> int:
        """Publish why no node can serve pods; return how many have no Event yet."""
        withheld = 0
        for each in unmet:
            pod, now_s = each.pod, self._clock.monotonic()
            number, message, published_s = self._published.get(pod.uid, (0, "", -math.inf))
            if message == each.message or now_s - published_s < _REPEAT_AFTER_S:
                continue
            subject = events.EventSubject(
                kind="Pod", name=pod.name, namespace=pod.namespace, uid=pod.uid
            )
            if self._allowance.take(now_s) and self._emit(
                subject,
                reason="NoRoomPossible",
                message=each.message,
                is_warning=True,
                about=f"{number} {each.message}",  # a reason can return
            ):
                self._published[pod.uid] = number + 1, each.message, now_s
            else:
                withheld += 1
        uids = {pod.uid for pod in pending}
        self._published = {uid: last for uid, last in self._published.items() if uid in uids}
        return withheld

    def _emit(
        self,
        subject: events.EventSubject,
        *,
        reason: str,
        message: str,
        is_warning: bool,
        about: str,
    ) -> bool:
        """Publish an Event; return False if it should be retried."""
        if self._clock.monotonic() < self._resume_s or not self._leader.campaign():
            return False
        event = events.Event(
            subject=subject, reason=reason, message=message, is_warning=is_warning
        )
        try:
            self._cluster.publish(event, about=about)
        except errors.ClusterError as error:
            _log.warning("event_not_published", event_reason=reason, detail=error.message)
            if error.reason is reasons.Reason.API_UNAVAILABLE:
                self._resume_s = self._clock.monotonic() + (error.retry_after_s or _RETRY_S)
                return False
        return True


def summary(change: decisions.NodeChange) -> str:
    """Describe a change: its reason, instances and pods."""
    parts = [change.why]
    for verb, counts in (("creates", change.created), ("destroys idle", change.destroyed)):
        if counts:
            amounts = (f"{count}x {profile}" for profile, count in counts.items())
            parts.append(f"{verb} {', '.join(amounts)}")
    if change.pods:
        parts.append(f"for {messages.list_names(sorted(pod.key for pod in change.pods))}")
    return messages.with_full_stop(messages.join(*parts))
