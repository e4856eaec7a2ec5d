"""One term of a replica as leader: decide, request the layouts, and follow the requests.

The Lease is checked before every write, so that two replicas never act at once. Every write
requires that the node is unchanged, so that no request is repeated.
"""

import dataclasses
import datetime as dt
import math
from collections.abc import Iterable, Mapping, Sequence

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import leader
from mig_manager.adapters.kubernetes import partitioning as kubernetes
from mig_manager.core import messages, model, timestamps, timing
from mig_manager.core.layout import layouts, served
from mig_manager.core.node import well_known
from mig_manager.core.partitioning import (
    breaker,
    changes,
    decisions,
    demand,
    node_index,
    partitioned,
    partitioning,
    past_decisions,
)
from mig_manager.partitioner import announcer, demand_signal, metrics, recommendations
from mig_manager.partitioner import settings as partitioner_settings

_RECHECK_S = 5.0
"""Between two decisions about the same pods: cooldowns end, and pods end."""
_RECHECK_SHARE = 1.0
"""Minimum pause, as a multiple of a decision's duration: decisions use half of a core at most."""
_AVOID_S = 300.0
"""How long not to change a node that the API refused to change, or whose agent failed a layout:
one bad node must not fail so many requests that all stop."""
_INHERITED_S = 300.0
"""How long a new leader waits for changes that a former leader requested."""
_FIRST_PAUSE_S = 2.0
_MAX_PAUSE_S = 60.0

Base = Mapping[str, model.DesiredGpu]
"""Instances of a node's GPUs, by UUID."""

