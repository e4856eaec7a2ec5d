"""One term of a replica as leader: decide, request the layouts, and follow the requests.

The Lease is checked before every write, so that two replicas never act at once. Every write
requires that the node is unchanged, so that no request is repeated.
"""

import dataclasses
import datetime as dt
import math
from collections.abc import Iterable, Mapping, Sequence

import structlog

from mig_manager import errors, reasons
from mig_manager.adapters.kubernetes import leader, partitioner_cluster
from mig_manager.core import timing
from mig_manager.core.layout import layout_documents
from mig_manager.core.partitioning import decider, demand
from mig_manager.core.partitioning.decision import decisions, situations
from mig_manager.core.partitioning.nodes import node_index, own_clock, partitioned_nodes
from mig_manager.partitioner import (
    announcer,
    base_layouts,
    demand_signal,
    metrics,
    node_log,
    partitioner_settings,
    recommendations,
    request_follower,
    waits,
)

_RECHECK_S = 5.0  # between two decisions about the same pods: cooldowns end, and pods end
_RECHECK_SHARE = 1.0
"""Minimum pause, as a multiple of a decision's duration: decisions use half of a core at most."""
_FIRST_PAUSE_S = 2.0
_MAX_PAUSE_S = 60.0

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The dependencies that all terms of a replica share."""

    cluster: partitioner_cluster.PartitionerCluster
    leader: leader.Leader
    settings: partitioner_settings.PartitionerSettings
    clock: timing.Clock
    signal: demand_signal.DemandSignal
    telemetry: metrics.PartitionerMetrics
    document: layout_documents.Document | None = None
    """None: the base layout is generated from the GPUs."""


class Term:
    """One term of a leader, with its memory between decisions."""

    def __init__(self, parts: Parts) -> None:
        self._cluster = parts.cluster
        self._leader = parts.leader
        self._settings = settings = parts.settings
        self._clock = clock = parts.clock
        self._signal = parts.signal
        self._telemetry = telemetry = parts.telemetry
        self._announcer = announcer.Announcer(parts.cluster, parts.leader, clock)
        self._began = dt.datetime.fromtimestamp(clock.unix_s(), tz=dt.UTC)
        self._began_s = self._checked_s = clock.monotonic()
        self._history = situations.History()
        self._cache = node_index.NodeCache()
        self._own_clock = own_clock.OwnClock()
        self._follower = request_follower.RequestFollower(
            self._announcer, telemetry, clock, max_failures=settings.max_failures
        )
        self._waits = waits.Waits(telemetry)
        self._node_log = node_log.NodeLog(telemetry)
        self._bases = base_layouts.BaseLayouts(settings.base_layout, parts.document)
        self._recommended = recommendations.Recommendations()
        self._recheck_s = -math.inf  # when to decide without a change of demand
        self._resume_s = -math.inf  # when to act again after an API failure
        self._pause_s = _FIRST_PAUSE_S
        telemetry.set_pending(decisions.PartitioningDecision(), withheld=0)

    def leave_out_blind_time(self) -> None:
        """Leave out the time since the last call from the silence of agents, if no watch works."""
        now_s = self._clock.monotonic()
        passed_s, self._checked_s = now_s - self._checked_s, now_s
        if not self._cluster.is_current:
            # Agents may be without the API as well.
            self._own_clock.leave_out(passed_s)

    @property
    def next_in_s(self) -> float:
        """Seconds until a decision is due, at most 0 if one is."""
        if not self._cluster.is_current:
            return _RECHECK_S
        now_s, quiet_in_s = self._clock.monotonic(), self._signal.quiet_in_s()
        next_in_s = self._recheck_s - now_s if quiet_in_s is None else quiet_in_s
        return max(next_in_s, self._resume_s - now_s)

    def decide(self) -> None:
        """Decide, and request or recommend the changes."""
        began_s = self._clock.monotonic()
        # The wall clock is read only once a term, because it can be set.
        now = self._began + dt.timedelta(seconds=began_s - self._began_s)
        self._signal.clear()
        nodes, pending = self._nodes_and_pending(now)
        situation = situations.Situation(
            index=node_index.NodeIndex(nodes, self._cache),
            limits=self._settings.limits,
            now=now,
            history=self._history,
        )
        likely = self._likely(began_s, situation.index)
        decision = decider.decide(situation, pending, base=self._bases.of(nodes), expected=likely)
        took_s = self._clock.monotonic() - began_s
        self._telemetry.decisions.inc()
        self._node_log.report_unusable(nodes)
        self._node_log.report_resting(situation, has_pending=bool(pending))
        self._follower.follow(nodes, now)
        results = self._carry_out(decision.changes[: self._follower.allowance()])
        self._history = situation.after(
            dataclasses.replace(decision, changes=tuple(results[metrics.ChangeResult.REQUESTED])),
            # The API server may have the request; then its pods need no room elsewhere.
            uncertain=(
                *results[metrics.ChangeResult.FAILED],
                *results[metrics.ChangeResult.CONFLICT],
            ),
        )
        self._report_recommendations(nodes, pending)
        withheld = self._announcer.announce_unmet(decision.unmet, pending)
        self._telemetry.set_pending(decision, withheld=withheld)
        has_failed = any(node.is_opted_in and node.agent.is_own_failure for node in nodes)
        is_unreported = self._recommended.is_unreported
        acts_at_rest = likely or self._settings.limits.merge_back_after_s
        is_at_rest = not (pending or has_failed or is_unreported or acts_at_rest)
        pause_s = math.inf if is_at_rest else max(_RECHECK_S, _RECHECK_SHARE * took_s)
        self._recheck_s = self._clock.monotonic() + pause_s

    def _nodes_and_pending(
        self, now: dt.datetime
    ) -> tuple[tuple[partitioned_nodes.PartitionedNode, ...], tuple[demand.PendingPod, ...]]:
        """Return the nodes with their pods' requests, and the pending pods."""
        waiting, bound = self._cluster.pending_and_bound(self._waits.served)
        self._waits.measure(bound, now)
        pending = self._waits.with_times(waiting, now)
        nodes = self._cluster.nodes()
        requests = self._cluster.requests
        dated = self._own_clock.with_own_times(nodes, requests, now=now)
        avoided = self._follower.whys_to_avoid()
        return tuple(self._restrict(node, avoided.get(node.name, "")) for node in dated), pending

    def _restrict(
        self, node: partitioned_nodes.PartitionedNode, avoided: str
    ) -> partitioned_nodes.PartitionedNode:
        """Mark a node that the partitioner must not change."""
        if node.is_opted_in and not self._settings.selects(node):
            return dataclasses.replace(node, is_opted_in=False)
        return dataclasses.replace(node, avoided=avoided) if avoided else node

    def _likely(self, now_s: float, index: node_index.NodeIndex) -> tuple[demand.PendingPod, ...]:
        """Return the pods to prepare for; none if nothing that is recommended is carried out."""
        if self._settings.mode is partitioner_settings.Mode.RECOMMEND:
            return ()
        within_s = self._settings.limits.prepare_for_s
        return self._cluster.arrivals.expected_pods(now_s, within_s, index)

    def _report_recommendations(
        self,
        nodes: Iterable[partitioned_nodes.PartitionedNode],
        pending: Iterable[demand.PendingPod],
    ) -> None:
        """Count how long pods wait without the recommended changes, and report that at times."""
        sums = self._recommended
        now_s = self._clock.monotonic()
        waited_s = sums.keep({node.name for node in nodes}, {pod.uid for pod in pending}, now_s)
        self._telemetry.recommended_s.inc(waited_s)
        message = sums.report(now_s)
        if message and self._announcer.announce("RepartitioningRecommended", message):
            _log.info("recommendations_reported", report=message)
            sums.begin(now_s)

    def _carry_out(
        self, requested: Sequence[decisions.NodeChange]
    ) -> Mapping[metrics.ChangeResult, Sequence[decisions.NodeChange]]:
        """Request or recommend changes; return them by result, without those not possible now."""
        results = {result: list[decisions.NodeChange]() for result in metrics.ChangeResult}
        for change in requested:
            if self._settings.mode is partitioner_settings.Mode.RECOMMEND:
                result = self._recommend(change)
            elif self._clock.monotonic() >= self._resume_s and self._leader.campaign():
                result = self._request(change)
            else:
                continue
            if result is not None:
                self._telemetry.changes.labels(result=result.value).inc()
                results[result].append(change)
        return results

    def _recommend(self, change: decisions.NodeChange) -> metrics.ChangeResult | None:
        """Recommend a change; return None if it is not new."""
        summary = announcer.summary(change)
        now_s = self._clock.monotonic()
        is_new, pods = self._recommended.add(change, summary, now_s)
        self._telemetry.recommended_pods.inc(pods)
        if not is_new:
            return None
        _log.info("layout_recommended", node=change.node, why=change.why)
        return metrics.ChangeResult.RECOMMENDED

    def _request(self, change: decisions.NodeChange) -> metrics.ChangeResult:
        try:
            is_requested = self._cluster.request(change)
        except errors.ClusterError as error:
            now_s = self._clock.monotonic()
            _log.warning("layout_not_requested", node=change.node, detail=error.message)
            if error.reason is reasons.Reason.API_UNAVAILABLE:
                self._resume_s = now_s + max(self._pause_s, error.retry_after_s or 0.0)
                self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
                return metrics.ChangeResult.FAILED
            self._follower.avoid(change.node, "the API refused or did not keep a change of it")
            return metrics.ChangeResult.REFUSED
        if not is_requested:
            # The node has changed: decide again after the watch has delivered it.
            self._signal.record_node()
            return metrics.ChangeResult.CONFLICT
        self._pause_s = _FIRST_PAUSE_S
        self._follower.await_answer(change.node)
        self._waits.record_served(change.pods)
        _log.info("layout_requested", node=change.node, why=change.why)
        self._announcer.announce_request(change)
        return metrics.ChangeResult.REQUESTED
