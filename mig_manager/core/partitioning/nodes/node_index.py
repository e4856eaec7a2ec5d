"""The nodes of a decision, what it derives from each, and sets of nodes by their properties."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping

from mig_manager.core import model
from mig_manager.core.node.devices import resources
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.nodes import exclusions, node_sets, partitioned_nodes
from mig_manager.core.partitioning.search import fit_search, trial_change


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NodeFacts:
    """Facts that a decision derives from one node."""

    node: partitioned_nodes.PartitionedNode  # in the state from which it was derived
    gpus: trial_change.ChangeableGpus
    empty: tuple[fit_search.GpuState, ...]  # all its GPUs without their instances
    devices: Mapping[model.Profile, int]
    available: Mapping[str, int]

    def is_of(self, node: partitioned_nodes.PartitionedNode) -> bool:
        """Return whether the facts are also true for this state of the node."""
        mine = self.node
        return (
            mine.gpus == node.gpus
            and mine.in_use == node.in_use
            and mine.supply.allocatable == node.supply.allocatable
            and mine.pods.allocated == node.pods.allocated
        )


_Alike = tuple[tuple[fit_search.GpuState, ...], model.Devices]
"""What nodes have in common: their idle GPUs, and the reserved devices that stay on them."""


class NodeCache:
    """Keeps what decisions derive from nodes that do not change, and their searches."""

    _MAX_SEARCHES = 200_000  # some 100 MB; no cluster needs as many at once

    def __init__(self) -> None:
        self.search = fit_search.FitSearch()
        self._facts: dict[str, NodeFacts] = {}

    def facts(self, nodes: Iterable[partitioned_nodes.PartitionedNode]) -> list[NodeFacts]:
        """Return the facts of nodes; forget other nodes."""
        if self.search.count > self._MAX_SEARCHES:
            self.search, self._facts = fit_search.FitSearch(), {}
        facts = []
        for node in nodes:
            kept = self._facts.get(node.name)
            facts.append(kept if kept and kept.is_of(node) else self._derive(node))
        self._facts = {each.node.name: each for each in facts}
        return facts

    def _derive(self, node: partitioned_nodes.PartitionedNode) -> NodeFacts:
        classes = [self.search.gpu_class(gpu, node.in_use.get(gpu.uuid)) for gpu in node.gpus]
        used = collections.Counter(itertools.chain.from_iterable(each.used for each in classes))
        # A pod that has not started yet has an idle instance of these profiles.
        allocated = frozenset(
            profile
            for name, count in node.pods.allocated
            if resources.is_mig(name)
            and (profile := resources.profile_of(name))
            and count > used[profile]
        )
        states = {
            gpu.index: state
            for gpu, each in zip(node.gpus, classes, strict=True)
            if (state := self.search.state(each, allocated))
        }
        return NodeFacts(
            node=node,
            gpus=trial_change.ChangeableGpus(self.search, states),
            empty=tuple(each.empty for each in classes),
            devices=collections.Counter(
                itertools.chain.from_iterable(each.devices for each in classes)
            ),
            available=node.available,
        )


class NodeIndex:
    """The nodes of one decision, sorted by name, and sets of them."""

    def __init__(
        self, nodes: Iterable[partitioned_nodes.PartitionedNode], cache: NodeCache | None = None
    ) -> None:
        """Build it from nodes with their pods (``with_pods``), and times by one ``OwnClock``.

        Nodes whose GPUs and pods are the same as in the last decision's ``cache`` are not
        examined again.
        """
        cache = cache or NodeCache()
        self.nodes = sorted(nodes, key=lambda node: node.name)
        self.facts = cache.facts(self.nodes)
        self.search = cache.search
        self.position = {node.name: position for position, node in enumerate(self.nodes)}
        self.every = node_sets.of(range(len(self.nodes)))
        self.opted_in = node_sets.of(i for i, node in enumerate(self.nodes) if node.is_opted_in)
        # A request that no agent has noticed keeps no pod off.
        self.ready = node_sets.of(
            i for i, node in enumerate(self.nodes) if node.is_ready and not node.agent.is_closed
        )
        self.published = node_sets.of(i for i, node in enumerate(self.nodes) if node.is_published)
        self._exclusions = exclusions.Exclusions(self.nodes)
        self._alike: dict[model.Devices, dict[_Alike, node_sets.NodeSet]] = {}
        self._with_idle_room: dict[tuple[model.Devices, model.Devices], node_sets.NodeSet] = {}

    @functools.cached_property
    def available(self) -> node_sets.NodeAmounts:
        """The resources of the nodes beside their pods."""
        return node_sets.NodeAmounts([each.available for each in self.facts])

    @functools.cached_property
    def allocatable(self) -> node_sets.NodeAmounts:
        """The allocatable resources of the nodes."""
        return node_sets.NodeAmounts([dict(node.supply.allocatable) for node in self.nodes])

    @functools.cached_property
    def hardware(self) -> dict[tuple[fit_search.GpuState, ...], node_sets.NodeSet]:
        """The sets of nodes whose GPUs are alike when they are idle."""
        return node_sets.by_key(each.empty for each in self.facts)

    def states(self, position: int) -> Mapping[int, fit_search.GpuState]:
        """Return the state of a node's GPUs that a change can include, by index."""
        return self.facts[position].gpus.states

    def excluding(self, needs: demand.Needs) -> Mapping[str, node_sets.NodeSet]:
        """Return the sets of nodes on which a pod cannot run, by the first reason; disjoint."""
        return self._exclusions.of(needs)

    def excluded_nodes(self, needs: demand.Needs) -> node_sets.NodeSet:
        """Return the nodes on which a pod cannot run."""
        return node_sets.union(self.excluding(needs).values())

    def with_idle_room(
        self, devices: model.Devices, reserved: Mapping[model.Profile, int]
    ) -> node_sets.NodeSet:
        """Return the nodes whose idle GPUs could have devices beside the reserved ones.

        Only the reserved devices that a node has stay there, and a pod can use them.
        """
        key = devices, model.in_order(reserved)
        if key not in self._with_idle_room:
            self._with_idle_room[key] = node_sets.union(
                nodes
                for (empty, kept), nodes in self._by_reserve(key[1]).items()
                if trial_change.TrialChange(
                    trial_change.ChangeableGpus(self.search, dict(enumerate(empty)))
                ).add(
                    model.in_order(
                        collections.Counter(dict(devices)) | collections.Counter(dict(kept))
                    )
                )
            )
        return self._with_idle_room[key]

    def _by_reserve(self, reserved: model.Devices) -> dict[_Alike, node_sets.NodeSet]:
        """Return the sets of nodes with equal GPUs and equal numbers of reserved devices."""
        if reserved not in self._alike:
            self._alike[reserved] = node_sets.by_key(
                (
                    each.empty,
                    model.in_order({p: min(n, each.devices.get(p, 0)) for p, n in reserved}),
                )
                for each in self.facts
            )
        return self._alike[reserved]
