"""Evict pods as their budgets allow, or delete them by force.

If one affected pod cannot be evicted, none is. A pod cannot be evicted if it is static, its owner
forbids it, its PodDisruptionBudget grants no eviction, or two budgets cover it. In the same way,
no pod is deleted by force while a pod remains that force cannot remove.

Budgets are checked over all affected pods before the first eviction, because a dry run does not
use up a budget (see ``core.node.eviction_rules``). If they grant all evictions, all pods go at
once. If they grant a part, the drain rolls like ``kubectl drain``: it evicts that part, and more
when successors are ready elsewhere. Other pods wait until the budgets grant the rest. Pods without
a controller have no successor and go last.

If evicted pods find no room elsewhere, the drain ends as DRAIN_STALLED: it has evicted only what
the budgets granted once. The node stays tainted until the next attempt, which evicts no pod before
the budgets grant that again.

Without the right to list budgets, the API server decides about every eviction.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts
from mig_manager.agent.pods import pod_removal
from mig_manager.core import messages
from mig_manager.core.node import eviction_rules, policies
from mig_manager.core.objects import pod_object
from mig_manager.core.records import run_status

_log = structlog.get_logger()

_ACCEPTED = "the API accepted its eviction, and it is not terminating"
_EVICTED = "was evicted just now"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """What a round of evictions leaves to the next one before the same deadline."""

    has_begun: bool = False
    """Whether all affected pods were evictable at some time, or force was announced."""
    checked_uids: frozenset[str] = frozenset()  # of the pods that were evictable then
    blocked: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Key of a pod -> why it was not evicted."""
    spent: tuple[eviction_rules.Budget, ...] = ()  # the budgets that did not grant all evictions
    error: errors.ClusterError | None = None  # why the API did not list the budgets
    next_s: float = 0.0  # when the next round may begin

    @property
    def may_list_budgets(self) -> bool:
        """Whether the agent has the right, as far as it knows."""
        return self.error is None or self.error.reason is not reasons.Reason.FORBIDDEN


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class EvictionRounds:
    """Rounds of evictions of one drain, each as the budgets grant."""

    attempt: attempts.Attempt
    removals: pod_removal.PodRemovals
    _last: _Round = dataclasses.field(default_factory=_Round)

    def begin_deadline(self, pods: Iterable[pod_object.Pod]) -> None:
        """Forget earlier tries and the budgets, which force ignores, for a new deadline.

        ``pods`` are the node's when the drain began.
        """
        self.removals.begin_deadline(pods)
        self._last = _Round()

    @property
    def is_rolling(self) -> bool:
        """Whether the budgets allowed only some of the evictions, and these are under way."""
        is_rolling = self.attempt.settings.policy.strategy is policies.DrainStrategy.ROLLING
        return is_rolling and bool(self._last.spent)

    def is_any_ready(self, remaining: Iterable[pod_object.Pod]) -> bool:
        """Return whether a pod can be evicted or deleted now."""
        is_time = self._now_s() >= self._last.next_s
        return is_time and any(map(self.removals.is_pending, remaining))

    def evict(self, remaining: Sequence[pod_object.Pod]) -> dict[str, str]:
        """Evict the remaining pods; return why others stay for now.

        Raises:
            ClusterError: The API refused the request as such.
            DrainError: PODS_RETURN.
            Superseded: Another layout is requested, or the agent stops.
        """
        self.removals.successors.refuse_more(filter(self.removals.is_pending, remaining))
        not_evictable = eviction_rules.not_evictable(remaining)
        # An admission webhook may have answered instead of the API server.
        accepted = [
            pod.key
            for pod in remaining
            if self.removals.result_of(pod).is_done and not pod.is_terminating
        ]
        # Pods without a controller come last, because nothing starts them again. Returned pods
        # come first: if pods keep returning, fewer are evicted in vain.
        pending = sorted(
            filter(self.removals.is_pending, remaining),
            key=lambda pod: (
                pod.owner_kind is None,
                not self.removals.successors.include(pod),
            ),
        )
        if pending and self._now_s() >= self._last.next_s:
            self._last = self._evict_pending(pending, remaining)
        evicted = [pod.key for pod in pending if self.removals.result_of(pod).is_done]
        return (
            dict.fromkeys(accepted, _ACCEPTED)
            | dict.fromkeys(evicted, _EVICTED)
            | not_evictable
            | {pod.key: why for pod in pending if (why := self._last.blocked.get(pod.key))}
        )

    def delete(self, remaining: Sequence[pod_object.Pod]) -> dict[str, str]:
        """Delete the remaining pods by force; return why others stay for now; as ``evict``."""
        self.removals.successors.refuse_more(filter(self.removals.is_pending, remaining))
        if not_evictable := eviction_rules.not_evictable(remaining):
            return not_evictable
        pending = [pod for pod in remaining if self.removals.is_pending(pod)]
        if pending and not self._last.has_begun:
            self._last = _Round(has_begun=True)
            message = f"deleting by force {_names(pending)}"
            self._enter(message)
            text = f"{self.attempt.status.title}: {message}"
            self.attempt.deps.node.emit(reason="ForcedDrain", message=text, is_warning=True)
        listing = pod_removal.Listing(remaining=remaining, began_s=self._now_s(), is_forced=True)
        return self.removals.remove_each(pending, listing)

    def why_incomplete(
        self, remaining: Sequence[pod_object.Pod], *, has_evicted: bool
    ) -> tuple[reasons.Reason, str]:
        """Return why a drain did not finish in time, with a clause for the message."""
        staying = [pod for pod in remaining if not pod.is_terminating]
        failed = [error for pod in staying if (error := self.removals.result_of(pod).error)]
        if self._last.error and self._last.may_list_budgets:
            failed.append(self._last.error)
        if failed:
            # A missing right comes first: only a person can grant it.
            failed.sort(key=lambda error: error.reason is not reasons.Reason.FORBIDDEN)
            return failed[0].reason, failed[0].message
        is_waiting = len(staying) == len(remaining) and not eviction_rules.not_evictable(remaining)
        if has_evicted and self.is_rolling and is_waiting:
            return self._why_stalled(remaining)
        if not self._last.may_list_budgets:
            more = "the agent may not list PodDisruptionBudgets, so they were not counted"
            return reasons.Reason.DRAIN_TIMEOUT, more
        return reasons.Reason.DRAIN_TIMEOUT, ""

    def _now_s(self) -> float:
        return self.attempt.deps.clock.monotonic()

    def _evict_pending(
        self, pending: Sequence[pod_object.Pod], remaining: Sequence[pod_object.Pod]
    ) -> _Round:
        check, error = self._check_budgets(pending)
        listing = pod_removal.Listing(remaining=remaining, began_s=self._now_s())
        uids = frozenset(pod.uid for pod in pending)
        # Other pods may have come before the first eviction, if the checks took long.
        is_checked = self.removals.count > 0 or uids <= self._last.checked_uids
        has_begun = self._last.has_begun and is_checked
        why_not = {} if has_begun else self._why_not_begun(pending, check, remaining)
        blocked = why_not or self._evict_granted(pending, check, listing)
        not_before_s = min(self.removals.result_of(pod).not_before_s for pod in pending)
        now_s = self._now_s()
        pause_s = 0.0 if listing.is_old(now_s) else pod_removal.RETRY_S
        return _Round(
            has_begun=not why_not,
            checked_uids=uids,
            blocked=blocked,
            spent=check.spent,
            error=error,
            next_s=max(now_s + pause_s, not_before_s),
        )

    def _why_not_begun(
        self,
        pending: Sequence[pod_object.Pod],
        check: eviction_rules.BudgetCheck,
        remaining: Sequence[pod_object.Pod],
    ) -> dict[str, str]:
        """Return why no pod is evicted yet: each one that is not evictable, with the reason."""
        is_whole = self.attempt.settings.policy.strategy is policies.DrainStrategy.WHOLE
        refused = dict(check.refused if is_whole else check.exhausted)
        not_evictable = eviction_rules.not_evictable(remaining) | refused
        return not_evictable or self.removals.check_each(pending)

    def _evict_granted(
        self,
        pending: Sequence[pod_object.Pod],
        check: eviction_rules.BudgetCheck,
        listing: pod_removal.Listing,
    ) -> dict[str, str]:
        """Evict as the budgets grant; return why other pods are not evicted yet."""
        if not eviction_rules.are_evictable_or_ending(listing.remaining):
            # A pod can no longer be evicted, so evicting others would be in vain.
            return dict(check.refused)
        batch = pending
        if check.refused:
            batch = [pod for pod in check.rolling if self.removals.why_paused(pod) is None]
            if batch:
                more = len(pending) - len(batch)
                self._enter(f"rolling drain: evicting {_names(batch)}; {more} more to evict")
        evict = self.removals.remove_each
        # Pods without a controller go once the budgets grant all others.
        blocked = evict((pod for pod in batch if pod.owner_kind), listing)
        if not blocked:
            blocked = evict((pod for pod in batch if not pod.owner_kind), listing)
        return dict(check.refused) | blocked

    def _check_budgets(
        self, pods: Sequence[pod_object.Pod]
    ) -> tuple[eviction_rules.BudgetCheck, errors.ClusterError | None]:
        """Check what the budgets grant: all, if the agent may not list them."""
        if not self._last.may_list_budgets:
            return eviction_rules.check_budgets(pods, ()), self._last.error
        try:
            budgets = self.attempt.deps.workloads.budgets({pod.namespace for pod in pods})
        except errors.ClusterError as error:
            if error.reason is reasons.Reason.API_UNAVAILABLE:
                _log.warning("budgets_not_listed", error=error.message)
                why = f"the Kubernetes API failed to list budgets ({error.reason.value})"
                return eviction_rules.refuse_all(pods, why), error
            if error.reason is not reasons.Reason.FORBIDDEN:
                raise
            _log.warning("budgets_not_counted", error=error.message)
            return eviction_rules.check_budgets(pods, ()), error
        return eviction_rules.check_budgets(pods, budgets), None

    def _why_stalled(self, remaining: Iterable[pod_object.Pod]) -> tuple[reasons.Reason, str]:
        try:
            covered = [
                pod
                for budget in self._last.spent
                for pod in self.attempt.deps.workloads.covered_by(budget)
            ]
        except errors.ClusterError as error:
            _log.warning("successors_not_listed", error=error.message)
            return reasons.Reason.DRAIN_TIMEOUT, ""
        return eviction_rules.why_stalled(self._last.spent, covered, remaining)

    def _enter(self, message: str) -> None:
        """Publish which pods go next, and record that the run costs pods."""
        enter = self.attempt.recorder.enter
        enter(run_status.Phase.DRAIN, message, is_draining=True, has_evicted=True)


def _names(pods: Sequence[pod_object.Pod]) -> str:
    return messages.list_names([pod.key for pod in pods])
