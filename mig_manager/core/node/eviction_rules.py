"""Which pods can be evicted: answers of the Eviction API, and the PodDisruptionBudgets.

The Eviction API answers for one pod at a time, and a dry run does not use up a budget. Where a
budget covers two pods and allows one disruption, a dry run of each eviction succeeds. So budgets
are counted here, by the rules of the API server (kubernetes/kubernetes,
``pkg/registry/core/pod/storage/eviction.go``).
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mig_manager import reasons
from mig_manager.core import messages
from mig_manager.core.objects import pod_object, selectors, well_known


class EvictionAnswer(enum.Enum):
    """The outcome of one attempt to evict a pod."""

    ACCEPTED = "accepted"
    GONE = "gone"
    BLOCKED = "blocked"
    """Not possible now: a budget or a webhook refuses it, or the pods must be listed again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvictionResponse:
    """The outcome of an eviction, and when to try again."""

    answer: EvictionAnswer
    why: str = ""  # the explanation if it is BLOCKED
    retry_after_s: float = 0.0  # how long the server asks to wait before the next attempt


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A PodDisruptionBudget with the status that the disruption controller gave it."""

    namespace: str
    name: str
    selector: tuple[selectors.Requirement, ...] | None
    """Empty: every pod of the namespace (policy/v1); None: no pod."""
    allowed: int  # ``disruptionsAllowed``: how many evictions it grants now
    healthy: int
    desired: int
    is_current: bool = True
    """Whether the status belongs to the current spec; the API server refuses until then."""
    always_allows_unready: bool = False  # ``unhealthyPodEvictionPolicy: AlwaysAllow``

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"

    @property
    def label_selector(self) -> str:
        """Its selector in the form of a query; meaningless if it selects no pod."""
        return ",".join(str(requirement) for requirement in self.selector or ())

    def covers(self, pod: pod_object.Pod) -> bool:
        """Return whether the budget selects a pod."""
        return (
            self.selector is not None
            and pod.namespace == self.namespace
            and all(requirement.matches(pod.labels) for requirement in self.selector)
        )

    def is_used_by(self, pod: pod_object.Pod) -> bool:
        """Return whether the eviction of a covered pod counts as a disruption."""
        if pod.is_ready:
            return True
        return not (self.always_allows_unready or self.healthy >= self.desired > 0)

    @property
    def refusal(self) -> str:
        """Why it grants no eviction now."""
        if not self.is_current:
            return f"PodDisruptionBudget {self.name} is still being processed"
        return (
            f"PodDisruptionBudget {self.name} needs {self.desired} healthy pods "
            f"and has {self.healthy}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BudgetCheck:
    """Which evictions of a set of pods the budgets grant."""

    rolling: pod_object.Pods
    """Pods that can be evicted now and whose budget covers more pods than it grants."""
    refused: Mapping[str, str]
    """Key of a pod -> why it cannot be evicted together with all others; empty: all can."""
    exhausted: Mapping[str, str]  # the part of ``refused`` whose budget grants no eviction at all
    spent: tuple[Budget, ...]  # the budgets that refuse


def check_budgets(pods: Sequence[pod_object.Pod], budgets: Iterable[Budget]) -> BudgetCheck:
    """Check which evictions all budgets grant; each budget serves the first pods first."""
    budgets = tuple(budgets)
    refused: dict[str, str] = {}
    exhausted: dict[str, str] = {}
    members: dict[str, list[pod_object.Pod]] = {}
    for pod in pods:
        # The API server ignores budgets for a pod that does not run.
        runs = not (pod.phase == "Pending" or pod.is_finished)
        guards = [budget for budget in budgets if runs and budget.covers(pod)]
        if len(guards) > 1:
            names = " and ".join(sorted(budget.name for budget in guards))
            why = f"PodDisruptionBudgets {names} both cover it, and the API evicts no such pod"
            refused[pod.key] = exhausted[pod.key] = why
        elif guards and guards[0].is_used_by(pod):
            members.setdefault(guards[0].key, []).append(pod)
    rolling: list[pod_object.Pod] = []
    spent: list[Budget] = []
    for budget in budgets:
        guarded = members.get(budget.key, [])
        room = max(0, budget.allowed) if budget.is_current else 0
        if len(guarded) <= room:
            continue
        spent.append(budget)
        why = budget.refusal
        if room:
            why = f"PodDisruptionBudget {budget.name} allows {room} of {len(guarded)} evictions"
        bare = sum(pod.owner_kind is None for pod in guarded)
        if bare > room > 0:
            # The budget would never grant the last of them.
            why, room = f"{why}, and nothing replaces {bare} of the pods", 0
        rolling += guarded[:room]
        refused |= {pod.key: why for pod in guarded[room:]}
        exhausted |= {pod.key: why for pod in guarded if not room}
    return BudgetCheck(
        rolling=tuple(rolling), refused=refused, exhausted=exhausted, spent=tuple(spent)
    )


def refuse_all(pods: Iterable[pod_object.Pod], why: str) -> BudgetCheck:
    """Refuse all evictions, while the budgets are unknown."""
    refused = {pod.key: why for pod in pods}
    return BudgetCheck(rolling=(), refused=refused, exhausted=refused, spent=())


def why_not_evictable(pod: pod_object.Pod) -> str:
    """Return why a pod is neither evicted nor deleted by force; empty if it may be."""
    if pod.is_unlisted:
        return "kubelet still has it, but the API server does not"
    if pod.is_unbound:
        return "it is not bound to the node yet, and its ResourceClaim has a device of it"
    if pod.is_terminating:
        return ""
    if pod.is_mirror:
        return "a static pod cannot be evicted"
    if pod.is_kept:
        return f"its annotation {well_known.KEEP_ANNOTATION} forbids the eviction"
    return ""


def are_evictable_or_ending(pods: Iterable[pod_object.Pod]) -> bool:
    """Return whether all pods may leave during a drain that has evicted a pod.

    A pod that only kubelet lists since then was deleted by force, and ends like the others.
    """
    return not any(why_not_evictable(pod) for pod in pods if not pod.is_unlisted)


def not_evictable(pods: Iterable[pod_object.Pod]) -> dict[str, str]:
    """Return why pods are not evictable, by their keys."""
    return {pod.key: why for pod in pods if (why := why_not_evictable(pod))}


def why_stalled(
    spent: Iterable[Budget],
    covered: Iterable[pod_object.Pod],
    remaining: Iterable[pod_object.Pod],
) -> tuple[reasons.Reason, str]:
    """Return why a rolling drain does not go on, with a clause for the message.

    DRAIN_STALLED: evicted pods have no successor, or no node has room for it. DRAIN_TIMEOUT: their
    successors are not ready yet.

    Args:
        spent: The budgets that did not grant all evictions.
        covered: The pods that they cover, on any node or unscheduled.
        remaining: The pods that were not evicted.
    """
    uids = {pod.uid for pod in remaining}
    unready = [
        pod
        for pod in covered
        if pod.uid not in uids and not (pod.is_ready or pod.is_finished or pod.is_terminating)
    ]
    unscheduled = [pod.key for pod in unready if not pod.node_name]
    if unscheduled:
        names = messages.list_names(unscheduled)
        return reasons.Reason.DRAIN_STALLED, f"no node has room for {names}"
    if unready:
        names = messages.list_names([pod.key for pod in unready])
        return reasons.Reason.DRAIN_TIMEOUT, f"not ready yet elsewhere: {names}"
    keys = ", ".join(sorted({budget.key for budget in spent}))
    return reasons.Reason.DRAIN_STALLED, f"no pod replaces those evicted (budgets: {keys})"


def parse_budget(item: Mapping[str, Any]) -> Budget:
    """Parse a PodDisruptionBudget; see ``api_values.as_cluster_error`` for its exceptions."""
    metadata = item["metadata"]
    spec, status = item.get("spec") or {}, item.get("status") or {}
    selector, observed = spec.get("selector"), int(status.get("observedGeneration") or 0)
    return Budget(
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        selector=None if selector is None else selectors.parse_label_selector(selector),
        allowed=int(status.get("disruptionsAllowed") or 0),
        healthy=int(status.get("currentHealthy") or 0),
        desired=int(status.get("desiredHealthy") or 0),
        is_current=observed >= int(metadata.get("generation") or 0),
        always_allows_unready=spec.get("unhealthyPodEvictionPolicy") == "AlwaysAllow",
    )
