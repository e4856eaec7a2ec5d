"""Explain why pods have no room: what they wait for, or why no opted-in node can serve them."""

import enum
from collections.abc import Callable

from mig_manager.core import messages, profile_name
from mig_manager.core.fleet import batch, demand, partitioned
from mig_manager.core.node import well_known


class Wait(enum.Enum):
    """Why a pod waits; the values are a public contract."""

    SCHEDULER = "scheduler"  # a node has room, or is being changed for it
    LIMITED = "limited"  # by the budget of nodes under change
    CHANGING = "changing"  # nodes that could have room are under change, or in their cooldown
    NOT_SCHEDULED = "not-scheduled"  # it had room, and the scheduler did not place it
    IN_USE = "in-use"  # other pods use the devices
    UNUSABLE = "unusable"  # nodes that could have room are not ready, or their use is unknown


_ORDER = tuple(Wait)
Cause = tuple[Wait | None, str]
"""A reason and a message; without a reason, no change can help."""


class Causes:
    """The causes for the pods of one batch; pods with equal needs share them."""

    def __init__(
        self, pods: batch.Batch, why_not_now: Callable[[partitioned.PartitionedNode], Cause]
    ) -> None:
        """Build it; ``why_not_now`` returns why a node cannot be changed now, empty if it can."""
        self._batch = pods
        self._why_not_now = why_not_now
        self._known: dict[tuple[int, frozenset[str]], Cause] = {}
        self._has_room: dict[tuple[int, str], bool] = {}

    def why(self, rank: int, refused: frozenset[str]) -> Cause:
        """Return why a pod is not served; the scheduler did not place it on ``refused`` nodes."""
        key = self._batch.group[rank], refused
        if key not in self._known:
            self._known[key] = self._why(rank, refused)
        return self._known[key]

    def _why(self, rank: int, refused: frozenset[str]) -> Cause:
        group, own = self._batch.group[rank], []
        possible: list[tuple[Wait, str, str]] = []
        for node in self._batch.nodes:
            reason, text = self._cause(rank, node, refused)
            if reason:
                possible.append((reason, node.name, text))
            elif node.is_opted_in:
                own.append((node.name, text))
        if possible:
            possible.sort(key=lambda each: (_ORDER.index(each[0]), each[1]))
            causes = messages.by_cause((name, text) for _, name, text in possible)
            return possible[0][0], f"it waits for {causes}"
        if unknown := self._batch.needs[group].unknown:
            return None, f"no MIG profile is called {messages.listed(unknown)}"
        devices = profile_name.counted(self._batch.profiles[group])
        needed = f"it needs a node with room for {devices}"
        if not own:
            label = f"{well_known.PARTITIONING_LABEL}={well_known.ON_DEMAND}"
            return None, f"{needed}, and no node has the label {label}"
        why = messages.by_cause(own)
        return None, f"{needed}, and no opted-in node has that even if idle: {why}"

    def _cause(
        self, rank: int, node: partitioned.PartitionedNode, refused: frozenset[str]
    ) -> Cause:
        group = self._batch.group[rank]
        if never := self.why_never(group, node):
            # The node can serve the pod without a change when other pods end.
            is_enough = not demand.why_short(
                self._batch.needs[group].amounts, dict(node.allocatable)
            )
            is_served = is_enough and not self._batch.why_excluded(group, node)
            return (Wait.IN_USE, "what it has is in use") if is_served else (None, never)
        if not node.is_published:
            return Wait.UNUSABLE, node.unusable
        if node.name in refused:
            return Wait.NOT_SCHEDULED, "it had room, and the scheduler did not place the pod"
        reason, text = self._why_not_now(node)
        return (reason, text) if text else self._why_no_room(rank, node)

    def _why_no_room(self, rank: int, node: partitioned.PartitionedNode) -> Cause:
        group = self._batch.group[rank]
        available = self._batch.available[node.name]
        if short := demand.why_short(self._batch.needs[group].others, available):
            return Wait.IN_USE, f"{short} is available"
        key = self._batch.kind[group], node.name
        if key not in self._has_room:
            self._has_room[key] = self._batch.offer(node, [rank]) is not None
        if self._has_room[key]:
            return Wait.LIMITED, "as many nodes as allowed are under change"
        return Wait.IN_USE, "too much of its GPUs is in use"

    def why_never(self, group: int, node: partitioned.PartitionedNode) -> str:
        """Return why a node could not serve pods of a group, even if idle; empty if it could.

        A node with unknown GPUs could.
        """
        if not node.is_opted_in:
            return "it is not opted in"
        needs = self._batch.needs[group]
        if excluded := self._batch.why_excluded(group, node):
            return excluded
        if short := demand.why_short(needs.others, dict(node.allocatable)):
            return short
        if not node.is_published or self._batch.is_possible(group, node):
            return ""
        return self._missing(group, node) if node.gpus else node.unusable

    def _missing(self, group: int, node: partitioned.PartitionedNode) -> str:
        """Return why a node's GPUs cannot have the devices of a group."""
        for profile, count in self._batch.profiles[group].items():
            most = self._batch.most(node, profile)
            if not most:
                return f"its GPUs have no profile {profile}"
            if most < count:
                return f"its GPUs can have at most {most}x {profile}"
        return "its GPUs cannot have all of it together"
