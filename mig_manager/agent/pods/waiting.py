"""Wait for the node's pods, and delete pods that must be replaced."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeVar

from mig_manager.agent import settings
from mig_manager.core import ports, timing
from mig_manager.core.node import pod_object

_Problem = TypeVar("_Problem")


@dataclasses.dataclass(frozen=True, slots=True)
class PodWait:
    """Waits for the pods of one node."""

    deps: ports.Dependencies
    limits: settings.Limits

    def until_solved(
        self,
        find: Callable[[tuple[pod_object.Pod, ...]], _Problem],
        cancel: ports.Cancellation,
        *,
        timeout_s: float,
    ) -> _Problem:
        """Wait until ``find`` finds no problem with the pods; return the problem at the deadline.

        A list confirms the watch's report, because a watch may lag behind.

        Raises:
            ClusterError: The API refused or does not answer.
            Superseded: Another layout is requested, or the agent stops.
        """
        wait = timing.Wait(
            clock=self.deps.clock,
            timeout_s=timeout_s,
            sleep=cancel.pause,
            backoff=self.limits.backoff,
        )
        workloads = self.deps.workloads

        def find_problem(is_late: bool) -> _Problem:  # noqa: FBT001 - as ``Wait.until`` calls it
            watched = None if is_late else workloads.watched()
            problem = find(watched) if watched is not None else None
            return problem or find(workloads.list())

        return wait.until(find_problem)


def delete(workloads: ports.Workloads, pods: Iterable[pod_object.Pod]) -> None:
    """Delete the pods that are not terminating already.

    Raises:
        ClusterError: The API refused or does not answer.
    """
    for pod in pods:
        if not pod.is_terminating:
            workloads.delete(pod)
