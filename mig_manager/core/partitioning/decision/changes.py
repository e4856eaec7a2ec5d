"""The changes that one decision requests, within the limits, and why nodes cannot change now."""

import datetime as dt
import enum
import math
from collections.abc import Mapping

from mig_manager import errors
from mig_manager.core import messages, model, steps
from mig_manager.core.fleet import node_amounts
from mig_manager.core.layout import custom_layouts
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.decision import decisions, situations, waiting
from mig_manager.core.partitioning.nodes import node_sets, partitioned_nodes
from mig_manager.core.planner import planner

_MAX_CHANGES = 8
"""In one decision: every change considers all nodes, and a leader must renew its Lease."""
_SILENCE_S = 300.0
_MAX_RUN_S = 3600.0  # the deadlines of a run end well before


class RequestResult(enum.Enum):
    """What became of a change that a decision may request."""

    REQUESTED = enum.auto()
    TOO_EARLY = enum.auto()  # the node's agent has just failed this layout
    DROPPED = enum.auto()  # it would change nothing, is impossible, or not safe


class Changes:
    """The changes of one decision; a node has at most one."""

    def __init__(self, situation: situations.Situation, nominated: node_sets.NodeSet) -> None:
        """Build it; on ``nominated`` nodes the scheduler preempts pods."""
        self._situation = situation
        self._nominated = nominated
        self._nodes = situation.index.nodes
        opted_in, now = situation.index.opted_in, situation.now
        max_changes = node_amounts.scale(situation.limits.max_unavailable, len(opted_in))
        under_change = sum(is_under_change(self._nodes[i], now=now) for i in opted_in)
        self._budget = min(_MAX_CHANGES, max_changes - under_change)
        self._requested: dict[int, decisions.NodeChange] = {}

    @property
    def requested(self) -> tuple[decisions.NodeChange, ...]:
        """The changes so far."""
        return tuple(self._requested.values())

    @property
    def is_full(self) -> bool:
        """Whether as many nodes as allowed are under change."""
        return self._budget <= 0

    @property
    def spare(self) -> int:
        """How many nodes may start a change without using up the budget."""
        return max(0, self._budget - 1)

    def can_change(self, position: int) -> bool:
        """Return whether a node can be changed now for no pod.

        A layout that its agent retries is not replaced: it gives a lost GPU that is back its
        instances.
        """
        is_retried = self._nodes[position].agent.is_retried
        return not (self.is_full or is_retried or self.why_not_now(position))

    def why_not_now(self, position: int) -> waiting.Cause | None:
        """Return why a node cannot be changed now, beside the budget; None if it can."""
        node = self._nodes[position]
        changing = waiting.WaitReason.CHANGING
        if change := self._requested.get(position):
            for_pods = " for other pods" if change.pods else ""
            return waiting.Cause(changing, f"it is being changed{for_pods}")
        if node.unusable:
            unusable = waiting.WaitReason.UNUSABLE
            return waiting.Cause(changing if node.is_changing else unusable, node.unusable)
        left_s = self._situation.cooldown_left_s(node)
        if left_s:
            text = f"it rests after a change for {math.ceil(left_s)} s more"
            return waiting.Cause(changing, text)
        if position in self._nominated:
            return waiting.Cause(changing, "the scheduler preempts pods on it")
        return None

    def request(
        self,
        position: int,
        desired: Mapping[str, model.DesiredGpu],
        why: str,
        *,
        pods: tuple[demand.PendingPod, ...] = (),
        likely: tuple[demand.Needs, ...] = (),
        is_replacement: bool = False,
    ) -> RequestResult:
        """Add a change, unless its agent has just failed this layout.

        A layout that may succeed later is requested again after a while. Its text differs, because
        the agent ignores an equal annotation.
        """
        node = self._nodes[position]
        try:
            plan = planner.plan(node.gpus, desired)
        except errors.LayoutError:
            return RequestResult.DROPPED
        document = custom_layouts.render(desired)
        # A GPU that awaits a reset has no known use.
        is_safe = all(
            step.gpu_uuid in node.in_use and step.placement not in node.in_use[step.gpu_uuid]
            for step in plan.of(steps.DestroyGpuInstance)
        )
        if self._repeats_failure(node, document.content_hash):
            return RequestResult.TOO_EARLY
        if document.content_hash == node.agent.failed_hash:
            addition = f"after {node.times.finished_at}"
            document = custom_layouts.render(desired, addition=addition)
        if (plan.is_empty and not is_replacement) or not is_safe:
            return RequestResult.DROPPED
        self._budget -= 1
        gpus = messages.ranges(gpu.gpu_index for gpu in plan.gpus)
        where = f" on GPU {', '.join(gpus)}" if gpus else ""
        self._requested[position] = decisions.NodeChange(
            node=node.name,
            version=node.version,
            layout=document.text,
            content_hash=document.content_hash,
            pods=pods,
            desired=desired,
            plan=plan,
            why=f"{why}{where}",
            likely=likely,
        )
        return RequestResult.REQUESTED

    def _repeats_failure(self, node: partitioned_nodes.PartitionedNode, content_hash: str) -> bool:
        """Return whether a layout would repeat a failure of a node's agent too early."""
        is_last = content_hash == node.agent.failed_hash
        if is_last and not (node.agent.is_repeatable and node.times.finished_at):
            return True
        return content_hash in self._situation.failures(node)


def is_under_change(node: partitioned_nodes.PartitionedNode, *, now: dt.datetime) -> bool:
    """Return whether a node counts as under change: its agent works, or soon will.

    An agent that has been silent for long must not keep all other nodes from a change. A node
    that is not ready is given up when Kubernetes evicts its pods (``DefaultTolerationSeconds``,
    300 s), but a reboot by its agent may take longer. A ready node whose agent is not is alike.
    """
    since, longest_s = node.times.requested_at, _SILENCE_S
    if since is None and not node.agent.is_rebooting:
        since = node.times.unready_at
    if since is None:
        since, longest_s = node.times.started_at, _MAX_RUN_S
    is_silent = since and (now - since).total_seconds() > longest_s
    return node.is_changing and not is_silent
