"""What attempts on one node remember of earlier ones, besides the journal."""

import dataclasses
import math
from collections.abc import Iterable

from mig_manager.agent import successors
from mig_manager.core.objects import pod_object

_REFUSAL_PAUSE_S = 10.0


@dataclasses.dataclass(slots=True)
class AttemptMemory:
    """What attempts on one node remember of earlier ones, besides the journal.

    A new agent has an empty one. At worst it evicts or restarts a pod once more before it fails
    for the same reason.
    """

    stuck_uids: frozenset[str] = frozenset()
    """UIDs of pods that did not stop by the deadline of an earlier pause, for as long as the agent
    runs. While one terminates, no pod is evicted."""
    pod_successors: successors.Successors = dataclasses.field(
        default_factory=successors.Successors
    )
    """Where evicted pods return, over the attempts of one drain: as long as the journal's
    ``is_draining``."""
    restarted: frozenset[str] = frozenset()
    """Names of the advertisers with stale devices that were restarted, over the attempts at one
    request. Each is restarted once."""
    checked_ids: frozenset[str] | None = None
    """The GPUs' devices, once advertisers of other devices were restarted; None: to be done. It
    lasts over the attempts at one request, and then over the checks until the layout is active."""
    stopped_services: frozenset[str] = frozenset()
    """Names of the host services that this process stopped, until it starts them. The journal
    cannot prove that, because other programs can write to it."""
    _removal_refused_s: float = dataclasses.field(default=-math.inf, init=False)

    def begin_request(self) -> None:
        """Forget the restarted advertisers and the checked devices of an earlier request."""
        self.restarted = frozenset()
        self.checked_ids = None

    def set_checked(self, ids: frozenset[str] | None) -> None:
        """Remember the devices for which no advertiser is restarted again; None: none."""
        self.checked_ids = ids

    def add_restarted(self, names: Iterable[str]) -> None:
        """Remember advertisers that were restarted because of stale devices."""
        self.restarted |= frozenset(names)

    def begin_drain(self) -> None:
        """Forget where the pods of an earlier drain returned."""
        self.pod_successors = successors.Successors()

    def add_stuck(self, pods: Iterable[pod_object.Pod]) -> None:
        """Remember pods that did not stop in time."""
        self.stuck_uids |= {pod.uid for pod in pods}

    def add_stopped_services(self, names: Iterable[str]) -> None:
        """Remember host services before they are stopped."""
        self.stopped_services |= frozenset(names)

    def remove_stopped_service(self, name: str) -> None:
        """Forget a host service that was started."""
        self.stopped_services -= {name}

    def may_remove_phantoms(self, now_s: float) -> bool:
        """Return whether to request a removal; a wait asks this more often than it may."""
        return now_s >= self._removal_refused_s + _REFUSAL_PAUSE_S

    def record_refused_removal(self, now_s: float) -> None:
        """Remember that the API refused to remove phantom devices."""
        self._removal_refused_s = now_s
