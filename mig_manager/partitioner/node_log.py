"""Log why opted-in nodes do not change: no Event on a pod mentions that."""

from collections.abc import Iterable

import structlog

from mig_manager.core.partitioning.decision import situations
from mig_manager.core.partitioning.nodes import partitioned_nodes
from mig_manager.partitioner import metrics

_log = structlog.get_logger()


class NodeLog:
    """Logs every reason once, and counts the nodes that rest."""

    def __init__(self, telemetry: metrics.PartitionerMetrics) -> None:
        self._telemetry = telemetry
        self._unusable: dict[str, str] = {}
        """By opted-in node: why it was unusable at the last decision."""
        self._resting = frozenset[str]()
        """Opted-in nodes that rested after a change while pods were pending."""
        self._telemetry.resting.set(0)

    def report_unusable(self, nodes: Iterable[partitioned_nodes.PartitionedNode]) -> None:
        """Log new reasons why opted-in nodes are unusable."""
        unusable = {
            node.name: node.unusable
            for node in nodes
            if node.is_opted_in and node.unusable and not node.is_changing
        }
        for name, why in unusable.items():
            if self._unusable.get(name) != why:
                _log.warning("node_unusable", node=name, why=why)
        self._unusable = unusable

    def report_resting(self, situation: situations.Situation, *, has_pending: bool) -> None:
        """Count the nodes that rest after a change, and log why pods may wait for them."""
        resting = [
            (node, left_s)
            for node in situation.index.nodes
            if node.is_opted_in
            and not node.unusable
            and (left_s := situation.cooldown_left_s(node))
        ]
        self._telemetry.resting.set(len(resting))
        for node, left_s in resting if has_pending else ():
            if node.name not in self._resting:
                request = situation.history.requests.get(node.name)
                is_own = request is not None and request.content_hash == node.agent.content_hash
                _log.info("node_resting", node=node.name, for_s=round(left_s, 1), is_own=is_own)
        self._resting = frozenset(node.name for node, _ in resting if has_pending)
