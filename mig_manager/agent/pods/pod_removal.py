"""Evict or delete single pods, and remember what became of each."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import structlog

from mig_manager import errors, reasons
from mig_manager.agent import attempts, successors
from mig_manager.core.node import eviction_rules
from mig_manager.core.objects import pod_object

RETRY_S = 5.0  # pause before retrying an eviction that the API forbade or did not answer
_OUTDATED_S = 10.0  # how long evictions may go on before the pods are listed again
_TRANSIENT = frozenset({reasons.Reason.FORBIDDEN, reasons.Reason.API_UNAVAILABLE})
"""Why the API may refuse an eviction now and grant it later."""

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodResult:
    """The last try to evict or delete a pod."""

    is_done: bool = False  # whether the pod was evicted, deleted, or gone
    not_before_s: float = 0.0  # when the pod may be tried again
    why: str = ""  # why the pod stays until then
    error: errors.ClusterError | None = None  # why the API did not decide about the pod


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The affected pods as listed, from which pods are evicted or deleted."""

    remaining: Sequence[pod_object.Pod]
    began_s: float  # when its dry runs, evictions or deletions began
    is_forced: bool = False  # whether pods are deleted

    def is_old(self, now_s: float) -> bool:
        """Return whether the pods must be listed again first."""
        return now_s >= self.began_s + _OUTDATED_S


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class PodRemovals:
    """The pods that one drain evicts or deletes."""

    attempt: attempts.Attempt
    forced: tuple[str, ...] = ()  # names of the pods that were deleted by force
    _results: dict[str, PodResult] = dataclasses.field(default_factory=dict)
    """By the UID of each pod that was tried before this deadline."""
    _evicted: dict[str, pod_object.Pod] = dataclasses.field(default_factory=dict)
    """The pods that were evicted or deleted, by UID."""

    def begin_deadline(self, pods: Iterable[pod_object.Pod]) -> None:
        """Forget earlier tries; ``pods`` are the node's when the drain began."""
        self.successors.record_first_pods(pods)
        self._results.clear()

    @property
    def count(self) -> int:
        """How many pods were evicted or deleted, also if the answer was lost."""
        return len(self._evicted)

    @property
    def progress(self) -> int:
        """How many of these pods were on the node at the start."""
        return sum(not self.successors.is_new(pod) for pod in self._evicted.values())

    @property
    def successors(self) -> successors.Successors:
        """Where the pods of this drain returned, over all its attempts."""
        return self.attempt.memory.pod_successors

    def result_of(self, pod: pod_object.Pod) -> PodResult:
        """Return the last try at a pod."""
        return self._results.get(pod.uid, PodResult())

    def is_pending(self, pod: pod_object.Pod) -> bool:
        """Return whether a pod is still to be evicted or deleted, and may be."""
        is_leaving = pod.is_terminating or self.result_of(pod).is_done
        return not (is_leaving or eviction_rules.why_not_evictable(pod))

    def why_paused(self, pod: pod_object.Pod) -> str | None:
        """Return why a pod was refused, until the server's requested pause is over."""
        last = self.result_of(pod)
        return last.why if self._now_s() < last.not_before_s else None

    def check_each(self, pods: Iterable[pod_object.Pod]) -> dict[str, str]:
        """Return why some pods cannot be evicted, by a dry run; errors as ``remove_each``."""
        return self._try_each(pods, self.attempt.deps.workloads.can_evict, verb="evict")

    def remove_each(self, pods: Iterable[pod_object.Pod], listing: Listing) -> dict[str, str]:
        """Evict pods, or delete them by force; return why some stay.

        API errors that may pass are refusals.

        Raises:
            ClusterError: The API refused the request as such.
            Superseded: Another layout is requested, or the agent stops.
        """
        verb = "delete" if listing.is_forced else "evict"
        return self._try_each(pods, functools.partial(self._remove, listing), verb=verb)

    def _try_each(
        self,
        pods: Iterable[pod_object.Pod],
        act: Callable[[pod_object.Pod], eviction_rules.EvictionResponse],
        *,
        verb: str,
    ) -> dict[str, str]:
        blocked: dict[str, str] = {}
        for pod in pods:
            if (why := self.why_paused(pod)) is not None:
                blocked[pod.key] = why
                continue
            # Evictions may take long, for example because of a slow webhook.
            self.attempt.cancel.check()
            before = self._results.pop(pod.uid, PodResult()).error
            failure: errors.ClusterError | None = None
            try:
                response = act(pod)
                why, pause_s = response.why, response.retry_after_s
                if response.answer is not eviction_rules.EvictionAnswer.BLOCKED:
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
                pause_s = max(RETRY_S, error.retry_after_s or 0.0)
            blocked[pod.key] = why
            not_before_s = self._now_s() + pause_s
            self._results[pod.uid] = PodResult(not_before_s=not_before_s, why=why, error=failure)
        return blocked

    def _remove(self, listing: Listing, pod: pod_object.Pod) -> eviction_rules.EvictionResponse:
        """Evict a pod, or delete it by force, and count it, also if the answer is lost."""
        self._record_eviction()
        # A request to record it may take long.
        if self._must_list_again(listing, pod):
            why = "the pods are listed again before its eviction"
            return eviction_rules.EvictionResponse(
                answer=eviction_rules.EvictionAnswer.BLOCKED, why=why
            )
        response = eviction_rules.EvictionResponse(answer=eviction_rules.EvictionAnswer.ACCEPTED)
        try:
            if listing.is_forced:
                self.attempt.deps.workloads.delete(pod)
                _log.warning("pod_deleted_by_force", pod=pod.key)
            else:
                response = self.attempt.deps.workloads.evict(pod)
        except errors.ClusterError as error:
            if error.may_be_done:
                self.successors.record_removed(pod)
                self._count_evicted(pod, is_forced=listing.is_forced)
            raise
        if response.answer is not eviction_rules.EvictionAnswer.BLOCKED:
            self._results[pod.uid] = PodResult(is_done=True)
            self.successors.record_removed(pod)
            if not listing.is_forced:
                _log.info("pod_evicted", pod=pod.key, answer=response.answer.value)
        if response.answer is eviction_rules.EvictionAnswer.ACCEPTED:
            self._count_evicted(pod, is_forced=listing.is_forced)
        return response

    def _now_s(self) -> float:
        return self.attempt.deps.clock.monotonic()

    def _must_list_again(self, listing: Listing, pod: pod_object.Pod) -> bool:
        """Return whether a pod may have finished, or any have become one that must stay.

        An eviction that requires the listed version of the pod would be refused for each change of
        its status, and a budget that granted it counts the pod as evicted for two minutes
        (``EvictionREST.Create`` of k8s.io/kubernetes/pkg/registry/core/pod/storage).
        """
        watched = {each.uid: each for each in self.attempt.deps.workloads.from_watch() or ()}
        latest = (watched.get(each.uid, each) for each in listing.remaining)
        is_old = listing.is_old(self._now_s())
        is_finished = watched.get(pod.uid, pod).is_finished
        return is_old or is_finished or not eviction_rules.are_evictable_or_ending(latest)

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
