"""The drain policy, answers of the Eviction API, device-plugin configs by layout, and budgets.

**Time slicing beside MIG.** The device plugin picks its config, with the replicas of each device,
by the node label ``nvidia.com/device-plugin.config``; a config that suits one layout is wrong for
the next. ``--plugin-configs all-1g.5gb=sliced,*=default`` maps layouts to configs; ``*`` stands
for all other layouts, which do not change the label without it. A run writes the label when it
resumes the plugin, and restores it if it does not succeed.

**Budgets.** The Eviction API answers for one pod at a time, and a dry run does not use up a
budget: where one covers two pods and allows one disruption, a dry run of each eviction succeeds.
So budgets are counted here, by the rules of the API server (kubernetes/kubernetes,
``pkg/registry/core/pod/storage/eviction.go``).
"""

import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mig_manager import errors
from mig_manager.core.node import cluster

_ANY_LAYOUT = "*"


class Eviction(enum.Enum):
    """An answer of the Eviction API."""

    ACCEPTED = "accepted"
    GONE = "gone"
    BLOCKED = "blocked"  # 429: a PodDisruptionBudget does not allow it now


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvictionResponse:
    """The API server's answer to an eviction."""

    answer: Eviction
    why: str = ""  # the server's explanation if it is BLOCKED
    retry_after_s: float = 0.0  # how long the server asks to wait before the next attempt


class Drain(enum.Enum):
    """Which pods a change evicts."""

    AFFECTED = "affected"  # the pods that use devices to be destroyed
    NODE = "node"  # every pod of the node that has or requests a GPU
    NONE = "none"  # no pod: the change waits until the affected pods have ended


class DrainStrategy(enum.Enum):
    """How to drain if PodDisruptionBudgets grant only a part of the evictions."""

    ROLLING = "rolling"
    """Evict the granted pods, and go on when budgets grant more, as ``kubectl drain`` does."""
    WHOLE = "whole"  # evict no pod until budgets grant all evictions together


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How to drain, and the plugin configs and startup taints of layouts."""

    drain: Drain = Drain.AFFECTED
    strategy: DrainStrategy = DrainStrategy.ROLLING
    is_forced: bool = False
    """Whether remaining pods are deleted at the deadline, regardless of budgets."""
    plugin_configs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name of a layout, or ``*``, to the name of a device-plugin config."""
    startup_taints: frozenset[str] = frozenset()
    """Keys of taints that the agent removes once a layout is verified, and never adds."""

    def plugin_config(self, layout: str) -> str | None:
        """Return the plugin config for a layout; None: do not change the label."""
        return self.plugin_configs.get(layout, self.plugin_configs.get(_ANY_LAYOUT))


def parse_plugin_configs(text: str, *, origin: str) -> dict[str, str]:
    """Parse ``layout=config,layout=config``; UsageError with the origin if a pair is malformed."""
    configs: dict[str, str] = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        layout, equals, config = (part.strip() for part in pair.partition("="))
        if not (layout and equals and cluster.LABEL_VALUE.fullmatch(config)):
            hint = "LAYOUT=CONFIG with a config name that can be a label's value"
            raise errors.UsageError(f"{origin}: {pair!r} is not {hint}")
        if layout in configs:
            raise errors.UsageError(f"{origin}: layout {layout!r} is named twice")
        configs[layout] = config
    return configs


_TAINT_KEY = re.compile(
    rf"(?:(?P<domain>[a-z0-9](?:[a-z0-9.-]{{0,251}}[a-z0-9])?)/)?{cluster.LABEL_VALUE.pattern}"
)
_KUBERNETES_OWN = ("node.kubernetes.io", "node.cloudprovider.kubernetes.io", "readiness.k8s.io")
"""Domains of the taints that Kubernetes' controllers add and remove themselves."""


def parse_startup_taint(text: str) -> str:
    """Return the key of a startup taint; ValueError if invalid, or owned by another program."""
    key = text.strip()
    match = _TAINT_KEY.fullmatch(key)
    if match is None:
        raise ValueError("is not the key of a taint; write DOMAIN/NAME, without value and effect")
    if key == cluster.HOLD_TAINT:
        raise ValueError("is the agent's own taint during a change")
    if match["domain"] in _KUBERNETES_OWN:
        raise ValueError("is a taint of Kubernetes: only its controller removes it")
    return key


