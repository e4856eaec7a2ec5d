"""The loop of the partitioner: wait until demand is quiet, decide, request the layouts.

Only the replica that holds the Lease decides. It looks at the Lease before each write, so that two
replicas never act at once, and each write requires the node to be as it was seen, so that nothing
is asked twice.
"""

import dataclasses
import datetime as dt
import math
import threading
from collections.abc import Mapping

import structlog

from mig_manager import errors
from mig_manager.adapters.kubernetes import events, leader
from mig_manager.adapters.kubernetes import partitioning as kubernetes
from mig_manager.core import messages, model, timing
from mig_manager.core.fleet import demand, partitioning
from mig_manager.core.layout import config, served
from mig_manager.partitioner import metrics
from mig_manager.partitioner import settings as partitioner_settings

_EVENTS_AT_ONCE = 20
_EVENT_PAUSE_S = 6.0
"""After a burst ten Events a minute, whatever the number of pods."""
_REPEAT_AFTER_S = 600.0
"""Least time between two Events about one pod; the second one has another message."""
_RECHECK_S = 5.0
"""Between two decisions about the same pods: cooldowns end, and pods that end leave room."""
_RECHECK_SHARE = 10.0
"""The pause is at least so many times what a decision takes."""
_REFUSED_S = 300.0
"""How long a node is left alone after the API refused to change it."""
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 60.0
_LEAST_PAUSE_S = 0.01

Base = Mapping[str, model.DesiredGpu]
"""Instances of a node's GPUs, by UUID."""

_log = structlog.get_logger()


class Signal:
    """Wakes the loop when demand has changed, or when it must end; for any thread."""

    def __init__(self, *, quiet_s: float, longest_s: float, clock: timing.Clock) -> None:
        self._burst = timing.Burst(quiet_s=quiet_s, longest_s=longest_s)
        self._clock = clock
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self.is_over = False

    def changed(self) -> None:
        """Note a change of demand."""
        with self._lock:
            self._burst.add(self._clock.monotonic())
        self._wake.set()

    def end(self) -> None:
        """End the loop soon."""
        self.is_over = True
        self._wake.set()

    def ends_in_s(self) -> float | None:
        """Return the time until demand is quiet, 0 if it is; None without a change."""
        with self._lock:
            return self._burst.ends_in_s(self._clock.monotonic())

    def clear(self) -> None:
        """Wait for the next change."""
        with self._lock:
            self._burst.clear()

    def wait(self, seconds: float) -> None:
        """Wait for a change or the end, up to a time-out."""
        self._wake.wait(seconds)
        self._wake.clear()


