"""The successors of evicted pods that start on the tainted node, because they tolerate the taint.

A drain evicts them once. If others follow, it would never end.
"""

import dataclasses
from collections.abc import Iterable

from mig_manager import errors, reasons
from mig_manager.core import messages
from mig_manager.core.objects import pod_object


@dataclasses.dataclass(eq=False, slots=True)
class Successors:
    """The pods of a drain, over all its attempts: from its start, evicted, and returned."""

    _first: frozenset[str] | None = None  # UIDs of the node's pods at the start
    _removed_uids: set[str] = dataclasses.field(default_factory=set)
    """UIDs of the pods that were evicted or deleted, also if the answer was lost."""
    _removed: set[str] = dataclasses.field(default_factory=set)
    """The controllers of the pods that were evicted or deleted."""
    _returned: set[str] = dataclasses.field(default_factory=set)
    """Controllers whose successors were evicted or deleted here as well."""

    def record_first_pods(self, pods: Iterable[pod_object.Pod]) -> None:
        """Remember the node's pods, when the first attempt begins."""
        if self._first is None:
            self._first = frozenset(pod.uid for pod in pods)

    def is_new(self, pod: pod_object.Pod) -> bool:
        """Return whether a pod was not on the node at the start."""
        return self._first is not None and pod.uid not in self._first

    def include(self, pod: pod_object.Pod) -> bool:
        """Return whether a pod succeeds an evicted or deleted pod of its controller."""
        return self.is_new(pod) and pod.controller in self._removed

    def record_removed(self, pod: pod_object.Pod) -> None:
        """Record that a pod was evicted or deleted, maybe not for the first time."""
        if pod.uid in self._removed_uids:
            return
        self._removed_uids.add(pod.uid)
        if self.include(pod):
            self._returned.add(pod.controller)
        elif pod.controller:
            self._removed.add(pod.controller)

    def refuse_more(self, pods: Iterable[pod_object.Pod]) -> None:
        """Fail if successors are to be evicted whose controllers have returned others before.

        Raises:
            DrainError: PODS_RETURN.
        """
        # A pod whose eviction was not answered may be evicted again.
        more = [pod for pod in pods if self.include(pod) and pod.uid not in self._removed_uids]
        again = {pod.controller for pod in more} & self._returned
        if again:
            raise errors.DrainError(
                "the pods of these controllers tolerate the taint, and return to the node: "
                + messages.list_names(sorted(again)),
                reason=reasons.Reason.PODS_RETURN,
            )
