"""Have the pods leave that hold what a plan destroys, and wait until they have let go.

Nobody is evicted before all may be: a budget that guards one pod would make the eviction of the
others be in vain. For the same reason nobody is deleted by force while a pod stays that force
does not move: a static pod, or one whose owner forbids its eviction.

An API that refuses or fails while we wait ends no drain before its deadline. Where we may evict
nobody, as with the rights that NVIDIA's GPU operator gives, a drain waits for the pods as if that
were the policy, and asks again now and then; an API server that is away for a moment comes back.
"""

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import structlog

from mig_manager import clocks, errors, ports
from mig_manager.core import clients, cluster, extras
from mig_manager.core import pace as pacing
from mig_manager.core import policy as policies

_log = structlog.get_logger()

_Act = Callable[[cluster.Pod], ports.Verdict]

_ASK_AGAIN_S = 5.0
"""Pause before an eviction is asked for again that the API forbade or did not answer."""
_CAN_PASS = frozenset({errors.Reason.FORBIDDEN, errors.Reason.API_UNAVAILABLE})
"""Why the API may refuse an eviction now and grant it later."""


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
    pods = workloads.list()
    # Kubelet before 1.34 lists the devices of finished pods (kubernetes/kubernetes#132028).
    finished = {pod.key for pod in pods if pod.is_finished}
    return Holders(pods=pods, assigned=tuple(one for one in assigned if one.key not in finished))


