"""The pending pods of one decision, in order, and the room that nodes have for them."""

import collections
import dataclasses
import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager.core import model
from mig_manager.core.fleet import demand, node_room, partitioned
from mig_manager.core.node import resources
from mig_manager.core.planner import placement

_LAST = dt.datetime.max.replace(tzinfo=dt.UTC)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """GPUs on which only pods up to a rank get new room, so that a large pod is served."""

    rank: int
    node: str
    indices: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The pods for which a change of a node would make room."""

    node: partitioned.PartitionedNode
    pods: tuple[int, ...]  # ranks, ascending
    room: node_room.NodeRoom

    @property
    def rank(self) -> tuple[object, ...]:
        """Lower is better: the first pod in order, then most pods, then least destruction."""
        return self.pods[0], -len(self.pods), self.room.destroyed, self.node.name


class Batch:
    """Pods by rank, grouped by equal needs, and the room for them on nodes."""

    def __init__(
        self,
        nodes: Iterable[partitioned.PartitionedNode],
        pending: Iterable[demand.Pending],
        reserved: Mapping[model.Profile, int],
    ) -> None:
        """Sort both, so that their order does not matter."""
        self.nodes = sorted(nodes, key=lambda node: node.name)
        self.pods = sorted(
            pending, key=lambda pod: (-pod.priority, pod.created_at or _LAST, pod.uid)
        )
        self._reserved = reserved
        groups: dict[demand.Needs, int] = {}
        self.group = [groups.setdefault(pod.needs, len(groups)) for pod in self.pods]
        self.needs = list(groups)
        self.profiles = [needs.profiles for needs in self.needs]
        kinds: dict[model.Devices, int] = {}
        self.kind = [
            kinds.setdefault(model.in_order(profiles), len(kinds)) for profiles in self.profiles
        ]
        """By group: the number of its devices; groups of equal devices differ in other needs."""
        self._others = [needs.others for needs in self.needs]
        self._is_known = [not needs.unknown for needs in self.needs]
        self.available = {node.name: node.available for node in self.nodes}
        self._claims: dict[str, collections.Counter[model.Profile]] = {}
        self._excluded: dict[tuple[int, str], str] = {}
        self._possible: dict[tuple[object, ...], bool] = {}
        self.search = node_room.Search()
        self._empty = {
            node.name: {gpu.index: self.search.empty(gpu) for gpu in node.gpus}
            for node in self.nodes
        }
        self._states = {node.name: self._states_of(node) for node in self.nodes}

    def why_excluded(self, group: int, node: partitioned.PartitionedNode) -> str:
        """Return why pods of a group can never run on a node; empty if they can."""
        key = group, node.name
        if key not in self._excluded:
            self._excluded[key] = demand.why_excluded(
                self.needs[group], node.name, node.labels, node.taints
            ) or demand.why_unclaimable(self.needs[group], node.claimable)
        return self._excluded[key]

    def has_room(self, group: int, node: partitioned.PartitionedNode) -> bool:
        """Return whether the scheduler can place a pod of a group on a node as it is."""
        if not node.is_ready or self.why_excluded(group, node):
            return False
        available = self.available[node.name]
        return all(available[name] >= count for name, count in self.needs[group].amounts)

    def claim(self, group: int, node: partitioned.PartitionedNode) -> None:
        """Reserve a node's room for a pod."""
        self.available[node.name].subtract(dict(self.needs[group].amounts))
        claims = self._claims.setdefault(node.name, collections.Counter())
        claims.update(self.profiles[group])

    def is_claimed(self, node: partitioned.PartitionedNode) -> bool:
        """Return whether a node has reserved room."""
        return node.name in self._claims

    def room(self, node: partitioned.PartitionedNode) -> node_room.NodeRoom:
        """Return the room of a node beside claims."""
        states = self._states[node.name]
        claims = self._claims.get(node.name, collections.Counter())
        total = self.devices(node)
        idle = collections.Counter(p for state in states.values() for p, _ in state.idle)
        schedulable = collections.Counter(claims)
        for profile in total:
            schedulable[profile] += max(
                0, self.available[node.name][resources.of_profile(profile) or ""]
            )
        floor = {
            profile: min(count, total[profile]) - (total[profile] - idle[profile])
            for profile, count in self._reserved.items()
        }
        return node_room.NodeRoom(
            self.search,
            states,
            schedulable=schedulable,
            claimed=claims,
            floor=dict(model.in_order(floor)),
        )

    def devices(self, node: partitioned.PartitionedNode) -> "collections.Counter[model.Profile]":
        """Count the MIG devices of a node."""
        return collections.Counter(device.profile for gpu in node.gpus for device in gpu.devices)

    def states(
        self, node: partitioned.PartitionedNode
    ) -> Iterator[tuple[model.Gpu, node_room.GpuState]]:
        """Yield the GPUs that a change can include."""
        for gpu in node.gpus:
            if gpu.index in self._states[node.name]:
                yield gpu, self._states[node.name][gpu.index]

    def present(self, node: partitioned.PartitionedNode) -> dict[str, model.DesiredGpu]:
        """Return the current state of those GPUs, by UUID; fixed instances have placements."""
        return {
            gpu.uuid: desired(
                gpu, state.fixed, model.in_order(collections.Counter(p for p, _ in state.idle))
            )
            for gpu, state in self.states(node)
        }

    def merged(
        self, node: partitioned.PartitionedNode, base: Mapping[str, model.DesiredGpu]
    ) -> dict[str, model.DesiredGpu]:
        """Return those GPUs with as much of their base layout as fits beside fixed instances."""
        wanted = self.present(node)
        for gpu, state in self.states(node):
            goal = base.get(gpu.uuid)
            if goal is None or goal.mode is not model.MigMode.ENABLED:
                continue
            if not state.fixed:
                wanted[gpu.uuid] = goal
                continue
            capacity = placement.Capacity(gpu.profiles or ())
            rest = collections.Counter(goal.counts)
            rest.subtract(profile for profile, _ in state.fixed)
            content: collections.Counter[model.Profile] = collections.Counter()
            for profile, count in model.in_order(rest):
                for _ in range(count if profile.spans else 0):
                    if capacity.fits(content + collections.Counter([profile]), pinned=state.fixed):
                        content[profile] += 1
            wanted[gpu.uuid] = desired(gpu, state.fixed, model.in_order(content))
        return wanted

    def keeps_reserved(
        self, node: partitioned.PartitionedNode, wanted: Mapping[str, model.DesiredGpu]
    ) -> bool:
        """Return whether a node with these states of GPUs, by UUID, keeps reserved devices."""
        before = self.devices(node)
        others = tuple(gpu for gpu in node.gpus if gpu.uuid not in wanted)
        after = self.devices(dataclasses.replace(node, gpus=others))
        for goal in wanted.values():
            after.update(goal.counts)
        return all(
            after[profile] >= min(count, before[profile])
            for profile, count in self._reserved.items()
        )

    def offer(
        self,
        node: partitioned.PartitionedNode,
        ranks: Sequence[int],
        *,
        hold: Hold | None = None,
        refused: frozenset[tuple[str, str]] = frozenset(),
    ) -> Offer | None:
        """Return the pods that a change of the node can serve; None if it serves none.

        ``refused`` are pairs of a pod's UID and a node to skip.
        """
        room, available = self.room(node), collections.Counter(self.available[node.name])
        failed: set[int] = set()
        full: set[int] = set()  # kinds
        served = []
        for rank in ranks:
            group = self.group[rank]
            if group in failed or (self.pods[rank].uid, node.name) in refused:
                continue
            is_behind = hold is not None and hold.node == node.name and rank > hold.rank
            without = hold.indices if hold and is_behind else frozenset()
            if (
                self.kind[group] in full
                or not self._is_known[group]
                or self.why_excluded(group, node)
                or any(available[name] < count for name, count in self._others[group])
            ):
                failed.add(group)
            elif room.add(self.profiles[group], without=without):
                served.append(rank)
                available.subtract(dict(self._others[group]))
            else:
                full.add(self.kind[group])
            if len(failed) == len(self.needs):
                break
        return Offer(node=node, pods=tuple(served), room=room) if served else None

    def alike(
        self, node: partitioned.PartitionedNode, refused: frozenset[tuple[str, str]]
    ) -> object:
        """Return a key that is equal for nodes with equal offers."""
        return (
            tuple(sorted((index, id(state)) for index, state in self._states[node.name].items())),
            demand.to_amounts(self.available[node.name]),
            demand.to_amounts({str(p): n for p, n in self._claims.get(node.name, {}).items()}),
            tuple(not self.why_excluded(group, node) for group in range(len(self.needs))),
            frozenset(uid for uid, name in refused if name == node.name),
            tuple(sorted((str(p), n) for p, n in self.devices(node).items())),
        )

    def is_possible(self, group: int, node: partitioned.PartitionedNode) -> bool:
        """Return whether an idle node's GPUs could have the devices of a group."""
        empty = self._empty[node.name]
        key = self.kind[group], tuple(state.kind for state in empty.values())
        if key not in self._possible:
            room = node_room.NodeRoom(self.search, empty, schedulable={}, claimed={}, floor={})
            self._possible[key] = room.add(self.profiles[group])
        return self._is_known[group] and self._possible[key]

    def most(self, node: partitioned.PartitionedNode, profile: model.Profile) -> int:
        """Return how many devices of a profile an idle node's GPUs could have."""
        return sum(self.search.most(state, profile) for state in self._empty[node.name].values())

    def hold_for(self, rank: int, nodes: Iterable[partitioned.PartitionedNode]) -> Hold | None:
        """Return the least used GPUs that can serve a pod when they are idle."""
        profiles = self.profiles[self.group[rank]]
        if not profiles:
            return None
        largest = min(profiles)
        options = []
        for node in nodes:
            indices, in_use, missing = [], 0, profiles[largest]
            for used, index, most in sorted(
                (sum(place.size for _, place in state.fixed), gpu.index, most)
                for gpu, state in self.states(node)
                if (most := self.search.most(state, largest))
            ):
                if missing > 0:
                    indices.append(index)
                    in_use, missing = in_use + used, missing - most
            if indices and missing <= 0:
                options.append((in_use, node.name, frozenset(indices)))
        if not options:
            return None
        _, name, indices_to_hold = min(options, key=lambda each: each[:2])
        return Hold(rank=rank, node=name, indices=indices_to_hold)

    def _states_of(self, node: partitioned.PartitionedNode) -> dict[int, node_room.GpuState]:
        in_use = collections.Counter(
            ci.profile
            for gpu in node.gpus
            for gi in gpu.gpu_instances
            if gi.placement in node.in_use.get(gpu.uuid, ())
            for ci in gi.compute_instances
        )
        requests = ((resources.profile_of(name), count) for name, count in node.allocated)
        # A pod that has not started yet has an idle instance of these profiles.
        allocated = frozenset(p for p, count in requests if p and count > in_use[p])
        return {
            gpu.index: state
            for gpu in node.gpus
            if gpu.uuid in node.in_use
            and (state := self.search.state(gpu, node.in_use[gpu.uuid], allocated))
        }


def desired(
    gpu: model.Gpu, fixed: Iterable[placement.Placed], content: model.Devices
) -> model.DesiredGpu:
    """Return the desired state with a GPU's fixed instances and other devices beside them."""
    spans = {span for _, span in fixed}
    pins = collections.Counter(
        model.Pin(profile=ci.profile, start=gi.placement.start)
        for gi in gpu.gpu_instances
        if gi.placement in spans
        for ci in gi.compute_instances
    )
    return model.DesiredGpu.of(model.MigMode.ENABLED, dict(content), pins)
