"""The nodes that a change lets serve pods, beside the pods that are assumed on them.

The scheduler calls a node feasible for a pod if the pod fits there.
"""

import functools
from collections.abc import Mapping, Sequence

from mig_manager.core import model
from mig_manager.core.node.devices import resources
from mig_manager.core.partitioning.batch import assumed_pods, batches
from mig_manager.core.partitioning.nodes import node_index, node_sets
from mig_manager.core.partitioning.search import trial_change


class FeasibleNodes:
    """Which nodes are feasible for which pods of a batch, if they are changed."""

    def __init__(
        self,
        index: node_index.NodeIndex,
        batch: batches.Batch,
        reserved: Mapping[model.Profile, int],
        assumed: assumed_pods.AssumedPods,
    ) -> None:
        """Build it; ``reserved`` devices stay on every node that has them."""
        self._facts = index.facts
        self._profiles = batch.profiles
        self._reserved = reserved
        self._assumed = assumed.devices
        self.available = (
            node_sets.NodeAmounts(assumed.available) if assumed.devices else index.available
        )
        self._exclusions = {group.excluded for group in batch.groups}
        self._tried: dict[int, tuple[node_sets.NodeSet, node_sets.NodeSet]] = {}
        """By kind: nodes for which the search for room has ended, and which of them have room."""

    def has_assumed(self, position: int) -> bool:
        """Return whether pods are assumed on a node as it is."""
        return position in self._assumed

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
        return self._max_devices.short(group.needs.mig)

    @functools.cached_property
    def _max_devices(self) -> node_sets.NodeAmounts:
        """How many devices of each requested profile nodes might have, beside assumed pods."""
        names = {resources.of_profile(each) or "": each for each in self._profiles}
        return node_sets.NodeAmounts(
            [
                {
                    name: facts.gpus.maximum(each) + free.get(each, 0)
                    for name, each in names.items()
                }
                for facts, free in zip(self._facts, self.free, strict=True)
            ]
        )

    def _has_devices(self, position: int, devices: model.Devices) -> bool:
        facts = self._facts[position]
        (profile, _), *others = devices
        is_certain = not (others or profile in self.free[position] or self.has_assumed(position))
        if is_certain and not self._floor(facts):
            return True
        return self.trial(position).add(devices)

    def likeness(self, position: int) -> object:
        """Return a key that is equal for nodes with equal room for all pods."""
        if self.has_assumed(position):
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

    def trial(self, position: int) -> trial_change.TrialChange:
        """Return a change of a node that serves no pod yet."""
        facts, free = self._facts[position], self.free[position]
        assumed: Mapping[model.Profile, int] = self._assumed.get(position, {})
        with_assumed = {profile: free.get(profile, 0) + n for profile, n in assumed.items()}
        return trial_change.TrialChange(
            facts.gpus,
            schedulable={**free, **with_assumed},
            assumed=assumed,
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