_OPERATORS = {
    "In": (True, False),
    "NotIn": (True, True),
    "Exists": (False, False),
    "DoesNotExist": (False, True),
}
"""Operators of a label selector: whether they have values, and whether they are negated."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One requirement of a label selector."""

    key: str
    values: frozenset[str] | None  # values of the label; None: any
    is_negated: bool = False

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether labels meet it."""
        is_met = self.key in labels if self.values is None else labels.get(self.key) in self.values
        return is_met is not self.is_negated

    def __str__(self) -> str:
        if self.values is None:
            return f"!{self.key}" if self.is_negated else self.key
        operator = "notin" if self.is_negated else "in"
        return f"{self.key} {operator} ({','.join(sorted(self.values))})"


_BETWEEN = re.compile(r",(?![^(]*\))")  # commas outside of parentheses
_KEY = r"(?P<key>[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?)"
_FORMS = (
    re.compile(rf"{_KEY}\s*(?P<negated>!?)==?\s*(?P<values>[A-Za-z0-9._-]*)"),
    re.compile(rf"{_KEY}\s+(?P<negated>not|)in\s*\((?P<values>[A-Za-z0-9._,\s-]*)\)"),
    re.compile(rf"(?P<negated>!?)\s*{_KEY}"),
)


def parse_selector(text: str) -> tuple[Requirement, ...]:
    """Parse a label selector as ``kubectl -l`` takes it; ValueError if it is invalid."""
    requirements = []
    for part in _BETWEEN.split(text) if text.strip() else ():
        match = next(filter(None, (form.fullmatch(part.strip()) for form in _FORMS)), None)
        if match is None:
            raise ValueError("is not a label selector, such as pool=a100,zone in (a,b)")
        values = match.groupdict().get("values")
        requirements.append(
            Requirement(
                key=match["key"],
                values=None
                if values is None
                else frozenset(each.strip() for each in values.split(",")),
                is_negated=bool(match["negated"]),
            )
        )
    return tuple(requirements)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A PodDisruptionBudget with the status that the disruption controller gave it."""

    namespace: str
    name: str
    selector: tuple[Requirement, ...] | None
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

    def covers(self, pod: cluster.Pod) -> bool:
        """Return whether the budget selects a pod."""
        return (
            self.selector is not None
            and pod.namespace == self.namespace
            and all(requirement.matches(pod.labels) for requirement in self.selector)
        )

    def is_used_by(self, pod: cluster.Pod) -> bool:
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
class Count:
    """The evictions, out of a set, that the budgets grant."""

    rolling: tuple[cluster.Pod, ...]
    """Pods that can be evicted now and whose budget covers more pods than it grants."""
    refused: Mapping[str, str]
    """Key of a pod -> why it cannot be evicted together with all others; empty: all can."""
    exhausted: Mapping[str, str]  # the part of ``refused`` whose budget grants no eviction at all
    spent: tuple[Budget, ...]  # the budgets that refuse


def count(pods: Sequence[cluster.Pod], budgets: Iterable[Budget]) -> Count:
    """Count the evictions that all budgets grant; each budget serves the first pods first."""
    budgets = tuple(budgets)
    refused: dict[str, str] = {}
    exhausted: dict[str, str] = {}
    members: dict[str, list[cluster.Pod]] = {}
    for pod in pods:
        # The API server ignores budgets for a pod that does not run.
        runs = not (pod.phase == "Pending" or pod.is_finished or pod.is_terminating)
        guards = [budget for budget in budgets if runs and budget.covers(pod)]
        if len(guards) > 1:
            names = " and ".join(sorted(budget.name for budget in guards))
            why = f"PodDisruptionBudgets {names} both cover it, and the API evicts no such pod"
            refused[pod.key] = exhausted[pod.key] = why
        elif guards and guards[0].is_used_by(pod):
            members.setdefault(guards[0].key, []).append(pod)
    rolling: list[cluster.Pod] = []
    spent: list[Budget] = []
    for budget in budgets:
        guarded = members.get(budget.key, [])
        room = max(0, budget.allowed) if budget.is_current else 0
        if len(guarded) <= room:
            continue
        spent.append(budget)
        rolling += guarded[:room]
        why = f"PodDisruptionBudget {budget.name} allows {room} of {len(guarded)} evictions"
        refused |= {pod.key: why if room else budget.refusal for pod in guarded[room:]}
        exhausted |= {pod.key: budget.refusal for pod in guarded if not room}
    return Count(rolling=tuple(rolling), refused=refused, exhausted=exhausted, spent=tuple(spent))


def none_granted(pods: Iterable[cluster.Pod], why: str) -> Count:
    """Return the count while the budgets are unknown."""
    refused = {pod.key: why for pod in pods}
    return Count(rolling=(), refused=refused, exhausted=refused, spent=())


def parse_budget(item: Mapping[str, Any]) -> Budget:
    """Parse a PodDisruptionBudget; see ``cluster.as_cluster_error`` for its exceptions."""
    metadata = item["metadata"]
    spec, status = item.get("spec") or {}, item.get("status") or {}
    observed = int(status.get("observedGeneration") or 0)
    return Budget(
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        selector=_selector(spec.get("selector")),
        allowed=int(status.get("disruptionsAllowed") or 0),
        healthy=int(status.get("currentHealthy") or 0),
        desired=int(status.get("desiredHealthy") or 0),
        is_current=observed >= int(metadata.get("generation") or 0),
        always_allows_unready=spec.get("unhealthyPodEvictionPolicy") == "AlwaysAllow",
    )


def _selector(selector: Mapping[str, Any] | None) -> tuple[Requirement, ...] | None:
    """Parse a ``LabelSelector``; None if it is absent."""
    if selector is None:
        return None
    requirements = [
        Requirement(key=str(key), values=frozenset({str(value)}))
        for key, value in (selector.get("matchLabels") or {}).items()
    ]
    for each in selector.get("matchExpressions") or ():
        has_values, is_negated = _OPERATORS[each["operator"]]
        values = frozenset(map(str, each.get("values") or ())) if has_values else None
        requirements.append(
            Requirement(key=str(each["key"]), values=values, is_negated=is_negated)
        )
    return tuple(requirements)
