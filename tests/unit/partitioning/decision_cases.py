"""Clusters and what is decided about them: what the tables of decisions share."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.rigs.cluster.partitions import decide, lines, pod
from tests.rigs.node import samples


class DecisionCase(NamedTuple):
    """A cluster, and what is decided about it."""

    nodes: list[dict[str, Any]]
    pods: list[dict[str, Any]]
    expected: list[str]  # changes, and why other pods wait
    limits: Mapping[str, Any] = MappingProxyType({})

    def decision_lines(self) -> list[str]:
        return lines(decide(self.nodes, self.pods, **self.limits))


TWO_ONES = {samples.profile("1g.5gb"): 2}
LARGE = pod("large", "7g.40gb")
IN_USE = "too much of its GPUs is in use"
BUSY = f"it waits for a ({IN_USE})"
OTHERS = "it is being changed for other pods"
ROOM = "has room: the scheduler will place the pod"


def unmet(name: str, needs: str, reason: str) -> str:
    nowhere = f"no opted-in node has that even if idle: {reason}"
    return f"{name} unmet: it needs a node with room for {needs}, and {nowhere}"
