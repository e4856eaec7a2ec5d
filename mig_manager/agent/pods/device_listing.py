"""How long to wait until kubelet has listed the devices of a pod."""

import math
from collections.abc import Iterable

from mig_manager.core import timing
from mig_manager.core.objects import pod_object

LISTED_WITHIN_S = 3.0  # how long kubelet may take to list the devices of a pod that was just bound
ADMITTED_WITHIN_S = 20.0
"""How long kubelet may take to admit such a pod. While its watch is broken it sees no new pod, and
it retries with a backoff."""


class ListingWait:
    """A wait for kubelet to list the devices of pods, from the time that each was first seen."""

    def __init__(self, clock: timing.Clock) -> None:
        self._clock = clock
        self._first_s: dict[tuple[str, bool], float] = {}
        """By the pod's UID, and whether it was admitted then."""

    def is_any_new(self, pods: Iterable[pod_object.Pod], *, max_s: float = math.inf) -> bool:
        """Return whether kubelet may still need time to list the devices of a pod.

        Args:
            pods: The pods without a listed device; others may be bound during the wait.
            max_s: How long to wait for a pod at most.
        """
        now_s = self._clock.monotonic()
        is_new = False
        for pod in pods:
            since_s = self._first_s.setdefault((pod.uid, pod.is_admitted), now_s)
            within_s = LISTED_WITHIN_S if pod.is_admitted else ADMITTED_WITHIN_S
            is_new |= now_s < since_s + min(within_s, max_s)
        return is_new
