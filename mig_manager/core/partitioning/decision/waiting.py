"""Explain why pods have no room: what they wait for, or why no opted-in node can serve them."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from mig_manager.core import messages, profile_name
from mig_manager.core.objects import well_known
from mig_manager.core.partitioning import demand
from mig_manager.core.partitioning.batch import batches, feasible_nodes
from mig_manager.core.partitioning.nodes import node_index, node_sets
from mig_manager.core.partitioning.search import fit_search


class WaitReason(enum.Enum):
    """Why a pod waits; the values are a public contract."""

    SCHEDULER = "scheduler"  # a node has room, or is being changed for it
    LIMITED = "limited"  # by the budget of nodes under change
    CHANGING = "changing"  # nodes that could have room are under change, or in their cooldown
    NOT_SCHEDULED = "not-scheduled"  # it had room, and the scheduler did not place it
    IN_USE = "in-use"  # other pods use the devices
    UNUSABLE = "unusable"  # nodes that could have room are not ready, or their use is unknown


_ORDER = tuple(WaitReason)


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """Why a pod must wait, or why a node cannot be changed now."""

    reason: WaitReason
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class Impossible:
    """Why no change of a node can help a pod."""

    message: str


class Causes:
    """The causes for the pods of one batch."""

    def __init__(
        self,
        index: node_index.NodeIndex,
        feasible: feasible_nodes.FeasibleNodes,
        why_not_now: Callable[[int], Cause | None],
        *,
        is_full: bool,
        on_hold: node_sets.NodeSet,
    ) -> None:
        """Build it.

        Args:
            index: The nodes.
            feasible: The feasible nodes for the batch.
            why_not_now: Returns why a node cannot be changed now; None if it can.
            is_full: Whether as many nodes as allowed are under change.
            on_hold: The nodes with GPUs on hold.
        """
        self._index = index
        self._feasible = feasible
        self._why_not_now = why_not_now
        self._is_full = is_full
        self._on_hold = on_hold

    @functools.cached_property
    def _not_now(self) -> Mapping[Cause, node_sets.NodeSet]:
        """The sets of nodes that cannot be changed now, by cause."""
        sets = node_sets.by_key(map(self._why_not_now, self._index.every))
        return {cause: nodes for cause, nodes in sets.items() if cause}

    @functools.cached_property
    def _unpublished(self) -> dict[str, node_sets.NodeSet]:
        """The sets of nodes without published GPUs, by the reason."""
        return node_sets.by_key(node.unusable for node in self._index.nodes)

    def why(
        self, group: batches.Group, unplaced: node_sets.NodeSet, failed: node_sets.NodeSet
    ) -> Cause | Impossible:
        """Return why a pod is not served.

        Args:
            group: The group of the pod.
            unplaced: The nodes where the scheduler did not place it.
            failed: The nodes whose agents have just failed the layout for it.
        """
        possible = [each for each in self._possible(group, unplaced, failed) if each[1]]
        if possible:
            possible.sort(key=lambda each: (_ORDER.index(each[0].reason), each[1].first))
            causes = self._list_causes((cause.message, nodes) for cause, nodes in possible)
            return Cause(possible[0][0].reason, f"it waits for {causes}")
        if unknown := group.needs.unknown:
            return Impossible(f"no MIG profile is called {messages.list_names(unknown)}")
        devices = profile_name.with_counts(group.needs.profiles)
        needed = f"it needs a node with room for {devices}"
        impossible = [each for each in self._impossible(group) if each[1]]
        if not impossible:
            label = f"{well_known.PARTITIONING_LABEL}={well_known.ON_DEMAND}"
            return Impossible(f"{needed}, and no node has the label {label}")
        impossible.sort(key=lambda each: each[1].first)
        return Impossible(
            f"{needed}, and no opted-in node has that even if idle: "
            f"{self._list_causes(impossible)}"
        )

    def _list_causes(self, causes: Iterable[tuple[str, node_sets.NodeSet]]) -> str:
        sets: dict[str, node_sets.NodeSet] = {}
        for text, nodes in causes:
            sets[text] = sets.get(text, node_sets.EMPTY) | nodes
        every = self._index.nodes
        return messages.list_groups(
            [(text, len(nodes), (every[i].name for i in nodes)) for text, nodes in sets.items()]
        )

    def _possible(
        self, group: batches.Group, unplaced: node_sets.NodeSet, failed: node_sets.NodeSet
    ) -> Iterator[tuple[Cause, node_sets.NodeSet]]:
        """Yield the nodes that could serve a group, by what they must wait for."""
        index, needs = self._index, group.needs
        available = self._feasible.available
        avoided = (unplaced & index.published) - group.never
        if unplaced:
            # Nor does the pod wait for the idle devices of other nodes: see ``schedulable_pods``.
            avoided |= index.ready - available.short(needs.amounts) - group.excluded
        unused = "it had room, and the scheduler did not place the pod"
        yield Cause(WaitReason.NOT_SCHEDULED, unused), avoided
        # These can serve a pod without a change when other pods end, or once they are ready.
        short = index.allocatable.short(needs.amounts)
        hosts = group.never - short - group.excluded - avoided
        for cause, nodes in self._not_now.items():
            yield cause, (hosts & nodes) - index.ready
        yield Cause(WaitReason.IN_USE, "its devices are in use"), hosts & index.ready
        rest = index.every - group.never - avoided
        for text, nodes in self._unpublished.items():
            yield Cause(WaitReason.UNUSABLE, text), (rest & nodes) - index.published
        rest &= index.published
        for cause, nodes in self._not_now.items():
            yield cause, rest & nodes
            rest -= nodes
        yield Cause(WaitReason.UNUSABLE, "its agent failed the layout for it"), rest & failed
        rest -= failed
        for text, nodes in self._short(needs.others, available, rest):
            yield Cause(WaitReason.IN_USE, f"{text} is available"), nodes
            rest -= nodes
        able = self._feasible.with_devices(group, rest)
        if self._is_full:
            yield Cause(WaitReason.LIMITED, "as many nodes as allowed are under change"), able
            rest -= able
        else:
            on_hold = able & self._on_hold
            yield Cause(WaitReason.IN_USE, "its GPUs are on hold for another pod"), on_hold
            rest -= on_hold
        yield Cause(WaitReason.IN_USE, "too much of its GPUs is in use"), rest

    def _impossible(self, group: batches.Group) -> Iterator[tuple[str, node_sets.NodeSet]]:
        """Yield the opted-in nodes, by the reason why they can never serve a group."""
        index, needs = self._index, group.needs
        rest = index.opted_in
        for text, nodes in index.excluding(needs).items():
            yield text, rest & nodes
            rest -= nodes
        for text, nodes in self._short(needs.others, index.allocatable, rest):
            yield text, nodes
            rest -= nodes
        beside_reserve = rest & index.with_idle_room(needs.devices, {})
        yield "the reserve leaves too little of its GPUs", beside_reserve
        rest -= beside_reserve
        for empty, nodes in index.hardware.items():
            if empty:
                yield self._missing(needs, empty), rest & nodes
                continue
            for text, unpublished in self._unpublished.items():
                yield text, rest & nodes & unpublished

    def _short(
        self, needs: demand.Amounts, has: node_sets.NodeAmounts, nodes: node_sets.NodeSet
    ) -> Iterator[tuple[str, node_sets.NodeSet]]:
        """Yield the nodes that have too little of something, by what that is."""
        sets = [nodes] if nodes else []
        for resource, amount in needs:
            fewer = has.fewer(resource, amount)
            sets = [part for each in sets for part in (each & fewer, each - fewer) if part]
        for each in sets:
            position = each.first
            if text := demand.why_short(needs, has.of(position)):
                yield text, each

    def _missing(self, needs: demand.Needs, empty: Collection[fit_search.GpuState]) -> str:
        """Return why GPUs cannot have the devices of a pod."""
        for profile, count in needs.profiles.items():
            maximum = sum(state.capacity.maximum(profile) for state in empty)
            if not maximum:
                return f"its GPUs have no profile {profile}"
            if maximum < count:
                return f"its GPUs can have at most {maximum}x {profile}"
        return "its GPUs cannot have all of it together"
