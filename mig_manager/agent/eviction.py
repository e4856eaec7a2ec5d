"""Evict pods as their budgets allow, or delete them by force.

No pod is evicted while another affected pod cannot be: a static pod, one whose owner forbids its
eviction, one whose PodDisruptionBudget grants no eviction, one that two budgets cover. For the
same reason no pod is deleted by force while one remains that force does not move.

Budgets are counted over all affected pods before the first eviction, because a dry run does not
use up a budget (see ``core.node.disruption``). What they grant as a whole goes at once. Where they
grant a part, the drain is a rolling one, like that of ``kubectl drain``: it evicts what they
grant, and more when successors are ready elsewhere. All other pods wait until the budgets grant
the rest as a whole, and pods without a controller, which have no successor, go last. A drain whose
evicted pods find no room elsewhere therefore costs what the budgets granted once: it ends as
DRAIN_STALLED. The node stays closed until the next attempt, which evicts no pod before the budgets
grant that again.

Without the right to list budgets the API server decides, eviction by eviction.
"""

from collections.abc import Callable, Container, Iterable, Sequence

import structlog

from mig_manager import errors
from mig_manager.core import messages, ports, timing
from mig_manager.core.node import cluster
from mig_manager.core.node import policy as policies

_log = structlog.get_logger()

_Act = Callable[[cluster.Pod], ports.Verdict]

_RETRY_S = 5.0
"""Pause before an eviction that the API forbade or did not answer is tried again."""
_TRANSIENT = frozenset({errors.Reason.FORBIDDEN, errors.Reason.API_UNAVAILABLE})
"""Why the API may refuse an eviction now and grant it later."""


