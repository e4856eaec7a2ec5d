"""The pods that the decision assumes on nodes as they are, and what these leave free.

The scheduler calls a pod assumed from its choice of a node until the pod is bound.
"""

import collections
import itertools
from collections.abc import Iterator, Mapping

from mig_manager.core import model
from mig_manager.core.partitioning.batch import batches
from mig_manager.core.partitioning.nodes import node_index, node_sets


class AssumedPods:
    """The devices that assumed pods get, and the resources that nodes have left."""

    def __init__(self, index: node_index.NodeIndex) -> None:
        self._index = index
        self.available: list[Mapping[str, int]] = [each.available for each in index.facts]
        """By node: the resources beside its pods and the assumed ones."""
        self.devices: dict[int, collections.Counter[model.Profile]] = {}
        """The devices of assumed pods, by node."""
        self._positive: dict[str, node_sets.NodeSet] = {}
        """By resource that an assumed pod gets: the nodes that have any left."""
        self._hosts: dict[batches.Group, node_sets.NodeSet] = {}
        """The nodes with room for pods of a group, and some without that had room before."""

    def hosts(self, group: batches.Group, preferred: node_sets.NodeSet) -> Iterator[int]:
        """Yield the nodes with room for a pod: preferred ones, then those not opted in."""
        index = self._index
        amounts = group.needs.amounts
        hosts = self._hosts.get(group)
        if hosts is None:
            hosts = index.ready - group.excluded - index.available.short(amounts)
        for name, _ in amounts:
            # Assumed pods only take away room.
            hosts &= self._positive.get(name, index.every)
        self._hosts[group] = hosts
        for part in (hosts & preferred, hosts - preferred):
            for position in itertools.chain(part - index.opted_in, part & index.opted_in):
                available = self.available[position]
                if all(available.get(name, 0) >= count for name, count in amounts):
                    yield position
                else:
                    self._hosts[group] -= node_sets.of([position])

    def assume(self, group: batches.Group, position: int) -> None:
        """Assume a pod of a group on a node."""
        available = self.available[position] = dict(self.available[position])
        for name, count in group.needs.amounts:
            available[name] -= count
            if not available[name]:
                others = self._positive.get(name, self._index.every)
                self._positive[name] = others - node_sets.of([position])
        self.devices.setdefault(position, collections.Counter()).update(group.needs.profiles)
