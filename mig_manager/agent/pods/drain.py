"""Evict the pods that use devices a plan destroys, and wait until they are gone.

``eviction_rounds`` decides which pods are evicted, in which order and within which budgets. API
errors during the wait do not end a drain before its deadline. Without the right to evict, as with
the GPU operator's rights, a drain waits for the pods to end, and at times tries again to evict
them.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts
from mig_manager.agent.pods import (
    device_listing,
    dra_driver,
    drain_scope,
    eviction_rounds,
    pod_removal,
)
from mig_manager.core import messages, pod_rights
from mig_manager.core.node import eviction_rules, gpu_use
from mig_manager.core.objects import pod_object

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """When a drain ends, or goes on by force."""

    at_s: float  # by the clock
    is_forced: bool = False  # whether pods are deleted by force until then


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrainState:
    """A drain, after it has listed the pods once and evicted what it may."""

    usage: gpu_use.Usage
    deadline: Deadline
    remaining: pod_object.Pods = ()  # the affected pods that were not gone before
    blocked: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Key of a pod -> why it was neither evicted nor deleted."""
    needs_plan: bool = False
    """Whether nothing was evicted, because another plan may spare pods that now got devices, or
    are not evicted yet."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A drain for one plan: evict, wait, and retry where a budget refused."""

    attempt: attempts.Attempt
    scope: drain_scope.DrainScope  # of the plan
    planned_usage: gpu_use.Usage  # the use of the devices for which the plan was made
    can_replan: bool = False  # whether to return once another plan may spare pods
    evictions: eviction_rounds.EvictionRounds  # also for earlier plans
    has_begun: bool  # whether an earlier attempt at this drain evicted pods

    @classmethod
    def start_or_continue(
        cls,
        attempt: attempts.Attempt,
        scope: drain_scope.DrainScope,
        usage: gpu_use.Usage,
    ) -> Self:
        """Return a new drain, or the next attempt at one that an earlier attempt has begun."""
        has_begun = attempt.journal.is_draining
        if not has_begun:
            attempt.memory.begin_drain()
        elif not attempt.is_repair:
            attempt.recorder.set_journal(has_evicted=True)
        removals = pod_removal.PodRemovals(attempt=attempt)
        return cls(
            attempt=attempt,
            scope=scope,
            planned_usage=usage,
            evictions=eviction_rounds.EvictionRounds(attempt=attempt, removals=removals),
            has_begun=has_begun,
        )

    def for_plan(
        self, scope: drain_scope.DrainScope, usage: gpu_use.Usage, *, can_replan: bool = False
    ) -> Self:
        """Return the drain for the next plan of the change."""
        return dataclasses.replace(self, scope=scope, planned_usage=usage, can_replan=can_replan)

    def run(self, deadline: Deadline | None = None) -> DrainState:
        """Wait until no pod uses an affected device, or until the plan is outdated.

        ``deadline`` is of the drain for an earlier plan; None: the time begins now.

        Raises:
            DrainError: The deadline passed; names every remaining pod, and why. FORBIDDEN or
                API_UNAVAILABLE if the API refused or failed to evict. PODS_RETURN.
            ClusterError: The API refused the request as such, or did not list the pods by the
                deadline.
            MigManagerError: The change may affect no pod.
            Superseded: Another layout is requested, or the agent stops.
        """
        journal_before = self.attempt.journal
        try:
            return self._run(deadline)
        finally:
            if not self.evictions.removals.count:
                # The API has refused the evictions that the journal lists.
                self.attempt.recorder.set_journal(
                    is_draining=journal_before.is_draining, has_evicted=journal_before.has_evicted
                )

    def _run(self, deadline: Deadline | None) -> DrainState:
        usage = self.planned_usage
        if self.scope.affected is not None and not self.scope.affected:
            return DrainState(usage=usage, deadline=deadline or self._new_deadline())
        if deadline is None:
            self.evictions.begin_deadline(usage.pods)
            deadline = self._new_deadline()
        state = self._wait(self._usage(usage.pods), deadline)
        if not state.deadline.is_forced and self._may_force(state.remaining):
            self.evictions.begin_deadline(usage.pods)
            forced = self._new_deadline(is_forced=True)
            state = self._wait(self._next_usage(forced, self._pauses_s()), forced)
        if state.remaining:
            raise self._timeout(state)
        return state

    def require_done(self) -> None:
        """Fail if a pod uses an affected device again; never evict.

        Raises:
            ClusterError: The API refused or does not answer.
            DrainError: Names the pods; the node does not stay tainted.
            MigManagerError: As ``run``.
        """
        workloads = self.attempt.deps.workloads
        pods = dra_driver.with_unbound(workloads, workloads.list())
        current = self._usage(pods)
        names = messages.list_names([pod.key for pod in current.users(self.scope.affected)])
        self.scope.require_allowed(names)
        if names:
            raise errors.DrainError(f"pods got devices to be removed after the drain: {names}")

    def _wait(self, usage: gpu_use.Usage, deadline: Deadline) -> DrainState:
        """Evict or delete the affected pods until they are gone, or until the deadline."""
        listing = device_listing.ListingWait(self.attempt.deps.clock)
        pauses_s = self._pauses_s()
        while True:
            state = self._evict_once(usage, deadline, listing)
            if state.needs_plan or not state.remaining or self._is_late(state.deadline):
                return state
            deadline = state.deadline
            usage = self._next_usage(deadline, pauses_s)

    def _pauses_s(self) -> Iterator[float]:
        return map(self.attempt.settings.backoff.delay_s, itertools.count())

    def _next_usage(self, deadline: Deadline, pauses_s: Iterator[float]) -> gpu_use.Usage:
        """Pause until there may be more to do than to wait; return the use then."""
        while True:
            self.attempt.cancel.pause(next(pauses_s))
            if usage := self._latest_usage(deadline):
                return usage

    def _evict_once(
        self, usage: gpu_use.Usage, deadline: Deadline, listing: device_listing.ListingWait
    ) -> DrainState:
        """Evict or delete the affected pods, unless it is better to wait or to plan again."""
        remaining = usage.users(self.scope.affected)
        if not remaining:
            return DrainState(usage=usage, deadline=deadline)
        self.attempt.cancel.check()
        progress = self.evictions.removals.progress
        blocked = self._await_listing(usage, listing)
        if not blocked and self.can_replan and self.scope.is_outdated(self.planned_usage, usage):
            if not self._is_late(deadline):
                return DrainState(usage=usage, deadline=deadline, needs_plan=True)
            # A plan may take as long as kubelet does not answer.
            why = "not evicted because the use of devices just changed"
            blocked = dict.fromkeys((pod.key for pod in remaining), why)
        if not blocked:
            delete = self.evictions.delete
            blocked = (delete if deadline.is_forced else self._evict)(remaining)
        if self.evictions.removals.progress > progress and self.evictions.is_rolling:
            # A rolling drain lasts until successors are ready.
            deadline = self._new_deadline()
        return DrainState(usage=usage, deadline=deadline, remaining=remaining, blocked=blocked)

    def _evict(self, remaining: Sequence[pod_object.Pod]) -> Mapping[str, str]:
        """Evict the pods if that is allowed; return why others stay for now."""
        keys = [pod.key for pod in remaining]
        self.scope.require_allowed(messages.list_names(keys))
        if isinstance(self.scope.rights, pod_rights.WaitOnly):
            return dict.fromkeys(keys, "--drain-policy none evicts no pod")
        return self.evictions.evict(remaining)

    def _await_listing(
        self, usage: gpu_use.Usage, listing: device_listing.ListingWait
    ) -> Mapping[str, str]:
        """Return the affected pods for which kubelet may still list other devices, with a reason.

        Empty once kubelet had the time.
        """
        undecided = usage.undecided_users(self.scope.affected)
        # Even before a short deadline, some time remains for the evictions.
        max_s = self.attempt.settings.drain_timeout_s * 3 / 4
        if not (listing.is_any_new(undecided, max_s=max_s) or usage.no_answer):
            return {}
        return {pod.key: "not evicted before its devices are known" for pod in undecided}

    def _new_deadline(self, *, is_forced: bool = False) -> Deadline:
        at_s = self.attempt.deps.clock.monotonic() + self.attempt.settings.drain_timeout_s
        return Deadline(at_s=at_s, is_forced=is_forced)

    def _is_late(self, deadline: Deadline) -> bool:
        return self.attempt.deps.clock.monotonic() >= deadline.at_s

    def _may_force(self, remaining: Sequence[pod_object.Pod]) -> bool:
        return (
            self.attempt.settings.policy.is_forced
            and isinstance(self.scope.rights, pod_rights.Evict)
            and bool(remaining)
            and not any(map(eviction_rules.why_not_evictable, remaining))
        )

    def _latest_usage(self, deadline: Deadline) -> gpu_use.Usage | None:
        """Return the usage now; None: the drain can only wait, or the API does not answer yet.

        The watch is enough for waiting. Evictions and the end of a drain need a list, because a
        watch may lag behind.
        """
        workloads = self.attempt.deps.workloads
        watched = None if self._is_late(deadline) else workloads.from_watch()
        if watched is not None and self._has_only_to_wait(self._usage(watched)):
            return None
        try:
            pods = dra_driver.list_pods(workloads, self.planned_usage.pods)
        except errors.ClusterError as error:
            if error.reason is not reasons.Reason.API_UNAVAILABLE or self._is_late(deadline):
                raise
            _log.warning("pods_not_listed", error=error.message)
            return None
        return self._usage(pods)

    def _has_only_to_wait(self, usage: gpu_use.Usage) -> bool:
        remaining = usage.users(self.scope.affected)
        only_waits = isinstance(self.scope.rights, pod_rights.WaitOnly)
        return bool(remaining) and (only_waits or not self.evictions.is_any_ready(remaining))

    def _usage(self, pods: pod_object.Pods) -> gpu_use.Usage:
        latest = self.planned_usage.with_pods(pods)
        if latest.assigned is None:
            return latest
        # If kubelet is silent now, or has just started, the drain waits and affects no more pods.
        try:
            assigned = self.attempt.deps.allocations.assigned_devices()
        except errors.KubeletError as error:
            _log.warning("pod_resources_unavailable", error=error.message)
            return dataclasses.replace(latest, no_answer=error.message)
        now = dataclasses.replace(latest, assigned=assigned, no_answer="")
        # A kubelet that has just started lists no pods for a moment. A pod keeps its devices.
        unlisted = {pod.key for pod in self.planned_usage.pods} - {
            one.key for one in assigned if one.device_ids
        }
        kept = (one for one in latest.assigned if one.key in unlisted)
        return dataclasses.replace(now, assigned=(*assigned, *kept), no_answer=now.why_incomplete)

    def _timeout(self, state: DrainState) -> errors.DrainError:
        def cause(pod: pod_object.Pod) -> str:
            ending = f"still terminating, which may take {pod.grace_s} s"
            why = state.blocked.get(pod.key) or (
                ending if pod.is_terminating else "waits for the others"
            )
            return ", ".join(filter(None, (why, state.usage.why_uncertain(pod))))

        remaining = state.remaining
        causes = messages.by_cause((pod.key, cause(pod)) for pod in remaining)
        has_evicted = self.evictions.removals.count > 0 or self.has_begun
        reason, more = self.evictions.why_incomplete(remaining, has_evicted=has_evicted)
        count = "1 pod still uses" if len(remaining) == 1 else f"{len(remaining)} pods still use"
        timeout_s = self.attempt.settings.drain_timeout_s
        by_force = ", and as long again by force" if state.deadline.is_forced else ""
        lacks_driver = any(pod.may_claim for pod in remaining) and not (
            dra_driver.has_ready(state.usage.pods)
        )
        return errors.DrainError(
            f"{count} devices to be removed after {timeout_s:g} s{by_force}: {causes}"
            + (f"; {more}" if more else ""),
            reason=reason,
            # If a pod cannot be evicted at all, the next attempt evicts none. A DRA driver returns
            # only to a node without the taint.
            keeps_taint=(
                has_evicted
                and eviction_rules.are_evictable_or_ending(remaining)
                and not lacks_driver
            ),
        )
