"""The room that changes of nodes can make for pods, beside the claims of other pods."""

import functools
from collections.abc import Mapping, Sequence

from mig_manager.core import model
from mig_manager.core.node import resources
from mig_manager.core.partitioning import batches, node_index, node_room, node_sets, room_claims

_MAX_CERTAIN = 300
"""Devices of a pod times GPUs; the search ends after as many tries (``node_room``)."""


class ClusterRoom:
    """The room of all nodes, after the claims."""

    def __init__(
        self,
        index: node_index.NodeIndex,
        batch: batches.Batch,
        reserved: Mapping[model.Profile, int],
        claims: room_claims.RoomClaims,
    ) -> None:
        """Build it; ``reserved`` devices stay on every node that has them."""
        self._facts = index.facts
        self._profiles = batch.profiles
        self._reserved = reserved
        self._claims = claims.devices
        self.available = node_sets.Amounts(claims.available) if claims.devices else index.available
        self._exclusions = {group.excluded for group in batch.groups}
        self._tried: dict[int, tuple[node_sets.NodeSet, node_sets.NodeSet]] = {}
        """By kind: nodes for which the search for room has ended, and which of them have room."""

    def is_claimed(self, position: int) -> bool:
        """Return whether a node has reserved room."""
        return position in self._claims

    def serving(self, group: batches.Group, nodes: node_sets.NodeSet) -> node_sets.NodeSet:
        """Return the nodes of a set that a change lets serve a pod of a known group."""
        short = self.available.short(group.needs.others)
        return self.with_devices(group, nodes - group.excluded - short)

    def with_devices(self, group: batches.Group, nodes: node_sets.NodeSet) -> node_sets.NodeSet:
        """Return the nodes of a set that have room for a group's devices alone."""
        tried, able = self._tried.get(group.kind, (node_sets.EMPTY, node_sets.EMPTY))
        fresh = nodes - tried
        if fresh:
            might = fresh - self.lacking(group)
            devices = group.needs.devices
            able |= node_sets.of(i for i in might if self._has_devices(i, devices))
            self._tried[group.kind] = tried | fresh, able
        return nodes & able

    def lacking(self, group: batches.Group) -> node_sets.NodeSet:
        """Return the nodes that cannot have a group's devices, by a quick comparison."""
        return self._most.short(group.needs.mig)

    @functools.cached_property
    def _most(self) -> node_sets.Amounts:
        """How many devices of each requested profile nodes might have room for, beside claims."""
        names = {resources.of_profile(each) or "": each for each in self._profiles}
        return node_sets.Amounts(
            [
                {name: facts.gpus.most(each) + free.get(each, 0) for name, each in names.items()}
                for facts, free in zip(self._facts, self.free, strict=True)
            ]
        )

    def _has_devices(self, position: int, devices: model.Devices) -> bool:
        facts = self._facts[position]
        (profile, count), *others = devices
        is_certain = not (others or profile in self.free[position] or self.is_claimed(position))
        most = count * len(facts.gpus.states)
        if is_certain and most < _MAX_CERTAIN and not self._floor(facts):
            return True
        return self.of(position).add(devices)

    def likeness(self, position: int) -> object:
        """Return a key that is equal for nodes with equal room for all pods."""
        if self.is_claimed(position):
            return position
        facts = self._facts[position]
        return (
            tuple(facts.gpus.states.items()),
            tuple(facts.devices.items()),
            tuple(self.available.of(position).items()),
            tuple(position in nodes for nodes in self._exclusions),
        )

    @functools.cached_property
    def free(self) -> Sequence[Mapping[model.Profile, int]]:
        """The idle devices of each node that the scheduler can give to further pods."""
        return [self._free(position) for position in range(len(self._facts))]

    def of(self, position: int) -> node_room.NodeRoom:
        """Return the room of a node."""
        facts, free = self._facts[position], self.free[position]
        claims: Mapping[model.Profile, int] = self._claims.get(position, {})
        with_claims = {profile: free.get(profile, 0) + n for profile, n in claims.items()}
        return node_room.NodeRoom(
            facts.gpus,
            schedulable={**free, **with_claims},
            claimed=claims,
            floor=self._floor(facts),
        )

    def _free(self, position: int) -> Mapping[model.Profile, int]:
        available = self.available.of(position)
        return {
            profile: free
            for profile in self._facts[position].devices
            if (free := available.get(resources.of_profile(profile) or "", 0)) > 0
        }

    def _floor(self, facts: node_index.NodeFacts) -> dict[model.Profile, int]:
        """Return how many idle devices of each profile a change keeps."""
        floor: dict[model.Profile, int] = {}
        for profile, count in self._reserved.items():
            total = facts.devices.get(profile, 0)
            in_use = total - facts.gpus.idle.get(profile, 0)
            if (least := min(count, total) - in_use) > 0:
                floor[profile] = least
        return floor