class Partitioner:
    """Decides and acts while its replica leads."""

    def __init__(  # noqa: PLR0913 - what it works with
        self,
        cluster: kubernetes.Cluster,
        leadership: leader.Leader,
        settings: partitioner_settings.PartitionerSettings,
        *,
        clock: timing.Clock,
        signal: Signal,
        telemetry: metrics.Metrics,
        document: config.Document | None = None,
    ) -> None:
        """Prepare; ``document`` has the base layout, else it is generated from the GPUs."""
        self._cluster = cluster
        self._leader = leadership
        self._settings = settings
        self._clock = clock
        self._signal = signal
        self._telemetry = telemetry
        self._document = document
        self._began = messages.parse_time(clock.now_iso()) or dt.datetime.now(tz=dt.UTC)
        self._began_s = clock.monotonic()
        self._beat_s = self._began_s
        self._bases: dict[str, tuple[tuple[str, ...], Base]] = {}
        """By node: the UUIDs of its GPUs, and what the base layout is on them."""
        self._was_leader = True
        self._forget()

    @property
    def silence_s(self) -> float:
        """How long ago the loop last began a step."""
        return self._clock.monotonic() - self._beat_s

    def run(self) -> None:
        """Step until the signal ends it, then let another replica lead at once."""
        try:
            while not self._signal.is_over:
                self._signal.wait(self.step())
        finally:
            self._leader.release()

    def step(self) -> float:
        """Decide if it is time; return the seconds until the next step without a signal."""
        self._beat_s = self._clock.monotonic()
        is_leader = self._leader.campaign()
        self._telemetry.leading(is_leader=is_leader)
        if not is_leader:
            if self._was_leader:
                self._forget()
            return max(_LEAST_PAUSE_S, self._leader.next_in_s)
        self._was_leader = True
        if self._next_in_s() <= 0:
            self._decide()
        return max(_LEAST_PAUSE_S, min(self._leader.next_in_s, self._next_in_s()))

    def _forget(self) -> None:
        """Become a replica that knows nothing of what a leader did before."""
        self._was_leader = False
        self._history = partitioning.History()
        self._recheck_s = math.inf
        """When to decide though nothing has changed."""
        self._resume_s = -math.inf
        """When to act again after a failure of the API."""
        self._pause_s = _FIRST_PAUSE_S
        self._refused: dict[str, float] = {}
        """By node: until when it is left alone."""
        self._reported: dict[str, tuple[str, float]] = {}
        """By UID of a pod: the message of its last Event, and when it was published."""
        self._recommended: dict[str, str] = {}
        """By node: the layout last recommended."""
        self._allowance = timing.Allowance(burst=_EVENTS_AT_ONCE, pause_s=_EVENT_PAUSE_S)
        self._pending_since_s: dict[str, float] = {}
        """By UID of a pending pod."""
        self._served: set[str] = set()
        """UIDs of pending pods for which a node was changed."""
        self._telemetry.decided(partitioning.Decision(), withheld=0)

    def _next_in_s(self) -> float:
        if not self._cluster.is_current:
            return _RECHECK_S
        now_s = self._clock.monotonic()
        quiet_in_s = self._signal.ends_in_s()
        next_in_s = self._recheck_s - now_s if quiet_in_s is None else quiet_in_s
        return max(next_in_s, self._resume_s - now_s)

    def _decide(self) -> None:
        began_s = self._clock.monotonic()
        # Steps of the wall clock do not matter: it is read once.
        now = self._began + dt.timedelta(seconds=began_s - self._began_s)
        self._signal.clear()
        nodes, pending = self._seen(began_s, now)
        decision = partitioning.decide(
            nodes,
            pending,
            self._settings.limits,
            now=now,
            history=self._history,
            base=self._base_of(nodes),
        )
        took_s = self._clock.monotonic() - began_s
        requested = tuple(change for change in decision.changes if self._carry_out(change))
        self._history = partitioning.remember(
            self._history,
            nodes,
            pending,
            dataclasses.replace(decision, changes=requested),
            now=now,
        )
        self._telemetry.decided(decision, withheld=self._report_unmet(decision.unmet))
        self._reported = {
            pod.uid: self._reported[pod.uid] for pod in pending if pod.uid in self._reported
        }
        is_at_rest = not (pending or self._settings.limits.merge_back_after_s)
        pause_s = math.inf if is_at_rest else max(_RECHECK_S, _RECHECK_SHARE * took_s)
        self._recheck_s = self._clock.monotonic() + pause_s

    def _seen(
        self, now_s: float, now: dt.datetime
    ) -> tuple[tuple[partitioning.PartitionedNode, ...], tuple[demand.Pending, ...]]:
        """Return the nodes with what pods take on them, and the pods that wait."""
        pods = self._cluster.pods()
        bound = [pod for pod in pods if isinstance(pod, demand.Bound)]
        pending = tuple(pod for pod in pods if isinstance(pod, demand.Pending))
        placed = self._served & {pod.uid for pod in bound}
        for uid in placed:
            self._telemetry.pod_placed(now_s - self._pending_since_s[uid])
        self._pending_since_s = {
            pod.uid: self._pending_since_s.get(pod.uid, now_s) for pod in pending
        }
        self._served &= self._pending_since_s.keys()
        self._refused = {name: end for name, end in self._refused.items() if end > now_s}
        nodes = (self._permitted(node, now) for node in self._cluster.nodes())
        return partitioning.with_pods(nodes, bound), pending

    def _permitted(
        self, node: partitioning.PartitionedNode, now: dt.datetime
    ) -> partitioning.PartitionedNode:
        """Return a node without what the partitioner may not do there, or cannot believe."""
        if node.changed_at is not None and node.changed_at > now:
            # Its clock is ahead of ours; a cooldown would last until we have caught up.
            node = dataclasses.replace(node, changed_at=None)
        if node.is_opted_in and not self._settings.selects(node):
            return dataclasses.replace(node, is_opted_in=False)
        if node.name in self._refused:
            return dataclasses.replace(node, unusable="the API refused to change it")
        return node

    def _carry_out(self, change: partitioning.Change) -> bool:
        """Request a change; return whether it was requested."""
        if self._settings.mode is partitioner_settings.Mode.RECOMMEND:
            self._recommend(change)
            return False
        if self._is_pausing or not self._leader.campaign():
            return False
        try:
            is_requested = self._cluster.request(change)
        except errors.ClusterError as error:
            self._not_requested(change, error)
            return False
        if not is_requested:
            # The watch brings what has changed.
            self._telemetry.asked(metrics.Result.CONFLICT)
            self._signal.changed()
            return False
        self._pause_s = _FIRST_PAUSE_S
        self._telemetry.asked(metrics.Result.REQUESTED)
        self._served.update(pod.uid for pod in change.pods)
        _log.info("layout_requested", node=change.node, why=change.why)
        self.emit(
            events.Subject.node(change.node),
            reason="RepartitioningRequested",
            message=_summary(change),
            is_warning=False,
            about=change.version,
        )
        return True

    def _recommend(self, change: partitioning.Change) -> None:
        if self._recommended.get(change.node) == change.layout:
            return
        is_published = self._leader.campaign() and self.emit(
            events.Subject.node(change.node),
            reason="RepartitioningRecommended",
            message=_summary(change),
            is_warning=False,
            about=change.layout,
        )
        if is_published:
            self._recommended[change.node] = change.layout
            self._telemetry.asked(metrics.Result.RECOMMENDED)
            _log.info("layout_recommended", node=change.node, why=change.why)

    def _not_requested(self, change: partitioning.Change, error: errors.ClusterError) -> None:
        now_s = self._clock.monotonic()
        _log.warning("layout_not_requested", node=change.node, detail=error.message)
        if error.reason is errors.Reason.API_UNAVAILABLE:
            self._telemetry.asked(metrics.Result.FAILED)
            self._resume_s = now_s + max(self._pause_s, error.retry_after_s or 0.0)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        else:
            self._telemetry.asked(metrics.Result.REFUSED)
            self._refused[change.node] = now_s + _REFUSED_S

    @property
    def _is_pausing(self) -> bool:
        return self._clock.monotonic() < self._resume_s

    def _report_unmet(self, unmet: tuple[partitioning.Unmet, ...]) -> int:
        """Publish on pods why no node can serve them; return how many have no Event yet."""
        withheld = 0
        for each in unmet:
            pod, now_s = each.pod, self._clock.monotonic()
            message, reported_s = self._reported.get(pod.uid, ("", -math.inf))
            if message == each.message or now_s - reported_s < _REPEAT_AFTER_S:
                continue
            is_published = (
                not self._is_pausing
                and self._leader.campaign()
                and self._allowance.take(now_s)
                and self.emit(
                    events.Subject(
                        kind="Pod", name=pod.name, namespace=pod.namespace, uid=pod.uid
                    ),
                    reason="NoRoomPossible",
                    message=each.message,
                    is_warning=True,
                    about=each.message,
                )
            )
            if is_published:
                self._reported[pod.uid] = each.message, now_s
            withheld += not is_published
        return withheld

    def emit(
        self, subject: events.Subject, *, reason: str, message: str, is_warning: bool, about: str
    ) -> bool:
        """Publish an Event; return False if it should be tried again."""
        event = events.Event(
            subject=subject, reason=reason, message=message, is_warning=is_warning
        )
        try:
            self._cluster.publish(event, about=about)
        except errors.ClusterError as error:
            _log.warning("event_not_published", event_reason=reason, detail=error.message)
            if error.reason is errors.Reason.API_UNAVAILABLE:
                self._resume_s = self._clock.monotonic() + (error.retry_after_s or self._pause_s)
                return False
        return True

    def _base_of(self, nodes: tuple[partitioning.PartitionedNode, ...]) -> Mapping[str, Base]:
        """Return the base layout on each opted-in node; empty where it does not fit."""
        name, bases = self._settings.base_layout, {}
        for node in nodes if name else ():
            uuids = tuple(gpu.uuid for gpu in node.gpus)
            known = self._bases.get(node.name)
            if not node.is_opted_in or not uuids:
                continue
            if known is None or known[0] != uuids:
                known = self._bases[node.name] = uuids, self._base(str(name), node)
            bases[node.name] = known[1]
        self._bases = {node: self._bases[node] for node in bases}
        return bases

    def _base(self, name: str, node: partitioning.PartitionedNode) -> Base:
        document = self._document
        layouts = document.layouts if document else served.generated(node.gpus)
        try:
            return config.select(layouts[name], node.gpus) if name in layouts else {}
        except errors.LayoutError as error:
            _log.warning("base_layout_does_not_fit", node=node.name, detail=error.message)
            return {}


def _summary(change: partitioning.Change) -> str:
    """Return a change in words: why, what it costs, and for which pods."""
    parts = [change.why]
    for verb, counts in (("creates", change.created), ("destroys idle", change.destroyed)):
        if counts:
            amounts = (f"{count}x {profile}" for profile, count in counts.items())
            parts.append(f"{verb} {', '.join(amounts)}")
    if change.pods:
        parts.append(f"for {messages.listed(sorted(pod.key for pod in change.pods))}")
    return messages.ended(messages.joined(*parts))
