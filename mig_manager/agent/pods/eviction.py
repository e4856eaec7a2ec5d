"""Evict pods as their budgets allow, or delete them by force.

If one affected pod cannot be evicted, none is. A pod cannot be evicted if it is static, its owner
forbids it, its PodDisruptionBudget grants no eviction, or two budgets cover it. In the same way,
no pod is deleted by force while a pod remains that force cannot remove.

Budgets are checked over all affected pods before the first eviction, because a dry run does not
use up a budget (see ``core.node.evictions``). If they grant all evictions, all pods go at once. If
they grant a part, the drain rolls like ``kubectl drain``: it evicts that part, and more when
successors are ready elsewhere. Other pods wait until the budgets grant the rest. Pods without a
controller have no successor and go last.

If evicted pods find no room elsewhere, the drain ends as DRAIN_STALLED: it has evicted only what
the budgets granted once. The node stays tainted until the next attempt, which evicts no pod before
the budgets grant that again.

Without the right to list budgets, the API server decides about every eviction.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts, successors
from mig_manager.core import messages
from mig_manager.core.node import evictions, policies
from mig_manager.core.objects import pod_object
from mig_manager.core.records import run_status

_log = structlog.get_logger()

_RETRY_S = 5.0  # pause before retrying an eviction that the API forbade or did not answer
_OUTDATED_S = 10.0  # how long evictions may go on before the pods are listed again
_ACCEPTED = "the API accepted its eviction, and it is not terminating"
_EVICTED = "was evicted just now"
_TRANSIENT = frozenset({reasons.Reason.FORBIDDEN, reasons.Reason.API_UNAVAILABLE})
"""Why the API may refuse an eviction now and grant it later."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PodResult:
    """The last attempt to evict or delete a pod."""

    is_done: bool = False  # whether the pod was evicted, deleted, or gone
    not_before_s: float = 0.0  # when the pod may be tried again
    why: str = ""  # why the pod stays until then
    error: errors.ClusterError | None = None  # why the API did not decide about the pod


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Evictions or deletions by one list of pods."""

    remaining: Sequence[pod_object.Pod]  # the affected pods as listed
    began_s: float  # when its dry runs, evictions or deletions began
    is_forced: bool = False

    def is_old(self, now_s: float) -> bool:
        """Return whether the pods must be listed again first."""
        return now_s >= self.began_s + _OUTDATED_S


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _RoundResult:
    """The result of a round, for the next one before the same deadline."""

    has_begun: bool = False
    """Whether all affected pods were evictable at some time, or force was announced."""
    checked_uids: frozenset[str] = frozenset()  # of the pods that were evictable then
    blocked: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Key of a pod -> why it was not evicted."""
    spent: tuple[evictions.Budget, ...] = ()  # the budgets that did not grant all evictions
    error: errors.ClusterError | None = None  # why the API did not list the budgets
    next_s: float = 0.0  # when the next round may begin

    @property
    def may_list_budgets(self) -> bool:
        """Whether the agent has the right, as far as it knows."""
        return self.error is None or self.error.reason is not reasons.Reason.FORBIDDEN


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Evictions:
    """The evictions of one drain."""

    attempt: attempts.Attempt
    forced: tuple[str, ...] = ()  # names of the pods that were deleted by force
    _by_uid: dict[str, _PodResult] = dataclasses.field(default_factory=dict)
    """The result for each pod that was tried."""
    _evicted: dict[str, pod_object.Pod] = dataclasses.field(default_factory=dict)
    """The pods that were evicted or deleted, by UID."""
    _last: _RoundResult = dataclasses.field(default_factory=_RoundResult)

    def begin_deadline(self, pods: Iterable[pod_object.Pod]) -> None:
        """Forget earlier attempts and the budgets, which force ignores, for a new deadline.

        ``pods`` are the node's when the drain began.
        """
        self._successors.record_first_pods(pods)
        self._by_uid.clear()
        self._last = _RoundResult()

    @property
    def evicted(self) -> int:
        """How many pods were evicted or deleted, also if the answer was lost."""
        return len(self._evicted)

    @property
    def progress(self) -> int:
        """How many of the evicted pods were on the node at the start."""
        return sum(not self._successors.is_new(pod) for pod in self._evicted.values())

    @property
    def is_rolling(self) -> bool:
        """Whether the budgets allowed only some of the evictions, and these are under way."""
        is_rolling = self.attempt.settings.policy.strategy is policies.DrainStrategy.ROLLING
        return is_rolling and bool(self._last.spent)

    def is_any_ready(self, remaining: Iterable[pod_object.Pod]) -> bool:
        """Return whether a pod can be evicted or deleted now."""
        is_time = self._now_s() >= self._last.next_s
        return is_time and any(map(self._is_pending, remaining))

    def evict(self, remaining: Sequence[pod_object.Pod]) -> dict[str, str]:
        """Evict the remaining pods; return why others stay for now.

        Raises:
            ClusterError: The API refused the request as such.
            DrainError: PODS_RETURN.
            Superseded: Another layout is requested, or the agent stops.
        """
        self._successors.refuse_more(filter(self._is_pending, remaining))
        not_evictable = evictions.not_evictable(remaining)
        # An admission webhook may have answered instead of the API server.
        accepted = [
            pod.key for pod in remaining if self._result_of(pod).is_done and not pod.is_terminating
        ]
        # Pods without a controller come last, because nothing starts them again. Returned pods
        # come first: if pods keep returning, fewer are evicted in vain.
        pending = sorted(
            filter(self._is_pending, remaining),
            key=lambda pod: (
                pod.owner_kind is None,
                not self._successors.include(pod),
            ),
        )
        if pending and self._now_s() >= self._last.next_s:
            self._last = self._evict_pending(pending, remaining)
        evicted = [pod.key for pod in pending if self._result_of(pod).is_done]
        return (
            dict.fromkeys(accepted, _ACCEPTED)
            | dict.fromkeys(evicted, _EVICTED)
            | not_evictable
            | {pod.key: why for pod in pending if (why := self._last.blocked.get(pod.key))}
        )

    def delete(self, remaining: Sequence[pod_object.Pod]) -> dict[str, str]:
        """Delete the remaining pods by force; return why others stay for now; as ``evict``."""
        self._successors.refuse_more(filter(self._is_pending, remaining))
        if not_evictable := evictions.not_evictable(remaining):
            return not_evictable
        pending = [pod for pod in remaining if self._is_pending(pod)]
        if pending and not self._last.has_begun:
            self._last = _RoundResult(has_begun=True)
            message = f"deleting by force {_names(pending)}"
            self._enter(message)
            text = f"{self.attempt.status.title}: {message}"
            self.attempt.deps.node.emit(reason="ForcedDrain", message=text, is_warning=True)
        current = _Round(remaining=remaining, began_s=self._now_s(), is_forced=True)
        return self._try_each(pending, functools.partial(self._remove, current), verb="delete")

    def why_incomplete(
        self, remaining: Sequence[pod_object.Pod], *, has_evicted: bool
    ) -> tuple[reasons.Reason, str]:
        """Return why a drain did not finish in time, with a clause for the message."""
        staying = [pod for pod in remaining if not pod.is_terminating]
        failed = [error for pod in staying if (error := self._result_of(pod).error)]
        if self._last.error and self._last.may_list_budgets:
            failed.append(self._last.error)
        if failed:
            # A missing right comes first: only a person can grant it.
            failed.sort(key=lambda error: error.reason is not reasons.Reason.FORBIDDEN)
            return failed[0].reason, failed[0].message
        is_waiting = len(staying) == len(remaining) and not evictions.not_evictable(remaining)
        if has_evicted and self.is_rolling and is_waiting:
            return self._why_stalled(remaining)
        if not self._last.may_list_budgets:
            more = "the agent may not list PodDisruptionBudgets, so they were not counted"
            return reasons.Reason.DRAIN_TIMEOUT, more
        return reasons.Reason.DRAIN_TIMEOUT, ""

    @property
    def _successors(self) -> successors.Successors:
        return self.attempt.memory.pod_successors

    def _now_s(self) -> float:
        return self.attempt.deps.clock.monotonic()

    def _must_list_again(self, current: _Round, pod: pod_object.Pod) -> bool:
        """Return whether a pod may have finished, or any have become one that must stay.

        An eviction that requires the listed version of the pod would be refused for each change of
        its status, and a budget that granted it counts the pod as evicted for two minutes
        (``EvictionREST.Create`` of k8s.io/kubernetes/pkg/registry/core/pod/storage).
        """
        watched = {each.uid: each for each in self.attempt.deps.workloads.from_watch() or ()}
        latest = (watched.get(each.uid, each) for each in current.remaining)
        is_old = current.is_old(self._now_s())
        is_finished = watched.get(pod.uid, pod).is_finished
        return is_old or is_finished or not evictions.are_evictable_or_ending(latest)

    def _result_of(self, pod: pod_object.Pod) -> _PodResult:
        return self._by_uid.get(pod.uid, _PodResult())

    def _is_pending(self, pod: pod_object.Pod) -> bool:
        is_leaving = pod.is_terminating or self._result_of(pod).is_done
        return not (is_leaving or evictions.why_not_evictable(pod))

    def _evict_pending(
        self, pending: Sequence[pod_object.Pod], remaining: Sequence[pod_object.Pod]
    ) -> _RoundResult:
        check, error = self._check_budgets(pending)
        current = _Round(remaining=remaining, began_s=self._now_s())
        uids = frozenset(pod.uid for pod in pending)
        # Other pods may have come before the first eviction, if the checks took long.
        is_checked = bool(self._evicted) or uids <= self._last.checked_uids
        has_begun = self._last.has_begun and is_checked
        why_not = {} if has_begun else self._why_not_begun(pending, check, remaining)
        blocked = why_not or self._evict_granted(pending, check, current)
        not_before_s = min(self._result_of(pod).not_before_s for pod in pending)
        now_s = self._now_s()
        pause_s = 0.0 if current.is_old(now_s) else _RETRY_S
        return _RoundResult(
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
        check: evictions.BudgetCheck,
        remaining: Sequence[pod_object.Pod],
    ) -> dict[str, str]:
        """Return why no pod is evicted yet: each one that is not evictable, with the reason."""
        is_whole = self.attempt.settings.policy.strategy is policies.DrainStrategy.WHOLE
        refused = dict(check.refused if is_whole else check.exhausted)
        not_evictable = evictions.not_evictable(remaining) | refused
        return not_evictable or self._try_each(pending, self.attempt.deps.workloads.can_evict)

    def _evict_granted(
        self, pending: Sequence[pod_object.Pod], check: evictions.BudgetCheck, current: _Round
    ) -> dict[str, str]:
        """Evict as the budgets grant; return why other pods are not evicted yet."""
        if not evictions.are_evictable_or_ending(current.remaining):
            # A pod can no longer be evicted, so evicting others would be in vain.
            return dict(check.refused)
        batch = pending
        if check.refused:
            batch = [pod for pod in check.rolling if self._why_paused(pod) is None]
            if batch:
                more = len(pending) - len(batch)
                self._enter(f"rolling drain: evicting {_names(batch)}; {more} more to evict")
        evict = functools.partial(self._remove, current)
        # Pods without a controller go once the budgets grant all others.
        blocked = self._try_each((pod for pod in batch if pod.owner_kind), evict)
        if not blocked:
            blocked = self._try_each((pod for pod in batch if not pod.owner_kind), evict)
        return dict(check.refused) | blocked

    def _check_budgets(
        self, pods: Sequence[pod_object.Pod]
    ) -> tuple[evictions.BudgetCheck, errors.ClusterError | None]:
        """Check what the budgets grant: all, if the agent may not list them."""
        if not self._last.may_list_budgets:
            return evictions.check_budgets(pods, ()), self._last.error
        try:
            budgets = self.attempt.deps.workloads.budgets({pod.namespace for pod in pods})
        except errors.ClusterError as error:
            if error.reason is reasons.Reason.API_UNAVAILABLE:
                _log.warning("budgets_not_listed", error=error.message)
                why = f"the Kubernetes API failed to list budgets ({error.reason.value})"
                return evictions.refuse_all(pods, why), error
            if error.reason is not reasons.Reason.FORBIDDEN:
                raise
            _log.warning("budgets_not_counted", error=error.message)
            return evictions.check_budgets(pods, ()), error
        return evictions.check_budgets(pods, budgets), None

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
        return evictions.why_stalled(self._last.spent, covered, remaining)

    def _try_each(
        self,
        pods: Iterable[pod_object.Pod],
        act: Callable[[pod_object.Pod], evictions.EvictionResponse],
        *,
        verb: str = "evict",
    ) -> dict[str, str]:
        """Evict or delete pods; return why some stay. API errors are temporary refusals."""
        blocked: dict[str, str] = {}
        for pod in pods:
            if (why := self._why_paused(pod)) is not None:
                blocked[pod.key] = why
                continue
            # Evictions may take long, for example because of a slow webhook.
            self.attempt.cancel.check()
            before = self._by_uid.pop(pod.uid, _PodResult()).error
            failure: errors.ClusterError | None = None
            try:
                response = act(pod)
                why, pause_s = response.why, response.retry_after_s
                if response.answer is not evictions.Eviction.BLOCKED:
                    continue
            except errors.ClusterError as error:
                if error.reason not in _TRANSIENT:
                    raise
                failure, reason = error, error.reason.value
                if before is None or before.reason is not error.reason:
                    _log.warning(
                        "pod_not_evicted", pod=pod.key, reason=reason, error=error.message
                    )
                is_forbidden = error.reason is reasons.Reason.FORBIDDEN
                fails = "the agent may not" if is_forbidden else "the Kubernetes API failed to"
                why = f"{fails} {verb} it ({reason})"
                pause_s = max(_RETRY_S, error.retry_after_s or 0.0)
            blocked[pod.key] = why
            not_before_s = self._now_s() + pause_s
            self._by_uid[pod.uid] = _PodResult(not_before_s=not_before_s, why=why, error=failure)
        return blocked

    def _why_paused(self, pod: pod_object.Pod) -> str | None:
        """Return why a pod was refused, until the server's requested pause is over."""
        last = self._result_of(pod)
        return last.why if self._now_s() < last.not_before_s else None

    def _remove(self, current: _Round, pod: pod_object.Pod) -> evictions.EvictionResponse:
        """Evict a pod, or delete it by force, and count it, also if the answer is lost."""
        self._record_eviction()
        # A request to record it may take long.
        if self._must_list_again(current, pod):
            why = "the pods are listed again before its eviction"
            return evictions.EvictionResponse(answer=evictions.Eviction.BLOCKED, why=why)
        response = evictions.EvictionResponse(answer=evictions.Eviction.ACCEPTED)
        try:
            if current.is_forced:
                self.attempt.deps.workloads.delete(pod)
                _log.warning("pod_deleted_by_force", pod=pod.key)
            else:
                response = self.attempt.deps.workloads.evict(pod)
        except errors.ClusterError as error:
            if error.may_be_done:
                self._successors.record_removed(pod)
                self._count_evicted(pod, is_forced=current.is_forced)
            raise
        if response.answer is not evictions.Eviction.BLOCKED:
            self._by_uid[pod.uid] = _PodResult(is_done=True)
            self._successors.record_removed(pod)
            if not current.is_forced:
                _log.info("pod_evicted", pod=pod.key, answer=response.answer.value)
        if response.answer is evictions.Eviction.ACCEPTED:
            self._count_evicted(pod, is_forced=current.is_forced)
        return response

    def _enter(self, message: str) -> None:
        """Publish which pods go next, and record it as ``_record_eviction``."""
        enter = self.attempt.recorder.enter
        enter(run_status.Phase.DRAIN, message, is_draining=True, has_evicted=True)

    def _record_eviction(self) -> None:
        """Record before the first eviction that the run costs pods.

        The record decides whether the node stays tainted, and whether a failure of the run counts.
        It comes first, because the agent may be killed, or the answer to the eviction be lost.
        """
        journal = self.attempt.journal
        if not (journal.is_draining and journal.has_evicted):
            self.attempt.recorder.publish(is_draining=True, has_evicted=True)

    def _count_evicted(self, pod: pod_object.Pod, *, is_forced: bool) -> None:
        if is_forced and pod.key not in self.forced:
            self.forced += (pod.key,)
        if pod.uid not in self._evicted:
            self._evicted[pod.uid] = pod
            self.attempt.deps.telemetry.pod_evicted()


def _names(pods: Sequence[pod_object.Pod]) -> str:
    return messages.list_names([pod.key for pod in pods])