class Evictions:
    """The evictions of one drain."""

    def __init__(
        self,
        workloads: ports.Workloads,
        clock: timing.Clock,
        *,
        strategy: policies.DrainStrategy,
        on_round: Callable[[str], None],
        telemetry: ports.Telemetry,
    ) -> None:
        self._workloads = workloads
        self._clock = clock
        self._strategy = strategy
        self._on_round = on_round
        self._telemetry = telemetry
        self._budgets = _Budgets(workloads)
        self.evicted = 0
        """How many pods were evicted."""
        self.forced: list[str] = []
        """Names of the pods that were deleted by force."""
        self._granted: set[str] = set()
        """UIDs of the pods whose eviction was granted, and of those that were gone."""
        self._deleted: set[str] = set()
        """UIDs of the pods that were deleted by force."""
        self._refused: dict[str, tuple[float, str]] = {}
        """UID -> not to be evicted again before, and why."""
        self._failed: dict[str, errors.ClusterError] = {}
        """UID -> why the API did not decide about its eviction."""
        self._may_evict = False
        """Whether the eviction of every affected pod was possible once."""
        self._blocked: dict[str, str] = {}
        """Key of a pod -> why it was not evicted when the budgets were last counted."""
        self._retry_at = 0.0
        """When the budgets are counted, and evictions tried, again."""

    def begin(self) -> None:
        """Forget refusals, for a new deadline."""
        self._refused.clear()
        self._failed.clear()
        self._retry_at = 0.0

    @property
    def is_rolling(self) -> bool:
        """Whether the budgets did not grant all evictions when they were last counted."""
        return bool(self._budgets.spent)

    def is_any_ready(self, remaining: Iterable[cluster.Pod], *, is_forcing: bool) -> bool:
        """Check whether a pod can be evicted or deleted now."""
        _, pending = _movable(remaining, done=self._deleted if is_forcing else self._granted)
        return bool(pending) and (is_forcing or self._clock.monotonic() >= self._retry_at)

    def evict(self, remaining: Sequence[cluster.Pod]) -> dict[str, str]:
        """Evict the pods that are not evicted yet; return why the others are not evicted."""
        unmoved, pending = _movable(remaining, done=self._granted)
        if pending and self._clock.monotonic() >= self._retry_at:
            # Pods without a controller last: no controller starts them again.
            pending.sort(key=lambda pod: pod.owner_kind is None)
            self._blocked = self._evict_granted(pending, is_possible=not unmoved)
            retry_at = min(self._refused.get(pod.uid, (0.0, ""))[0] for pod in pending)
            self._retry_at = max(self._clock.monotonic() + _RETRY_S, retry_at)
        asked = {pod.key for pod in pending}
        return unmoved | {key: why for key, why in self._blocked.items() if key in asked}

    def force(self, remaining: Sequence[cluster.Pod]) -> dict[str, str]:
        """Delete the remaining pods regardless of budgets; return why some are not deleted."""
        unmoved, pending = _movable(remaining, done=self._deleted)
        return unmoved | self._try_each(pending, self._delete)

    def why_incomplete(
        self, remaining: Sequence[cluster.Pod], *, has_evicted: bool
    ) -> tuple[errors.Reason, str]:
        """Return why a drain did not finish in time, with a clause for the message."""
        staying = [pod for pod in remaining if not pod.is_terminating]
        failed = [self._failed[pod.uid] for pod in staying if pod.uid in self._failed]
        failed += [self._budgets.failure] if self._budgets.failure else []
        if failed:
            # A missing right comes first: only a person can grant it.
            failed.sort(key=lambda error: error.reason is not errors.Reason.FORBIDDEN)
            return failed[0].reason, failed[0].message
        if has_evicted and self.is_rolling and len(staying) == len(remaining):
            return self._budgets.why_stalled(remaining)
        if not self._budgets.are_known:
            more = "the agent may not list PodDisruptionBudgets, so they were not counted"
            return errors.Reason.DRAIN_TIMEOUT, more
        return errors.Reason.DRAIN_TIMEOUT, ""

    def _evict_granted(
        self, pending: Sequence[cluster.Pod], *, is_possible: bool
    ) -> dict[str, str]:
        """Evict what the budgets grant; return why other pods are not evicted yet."""
        counted = self._budgets.count(pending)
        if not self._may_evict:
            is_whole = self._strategy is policies.DrainStrategy.WHOLE
            blocked = dict(counted.refused if is_whole else counted.exhausted)
            if is_possible and not blocked:
                blocked = self._try_each(pending, self._workloads.can_evict)
            if blocked or not is_possible:
                return blocked
            self._may_evict = True
        if not counted.refused:
            return self._evict_each(pending)
        batch = [pod for pod in counted.rolling if self._may_retry(pod)]
        if batch:
            more = len(pending) - len(batch)
            self._on_round(f"rolling drain: evicting {_names(batch)}; {more} more to evict")
        return dict(counted.refused) | self._evict_each(batch)

    def _evict_each(self, pods: Iterable[cluster.Pod]) -> dict[str, str]:
        """Evict pods in this order; those without a controller once all others are granted."""
        chosen = tuple(pods)
        blocked = self._try_each((pod for pod in chosen if pod.owner_kind), self._evict)
        if not blocked:
            blocked = self._try_each((pod for pod in chosen if not pod.owner_kind), self._evict)
        return blocked

    def _try_each(self, pending: Iterable[cluster.Pod], act: _Act) -> dict[str, str]:
        blocked: dict[str, str] = {}
        for pod in pending:
            if not self._may_retry(pod):
                blocked[pod.key] = self._refused[pod.uid][1]
                continue
            verdict = self._try(pod, act)
            if verdict.answer is ports.Eviction.BLOCKED:
                blocked[pod.key] = verdict.why
                until = self._clock.monotonic() + verdict.retry_after_s
                self._refused[pod.uid] = (until, verdict.why)
        return blocked

    def _may_retry(self, pod: cluster.Pod) -> bool:
        """Check whether the pause that the server asked for is over."""
        not_before, _ = self._refused.get(pod.uid, (0.0, ""))
        return self._clock.monotonic() >= not_before

    def _try(self, pod: cluster.Pod, act: _Act) -> ports.Verdict:
        """Treat an API that forbids, or fails, as one that refuses for now."""
        before = self._failed.pop(pod.uid, None)
        try:
            return act(pod)
        except errors.ClusterError as error:
            if error.reason not in _TRANSIENT:
                raise
            self._failed[pod.uid] = error
            if before is None or before.reason is not error.reason:
                reason = error.reason.value
                _log.warning("pod_not_moved", pod=pod.key, reason=reason, error=error.message)
            verb = "delete" if act == self._delete else "evict"
            why = (
                f"the agent may not {verb} it ({error.reason.value})"
                if error.reason is errors.Reason.FORBIDDEN
                else f"the Kubernetes API failed to {verb} it ({error.reason.value})"
            )
            return ports.Verdict(
                answer=ports.Eviction.BLOCKED,
                why=why,
                retry_after_s=max(_RETRY_S, error.retry_after_s or 0.0),
            )

    def _evict(self, pod: cluster.Pod) -> ports.Verdict:
        verdict = self._workloads.evict(pod)
        if verdict.answer is not ports.Eviction.BLOCKED:
            self._granted.add(pod.uid)
            _log.info("pod_evicted", pod=pod.key, answer=verdict.answer.value)
        if verdict.answer is ports.Eviction.ACCEPTED:
            self.evicted += 1
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


