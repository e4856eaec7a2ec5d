"""Evict the pods that use devices a plan destroys, and wait until they are gone.

No pod is evicted while another affected pod cannot be: a static pod, one whose owner forbids its
eviction, one whose PodDisruptionBudget grants no eviction, one that two budgets cover. For the
same reason no pod is deleted by force while one stays that force does not move.

Budgets are counted over all affected pods before the first eviction, because a dry run does not
use up a budget (see ``core.disruption``). What they grant as a whole goes at once. Where they
grant a part, the drain is a rolling one, like that of ``kubectl drain``: it evicts what they
grant, and more when they grant more because successors are ready elsewhere. All other pods wait
until the budgets grant the rest as a whole, and pods without a controller, which have no
successor, go last. So a drain whose evicted pods find no room elsewhere costs what the budgets
granted once, and no more: it ends as DRAIN_STALLED. The node stays closed until the next try,
which evicts no pod before the budgets grant that again.

Without the right to list budgets the API server decides, eviction by eviction.

An API that refuses or fails while we wait ends no drain before its deadline. Where we may evict
nobody, as with the rights that NVIDIA's GPU operator gives, a drain waits for the pods as if that
were the policy, and asks again now and then; an API server that is away for a moment comes back.
"""

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import structlog

from mig_manager import errors
from mig_manager.agent import eviction
from mig_manager.change import instrumentation
from mig_manager.core import messages, ports, timing
from mig_manager.core.node import clients, cluster
from mig_manager.core.node import policy as policies

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
    daemons: tuple[clients.ExtraClient, ...] = ()
    """Those that are paused later, and so need not leave."""
    has_begun: bool = False
    """Whether an earlier try of this drain has evicted pods."""
    timeout_s: float
    pace: timing.Backoff

    @property
    def is_passive(self) -> bool:
        """Whether nobody is sent away."""
        return self.policy.drain is policies.Drain.NONE

    def leaving(self, holders: Holders) -> tuple[cluster.Pod, ...]:
        """Return the pods that must leave, of those found."""
        return clients.affected_pods(
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Whom a drain tells of its steps, before it takes them."""

    on_turn: Callable[[str], None]
    """Gets a sentence on the next turn of a rolling drain."""
    on_force: Callable[[str], None]
    """Gets the names of the pods that are deleted by force."""


class Drain:
    """One drain: ask, wait, ask again where a budget said no, until nobody holds on."""

    def __init__(
        self,
        workloads: ports.Workloads,
        allocations: ports.DeviceAllocations,
        clock: timing.Clock,
        *,
        order: Order,
        tell: Tell,
        telemetry: instrumentation.Telemetry | None = None,
    ) -> None:
        """Prepare a drain.

        Args:
            workloads: The pods.
            allocations: Who holds what.
            clock: For the deadlines.
            order: What to do.
            tell: Called before what is worth telling.
            telemetry: Told of each eviction.
        """
        self._workloads = workloads
        self._allocations = allocations
        self._clock = clock
        self._order = order
        self._tell = tell
        self._telemetry = telemetry or instrumentation.Telemetry()
        self._settled: set[str] = set()
        """UIDs of the pods whose eviction is granted, and of those that had gone."""
        self._deleted: set[str] = set()
        """UIDs of the pods that were deleted by force."""
        self._evicted = 0
        self._refused: dict[str, tuple[float, str]] = {}
        """UID -> not to be asked again before, and why."""
        self._failed: dict[str, errors.ClusterError] = {}
        """UID -> why the API did not even say whether it may be evicted."""
        self._may_evict = False
        """Whether the eviction of every affected pod was possible once."""
        self._budgets = eviction.EvictionBudgets(workloads)
        self._blocked: dict[str, str] = {}
        """Key of a pod -> why it was not evicted when the budgets were counted last."""
        self._ask_after = 0.0
        """When the budgets are counted, and evictions tried, again."""
        self._is_forcing = False
        self._deadline = 0.0
        self._turn = 0
        self.forced: list[str] = []
        """Names of the pods that were deleted by force."""

    def run(self, holders: Holders, wish: ports.Cancellation) -> int:
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
            now = None if self._may_wait(holders) else self._look(holders)
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
        self._ask_after = 0.0

    @property
    def _is_late(self) -> bool:
        return self._clock.monotonic() >= self._deadline

    def _may_wait(self, before: Holders) -> bool:
        """Tell whether there is nothing to do but to wait, going by what a watch tells.

        Evictions, and the end of the drain, rest on a list.
        """
        pods = None if self._is_late else self._workloads.watched()
        if pods is None:
            return False
        waiting = self._order.leaving(self._holders(pods, before))
        if not waiting or self._order.is_passive:
            return bool(waiting)
        _, due = _movable(waiting, done=self._deleted if self._is_forcing else self._settled)
        return not due or (not self._is_forcing and self._clock.monotonic() < self._ask_after)

    def _look(self, before: Holders) -> Holders | None:
        """Return who holds what now; None when the API does not say and there is time left."""
        if not (self._order.affected or self._order.policy.drain is policies.Drain.NODE):
            return Holders(pods=(), assigned=())
        pods = self._pods()
        return None if pods is None else self._holders(pods, before)

    def _holders(self, pods: tuple[cluster.Pod, ...], before: Holders) -> Holders:
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
            self._tell.on_force(names)

    def _ask(self, waiting: Sequence[cluster.Pod]) -> dict[str, str]:
        """Ask for every eviction that is still due; return why some are not granted."""
        if self._order.is_passive:
            return {pod.key: "nobody is evicted by --drain-policy none" for pod in waiting}
        unmoved, due = _movable(waiting, done=self._settled)
        if due and self._clock.monotonic() >= self._ask_after:
            # Pods without a controller last: nothing starts them again.
            due.sort(key=lambda pod: pod.owner_kind is None)
            self._blocked = self._evict_granted(due, is_possible=not unmoved)
            pauses = [self._refused.get(pod.uid, (0.0, ""))[0] for pod in due]
            self._ask_after = max(self._clock.monotonic() + _ASK_AGAIN_S, min(pauses))
        asked = {pod.key for pod in due}
        return unmoved | {key: why for key, why in self._blocked.items() if key in asked}

    def _evict_granted(self, due: Sequence[cluster.Pod], *, is_possible: bool) -> dict[str, str]:
        """Evict what the budgets grant; return why other pods are not evicted yet."""
        counted = self._budgets.count(due)
        if not self._may_evict:
            is_whole = self._order.policy.strategy is policies.DrainStrategy.WHOLE
            blocked = dict(counted.refused if is_whole else counted.exhausted)
            if is_possible and not blocked:
                blocked = self._try_each(due, self._workloads.can_evict)
            if blocked or not is_possible:
                return blocked
            self._may_evict = True
        if not counted.refused:
            return self._evict_each(due)
        turn = [pod for pod in counted.rolling if self._may_be_asked(pod)]
        if turn:
            more = len(due) - len(turn)
            self._tell.on_turn(
                f"rolling drain: evicting {eviction.names(turn)}; {more} more must leave"
            )
        return dict(counted.refused) | self._evict_each(turn)

    def _evict_each(self, pods: Iterable[cluster.Pod]) -> dict[str, str]:
        """Evict pods in this order; those without a controller once all others are granted."""
        chosen = tuple(pods)
        blocked = self._try_each((pod for pod in chosen if pod.owner_kind), self._evict)
        if not blocked:
            blocked = self._try_each((pod for pod in chosen if not pod.owner_kind), self._evict)
        return blocked

    def _force(self, waiting: Sequence[cluster.Pod]) -> dict[str, str]:
        """Delete whoever is still there, budgets or not; return why some stay all the same."""
        unmoved, due = _movable(waiting, done=self._deleted)
        return unmoved | self._try_each(due, self._delete)

    def _try_each(self, due: Iterable[cluster.Pod], act: _Act) -> dict[str, str]:
        blocked: dict[str, str] = {}
        for pod in due:
            if not self._may_be_asked(pod):
                blocked[pod.key] = self._refused[pod.uid][1]
                continue
            verdict = self._try(pod, act)
            if verdict.answer is ports.Eviction.BLOCKED:
                blocked[pod.key] = verdict.why
                until = self._clock.monotonic() + verdict.retry_after_s
                self._refused[pod.uid] = (until, verdict.why)
        return blocked

    def _may_be_asked(self, pod: cluster.Pod) -> bool:
        """Tell whether the pause is over for which the server wants no question about a pod."""
        not_before, _ = self._refused.get(pod.uid, (0.0, ""))
        return self._clock.monotonic() >= not_before

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
            if self._budgets.spent:
                # A rolling drain takes as long as its successors do: each eviction is progress.
                self._deadline = self._clock.monotonic() + self._order.timeout_s
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
        said = messages.by_cause(
            (clients.describe_pod(pod, now.assigned), blocked.get(pod.key) or _still(pod))
            for pod in waiting
        )
        by_force = ", and as long again by force" if self._is_forcing else ""
        cause = self._cause(waiting)
        reason, more = errors.Reason.DRAIN_TIMEOUT, ""
        if cause:
            reason, more = cause.reason, cause.message
        elif (
            self._has_evicted
            and self._budgets.spent
            and not any(pod.is_terminating for pod in waiting)
        ):
            reason, more = self._budgets.why_stalled(waiting)
        elif not self._budgets.are_known:
            more = "the agent may not list PodDisruptionBudgets, so they were not counted"
        return errors.DrainError(
            f"what must go is still held after {self._order.timeout_s:g} s{by_force} "
            f"(pods: {len(waiting)}): {said}" + (f"; {more}" if more else ""),
            pods=tuple(pod.key for pod in waiting),
            reason=reason,
            # A pod that cannot be evicted at all keeps the next try from evicting any.
            keeps_closed=self._has_evicted and not any(map(_why_immovable, waiting)),
        )

    @property
    def _has_evicted(self) -> bool:
        return self._evicted > 0 or self._order.has_begun

    def _cause(self, waiting: Iterable[cluster.Pod]) -> errors.ClusterError | None:
        """Return what must be mended before the pods can leave: a missing right before all."""
        staying = (pod for pod in waiting if not pod.is_terminating)
        failed = [self._failed[pod.uid] for pod in staying if pod.uid in self._failed]
        failed += [self._budgets.failure] if self._budgets.failure else []
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
