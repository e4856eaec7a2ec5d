"""How long to wait until kubelet has listed the devices of a pod."""

import math
from collections.abc import Iterable

from mig_manager.core.objects import pod_object

LISTED_WITHIN_S = 3.0  # how long kubelet may take to list the devices of a pod that was just bound
ADMITTED_WITHIN_S = 20.0
"""How long kubelet may take to admit such a pod. While its watch is broken it sees no new pod, and
it retries with a backoff."""


def is_any_new(
    pods: Iterable[pod_object.Pod],
    first_s: dict[tuple[str, bool], float],
    now_s: float,
    *,
    max_s: float = math.inf,
) -> bool:
    """Return whether kubelet may still need time to list the devices of a pod.

    Args:
        pods: The pods without a listed device.
        first_s: When each was first seen, before and after its admission. This function adds new
            pods, because a pod may be bound or admitted at any time during a wait.
        now_s: The time now.
        max_s: How long to wait for a pod at most.
    """
    is_new = False
    for pod in pods:
        since_s = first_s.setdefault((pod.uid, pod.is_admitted), now_s)
        within_s = LISTED_WITHIN_S if pod.is_admitted else ADMITTED_WITHIN_S
        is_new |= now_s < since_s + min(within_s, max_s)
    return is_new
