"""What the agent and its kubelet worker say to each other: a line a question, a line an answer.

Both sides use it, so it imports next to nothing.
"""

from collections.abc import Mapping
from typing import Any

from mig_manager import errors
from mig_manager.adapters.kubelet import pod_resources
from mig_manager.core.node import cluster

ASSIGNED, ALLOCATABLE = "assigned", "allocatable"
"""The questions."""


def answer(question: str, kubelet: pod_resources.PodResources) -> dict[str, Any]:
    """Ask kubelet; return what ``pods`` or ``devices`` understands, by question, or an error."""
    try:
        if question == ASSIGNED:
            assigned = kubelet.assigned()
            return {
                ASSIGNED: [
                    (pod.namespace, pod.name, sorted(pod.device_ids), sorted(pod.claim_drivers))
                    for pod in assigned
                ]
            }
        offered = kubelet.allocatable()
    except errors.ClusterError as error:
        return {"error": error.message}
    return {ALLOCATABLE: {resource: sorted(ids) for resource, ids in offered.items()}}


def pods(told: Any) -> tuple[cluster.PodDevices, ...]:
    """Return what the answer to ASSIGNED stands for."""
    return tuple(
        cluster.PodDevices(
            namespace=namespace,
            name=name,
            device_ids=frozenset(ids),
            claim_drivers=frozenset(drivers),
        )
        for namespace, name, ids, drivers in told
    )


def devices(told: Any) -> Mapping[str, frozenset[str]]:
    """Return what the answer to ALLOCATABLE stands for."""
    return {resource: frozenset(ids) for resource, ids in told.items()}
