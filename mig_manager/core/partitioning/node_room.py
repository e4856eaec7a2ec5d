"""Find room on a node for the devices of pods, and destroy the fewest idle instances.

Instances in use stay. Per GPU the search is exact: it tries the sets of idle instances to keep,
largest set first, until the new instances fit beside one. Over the GPUs of a node it is greedy,
with a bounded search for pods that request several devices. A cache by the state of a GPU and its
new devices makes equal GPUs free.
"""

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from mig_manager.core import model
from mig_manager.core.planner import placement

_MAX_TRIES = 300
"""Tries of GPUs of one node for one pod: enough for every realistic pod."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GpuFacts:
    """The facts that decide whether devices fit a GPU; a ``FitSearch`` has one for equal GPUs."""

    capacity: placement.Capacity
    fixed: tuple[placement.Placed, ...]  # GPU instances that stay, in placement order
    idle: tuple[placement.Placed, ...]  # GPU instances that may be destroyed, largest first
    fill: int  # memory slices of the instances that stay
    idle_devices: model.Devices

    @property
    def free_slices(self) -> int:
        """How many memory slices the fixed instances leave."""
        return self.capacity.memory_slices - self.fill


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GpuClass:
    """GPUs with equal instances in equal use; a ``FitSearch`` has one object for them."""

    capacity: placement.Capacity
    gpu_instances: tuple[model.GpuInstance, ...]
    in_use: frozenset[model.Placement] | None  # None: unknown
    empty: GpuFacts  # without their instances
    devices: tuple[model.Profile, ...]
    used: tuple[model.Profile, ...]  # of the devices in use
    states: dict[frozenset[model.Profile], GpuFacts | None] = dataclasses.field(
        default_factory=dict
    )
    """By the profiles whose idle instances stay; filled on demand."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NewDevices:
    """New devices of one GPU; a ``FitSearch`` has one object for equal devices."""

    devices: model.Devices
    count: int
    following: "dict[model.Profile, NewDevices]" = dataclasses.field(default_factory=dict)
    """With one device more; filled on demand."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """How new devices fit a GPU."""

    content: model.Devices
    """The devices beside the fixed instances afterwards: new ones, and idle ones that stay."""
    lost: model.Devices  # idle devices that do not exist afterwards
    destroyed: int


class FitSearch:
    """Searches the GPUs of one decision, with a cache."""

    def __init__(self) -> None:
        self._capacities: dict[tuple[model.GpuInstanceProfile, ...], placement.Capacity] = {}
        self._last: tuple[tuple[model.GpuInstanceProfile, ...], placement.Capacity] | None = None
        """Of the last GPU: all GPUs of a node have one object, whose hash takes long."""
        self._classes: dict[tuple[object, ...], GpuClass] = {}
        self._states: dict[tuple[object, ...], GpuFacts] = {}
        self._most: dict[model.Profile, dict[GpuFacts, int]] = {}
        self.nothing = NewDevices((), 0)
        self._new_devices: dict[model.Devices, NewDevices] = {(): self.nothing}
        self._searches: dict[tuple[object, ...], Fit | None] = {}

    def plus(self, new: NewDevices, profile: model.Profile) -> NewDevices:
        """Return new devices and one more."""
        following = new.following.get(profile)
        if following is None:
            counts = collections.Counter(dict(new.devices))
            counts[profile] += 1
            more = model.in_order(counts)
            following = self._new_devices.setdefault(more, NewDevices(more, new.count + 1))
            new.following[profile] = following
        return following

    @property
    def count(self) -> int:
        """How many classes of GPUs and searches it keeps."""
        return len(self._classes) + len(self._searches)

    def gpu_class(self, gpu: model.Gpu, in_use: frozenset[model.Placement] | None) -> GpuClass:
        """Return the class of a GPU; ``in_use`` None: it is unknown which instances are in use."""
        # The hash of the instances takes long.
        key = self._capacity(gpu.profiles or ()), gpu.gpu_instances, in_use
        gpus = self._classes.get(key)
        if gpus is None:
            gpus = self._classes[key] = GpuClass(
                *key,
                empty=self._state(key[0], (), ()),
                devices=tuple(device.profile for device in gpu.devices),
                used=tuple(
                    ci.profile
                    for gi in gpu.gpu_instances
                    if in_use and gi.placement in in_use
                    for ci in gi.compute_instances
                ),
            )
        return gpus

    def state(self, gpus: GpuClass, kept: frozenset[model.Profile]) -> GpuFacts | None:
        """Return the state of GPUs; None if they must not change.

        Their use or an instance is unknown. Idle instances also stay if their profile is ``kept``,
        or if another program created compute instances in them that no pod can request.
        """
        if kept not in gpus.states:
            gpus.states[kept] = self._derive(gpus, kept)
        return gpus.states[kept]

    def _derive(self, gpus: GpuClass, kept: frozenset[model.Profile]) -> GpuFacts | None:
        if gpus.in_use is None:
            return None
        fixed: list[placement.Placed] = []
        idle: list[placement.Placed] = []
        for gi in gpus.gpu_instances:
            inside = [ci.profile for ci in gi.compute_instances]
            is_whole = inside == [gi.profile]
            if gi.placement not in gpus.in_use:
                if is_whole and gi.profile not in kept:
                    idle.append((gi.profile, gi.placement))
                    continue
                if not inside:
                    continue  # every change removes it
            spec = gpus.capacity.by_profile.get(gi.profile)
            is_known = spec is not None and gi.placement in spec.placements
            is_ours = is_whole or all(each.gpu_instance == gi.profile for each in inside)
            if not (is_known and inside and is_ours):
                return None
            fixed.append((gi.profile, gi.placement))
        idle.sort()
        return self._state(gpus.capacity, tuple(fixed), tuple(idle))

    def fit(self, state: GpuFacts, new: NewDevices, spare: model.Devices) -> Fit | None:
        """Return how new devices fit a GPU; None if they do not.

        ``spare`` are the idle devices that the node can lose; other devices that are destroyed
        must be created again.
        """
        # Most nodes can lose all, and the hash of devices takes long.
        key = (state, new) if spare is state.idle_devices else (state, new, spare)
        try:
            return self._searches[key]
        except KeyError:
            fit = self._searches[key] = next(self._fits(state, new.devices, dict(spare)), None)
            return fit

    def most_beside(self, states: Collection[GpuFacts], profile: model.Profile) -> list[int]:
        """Return how many devices of a profile fit beside the fixed instances of GPUs."""
        most = self._most.setdefault(profile, {})
        for state in states:
            if state not in most:
                count = 0
                if profile in state.capacity.by_profile:
                    while state.capacity.fits({profile: count + 1}, pinned=state.fixed):
                        count += 1
                most[state] = count
        return [most[state] for state in states]

    def sizes(
        self, states: Iterable[GpuFacts], profiles: Iterable[model.Profile]
    ) -> dict[model.Profile, int]:
        """Return the fewest memory slices of each profile that one of these GPUs has."""
        specs = [
            spec
            for capacity in {state.capacity for state in states}
            for profile in profiles
            if (spec := capacity.by_profile.get(profile)) and spec.placements
        ]
        sizes: dict[model.Profile, int] = {}
        for spec in specs:
            size = min(place.size for place in spec.placements)
            sizes[spec.profile] = min(size, sizes.get(spec.profile, size))
        return sizes

    def _state(
        self,
        capacity: placement.Capacity,
        fixed: tuple[placement.Placed, ...],
        idle: tuple[placement.Placed, ...],
    ) -> GpuFacts:
        key = capacity, fixed, idle
        if key not in self._states:
            counts = collections.Counter(profile for profile, _ in idle)
            fill = sum(place.size for _, place in fixed)
            self._states[key] = GpuFacts(*key, fill, model.in_order(counts))
        return self._states[key]

    def _capacity(self, profiles: tuple[model.GpuInstanceProfile, ...]) -> placement.Capacity:
        if self._last is None or self._last[0] is not profiles:
            if profiles not in self._capacities:
                self._capacities[profiles] = placement.Capacity(profiles)
            self._last = profiles, self._capacities[profiles]
        return self._last[1]

    def _fits(
        self, state: GpuFacts, new: model.Devices, spare: Mapping[model.Profile, int]
    ) -> Iterator[Fit]:
        capacity, wanted = state.capacity, collections.Counter(dict(new))
        had = collections.Counter(dict(state.idle_devices))
        required = had - collections.Counter(spare)  # kept, or created again
        is_known = all(profile in capacity.by_profile for profile in wanted)
        if not (is_known and capacity.fits(wanted + required, pinned=state.fixed)):
            return  # nor does it fit beside idle instances
        for count in range(len(state.idle), -1, -1):
            for stays in itertools.combinations(state.idle, count):
                kept = collections.Counter(profile for profile, _ in stays)
                again = required - kept
                if capacity.fits(wanted + again, pinned=(*state.fixed, *stays)):
                    yield Fit(
                        content=model.in_order(wanted + again + kept),
                        lost=model.in_order(had - kept - again),
                        destroyed=len(state.idle) - count,
                    )


class ChangeableGpus:
    """The GPUs of one node that a change can include."""

    def __init__(self, search: FitSearch, states: Mapping[int, GpuFacts]) -> None:
        self.search = search
        self.states = dict(sorted(states.items()))  # by index
        self.idle: dict[model.Profile, int] = {}
        for state in states.values():
            for profile, count in state.idle_devices:
                self.idle[profile] = self.idle.get(profile, 0) + count
        self._most: dict[model.Profile, int] = {}
        self._able: dict[model.Profile, Sequence[int]] = {}

    def most(self, profile: model.Profile) -> int:
        """Return how many devices of a profile fit beside the instances that stay."""
        if profile not in self._most:
            self._most[profile] = sum(self.search.most_beside(self.states.values(), profile))
        return self._most[profile]

    def able(self, profile: model.Profile) -> Sequence[int]:
        """Return the GPUs on which a device of a profile fits beside the instances that stay."""
        if profile not in self._able:
            counts = self.search.most_beside(self.states.values(), profile)
            able = [i for i, count in zip(self.states, counts, strict=True) if count]
            self._able[profile] = able
        return self._able[profile]


class NodeRoom:
    """The room of one node, which shrinks as pods are added."""

    def __init__(
        self,
        gpus: ChangeableGpus,
        *,
        schedulable: Mapping[model.Profile, int],
        claimed: Mapping[model.Profile, int],
        floor: Mapping[model.Profile, int],
    ) -> None:
        """Build it from the GPUs of the node.

        ``schedulable`` are the idle devices that the scheduler can give to pods, ``claimed`` the
        devices that it will give; ``floor`` is how many idle devices must stay.
        """
        self._gpus = gpus
        self._search = gpus.search
        self._had = gpus.idle
        self._schedulable = schedulable
        self._floor = floor
        self._claimed = claimed
        self._new: dict[int, NewDevices] = {}
        self.fits: dict[int, Fit] = {}
        """By index of the GPUs that change."""
        self._lost: dict[model.Profile, int] = {}
        """Idle devices that are lost."""

    @property
    def destroyed(self) -> int:
        """How many idle instances the changes destroy."""
        return sum(fit.destroyed for fit in self.fits.values())

    @property
    def begun(self) -> int:
        """On how many GPUs without an instance in use the changes make room."""
        return sum(not self._gpus.states[index].fixed for index in self.fits)

    def add(self, devices: model.Devices, *, without: AbstractSet[int] = frozenset()) -> bool:
        """Make room for one pod; return False, and change nothing, if it has no room.

        No device is created on the GPUs ``without``.
        """
        before = self._claimed
        # Of several profiles, the idle instance of one may be where another has to be created.
        for reuses_idle in (True, False)[: len(devices)]:
            missing = self._missing(devices, reuses_idle=reuses_idle)
            # A pod can request any number.
            if all(count <= self._gpus.most(each) for each, count in missing):
                items = [profile for profile, count in missing for _ in range(count)]
                if self._create(items, without, itertools.count()):
                    return True
            if self._claimed is before:
                break  # nothing idle was claimed: another search would be the same
            self._claimed = before
        return False

    def _missing(
        self, devices: model.Devices, *, reuses_idle: bool
    ) -> list[tuple[model.Profile, int]]:
        """Return the devices to create for a pod, and claim the idle ones that serve it."""
        missing = []
        for profile, count in devices:
            again = 0
            if reuses_idle and (has := self._schedulable.get(profile, 0)):
                claimed = self._claimed.get(profile, 0)
                again = max(0, min(count, has - claimed - self._lost.get(profile, 0)))
                if again:
                    self._claimed = {**self._claimed, profile: claimed + again}
            missing.append((profile, count - again))
        return missing

    def drain(self, indices: Iterable[int]) -> bool:
        """Destroy the idle instances of GPUs that can be lost; return whether there are any."""
        before = len(self.fits)
        for index in sorted({*indices} & self._gpus.states.keys() - self.fits.keys()):
            if spare := self._spare(index, self._losable()):
                had = collections.Counter(dict(self._gpus.states[index].idle_devices))
                content = model.in_order(had - collections.Counter(dict(spare)))
                count = sum(number for _, number in spare)
                self._change(index, Fit(content=content, lost=spare, destroyed=count))
        return len(self.fits) > before

    def _create(
        self, items: Sequence[model.Profile], without: AbstractSet[int], tries: Iterator[int]
    ) -> bool:
        """Create the devices, largest first, and backtrack."""
        if not items:
            return True
        item, *rest = items
        for _, index, new, fit in self._candidates(item, without, tries):
            before = self._new.get(index), self.fits.get(index)
            self._new[index] = new
            self._change(index, fit)
            if self._create(rest, without, tries):
                return True
            self._new[index] = before[0] or self._search.nothing
            self._change(index, before[1])
        return False

    def _change(self, index: int, fit: Fit | None) -> None:
        """Fit devices to a GPU in another way; None: the GPU does not change."""
        for each, sign in ((self.fits.pop(index, None), -1), (fit, 1)):
            for profile, count in each.lost if each else ():
                self._lost[profile] = self._lost.get(profile, 0) + sign * count
        if fit:
            self.fits[index] = fit

    def _candidates(
        self, item: model.Profile, without: AbstractSet[int], tries: Iterator[int]
    ) -> list[tuple[tuple[int, int, int], int, NewDevices, Fit]]:
        """List the GPUs where a device fits: least loss first, then the fullest GPU."""
        ranked = []
        tried: set[tuple[GpuFacts, NewDevices]] = set()
        nothing, losable = self._search.nothing, self._losable()
        first = self._search.plus(nothing, item)
        for index in self._gpus.able(item):
            state, had = self._gpus.states[index], self._new.get(index, nothing)
            if index in without or (state, had) in tried or next(tries) > _MAX_TRIES:
                continue
            tried.add((state, had))
            new = first if had is nothing else self._search.plus(had, item)
            fit = self._search.fit(state, new, self._spare(index, losable))
            if fit is not None:
                old = self.fits[index].destroyed if index in self.fits else 0
                fill = state.fill + had.count
                ranked.append(((fit.destroyed - old, -fill, index), index, new, fit))
        return sorted(ranked)  # the index decides at the latest

    def _losable(self) -> dict[model.Profile, int]:
        """Return how many more idle devices of some profiles the node can lose.

        A GPU can lose all that it has of the others. The scheduler can also give devices of GPUs
        that do not change.
        """
        losable = {}
        for profile in self._claimed.keys() | self._floor.keys():
            had = self._had.get(profile, 0)
            free = max(had, self._schedulable.get(profile, 0)) - self._claimed.get(profile, 0)
            most = min(had - self._floor.get(profile, 0), free)
            losable[profile] = most - self._lost.get(profile, 0)
        return losable

    def _spare(self, index: int, losable: Mapping[model.Profile, int]) -> model.Devices:
        """Return how many idle devices of each profile a GPU can lose, with its present loss."""
        idle = self._gpus.states[index].idle_devices
        if not (idle and losable):
            return idle
        lost = dict(self.fits[index].lost) if index in self.fits else {}
        spare = []
        for profile, count in idle:
            most = losable[profile] + lost.get(profile, 0) if profile in losable else count
            if most > 0:
                spare.append((profile, min(count, most)))
        return idle if len(spare) == len(idle) and tuple(spare) == idle else tuple(spare)
