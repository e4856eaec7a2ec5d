"""Collect facts about nodes from pods: requests, lost agents and nominations."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterable

from mig_manager.core.node.devices import resources
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.nodes import partitioned_nodes


class Requests:
    """Counts the requests of the pods bound to each node, and its agents, as pods come and go.

    Threads that share it give it a lock.
    """

    def __init__(
        self,
        pods: Iterable[demand.PodOfNode] = (),
        *,
        lock: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        self._lock = lock or contextlib.nullcontext()
        self._counts: dict[str, collections.Counter[str]] = {}
        self._amounts: dict[str, demand.Amounts] = {}
        self._ready_agents: dict[str, set[str]] = {}
        """UIDs by node; a node without an agent's pod since the first list is missing."""
        self._nominated: collections.Counter[str] = collections.Counter()
        for pod in pods:
            self.replace(None, pod)

    def replace(self, before: demand.PodOfNode | None, now: demand.PodOfNode | None) -> None:
        """Count a pod as it is now, no longer as it was before; None: it has no node."""
        with self._lock:
            for pod, sign in ((before, -1), (now, 1)):
                match pod:
                    case demand.BoundPod():
                        self._count(pod, sign)
                    case demand.NominatedPod():
                        self._nominated[pod.node_name] += sign
                    case None:
                        pass

    def of(self, node_name: str) -> demand.Amounts:
        """Return the requests of the pods bound to a node."""
        with self._lock:
            if node_name not in self._amounts:
                amounts = demand.to_amounts(self._counts.get(node_name, {}))
                self._amounts[node_name] = amounts
            return self._amounts[node_name]

    def has_lost_agent(self, node_name: str) -> bool:
        """Return whether a node had an agent's pod, and none is ready now."""
        with self._lock:
            return self._ready_agents.get(node_name) == set()

    def is_nominated(self, node_name: str) -> bool:
        """Return whether the scheduler preempts pods on a node for a ``NominatedPod``."""
        with self._lock:
            return self._nominated[node_name] > 0

    def _count(self, pod: demand.BoundPod, sign: int) -> None:
        """Add a pod, or subtract it with a ``sign`` of -1."""
        counts = self._counts.setdefault(pod.node_name, collections.Counter())
        for name, amount in pod.amounts:
            counts[name] += sign * amount
            if not counts[name]:
                del counts[name]
        if not counts:
            del self._counts[pod.node_name]
        self._amounts.pop(pod.node_name, None)
        if pod.is_ready_agent is not None:
            ready = self._ready_agents.setdefault(pod.node_name, set())
            ready.discard(pod.uid)
            if sign > 0 and pod.is_ready_agent:
                ready.add(pod.uid)


def with_pods(
    nodes: Iterable[partitioned_nodes.PartitionedNode], requests: Requests
) -> tuple[partitioned_nodes.PartitionedNode, ...]:
    """Return the nodes with what their pods show."""
    return tuple(dataclasses.replace(node, pods=shown_by_pods(node, requests)) for node in nodes)


def shown_by_pods(
    node: partitioned_nodes.PartitionedNode, requests: Requests
) -> partitioned_nodes.PodFacts:
    """Return what a node's pods show; claims also show devices that no limit names."""
    allocated = requests.of(node.name)
    if node.supply.claimable is not None:
        others = {name: count for name, count in allocated if not resources.is_mig(name)}
        allocated = demand.to_amounts({**others, **dict(node.supply.claimed)})
    return partitioned_nodes.PodFacts(
        allocated=allocated,
        has_lost_agent=requests.has_lost_agent(node.name),
        is_nominated=requests.is_nominated(node.name),
    )
