"""Find room on a GPU for new devices, and destroy the fewest idle instances.

Instances in use stay. The search is exact: it tries the sets of idle instances to keep, largest
set first, until the new instances fit beside one. A cache by the state of a GPU and its new
devices makes equal GPUs free.
"""

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping

from mig_manager.core import model
from mig_manager.core.planner import placement


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GpuState:
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
    empty: GpuState  # without their instances
    devices: tuple[model.Profile, ...]
    used: tuple[model.Profile, ...]  # profiles of the devices in use
    states: dict[frozenset[model.Profile], GpuState | None] = dataclasses.field(
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
        """Capacity of the last GPU: all GPUs of a node have one object, whose hash takes long."""
        self._classes: dict[tuple[object, ...], GpuClass] = {}
        self._states: dict[tuple[object, ...], GpuState] = {}
        self._maxima: dict[model.Profile, dict[GpuState, int]] = {}
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

    def state(self, gpus: GpuClass, kept: frozenset[model.Profile]) -> GpuState | None:
        """Return the state of GPUs; None if they must not change.

        Their use or an instance is unknown. Idle instances also stay if their profile is ``kept``,
        or if another program created compute instances in them that no pod can request.
        """
        if kept not in gpus.states:
            gpus.states[kept] = self._derive(gpus, kept)
        return gpus.states[kept]

    def _derive(self, gpus: GpuClass, kept: frozenset[model.Profile]) -> GpuState | None:
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

    def fit(self, state: GpuState, new: NewDevices, spare: model.Devices) -> Fit | None:
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

    def max_beside(self, states: Collection[GpuState], profile: model.Profile) -> list[int]:
        """Return how many devices of a profile fit beside the fixed instances of GPUs."""
        maxima = self._maxima.setdefault(profile, {})
        for state in states:
            if state not in maxima:
                count = 0
                if profile in state.capacity.by_profile:
                    while state.capacity.fits({profile: count + 1}, pinned=state.fixed):
                        count += 1
                maxima[state] = count
        return [maxima[state] for state in states]

    def sizes(
        self, states: Iterable[GpuState], profiles: Collection[model.Profile]
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
    ) -> GpuState:
        key = capacity, fixed, idle
        if key not in self._states:
            counts = collections.Counter(profile for profile, _ in idle)
            fill = sum(place.size for _, place in fixed)
            self._states[key] = GpuState(*key, fill, model.in_order(counts))
        return self._states[key]

    def _capacity(self, profiles: tuple[model.GpuInstanceProfile, ...]) -> placement.Capacity:
        if self._last is None or self._last[0] is not profiles:
            if profiles not in self._capacities:
                self._capacities[profiles] = placement.Capacity(profiles)
            self._last = profiles, self._capacities[profiles]
        return self._last[1]

    def _fits(
        self, state: GpuState, new: model.Devices, spare: Mapping[model.Profile, int]
    ) -> Iterator[Fit]:
        capacity, desired = state.capacity, collections.Counter(dict(new))
        had = collections.Counter(dict(state.idle_devices))
        required = had - collections.Counter(spare)  # kept, or created again
        is_known = all(profile in capacity.by_profile for profile in desired)
        if not (is_known and capacity.fits(desired + required, pinned=state.fixed)):
            return  # nor does it fit beside idle instances
        for count in range(len(state.idle), -1, -1):
            for stays in itertools.combinations(state.idle, count):
                kept = collections.Counter(profile for profile, _ in stays)
                recreated = required - kept
                if capacity.fits(desired + recreated, pinned=(*state.fixed, *stays)):
                    yield Fit(
                        content=model.in_order(desired + recreated + kept),
                        lost=model.in_order(had - kept - recreated),
                        destroyed=len(state.idle) - count,
                    )
