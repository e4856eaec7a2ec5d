"""Which pods a change drains, and whether it may evict them."""

import dataclasses
from collections.abc import Callable

from mig_manager import errors, reasons
from mig_manager.core import pod_rights
from mig_manager.core.node import gpu_use


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse a change that affects a pod."""

    reason: reasons.Reason
    message: Callable[[str], str]  # returns the message, from the names of the affected pods


DrainRights = pod_rights.Evict | pod_rights.WaitOnly | Refuse
"""What a change may do with the pods that it affects."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrainScope:
    """Which pods to drain, and whether to evict them."""

    affected: frozenset[str] | None  # ids of the devices to be destroyed; None: of every GPU
    rights: DrainRights

    def require_allowed(self, affected: str) -> None:
        """Refuse the change if no pod may be affected; ``affected`` has their names.

        Raises:
            MigManagerError: With the reason of the refusal.
        """
        if affected and isinstance(self.rights, Refuse):
            raise errors.MigManagerError(self.rights.message(affected), reason=self.rights.reason)

    def is_outdated(self, before: gpu_use.Usage, now: gpu_use.Usage) -> bool:
        """Return whether a plan for the usage now may spare pods in this scope.

        That is so if another pod uses an affected device than ``before``, or if a pod releases a
        device outside the scope.
        """
        if not self.affected:
            return False
        old, new = (
            {(pod.uid, not usage.why_uncertain(pod)) for pod in usage.users(self.affected)}
            for usage in (before, now)
        )
        affected = {uid for uid, _ in old}
        spared, staying = (
            {(pod.uid, pod.is_terminating) for pod in usage.users(None) if pod.uid not in affected}
            for usage in (before, now)
        )
        return not (new <= old and spared <= staying)
