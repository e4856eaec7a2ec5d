"""The pending pods of one decision, in order, and the room that nodes have for them."""

import collections
import datetime as dt
import functools
from collections.abc import Iterable, Iterator, Mapping

from mig_manager.core import model
from mig_manager.core.node import resources
from mig_manager.core.partitioning import demand, node_index, node_room, node_sets, partitioned

_MAX_CERTAIN = 300
"""Devices of a pod times GPUs; the search ends after as many tries (``node_room``)."""
_LAST = dt.datetime.max.replace(tzinfo=dt.UTC)


class Batch:
    """Pods by rank, grouped by equal needs, and the room for them on nodes."""

    def __init__(
        self,
        index: node_index.NodeIndex,
        pending: Iterable[demand.Pending],
        reserved: Mapping[model.Profile, int],
        *,
        expected: Iterable[demand.Pending] = (),
    ) -> None:
        """Sort the pods: their order does not matter; expected pods are behind, in order."""
        self.index = index
        self.nodes = index.nodes
        self.search = index.search
        self.pods = sorted(
            pending, key=lambda pod: (-pod.priority, pod.created_at or _LAST, pod.uid)
        )
        self.pods += expected
        self._reserved = reserved
        groups: dict[demand.Needs, int] = {}
        self.group = [groups.setdefault(pod.needs, len(groups)) for pod in self.pods]
        self.needs = list(groups)
        kinds = dict[model.Devices, int]()
        self.kind = [
            kinds.setdefault(devices, len(kinds))
            for devices in (needs.devices for needs in groups)
        ]
        """By group: the number of its devices; groups of equal devices differ in other needs."""
        self.profiles = {profile for needs in groups for profile in needs.profiles}
        self._available: list[Mapping[str, int]] = [each.available for each in index.facts]
        self.amounts = node_sets.Amounts(self._available)
        self._free: dict[int, Mapping[model.Profile, int]] = {}
        self._positive: dict[str, node_sets.NodeSet] = {}
        """By resource that a pod claims: the nodes that have any left."""
        self._hosts: dict[int, node_sets.NodeSet] = {}
        """By group: nodes that had room when the first pod of the group was considered."""
        self._claims: dict[str, collections.Counter[model.Profile]] = {}
        self._possible: dict[int, node_sets.NodeSet] = {}
        self._excluded: dict[int, node_sets.NodeSet] = {}
        self._tried: dict[int, tuple[node_sets.NodeSet, node_sets.NodeSet]] = {}
        """By kind: nodes for which the search for room has ended, and those of them with room."""

    # -- room without a change -----------------------------------------------------------------

    def has_room(self, group: int, node: partitioned.PartitionedNode) -> bool:
        """Return whether the scheduler can place a pod of a group on a node as it is."""
        position = self.index.position[node.name]
        if position not in self.index.ready or position in self.excluded_nodes(group):
            return False
        available = self._available[position]
        return all(available.get(name, 0) >= count for name, count in self.needs[group].amounts)

    def hosts(self, group: int, preferred: Iterable[str]) -> Iterator[partitioned.PartitionedNode]:
        """Yield the nodes with room for a pod: preferred ones, then those not opted in."""
        names = sorted(set(preferred) & self.index.position.keys())
        first = sorted((self.nodes[self.index.position[name]] for name in names), key=_is_opted_in)
        yield from (node for node in first if self.has_room(group, node))
        amounts = self.needs[group].amounts
        if group not in self._hosts:
            short = self.amounts.short(amounts)
            self._hosts[group] = self.index.ready - self.excluded_nodes(group) - short
        for name, _ in amounts:
            # Claims only take away room.
            self._hosts[group] &= self._positive.get(name, self.index.every)
        hosts, opted_in = self._hosts[group], self.index.opted_in
        for part in (hosts - opted_in, hosts & opted_in):
            for position in part:
                node = self.nodes[position]
                if not self.has_room(group, node):
                    self._hosts[group] -= node_sets.of([position])
                elif node.name not in names:
                    yield node

    def claim(self, group: int, node: partitioned.PartitionedNode) -> None:
        """Reserve a node's room for a pod."""
        position = self.index.position[node.name]
        available = self._available[position] = dict(self._available[position])
        self._free.pop(position, None)
        for name, count in self.needs[group].amounts:
            available[name] -= count
            if not available[name]:
                others = self._positive.get(name, self.index.every)
                self._positive[name] = others - node_sets.of([position])
        claims = self._claims.setdefault(node.name, collections.Counter())
        claims.update(self.needs[group].profiles)

    def end_claims(self) -> None:
        """Compare amounts with what the claims leave; there is no claim afterwards."""
        if self._claims:
            self.amounts = node_sets.Amounts(self._available)

    def is_claimed(self, node: partitioned.PartitionedNode) -> bool:
        """Return whether a node has reserved room."""
        return node.name in self._claims

    # -- room after a change -------------------------------------------------------------------

    def excluded_nodes(self, group: int) -> node_sets.NodeSet:
        """Return the nodes on which pods of a group can never run."""
        if group not in self._excluded:
            excluded = self.index.exclusions.of(self.needs[group])
            self._excluded[group] = node_sets.union(excluded.values())
        return self._excluded[group]

    def never(self, group: int) -> node_sets.NodeSet:
        """Return the nodes that could not serve pods of a group even if idle, or must not change.

        A node with unknown GPUs could.
        """
        index = self.index
        possible = self.possible(group) | (index.every - index.published)
        short = index.allocatable.short(self.needs[group].others)
        able = (index.opted_in & possible) - self.excluded_nodes(group) - short
        return index.every - able

    def possible(self, group: int) -> node_sets.NodeSet:
        """Return the nodes whose idle GPUs could have the devices of a group."""
        if self.needs[group].unknown:
            return node_sets.EMPTY
        kind = self.kind[group]
        if kind not in self._possible:
            self._possible[kind] = node_sets.union(
                nodes
                for empty, nodes in self.index.hardware.items()
                if node_room.NodeRoom(
                    node_room.ChangeableGpus(self.search, dict(enumerate(empty))),
                    schedulable={},
                    claimed={},
                    floor={},
                ).add(self.needs[group].devices)
            )
        return self._possible[kind]

    def serving(self, group: int, nodes: node_sets.NodeSet) -> node_sets.NodeSet:
        """Return the nodes of a set that a change lets serve a pod of a known group."""
        short = self.amounts.short(self.needs[group].others)
        return self.with_devices(group, nodes - self.excluded_nodes(group) - short)

    def with_devices(self, group: int, nodes: node_sets.NodeSet) -> node_sets.NodeSet:
        """Return the nodes of a set that have room for a group's devices alone."""
        kind = self.kind[group]
        tried, able = self._tried.get(kind, (node_sets.EMPTY, node_sets.EMPTY))
        fresh = nodes - tried
        if fresh:
            needs = self.needs[group]
            might = fresh - self.lacking(group)
            able |= node_sets.of(i for i in might if self._has_devices(i, needs))
            self._tried[kind] = tried | fresh, able
        return nodes & able

    def lacking(self, group: int) -> node_sets.NodeSet:
        """Return the nodes that cannot have a group's devices, by a quick comparison."""
        return self._most.short(self.needs[group].mig)

    @functools.cached_property
    def _most(self) -> node_sets.Amounts:
        """How many devices of each requested profile nodes might have room for, beside claims."""
        names = {resources.of_profile(profile) or "": profile for profile in self.profiles}
        amounts: list[dict[str, int]] = []
        for position, facts in enumerate(self.index.facts):
            free = self.free(position)
            amounts.append(
                {name: facts.gpus.most(each) + free.get(each, 0) for name, each in names.items()}
            )
        return node_sets.Amounts(amounts)

    def _has_devices(self, position: int, needs: demand.Needs) -> bool:
        node = self.nodes[position]
        facts = self.index.facts[position]
        free = self.free(position)
        (profile, count), *others = needs.devices
        is_certain = not (others or profile in free or node.name in self._claims)
        most = count * len(facts.gpus.states)
        if is_certain and most < _MAX_CERTAIN and not self._floor(facts):
            return True
        return self.room(node).add(needs.devices)

    def likeness(self, position: int) -> object:
        """Return a key that is equal for nodes with equal room for all pods."""
        facts = self.index.facts[position]
        if self.nodes[position].name in self._claims:
            return position
        return (
            tuple(facts.gpus.states.items()),
            tuple(facts.devices.items()),
            tuple(self._available[position].items()),
            tuple(position in nodes for nodes in self._distinct_exclusions),
        )

    @functools.cached_property
    def _distinct_exclusions(self) -> tuple[node_sets.NodeSet, ...]:
        return tuple({self.excluded_nodes(group) for group in range(len(self.needs))})

    def queue(self, ranks: Iterable[int]) -> dict[int, list[int]]:
        """Return ascending ranks by group."""
        queue: dict[int, list[int]] = {}
        for rank in ranks:
            queue.setdefault(self.group[rank], []).append(rank)
        return queue

    def free(self, position: int) -> Mapping[model.Profile, int]:
        """Return the idle devices of a node that the scheduler can give to further pods."""
        if position not in self._free:
            available = self._available[position]
            self._free[position] = {
                profile: free
                for profile in self.index.facts[position].devices
                if (free := available.get(resources.of_profile(profile) or "", 0)) > 0
            }
        return self._free[position]

    def available(self, position: int) -> Mapping[str, int]:
        """Return the resources of a node beside its pods and claims."""
        return self._available[position]

    def room(self, node: partitioned.PartitionedNode) -> node_room.NodeRoom:
        """Return the room of a node beside claims."""
        position = self.index.position[node.name]
        facts = self.index.facts[position]
        claims: Mapping[model.Profile, int] = self._claims.get(node.name, {})
        schedulable = dict(claims)
        for profile, free in self.free(position).items():
            schedulable[profile] = schedulable.get(profile, 0) + free
        return node_room.NodeRoom(
            facts.gpus,
            schedulable=schedulable,
            claimed=claims,
            floor=self._floor(facts),
        )

    def _floor(self, facts: node_index.NodeFacts) -> dict[model.Profile, int]:
        """Return how many idle devices of each profile a change keeps."""
        floor: dict[model.Profile, int] = {}
        for profile, count in self._reserved.items():
            total = facts.devices.get(profile, 0)
            in_use = total - facts.gpus.idle.get(profile, 0)
            if (least := min(count, total) - in_use) > 0:
                floor[profile] = least
        return floor


def _is_opted_in(node: partitioned.PartitionedNode) -> bool:
    return node.is_opted_in
