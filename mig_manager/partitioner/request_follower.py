"""Follow requested layouts: avoid nodes that failed, stop if many fail, adopt a past leader's."""

import datetime as dt
from collections.abc import Mapping, Sequence

import structlog

from mig_manager.core import messages, timing
from mig_manager.core.objects import well_known
from mig_manager.core.partitioning import breaker
from mig_manager.core.partitioning.decision import changes
from mig_manager.core.partitioning.nodes import partitioned_nodes
from mig_manager.partitioner import announcer, metrics

_AVOID_S = 240.0
"""How long not to change a node that the API refused to change, or whose agent failed a layout:
one bad node must not fail so many requests that all stop. It is shorter than ``ROOM_TIMEOUT_S``,
after which the layout is requested again: meanwhile the node serves other pods."""
_INHERITED_S = 300.0  # how long a new leader waits for changes that a former leader requested

_log = structlog.get_logger()


class RequestFollower:
    """Follows the requests of one term."""

    def __init__(
        self,
        events: announcer.Announcer,
        telemetry: metrics.PartitionerMetrics,
        clock: timing.Clock,
        *,
        max_failures: int,
    ) -> None:
        self._announcer = events
        self._telemetry = telemetry
        self._clock = clock
        self._max_failures = max_failures
        self._avoided: dict[str, tuple[float, str]] = {}
        """By node: until when not to change it, and why."""
        self._failed: set[str] = set()
        """Nodes whose agents failed the last request on which they reported."""
        self._awaited: set[str] = set()
        """Nodes whose agents have not reported on our request."""
        self._circuit = breaker.Breaker()
        self._inherited: set[str] | None = None
        """Nodes that are changing on a former leader's request; None before the first decision."""
        self._leads_since_s = clock.monotonic()
        self._telemetry.stopped.set(0)

    def await_answer(self, name: str) -> None:
        """Await the answer of a node's agent to a request."""
        self._awaited.add(name)

    def avoid(self, name: str, why: str) -> None:
        """Leave a node alone for a while."""
        self._avoided[name] = self._clock.monotonic() + _AVOID_S, why

    def whys_to_avoid(self) -> Mapping[str, str]:
        """Return why nodes are left alone now, by name."""
        now_s = self._clock.monotonic()
        self._avoided = {name: each for name, each in self._avoided.items() if each[0] > now_s}
        return {name: why for name, (_, why) in self._avoided.items()}

    def allowance(self) -> int | None:
        """Return how many changes may be requested now; None: any number.

        0 until a former leader's changes have ended, because only that leader knew their pods.
        Few or none while agents fail requests.
        """
        now_s = self._clock.monotonic()
        if self._inherited and now_s - self._leads_since_s < _INHERITED_S:
            return 0
        return self._circuit.allowance(len(self._awaited), now_s=now_s)

    def follow(self, nodes: Sequence[partitioned_nodes.PartitionedNode], now: dt.datetime) -> None:
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
            answer = "failed" if node.agent.failed_hash else "applied"
            self._telemetry.answers.labels(result=answer).inc()
            if not node.agent.failed_hash:
                self._failed.discard(node.name)
                continue
            # An instance can come into use just before a change; twice in a row is no accident.
            if node.name in self._failed or not node.agent.is_repeatable:
                self.avoid(node.name, "its agent failed a layout a short time ago")
            self._failed.add(node.name)
        self._stop_or_resume(answered)
        self._awaited &= {node.name for node in opted_in if changes.is_under_change(node, now=now)}
        if self._inherited is None:
            # A person's request, or a dead node, has no pods of a former leader.
            self._inherited = {node.name for node in custom if node.is_ready}
            self._leads_since_s = self._clock.monotonic()
        self._inherited &= changing

    def _stop_or_resume(self, answered: Sequence[partitioned_nodes.PartitionedNode]) -> None:
        """Stop requests if agents failed too many, and resume them after a success."""
        failed = sorted(node.name for node in answered if node.agent.failed_hash)
        before = self._circuit
        self._circuit = now = before.after(
            applied=len(answered) - len(failed),
            failed=len(failed),
            max_failures=self._max_failures,
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