_log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the terms of a replica work with."""

    cluster: kubernetes.PartitionerCluster
    leader: leader.Leader
    settings: partitioner_settings.PartitionerSettings
    clock: timing.Clock
    signal: demand_signal.DemandSignal
    telemetry: metrics.PartitionerMetrics
    document: layouts.Document | None = None
    """None: the base layout is generated from the GPUs."""


class Term:
    """What a leader does, and remembers between decisions; the next term begins with a new one."""

    def __init__(self, parts: Parts) -> None:
        self._cluster = parts.cluster
        self._leader = parts.leader
        self._settings = parts.settings
        self._clock = parts.clock
        self._signal = parts.signal
        self._telemetry = parts.telemetry
        self._document = parts.document
        self._announcer = announcer.Announcer(parts.cluster, parts.leader, parts.clock)
        self._began = timestamps.parse(parts.clock.now_iso()) or dt.datetime.now(tz=dt.UTC)
        self._began_s = self._leads_since_s = parts.clock.monotonic()
        self._history = past_decisions.History()
        self._cache = node_index.NodeCache()
        self._recheck_s = -math.inf  # when to decide without a change of demand
        self._resume_s = -math.inf  # when to act again after an API failure
        self._pause_s = _FIRST_PAUSE_S
        self._avoided: dict[str, tuple[float, str]] = {}
        """By node: until when not to change it, and why."""
        self._pending_since: dict[str, dt.datetime] = {}
        """By UID of a pending pod; before the first decision, its creation."""
        self._own_clock = partitioned.OwnClock()
        self._unusable: dict[str, str] = {}
        """By opted-in node: why it was unusable at the last decision."""
        self._resting = frozenset[str]()
        """Opted-in nodes that rested after a change while pods were pending."""
        self._served: set[str] = set()
        """UIDs of pending pods for which a node was changed."""
        self._failed: set[str] = set()
        """Nodes whose agents failed the last request on which they reported."""
        self._awaited: set[str] = set()
        """Nodes whose agents have not reported on our request."""
        self._circuit = breaker.Breaker()
        self._recommended = recommendations.Recommendations()
        self._inherited: set[str] | None = None
        """Nodes that are changing on a former leader's request; None before the first decision."""
        self._bases: dict[str, tuple[tuple[model.Gpu, ...], Base]] = {}
        """By node: its GPUs, and the base layout on them."""
        self._telemetry.set_pending(decisions.PartitioningDecision(), withheld=0)
        self._telemetry.stopped.set(0)
        self._telemetry.resting.set(0)

    def next_in_s(self) -> float:
        """Return the seconds until a decision is due, at most 0 if one is."""
        if not self._cluster.is_current:
            # Agents may have been without the API as well: their silence counts from then on.
            self._own_clock = partitioned.OwnClock()
            return _RECHECK_S
        now_s = self._clock.monotonic()
        quiet_in_s = self._signal.quiet_in_s()
        next_in_s = self._recheck_s - now_s if quiet_in_s is None else quiet_in_s
        return max(next_in_s, self._resume_s - now_s)

    def decide(self) -> None:
        """Decide, and request or recommend the changes."""
        began_s = self._clock.monotonic()
        # The wall clock is read only once a term, because it can be set.
        now = self._began + dt.timedelta(seconds=began_s - self._began_s)
        self._signal.clear()
        nodes, pending = self._observe(began_s, now)
        index = node_index.NodeIndex(nodes, self._cache)
        likely = self._likely(began_s, index)
        decision = partitioning.decide(
            index,
            pending,
            self._settings.limits,
            now=now,
            history=self._history,
            base=self._base_of(nodes),
            expected=likely,
        )
        took_s = self._clock.monotonic() - began_s
        self._telemetry.decisions.inc()
        self._log_unusable(nodes)
        self._report_resting(nodes, now, has_pending=bool(pending))
        self._follow(nodes, now)
        outcomes = [(each, self._carry_out(each)) for each in self._acceptable(decision)]
        requested = tuple(
            each for each, result in outcomes if result is metrics.ChangeResult.REQUESTED
        )
        room = {uid: dict(since) for uid, since in decision.room_since.items()}
        for change, result in outcomes:
            # The API server may have the request; then its pods need no room elsewhere.
            for pod in (
                change.pods
                if result in (metrics.ChangeResult.FAILED, metrics.ChangeResult.CONFLICT)
                else ()
            ):
                room.setdefault(pod.uid, {})[change.node] = now
        done = dataclasses.replace(decision, changes=requested, room_since=room)
        self._history = past_decisions.remember(self._history, nodes, pending, done, now=now)
        self._report_recommendations(nodes, pending)
        withheld = self._announcer.announce_unmet(decision.unmet, pending)
        self._telemetry.set_pending(decision, withheld=withheld)
        has_failed = any(node.is_opted_in and node.is_own_failure for node in nodes)
        is_unreported = self._recommended.is_unreported
        acts_at_rest = likely or self._settings.limits.merge_back_after_s
        is_at_rest = not (pending or has_failed or is_unreported or acts_at_rest)
        pause_s = math.inf if is_at_rest else max(_RECHECK_S, _RECHECK_SHARE * took_s)
        self._recheck_s = self._clock.monotonic() + pause_s

    def _observe(
        self, now_s: float, now: dt.datetime
    ) -> tuple[tuple[partitioned.PartitionedNode, ...], tuple[demand.Pending, ...]]:
        """Return the nodes with their pods' requests, and the pending pods."""
        for uid in self._cluster.bound(self._served):
            waited = now - self._pending_since[uid]
            self._telemetry.wait_s.observe(waited.total_seconds())
        pending = tuple(
            dataclasses.replace(pod, pending_since=self._since(pod, now))
            for pod in self._cluster.pending()
        )
        self._pending_since = {pod.uid: self._since(pod, now) for pod in pending}
        self._served &= self._pending_since.keys()
        self._avoided = {name: each for name, each in self._avoided.items() if each[0] > now_s}
        nodes = partitioned.with_pods(self._cluster.nodes(), self._cluster.requests)
        dated = self._own_clock.with_own_times(nodes, now=now)
        return tuple(map(self._mark_unusable, dated)), pending

    def _since(self, pod: demand.Pending, now: dt.datetime) -> dt.datetime:
        """Return since when a pod is pending: a gate can end long after the creation."""
        is_first = self._inherited is None
        begin = min(pod.created_at, now) if is_first and pod.created_at else now
        return self._pending_since.get(pod.uid, begin)

    def _likely(self, now_s: float, index: node_index.NodeIndex) -> tuple[demand.Pending, ...]:
        """Return the pods to prepare for; none if nothing that is recommended is carried out."""
        if self._settings.mode is partitioner_settings.Mode.RECOMMEND:
            return ()
        within_s = self._settings.limits.prepare_for_s
        return self._cluster.arrivals.expected_pods(now_s, within_s, index)

    def _mark_unusable(self, node: partitioned.PartitionedNode) -> partitioned.PartitionedNode:
        """Mark a node that the partitioner must not change."""
        if node.is_opted_in and not self._settings.selects(node):
            return dataclasses.replace(node, is_opted_in=False)
        if node.name in self._avoided:
            return dataclasses.replace(node, avoided=self._avoided[node.name][1])
        return node

    def _log_unusable(self, nodes: tuple[partitioned.PartitionedNode, ...]) -> None:
        """Log new reasons why opted-in nodes are unusable: no Event on a pod mentions them."""
        unusable = {
            node.name: node.unusable
            for node in nodes
            if node.is_opted_in and node.unusable and not node.is_changing
        }
        for name, why in unusable.items():
            if self._unusable.get(name) != why:
                _log.warning("node_unusable", node=name, why=why)
        self._unusable = unusable

    def _report_resting(
        self,
        nodes: tuple[partitioned.PartitionedNode, ...],
        now: dt.datetime,
        *,
        has_pending: bool,
    ) -> None:
        """Count the nodes that rest after a change, and log why pods may wait for them."""
        limits, history = self._settings.limits, self._history
        resting = [
            (node, left_s)
            for node in nodes
            if node.is_opted_in and not node.unusable
            if (left_s := past_decisions.cooldown_left_s(node, limits, history, now=now))
        ]
        self._telemetry.resting.set(len(resting))
        for node, left_s in resting if has_pending else ():
            if node.name not in self._resting:
                is_own = node.served == history.requested.get(node.name)
                _log.info("node_resting", node=node.name, for_s=round(left_s, 1), is_own=is_own)
        self._resting = frozenset(node.name for node, _ in resting if has_pending)

    def _follow(self, nodes: tuple[partitioned.PartitionedNode, ...], now: dt.datetime) -> None:
        """Count the outcomes of requests, and follow a former leader's requests."""
        opted_in = [node for node in nodes if node.is_opted_in]
        changing = {node.name for node in opted_in if node.is_changing}
        custom = [
            node
            for node in opted_in
            if node.labels.get(well_known.CONFIG_LABEL) == well_known.CUSTOM_LAYOUT
        ]
        # A person may have requested another layout meanwhile.
        answered = [node for node in custom if node.name in self._awaited - changing]
        for node in answered:
            answer = "failed" if node.failed_hash else "applied"
            self._telemetry.answers.labels(result=answer).inc()
            if not node.failed_hash:
                self._failed.discard(node.name)
                continue
            # An instance can come into use just before a change; twice in a row is no accident.
            if node.name in self._failed or not node.is_repeatable:
                self._avoid(node.name, "its agent failed a layout a short time ago")
            self._failed.add(node.name)
        self._stop_or_resume(answered)
        self._awaited &= {node.name for node in opted_in if changes.is_under_change(node, now=now)}
        if self._inherited is None:
            # A person's request, or a dead node, has no pods of a former leader.
            self._inherited = {node.name for node in custom if node.is_ready}
            self._leads_since_s = self._clock.monotonic()
        self._inherited &= changing

    def _stop_or_resume(self, answered: Sequence[partitioned.PartitionedNode]) -> None:
        """Stop requests if agents failed too many, and resume them after a success."""
        failed = sorted(node.name for node in answered if node.failed_hash)
        before = self._circuit
        self._circuit = now = before.after(
            applied=len(answered) - len(failed),
            failed=len(failed),
            most=self._settings.max_failures,
            now_s=self._clock.monotonic(),
        )
        if now.resumes_at_s > before.resumes_at_s:
            _log.warning("requests_stopped", for_s=now.stop_s, nodes=failed)
            message = (
                f"agents failed too many requests, last of {messages.list_names(failed)}: no "
                f"layout is requested for {now.stop_s / 60:g} min, then one at a time"
            )
            self._announcer.announce("PartitioningStopped", message, is_warning=True)
        elif before.stop_s and not now.stop_s:
            _log.info("requests_resumed")
            message = "an agent applied a layout: requests are resumed"
            self._announcer.announce("PartitioningResumed", message)
        self._telemetry.stopped.set(bool(now.stop_s))

    def _report_recommendations(
        self,
        nodes: Iterable[partitioned.PartitionedNode],
        pending: Iterable[demand.Pending],
    ) -> None:
        """Count how long pods wait without the recommended changes, and report that at times."""
        sums, now_s = self._recommended, self._clock.monotonic()
        waited_s = sums.keep({node.name for node in nodes}, {pod.uid for pod in pending}, now_s)
        self._telemetry.recommended_s.inc(waited_s)
        message = sums.report(now_s)
        if message and self._announcer.announce("RepartitioningRecommended", message):
            _log.info("recommendations_reported", report=message)
            sums.begin(now_s)

    def _acceptable(
        self, decision: decisions.PartitioningDecision
    ) -> tuple[decisions.NodeChange, ...]:
        """Return the changes to make now: none until a former leader's changes have ended.

        Only that leader knew the pods of its changes. Few or none while agents fail requests.
        """
        age_s = self._clock.monotonic() - self._leads_since_s
        is_waiting = self._inherited and age_s < _INHERITED_S
        most = self._circuit.allowance(len(self._awaited), now_s=self._clock.monotonic())
        return () if is_waiting else decision.changes[:most]

    def _carry_out(self, change: decisions.NodeChange) -> metrics.ChangeResult | None:
        """Request or recommend a change; return the result, None if neither was possible."""
        result = None
        if self._settings.mode is partitioner_settings.Mode.RECOMMEND:
            is_new, pods = self._recommended.add(
                change, announcer.summary(change), self._clock.monotonic()
            )
            self._telemetry.recommended_pods.inc(pods)
            if is_new:
                _log.info("layout_recommended", node=change.node, why=change.why)
                result = metrics.ChangeResult.RECOMMENDED
        elif self._clock.monotonic() >= self._resume_s and self._leader.campaign():
            result = self._request(change)
        if result is not None:
            self._telemetry.changes.labels(result=result.value).inc()
        return result

    def _request(self, change: decisions.NodeChange) -> metrics.ChangeResult:
        try:
            is_requested = self._cluster.request(change)
        except errors.ClusterError as error:
            now_s = self._clock.monotonic()
            _log.warning("layout_not_requested", node=change.node, detail=error.message)
            if error.reason is errors.Reason.API_UNAVAILABLE:
                self._resume_s = now_s + max(self._pause_s, error.retry_after_s or 0.0)
                self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
                return metrics.ChangeResult.FAILED
            self._avoid(change.node, "the API refused to change it")
            return metrics.ChangeResult.REFUSED
        if not is_requested:
            # The node has changed: decide again after the watch has delivered it.
            self._signal.note_node()
            return metrics.ChangeResult.CONFLICT
        self._pause_s = _FIRST_PAUSE_S
        self._awaited.add(change.node)
        self._served.update(pod.uid for pod in change.pods)
        _log.info("layout_requested", node=change.node, why=change.why)
        self._announcer.announce_request(change)
        return metrics.ChangeResult.REQUESTED

    def _avoid(self, name: str, why: str) -> None:
        self._avoided[name] = self._clock.monotonic() + _AVOID_S, why

    def _base_of(self, nodes: tuple[partitioned.PartitionedNode, ...]) -> Mapping[str, Base]:
        """Return the base layout for every opted-in node; empty if it does not fit."""
        name, bases = self._settings.base_layout, {}
        for node in nodes if name else ():
            base = self._bases.get(node.name)
            if not node.is_opted_in or not node.gpus:
                continue
            if base is None or base[0] != node.gpus:
                base = self._bases[node.name] = node.gpus, self._base(str(name), node)
            bases[node.name] = base[1]
        self._bases = {node: self._bases[node] for node in bases}
        return bases

    def _base(self, name: str, node: partitioned.PartitionedNode) -> Base:
        try:
            return served.desired_gpus(name, self._document, node.gpus)
        except errors.LayoutError as error:
            _log.warning("base_layout_does_not_fit", node=node.name, detail=error.message)
            return {}