class _Budgets:
    """The PodDisruptionBudgets of one drain, and the pods that they wait for."""

    def __init__(self, workloads: ports.Workloads) -> None:
        self._workloads = workloads
        self.are_known = True
        """Whether the API lets the agent list them."""
        self.failure: errors.ClusterError | None = None
        """Why they could not be listed last."""
        self.spent: tuple[policies.Budget, ...] = ()
        """Those that did not grant all evictions when they were last counted."""

    def count(self, pods: Sequence[cluster.Pod]) -> policies.Count:
        """Count which evictions the budgets grant: all where the agent may not list budgets.

        Raises:
            ClusterError: The API refused the request as such.
        """
        self.failure, self.spent = None, ()
        known: tuple[policies.Budget, ...] = ()
        if self.are_known:
            try:
                known = self._workloads.budgets({pod.namespace for pod in pods})
            except errors.ClusterError as error:
                if error.reason is errors.Reason.API_UNAVAILABLE:
                    _log.warning("budgets_not_listed", error=error.message)
                    self.failure = error
                    why = f"the Kubernetes API failed to list budgets ({error.reason.value})"
                    return policies.none_granted(pods, why)
                if error.reason is not errors.Reason.FORBIDDEN:
                    raise
                _log.warning("budgets_not_counted", error=error.message)
                self.are_known = False
        counted = policies.count(pods, known)
        self.spent = counted.spent
        return counted

    def why_stalled(self, remaining: Iterable[cluster.Pod]) -> tuple[errors.Reason, str]:
        """Return DRAIN_STALLED where evicted pods have no successor or no node has room for it.

        DRAIN_TIMEOUT where successors exist and are not ready yet.
        """
        uids = {pod.uid for pod in remaining}
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
            return errors.Reason.DRAIN_STALLED, f"no node has room for {_names(unscheduled)}"
        if unready:
            return errors.Reason.DRAIN_TIMEOUT, f"not ready yet elsewhere: {_names(unready)}"
        keys = ", ".join(sorted({budget.key for budget in self.spent}))
        return errors.Reason.DRAIN_STALLED, f"no pod replaces those evicted (budgets: {keys})"


def why_immovable(pod: cluster.Pod) -> str:
    """Return why neither eviction nor force moves a pod; empty when they do."""
    if pod.is_terminating:
        return ""
    if pod.is_mirror:
        return "a static pod cannot be evicted"
    if pod.is_kept:
        return f"its annotation {cluster.KEEP_ANNOTATION} forbids the eviction"
    return ""


def _movable(
    remaining: Iterable[cluster.Pod], *, done: Container[str]
) -> tuple[dict[str, str], list[cluster.Pod]]:
    """Return why some pods cannot be moved, and the others that are not done with by UID."""
    unmoved = {pod.key: why for pod in remaining if (why := why_immovable(pod))}
    pending = [pod for pod in remaining if not (pod.is_terminating or pod.uid in done)]
    return unmoved, [pod for pod in pending if pod.key not in unmoved]


def _names(pods: Sequence[cluster.Pod]) -> str:
    return messages.listed([pod.key for pod in pods])
