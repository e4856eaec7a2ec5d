"""Ask for the PodDisruptionBudgets of a drain, and for the pods that they wait for."""

from collections.abc import Iterable, Sequence

import structlog

from mig_manager import errors
from mig_manager.core import messages, ports
from mig_manager.core.node import cluster, policy

_log = structlog.get_logger()


class EvictionBudgets:
    """The budgets that one drain must respect."""

    def __init__(self, workloads: ports.Workloads) -> None:
        self._workloads = workloads
        self.are_known = True
        """Whether the API lets us list them."""
        self.failure: errors.ClusterError | None = None
        """Why they could not be listed last."""
        self.spent: tuple[policy.Budget, ...] = ()
        """Those that did not grant all evictions when they were counted last."""

    def count(self, pods: Sequence[cluster.Pod]) -> policy.Count:
        """Count what the budgets grant of some evictions: all where we may not list budgets.

        Raises:
            ClusterError: The API refused the request as such.
        """
        self.failure, self.spent = None, ()
        known: tuple[policy.Budget, ...] = ()
        if self.are_known:
            try:
                known = self._workloads.budgets({pod.namespace for pod in pods})
            except errors.ClusterError as error:
                if error.reason is errors.Reason.API_UNAVAILABLE:
                    _log.warning("budgets_not_listed", error=error.message)
                    self.failure = error
                    why = f"the Kubernetes API failed to list budgets ({error.reason.value})"
                    return policy.none_granted(pods, why)
                if error.reason is not errors.Reason.FORBIDDEN:
                    raise
                _log.warning("budgets_not_counted", error=error.message)
                self.are_known = False
        counted = policy.count(pods, known)
        self.spent = counted.spent
        return counted

    def why_stalled(self, staying: Iterable[cluster.Pod]) -> tuple[errors.Reason, str]:
        """Tell budgets that wait for pods to become ready from those that wait in vain.

        Args:
            staying: The pods that still have to be evicted.

        Returns:
            DRAIN_STALLED where evicted pods have no successor or no node has room for it, else
            DRAIN_TIMEOUT; with a clause for the message.
        """
        uids = {pod.uid for pod in staying}
        try:
            covered = [pod for budget in self.spent for pod in self._workloads.covered(budget)]
        except errors.ClusterError as error:
            _log.warning("successors_not_listed", error=error.message)
            return errors.Reason.DRAIN_TIMEOUT, ""
        unready = [
            pod
            for pod in covered
            if pod.uid not in uids and not (pod.is_ready or pod.is_finished or pod.is_terminating)
        ]
        unscheduled = [pod for pod in unready if not pod.node_name]
        if unscheduled:
            return errors.Reason.DRAIN_STALLED, f"no node has room for {names(unscheduled)}"
        if unready:
            return errors.Reason.DRAIN_TIMEOUT, f"not ready yet elsewhere: {names(unready)}"
        keys = ", ".join(sorted({budget.key for budget in self.spent}))
        return errors.Reason.DRAIN_STALLED, f"no pod replaces those evicted (budgets: {keys})"


def names(pods: Sequence[cluster.Pod]) -> str:
    """Name the first of many pods, and count the others."""
    return messages.listed([pod.key for pod in pods])