class Drain:
    """One drain: ask, wait, ask again where a budget said no, until nobody holds on."""

    def __init__(
        self,
        workloads: ports.Workloads,
        allocations: ports.DeviceAllocations,
        clock: clocks.Clock,
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
        self._settled: set[str] = set()
        """UIDs of the pods whose eviction is granted, and of those that had gone."""
        self._deleted: set[str] = set()
        """UIDs of the pods that were deleted by force."""
        self._evicted = 0
        self._refused: dict[str, tuple[float, str]] = {}
        """UID -> not to be asked again before, and why."""
        self._failed: dict[str, errors.ClusterError] = {}
        """UID -> why the API did not even say whether it may be evicted."""
        self._has_begun = False
        self._is_forcing = False
        self._deadline = 0.0
        self._turn = 0
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
            DrainError: The deadline passed; names each pod that stayed, and why. With FORBIDDEN
                or API_UNAVAILABLE where the API kept a pod from being asked to leave.
            ClusterError: The API refused the request as such, or has not listed the pods by the
                deadline.
            Superseded: The run is no longer wanted.
        """
        self._begin(is_forcing=False)
        while True:
            now = self._look(holders)
            waiting = self._order.leaving(now) if now else ()
            if now and not waiting:
                return self._evicted
            wish.check()
            if now:
                self._act(waiting, now)
            wish.pause(self._order.pace.delay_s(self._turn))
            self._turn += 1

    def _begin(self, *, is_forcing: bool) -> None:
        self._is_forcing = is_forcing
        self._deadline = self._clock.monotonic() + self._order.timeout_s
        self._turn = 0
        self._refused.clear()
        self._failed.clear()

    @property
    def _is_late(self) -> bool:
        return self._clock.monotonic() >= self._deadline

    def _look(self, before: Holders) -> Holders | None:
        """Return who holds what now; None when the API does not say and there is time left."""
        if not (self._order.affected or self._order.policy.drain is policies.Drain.NODE):
            return Holders(pods=(), assigned=())
        pods = self._pods()
        if pods is None:
            return None
        if before.assigned is None:
            return Holders(pods=pods, assigned=None)
        # Kubelet answered before: if it is silent now, waiting is right, widening is not.
        try:
            assigned = self._allocations.assigned()
        except errors.ClusterError as error:
            _log.warning("pod_resources_unavailable", error=error.message)
            assigned = before.assigned
        return Holders(pods=pods, assigned=assigned)

    def _pods(self) -> tuple[cluster.Pod, ...] | None:
        try:
            return self._workloads.list()
        except errors.ClusterError as error:
            if error.reason is not errors.Reason.API_UNAVAILABLE or self._is_late:
                raise
            _log.warning("pods_not_listed", error=error.message)
            return None

    def _act(self, waiting: Sequence[cluster.Pod], now: Holders) -> None:
        """Do what can be done to have the pods leave; turn to force, or give up, when it is late.

        Raises:
            DrainError: It is late, and there is nothing more that could be done.
        """
        blocked = self._force(waiting) if self._is_forcing else self._ask(waiting)
        if not self._is_late:
            return
        if self._is_forcing or not self._may_force(waiting):
            raise self._timeout(waiting, blocked, now)
        self._begin(is_forcing=True)
        names = ", ".join(pod.key for pod in waiting if not pod.is_terminating)
        if names:
            self._on_force(names)

    def _ask(self, waiting: Sequence[cluster.Pod]) -> dict[str, str]:
        """Ask for every eviction that is still due; return why some are not granted."""
        if self._order.is_passive:
            return {pod.key: "nobody is evicted by --drain-policy none" for pod in waiting}
        unmoved, due = _movable(waiting, done=self._settled)
        if not self._has_begun:
            blocked = unmoved | self._try_each(due, self._workloads.may_evict)
            if blocked:
                return blocked
            self._has_begun = True
        return unmoved | self._try_each(due, self._evict)

    def _force(self, waiting: Sequence[cluster.Pod]) -> dict[str, str]:
        """Delete whoever is still there, budgets or not; return why some stay all the same."""
        unmoved, due = _movable(waiting, done=self._deleted)
        return unmoved | self._try_each(due, self._delete)

    def _try_each(self, due: Iterable[cluster.Pod], act: _Act) -> dict[str, str]:
        blocked: dict[str, str] = {}
        for pod in due:
            not_before, why = self._refused.get(pod.uid, (0.0, ""))
            if self._clock.monotonic() < not_before:
                blocked[pod.key] = why
                continue
            verdict = self._try(pod, act)
            if verdict.answer is ports.Eviction.BLOCKED:
                blocked[pod.key] = verdict.why
                until = self._clock.monotonic() + verdict.retry_after_s
                self._refused[pod.uid] = (until, verdict.why)
        return blocked

    def _try(self, pod: cluster.Pod, act: _Act) -> ports.Verdict:
        """Take an API that forbids, or fails, for one that says no for now."""
        before = self._failed.pop(pod.uid, None)
        try:
            return act(pod)
        except errors.ClusterError as error:
            if error.reason not in _CAN_PASS:
                raise
            self._failed[pod.uid] = error
            if before is None or before.reason is not error.reason:
                reason = error.reason.value
                _log.warning("pod_not_moved", pod=pod.key, reason=reason, error=error.message)
            return ports.Verdict(
                answer=ports.Eviction.BLOCKED,
                why=self._why_failed(error),
                retry_after_s=max(_ASK_AGAIN_S, error.retry_after_s or 0.0),
            )

    def _why_failed(self, error: errors.ClusterError) -> str:
        verb = "delete" if self._is_forcing else "evict"
        if error.reason is errors.Reason.FORBIDDEN:
            return f"the agent may not {verb} it ({error.reason.value})"
        return f"the Kubernetes API failed to {verb} it ({error.reason.value})"

    def _evict(self, pod: cluster.Pod) -> ports.Verdict:
        verdict = self._workloads.evict(pod)
        if verdict.answer is not ports.Eviction.BLOCKED:
            self._settled.add(pod.uid)
            _log.info("pod_evicted", pod=pod.key, answer=verdict.answer.value)
        if verdict.answer is ports.Eviction.ACCEPTED:
            self._evicted += 1
            self._telemetry.pod_evicted()
        return verdict

    def _delete(self, pod: cluster.Pod) -> ports.Verdict:
        self._workloads.delete(pod)
        self._deleted.add(pod.uid)
        if pod.key not in self.forced:
            self.forced.append(pod.key)
        _log.warning("pod_deleted_by_force", pod=pod.key)
        self._telemetry.pod_evicted()
        return ports.Verdict(answer=ports.Eviction.ACCEPTED)

    def _may_force(self, waiting: Sequence[cluster.Pod]) -> bool:
        policy = self._order.policy
        return policy.is_forced and not (
            self._order.is_passive or any(_why_immovable(pod) for pod in waiting)
        )

    def _timeout(
        self, waiting: Sequence[cluster.Pod], blocked: Mapping[str, str], now: Holders
    ) -> errors.DrainError:
        said = [
            f"{clients.told(pod, now.assigned)} ({blocked.get(pod.key) or _still(pod)})"
            for pod in waiting
        ]
        by_force = ", and as long again by force" if self._is_forcing else ""
        cause = self._cause(waiting)
        return errors.DrainError(
            f"what must go is still held after {self._order.timeout_s:g} s{by_force} "
            f"(pods: {len(waiting)}): "
            + ", ".join(said)
            + (f"; {cause.message}" if cause else ""),
            pods=tuple(pod.key for pod in waiting),
            reason=cause.reason if cause else errors.Reason.DRAIN_TIMEOUT,
        )

    def _cause(self, waiting: Iterable[cluster.Pod]) -> errors.ClusterError | None:
        """Return what must be mended before the pods can leave: a missing right before all."""
        staying = (pod for pod in waiting if not pod.is_terminating)
        failed = [self._failed[pod.uid] for pod in staying if pod.uid in self._failed]
        forbidden = [error for error in failed if error.reason is errors.Reason.FORBIDDEN]
        return next(iter(forbidden or failed), None)


def _movable(
    waiting: Iterable[cluster.Pod], *, done: Container[str]
) -> tuple[dict[str, str], list[cluster.Pod]]:
    """Return why some pods cannot be moved, and those to move that are not done with by UID."""
    unmoved = {pod.key: why for pod in waiting if (why := _why_immovable(pod))}
    due = [pod for pod in waiting if not (pod.is_terminating or pod.uid in done)]
    return unmoved, [pod for pod in due if pod.key not in unmoved]


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
