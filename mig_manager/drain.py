"""Evict the pods that hold what a plan destroys, and wait until they have let go.

Nobody is evicted before all may be: a budget that guards one pod would make the eviction of the
others be in vain.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from mig_manager import errors, ports
from mig_manager.core import clients, cluster
from mig_manager.core import pace as pacing

_log = structlog.get_logger()

_Act = Callable[[cluster.Pod], tuple[ports.Eviction, str]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Who holds what, as found before the plan was made."""

    pods: tuple[cluster.Pod, ...]
    assigned: tuple[cluster.PodDevices, ...] | None
    """None: kubelet cannot be asked, every GPU pod counts."""


def survey(workloads: ports.Workloads, allocations: ports.DeviceAllocations) -> Holders:
    """Ask the API for our pods and kubelet for their devices.

    Raises:
        ClusterError: The API refused or does not answer. Kubelet's silence is no error.
    """
    try:
        assigned = allocations.assigned()
    except errors.ClusterError as error:
        _log.info("pod_resources_unavailable", error=error.message)
        return Holders(pods=workloads.list(), assigned=None)
    return Holders(pods=workloads.list(), assigned=assigned)


class Drain:
    """One drain: ask, wait, ask again where a budget said no, until nobody holds on."""

    def __init__(
        self,
        workloads: ports.Workloads,
        allocations: ports.DeviceAllocations,
        clock: ports.Clock,
        *,
        timeout_s: float,
        pace: pacing.Pace,
        telemetry: ports.Telemetry | None = None,
    ) -> None:
        self._workloads = workloads
        self._allocations = allocations
        self._clock = clock
        self._timeout_s = timeout_s
        self._pace = pace
        self._telemetry = telemetry or ports.Telemetry()
        self._evicted: set[str] = set()
        self._has_begun = False

    def run(self, holders: Holders, affected: frozenset[str], wish: ports.Wish) -> int:
        """Return once no pod holds an affected device.

        Args:
            holders: The survey that the plan was made with.
            affected: Device ids that are taken away.
            wish: Asked at every turn; a drain can be given up for free.

        Returns:
            How many pods were evicted.

        Raises:
            DrainError: The deadline passed; names each pod that stayed, and why.
            ClusterError: The API refused evictions, or does not answer.
            Superseded: The run is no longer wanted.
        """
        deadline = self._clock.monotonic() + self._timeout_s
        waiting = clients.victims(holders.pods, holders.assigned, affected)
        turn = 0
        while waiting:
            wish.check()
            blocked = self._ask(waiting)
            if self._clock.monotonic() >= deadline:
                raise _timeout(waiting, blocked, self._timeout_s)
            wish.wait(self._pace.delay_s(turn))
            turn += 1
            waiting = self._look(holders, affected)
        return len(self._evicted)

    def _ask(self, waiting: Sequence[cluster.Pod]) -> dict[str, str]:
        """Ask for every eviction that is still due; return why some are not granted."""
        due = [p for p in waiting if not p.is_terminating and p.uid not in self._evicted]
        if not self._has_begun:
            blocked = self._try_each(due, self._workloads.may_evict)
            if blocked:
                return blocked
            self._has_begun = True
        return self._try_each(due, self._evict)

    def _try_each(self, due: Iterable[cluster.Pod], act: _Act) -> dict[str, str]:
        blocked: dict[str, str] = {}
        for pod in due:
            if pod.is_mirror:
                blocked[pod.key] = "a static pod cannot be evicted"
                continue
            answer, why = act(pod)
            if answer is ports.Eviction.BLOCKED:
                blocked[pod.key] = why
        return blocked

    def _evict(self, pod: cluster.Pod) -> tuple[ports.Eviction, str]:
        answer, why = self._workloads.evict(pod)
        if answer is not ports.Eviction.BLOCKED:
            self._evicted.add(pod.uid)
            _log.info("pod_evicted", pod=pod.key, answer=answer.value)
            self._telemetry.pod_evicted()
        return answer, why

    def _look(self, holders: Holders, affected: frozenset[str]) -> tuple[cluster.Pod, ...]:
        pods = self._workloads.list()
        if holders.assigned is None:
            return clients.victims(pods, None, affected)
        # Kubelet answered before: if it is silent now, waiting is right, widening is not.
        try:
            assigned = self._allocations.assigned()
        except errors.ClusterError as error:
            _log.warning("pod_resources_unavailable", error=error.message)
            assigned = holders.assigned
        return clients.victims(pods, assigned, affected)


def _still(pod: cluster.Pod) -> str:
    return "still terminating" if pod.is_terminating else "waits for the others"


def _timeout(
    waiting: Sequence[cluster.Pod], blocked: Mapping[str, str], timeout_s: float
) -> errors.DrainError:
    told = [f"{pod.key} ({blocked.get(pod.key) or _still(pod)})" for pod in waiting]
    return errors.DrainError(
        f"{len(waiting)} pods still hold instances that must go after {timeout_s:g} s: "
        + ", ".join(told),
        pods=tuple(pod.key for pod in waiting),
    )
