"""Have the pods leave that hold what a plan destroys, and wait until they have let go.

Nobody is evicted before all may be: a budget that guards one pod would make the eviction of the
others be in vain. For the same reason nobody is deleted by force while a pod stays that force
does not move: a static pod, or one whose owner forbids its eviction.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from mig_manager import errors, ports
from mig_manager.core import clients, cluster, extras
from mig_manager.core import pace as pacing
from mig_manager.core import policy as policies

_log = structlog.get_logger()

_Act = Callable[[cluster.Pod], ports.Verdict]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Who holds what, as found before the plan was made."""

    pods: tuple[cluster.Pod, ...]
    assigned: tuple[cluster.PodDevices, ...] | None
    """None: kubelet cannot be asked, every GPU pod counts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Who must leave, how, and how long that may take."""

    affected: frozenset[str]
    """Device ids that are taken away."""
    policy: policies.Policy
    daemons: tuple[extras.ExtraClient, ...] = ()
    """Those that are paused later, and so need not leave."""
    timeout_s: float
    pace: pacing.Pace

    @property
    def is_passive(self) -> bool:
        """Whether nobody is sent away."""
        return self.policy.drain is policies.Drain.NONE

    def leaving(self, holders: Holders) -> tuple[cluster.Pod, ...]:
        """Return the pods that must leave, of those found."""
        return clients.victims(
            holders.pods,
            holders.assigned,
            self.affected,
            is_whole_node=self.policy.drain is policies.Drain.NODE,
            daemons=self.daemons,
        )


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
        order: Order,
        on_force: Callable[[str], None],
        telemetry: ports.Telemetry | None = None,
    ) -> None:
        """Prepare a drain.

        Args:
            workloads: The pods.
            allocations: Who holds what.
            clock: For the deadlines.
            order: What to do.
            on_force: Told the names of the pods before they are deleted by force.
            telemetry: Told of each eviction.
        """
        self._workloads = workloads
        self._allocations = allocations
        self._clock = clock
        self._order = order
        self._on_force = on_force
        self._telemetry = telemetry or ports.Telemetry()
        self._evicted: set[str] = set()
        self._refused: dict[str, tuple[float, str]] = {}
        """UID -> not to be asked again before, and why."""
        self._has_begun = False
        self.forced: list[str] = []
        """Names of the pods that were deleted by force."""

    def run(self, holders: Holders, wish: ports.Wish) -> int:
        """Return once no pod holds an affected device; look at least once.

        Args:
            holders: The survey that the plan was made with.
            wish: Asked at every turn; a drain can be given up for free.

        Returns:
            How many pods were evicted.

        Raises:
            DrainError: The deadline passed; names each pod that stayed, and why.
            ClusterError: The API refused evictions, or does not answer.
            Superseded: The run is no longer wanted.
        """
        deadline = self._deadline()
        is_forcing = False
        turn = 0
        while True:
            now = self._look(holders)
            waiting = self._order.leaving(now)
            if not waiting:
                return len(self._evicted)
            wish.check()
            blocked = self._force(waiting) if is_forcing else self._ask(waiting)
            if self._clock.monotonic() >= deadline:
                if is_forcing or not self._may_force(waiting):
                    raise self._timeout(waiting, blocked, now)
                is_forcing, deadline, turn = True, self._deadline(), 0
                self._announce_force(waiting)
                continue
            wish.wait(self._order.pace.delay_s(turn))
            turn += 1

    def _deadline(self) -> float:
        return self._clock.monotonic() + self._order.timeout_s

    def _look(self, before: Holders) -> Holders:
        if not (self._order.affected or self._order.policy.drain is policies.Drain.NODE):
            return Holders(pods=(), assigned=())
        pods = self._workloads.list()
        if before.assigned is None:
            return Holders(pods=pods, assigned=None)
        # Kubelet answered before: if it is silent now, waiting is right, widening is not.
        try:
            assigned = self._allocations.assigned()
        except errors.ClusterError as error:
            _log.warning("pod_resources_unavailable", error=error.message)
            assigned = before.assigned
        return Holders(pods=pods, assigned=assigned)

    def _ask(self, waiting: Sequence[cluster.Pod]) -> dict[str, str]:
        """Ask for every eviction that is still due; return why some are not granted."""
        if self._order.is_passive:
            return {pod.key: "nobody is evicted by --drain-policy none" for pod in waiting}
        unmoved = {pod.key: why for pod in waiting if (why := _why_immovable(pod))}
        due = [p for p in waiting if not p.is_terminating and p.uid not in self._evicted]
        due = [p for p in due if p.key not in unmoved]
        if not self._has_begun:
            blocked = unmoved | self._try_each(due, self._workloads.may_evict)
            if blocked:
                return blocked
            self._has_begun = True
        return unmoved | self._try_each(due, self._evict)

    def _try_each(self, due: Iterable[cluster.Pod], act: _Act) -> dict[str, str]:
        blocked: dict[str, str] = {}
        for pod in due:
            not_before, why = self._refused.get(pod.uid, (0.0, ""))
            if self._clock.monotonic() < not_before:
                blocked[pod.key] = why
                continue
            verdict = act(pod)
            if verdict.answer is ports.Eviction.BLOCKED:
                blocked[pod.key] = verdict.why
                until = self._clock.monotonic() + verdict.retry_after_s
                self._refused[pod.uid] = (until, verdict.why)
        return blocked

    def _evict(self, pod: cluster.Pod) -> ports.Verdict:
        verdict = self._workloads.evict(pod)
        if verdict.answer is not ports.Eviction.BLOCKED:
            self._evicted.add(pod.uid)
            _log.info("pod_evicted", pod=pod.key, answer=verdict.answer.value)
            self._telemetry.pod_evicted()
        return verdict

    def _may_force(self, waiting: Sequence[cluster.Pod]) -> bool:
        policy = self._order.policy
        return policy.is_forced and not (
            self._order.is_passive or any(_why_immovable(pod) for pod in waiting)
        )

    def _announce_force(self, waiting: Sequence[cluster.Pod]) -> None:
        names = ", ".join(pod.key for pod in waiting if not pod.is_terminating)
        if names:
            self._on_force(names)

    def _force(self, waiting: Sequence[cluster.Pod]) -> dict[str, str]:
        """Delete whoever is still there, budgets or not; return why some stay all the same."""
        unmoved = {pod.key: why for pod in waiting if (why := _why_immovable(pod))}
        for pod in waiting:
            if pod.is_terminating or pod.key in unmoved:
                continue
            self._workloads.delete(pod)
            if pod.key not in self.forced:
                self.forced.append(pod.key)
                _log.warning("pod_deleted_by_force", pod=pod.key)
                self._telemetry.pod_evicted()
        return unmoved

    def _timeout(
        self, waiting: Sequence[cluster.Pod], blocked: Mapping[str, str], now: Holders
    ) -> errors.DrainError:
        said = [
            f"{clients.told(pod, now.assigned)} ({blocked.get(pod.key) or _still(pod)})"
            for pod in waiting
        ]
        by_force = ", and as long again by force" if self.forced else ""
        return errors.DrainError(
            f"what must go is still held after {self._order.timeout_s:g} s{by_force} "
            f"(pods: {len(waiting)}): " + ", ".join(said),
            pods=tuple(pod.key for pod in waiting),
        )


def _why_immovable(pod: cluster.Pod) -> str:
    """Say why neither eviction nor force moves a pod; empty when they do."""
    if pod.is_terminating:
        return ""
    if pod.is_mirror:
        return "a static pod cannot be evicted"
    if pod.is_kept:
        return f"its annotation {cluster.KEEP_ANNOTATION} forbids the eviction"
    return ""


def _still(pod: cluster.Pod) -> str:
    if pod.is_terminating:
        return f"still terminating; it may take {pod.grace_s} s"
    return "waits for the others"
