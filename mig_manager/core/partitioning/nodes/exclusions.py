"""Find the nodes on which a pod can never run, regardless of resources, and say why.

A check compares a pod with all nodes at once: nodes with an equal label, equal taints or equal
DeviceClasses are one set.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence

from mig_manager.core import messages
from mig_manager.core.node.devices import resources
from mig_manager.core.objects import selectors, well_known
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.nodes import node_sets, partitioned_nodes

_NAME_FIELD = "metadata.name"


class Exclusions:
    """The nodes of one decision by what can keep pods off."""

    def __init__(self, nodes: Sequence[partitioned_nodes.PartitionedNode]) -> None:
        self._nodes = nodes
        self._every = node_sets.of(range(len(nodes)))
        self._values: dict[str, dict[str | None, node_sets.NodeSet]] = {}
        self._exclusions: dict[tuple[object, ...], Mapping[str, node_sets.NodeSet]] = {}

    def of(self, needs: demand.Needs) -> Mapping[str, node_sets.NodeSet]:
        """Return the sets of nodes on which a pod cannot run, by the first reason; disjoint."""
        devices = tuple(name for name, _ in needs.amounts if resources.is_mig(name))
        key = needs.selector, needs.affinity, needs.tolerations, devices
        if key not in self._exclusions:
            rest, by_reason = self._every, dict[str, node_sets.NodeSet]()
            for why, nodes in self._all(needs, devices):
                if rest & nodes:
                    by_reason[why] = by_reason.get(why, node_sets.EMPTY) | rest & nodes
                    rest -= nodes
            self._exclusions[key] = by_reason
        return self._exclusions[key]

    @functools.cached_property
    def _taints(self) -> dict[tuple[demand.Taint, ...], node_sets.NodeSet]:
        return node_sets.by_key(node.taints for node in self._nodes)

    @functools.cached_property
    def _claimable(self) -> dict[frozenset[str] | None, node_sets.NodeSet]:
        return node_sets.by_key(node.supply.claimable for node in self._nodes)

    def _all(
        self, needs: demand.Needs, devices: Sequence[str]
    ) -> Iterator[tuple[str, node_sets.NodeSet]]:
        for key, value in needs.selector:
            others = self._every - self._with_label(key).get(value, node_sets.EMPTY)
            yield f"its node selector requires {key}={value}", others
        if needs.affinity is not None:
            terms = [
                " and ".join(map(str, (*labels, *fields))) for labels, fields in needs.affinity
            ]
            others = self._every - node_sets.union(map(self._matching, needs.affinity))
            yield f"its node affinity requires {messages.list_names(terms, limit=2)}", others
        for taints, nodes in self._taints.items():
            for taint in taints:
                if not any(each.tolerates(taint) for each in needs.tolerations):
                    yield _why_tainted(taint), nodes
        for claimable, nodes in self._claimable.items():
            missing = [] if claimable is None else [n for n in devices if n not in claimable]
            if missing:
                yield f"no DeviceClass serves {messages.list_names(missing)}", nodes

    def _with_label(self, key: str) -> dict[str | None, node_sets.NodeSet]:
        """Return the sets of nodes by the value of a label; None: they lack it."""
        if key not in self._values:
            self._values[key] = node_sets.by_key(node.labels.get(key) for node in self._nodes)
        return self._values[key]

    def _matching(self, term: demand.Term) -> node_sets.NodeSet:
        """Return the nodes that meet all requirements of a term; an empty term matches none."""
        nodes = self._every if any(term) else node_sets.EMPTY
        about_labels, about_fields = term
        for requirement in about_labels:
            nodes &= self._meeting(requirement)
        for requirement in about_fields:  # The only field is the name.
            nodes = node_sets.of(
                position
                for position in nodes
                if requirement.matches({_NAME_FIELD: self._nodes[position].name})
            )
        return nodes

    def _meeting(self, requirement: selectors.Requirement) -> node_sets.NodeSet:
        return node_sets.union(
            nodes
            for value, nodes in self._with_label(requirement.key).items()
            if requirement.matches({} if value is None else {requirement.key: value})
        )


def _why_tainted(taint: demand.Taint) -> str:
    if taint.key == well_known.CORDON_TAINT:
        return "the node is cordoned"
    value = f"={taint.value}" if taint.value else ""
    return f"it does not tolerate taint {taint.key}{value}:{taint.effect}"
