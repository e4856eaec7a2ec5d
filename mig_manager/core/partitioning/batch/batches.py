"""The pending pods of one decision, in order, and grouped by equal needs."""

import dataclasses
import datetime as dt
from collections.abc import Iterable, Mapping

from mig_manager.core import model
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.nodes import node_index, node_sets

_LAST = dt.datetime.max.replace(tzinfo=dt.UTC)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Group:
    """Pods with equal needs, and the nodes that can never serve them."""

    needs: demand.Needs
    kind: int  # equal for groups of equal devices, which differ in other needs
    excluded: node_sets.NodeSet  # nodes on which the pods can never run
    never: node_sets.NodeSet
    """Nodes that could not serve them even if idle, or must not change; unknown GPUs could."""

    @staticmethod
    def of(
        needs: demand.Needs,
        kind: int,
        index: node_index.NodeIndex,
        reserved: Mapping[model.Profile, int],
    ) -> "Group":
        """Derive the sets of nodes; ``reserved`` devices stay on every node that has them."""
        excluded = index.excluded_nodes(needs)
        possible = node_sets.EMPTY
        if not needs.unknown:
            possible = index.with_idle_room(needs.devices, reserved)
        possible |= index.every - index.published
        short = index.allocatable.short(needs.others)
        never = index.every - ((index.opted_in & possible) - excluded - short)
        return Group(needs=needs, kind=kind, excluded=excluded, never=never)


class Batch:
    """Pods by rank, and their groups."""

    def __init__(
        self,
        index: node_index.NodeIndex,
        pending: Iterable[demand.PendingPod],
        reserved: Mapping[model.Profile, int],
        *,
        expected: Iterable[demand.PendingPod] = (),
    ) -> None:
        """Sort the pods: their order does not matter; expected pods are behind, in order."""
        self.pods = sorted(
            pending, key=lambda pod: (-pod.priority, pod.created_at or _LAST, pod.uid)
        )
        self.first_expected = len(self.pods)
        """The rank from which on the pods are only expected."""
        self.pods += expected
        kinds: dict[model.Devices, int] = {}
        groups: dict[demand.Needs, Group] = {}
        for needs in dict.fromkeys(pod.needs for pod in self.pods):
            kind = kinds.setdefault(needs.devices, len(kinds))
            groups[needs] = Group.of(needs, kind, index, reserved)
        self.groups = tuple(groups.values())
        self.group = [groups[pod.needs] for pod in self.pods]
        """By rank."""
        self.profiles = {profile for needs in groups for profile in needs.profiles}

    def queue(self, ranks: Iterable[int]) -> dict[Group, list[int]]:
        """Return ascending ranks by group."""
        queue: dict[Group, list[int]] = {}
        for rank in ranks:
            queue.setdefault(self.group[rank], []).append(rank)
        return queue
