"""Find room on a node for devices that pods ask for, at the price of the fewest idle instances.

Instances in use stay where they are. Per GPU the search is exact: over the sets of idle instances
that stay, largest set first, it takes the first beside which the new instances fit. Over the GPUs
of a node it is greedy, with a bounded search for pods that ask for several devices. Answers are
remembered by the state of a GPU and its new devices, so equal GPUs cost nothing.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mig_manager.core import model
from mig_manager.core.planner import placement

Devices = tuple[tuple[model.Profile, int], ...]
"""Profiles with positive counts, in ``Profile.sort_key`` order."""
_MOST_LOOKS = 300
"""At the GPUs of one node for one pod: enough for every pod that a person would write."""


def devices(counts: Mapping[model.Profile, int]) -> Devices:
    """Return counted devices in canonical form."""
    positive = ((profile, count) for profile, count in counts.items() if count > 0)
    return tuple(sorted(positive, key=lambda item: item[0].sort_key))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GpuState:
    """What decides whether devices fit a GPU; equal GPUs have the same one of a ``Search``."""

    kind: int  # number of its set of profiles
    fixed: tuple[placement.Placed, ...]  # GPU instances that stay, in placement order
    idle: tuple[placement.Placed, ...]  # those that may go, largest first


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class New:
    """New devices of one GPU; equal ones are the same one of a ``Search``."""

    devices: Devices
    following: "dict[model.Profile, New]" = dataclasses.field(default_factory=dict)
    """With one device more, as far as that was asked."""


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """How new devices fit a GPU."""

    content: Devices
    """The devices beside the fixed instances afterwards: new ones and idle ones that stay."""
    lost: Devices  # idle devices that are gone afterwards
    destroyed: int


class Search:
    """Answers for all GPUs of a decision."""

    def __init__(self) -> None:
        """Start without knowledge."""
        self._kinds: dict[tuple[model.GpuInstanceProfile, ...], int] = {}
        self._capacities: list[placement.Capacity] = []
        self._states: dict[tuple[object, ...], GpuState] = {}
        self.nothing = New(())
        self._news: dict[Devices, New] = {(): self.nothing}
        self._ways: dict[tuple[GpuState, New, Devices], Way | None] = {}

    def plus(self, new: New, profile: model.Profile) -> New:
        """Return new devices and one more."""
        if profile not in new.following:
            counts = collections.Counter(dict(new.devices))
            counts[profile] += 1
            more = devices(counts)
            new.following[profile] = self._news.setdefault(more, New(more))
        return new.following[profile]

    @property
    def count(self) -> int:
        """How many different questions were answered."""
        return len(self._ways)

    def state(
        self,
        gpu: model.Gpu,
        in_use: frozenset[model.Placement],
        kept: frozenset[model.Profile] = frozenset(),
    ) -> GpuState | None:
        """Return the state of a GPU; None if it should be left alone: it is not understood.

        Idle instances of the ``kept`` profiles stay too, and so do those with compute instances
        that no pod can ask for: another program created them.
        """
        kind = self._kind(gpu)
        capacity = self._capacities[kind]
        fixed: list[placement.Placed] = []
        idle: list[placement.Placed] = []
        for gi in gpu.gpu_instances:
            inside = [ci.profile for ci in gi.compute_instances]
            spec = capacity.by_profile.get(gi.profile)
            if inside == [gi.profile] and gi.placement not in in_use and gi.profile not in kept:
                idle.append((gi.profile, gi.placement))
                continue
            if not inside and gi.placement not in in_use:
                continue  # every change removes it
            is_known = spec is not None and gi.placement in spec.placements
            if not (is_known and inside and {p.gpu_instance for p in inside} == {gi.profile}):
                return None
            fixed.append((gi.profile, gi.placement))
        idle.sort(key=lambda item: (item[0].sort_key, item[1]))
        return self._state(kind, tuple(fixed), tuple(idle))

    def empty(self, gpu: model.Gpu) -> GpuState:
        """Return the state that a GPU would have without instances."""
        return self._state(self._kind(gpu), (), ())

    def way(self, state: GpuState, new: New, spare: Devices) -> Way | None:
        """Return how new devices fit a GPU; None if they do not.

        ``spare`` says how many idle devices of each profile the node can lose; of the others as
        many are created again as are destroyed.
        """
        key = state, new, spare
        if key not in self._ways:
            self._ways[key] = next(self._found(state, new.devices, dict(spare)), None)
        return self._ways[key]

    def most(self, state: GpuState, profile: model.Profile) -> int:
        """Return how many devices of a profile fit the GPU if it is empty."""
        return self._capacities[state.kind].most(profile)

    def _state(
        self, kind: int, fixed: tuple[placement.Placed, ...], idle: tuple[placement.Placed, ...]
    ) -> GpuState:
        return self._states.setdefault((kind, fixed, idle), GpuState(kind, fixed, idle))

    def _kind(self, gpu: model.Gpu) -> int:
        profiles = gpu.profiles or ()
        if profiles not in self._kinds:
            self._kinds[profiles] = len(self._capacities)
            self._capacities.append(placement.Capacity(profiles))
        return self._kinds[profiles]

    def _found(
        self, state: GpuState, new: Devices, spare: Mapping[model.Profile, int]
    ) -> Iterator[Way]:
        capacity = self._capacities[state.kind]
        wanted = collections.Counter(dict(new))
        if any(profile not in capacity.by_profile for profile in wanted):
            return
        had = collections.Counter(profile for profile, _ in state.idle)
        for count in range(len(state.idle), -1, -1):
            for stays in itertools.combinations(state.idle, count):
                left = collections.Counter(profile for profile, _ in stays)
                gone = had - left
                again = gone - collections.Counter(spare)
                if capacity.fits(wanted + again, pinned=(*state.fixed, *stays)):
                    yield Way(
                        content=devices(wanted + again + left),
                        lost=devices(gone - again),
                        destroyed=len(state.idle) - count,
                    )


class NodeRoom:
    """The room of one node, which shrinks as pods are added."""

    def __init__(
        self,
        search: Search,
        states: Mapping[int, GpuState],
        *,
        schedulable: Mapping[model.Profile, int],
        taken: Mapping[model.Profile, int],
        floor: Mapping[model.Profile, int],
    ) -> None:
        """Build it from the states of its GPUs, by index.

        ``schedulable`` are the idle devices that the scheduler can give to pods, ``taken`` those
        that it is going to give; ``floor`` is how many idle ones must stay.
        """
        self._search = search
        self._states = dict(sorted(states.items()))
        self._had = collections.Counter(
            profile for state in states.values() for profile, _ in state.idle
        )
        self._schedulable = collections.Counter(schedulable)
        self._floor = collections.Counter(floor)
        self._taken = collections.Counter(taken)
        self._new: dict[int, New] = {}
        self.ways: dict[int, Way] = {}
        """By index of the GPUs that change."""

    @property
    def destroyed(self) -> int:
        """How many idle instances the changes destroy."""
        return sum(way.destroyed for way in self.ways.values())

    def add(
        self, profiles: Mapping[model.Profile, int], *, without: frozenset[int] = frozenset()
    ) -> bool:
        """Make room for one pod; return False, and change nothing, if there is none.

        On the GPUs ``without`` nothing is created.
        """
        free = self._schedulable - self._taken - self._lost()
        taken = {profile: min(count, free[profile]) for profile, count in profiles.items()}
        if any(
            count - taken[profile] > self._most(profile) for profile, count in profiles.items()
        ):
            return False  # A pod may ask for any number.
        items = [
            profile for profile, count in devices(profiles) for _ in range(count - taken[profile])
        ]
        before = self._taken, dict(self._new), dict(self.ways)
        self._taken = self._taken + collections.Counter(taken)
        indices = [index for index in self._states if index not in without]
        looks = itertools.count()
        if self._placed(items, indices, looks):
            return True
        self._taken, self._new, self.ways = before
        return False

    def _most(self, profile: model.Profile) -> int:
        return sum(self._search.most(state, profile) for state in self._states.values())

    def _placed(
        self, items: Sequence[model.Profile], indices: Sequence[int], looks: Iterator[int]
    ) -> bool:
        """Create the devices, the largest first, with all ways back."""
        if not items:
            return True
        item, *rest = items
        for index, new, way in self._candidates(item, indices, looks):
            before = self._new.get(index), self.ways.get(index)
            self._new[index], self.ways[index] = new, way
            if self._placed(rest, indices, looks):
                return True
            self._restore(index, *before)
        return False

    def _restore(self, index: int, new: New | None, way: Way | None) -> None:
        del self._new[index], self.ways[index]
        if new is not None and way is not None:
            self._new[index], self.ways[index] = new, way

    def _candidates(
        self, item: model.Profile, indices: Iterable[int], looks: Iterator[int]
    ) -> list[tuple[int, New, Way]]:
        """List the GPUs where a device fits: least loss first, then the fullest GPU."""
        found: dict[tuple[GpuState, New], tuple[tuple[int, int, int], int, New, Way] | None] = {}
        for index in indices:
            state, had = self._states[index], self._new.get(index, self._search.nothing)
            if (state, had) in found or next(looks) > _MOST_LOOKS:
                continue
            new = self._search.plus(had, item)
            way = self._search.way(state, new, self._spare(index) if state.idle else ())
            found[state, had] = None
            if way is not None:
                old = self.ways[index].destroyed if index in self.ways else 0
                fill = sum(place.size for _, place in state.fixed)
                fill += sum(count for _, count in had.devices)
                found[state, had] = (way.destroyed - old, -fill, index), index, new, way
        ordered = sorted(filter(None, found.values()), key=lambda each: each[0])
        return [(index, new, way) for _, index, new, way in ordered]

    def _lost(self, besides: int | None = None) -> "collections.Counter[model.Profile]":
        """Count the idle devices that are lost on all GPUs but one."""
        lost: collections.Counter[model.Profile] = collections.Counter()
        for index, way in self.ways.items():
            if index != besides:
                lost.update(dict(way.lost))
        return lost

    def _spare(self, index: int) -> Devices:
        """Return how many idle devices of each profile a GPU can lose.

        The scheduler may also give those of GPUs that are left alone.
        """
        here = collections.Counter(profile for profile, _ in self._states[index].idle)
        lost = self._lost(index)
        spare = (self._had - lost - self._floor) & (
            (self._had | self._schedulable) - lost - self._taken
        )
        return devices(spare & here)
