"""The partitioner's Prometheus metrics; docs/metrics.md explains each."""

import collections
import enum
from collections.abc import Callable

from mig_manager.adapters import metric_registry
from mig_manager.core.partitioning.decision import decisions, waiting

_BUCKETS_S = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


class ChangeResult(enum.Enum):
    """The result of a decision to change a node."""

    REQUESTED = "requested"
    RECOMMENDED = "recommended"
    CONFLICT = "conflict"  # the node has changed since the decision
    REFUSED = "refused"  # the API forbids it
    FAILED = "failed"  # the API does not answer


class PartitionerMetrics:
    """Metrics in their own registry; the loop sets and counts most of them."""

    def __init__(self, *, contact_age_s: Callable[[], float]) -> None:
        self.registry = registry = metric_registry.MetricRegistry(
            "mig_manager_partitioner", program="partitioner", contact_age_s=contact_age_s
        )
        gauge, counter = registry.gauge, registry.counter
        self.leader = gauge("leader", "1 while this replica decides and acts, else 0.")
        self.decisions = counter("decisions", "Decisions about the pending pods.")
        self.changes = counter("changes", "Changes of nodes decided on.", ("result",))
        self.answers = counter("answers", "Requests on which agents have reported.", ("result",))
        self._pending = gauge(
            "pending_pods", "Pods that wait for MIG devices, by what they wait for.", ("reason",)
        )
        self.resting = gauge("resting_nodes", "Opted-in nodes that rest after a change.")
        self._withheld = gauge("withheld_events", "Pods without room that have no Event yet.")
        self.stopped = gauge(
            "stopped", "1 while requests are stopped or on trial, because agents failed them."
        )
        self.recommended_pods = counter(
            "recommended_pods", "Pods for which a change was recommended."
        )
        self.recommended_s = counter(
            "unserved_seconds", "How long pods waited without a recommended change."
        )
        self.wait_s = registry.histogram(
            "wait_seconds",
            "How long pods waited for a node, if a node was changed for them.",
            buckets=_BUCKETS_S,
        )
        for result in ChangeResult:
            # Start at zero: increase() misses the first event of a series that appears as 1.
            self.changes.labels(result=result.value)
        for answer in ("applied", "failed"):
            self.answers.labels(result=answer)

    def set_pending(self, decision: decisions.PartitioningDecision, *, withheld: int) -> None:
        """Set the pending pods by reason, and the number of pods that lack their Event."""
        counts = collections.Counter(each.reason.value for each in decision.waiting)
        counts["change"] = sum(len(change.pods) for change in decision.changes)
        counts["no-room-possible"] = len(decision.unmet)
        for reason in (*(each.value for each in waiting.WaitReason), "change", "no-room-possible"):
            self._pending.labels(reason=reason).set(counts[reason])
        self._withheld.set(withheld)
