"""Try a change of one node for the devices of pods, and destroy the fewest idle instances.

Over the GPUs of a node the search is greedy, with a bounded search for pods that request several
devices; ``fit_search`` searches one GPU.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from mig_manager.core import model
from mig_manager.core.partitioning.search import fit_search

_MAX_REPEATS = 300
"""Tries of GPUs of one node for one pod, beside one try of each GPU for each of its devices."""
_NONE: Mapping[model.Profile, int] = {}


class ChangeableGpus:
    """The GPUs of one node that a change can include."""

    def __init__(
        self, search: fit_search.FitSearch, states: Mapping[int, fit_search.GpuState]
    ) -> None:
        self.search = search
        self.states = dict(sorted(states.items()))  # by index
        self.idle: dict[model.Profile, int] = {}
        for state in states.values():
            for profile, count in state.idle_devices:
                self.idle[profile] = self.idle.get(profile, 0) + count

    def maximum(self, profile: model.Profile) -> int:
        """Return how many devices of a profile fit beside the instances that stay."""
        return sum(self.search.max_beside(self.states.values(), profile))

    def able(self, profile: model.Profile) -> Sequence[int]:
        """Return the GPUs on which a device of a profile fits beside the instances that stay."""
        counts = self.search.max_beside(self.states.values(), profile)
        return [i for i, count in zip(self.states, counts, strict=True) if count]


class TrialChange:
    """A change of one node, to which pods are added while they fit."""

    def __init__(
        self,
        gpus: ChangeableGpus,
        *,
        schedulable: Mapping[model.Profile, int] = _NONE,
        assumed: Mapping[model.Profile, int] = _NONE,
        floor: Mapping[model.Profile, int] = _NONE,
    ) -> None:
        """Build it from the GPUs of the node.

        ``schedulable`` are the idle devices that the scheduler can give to pods, ``assumed`` the
        devices of the pods that are assumed there; ``floor`` is how many idle devices must stay.
        """
        self._gpus = gpus
        self._search = gpus.search
        self._had = gpus.idle
        self._schedulable = schedulable
        self._floor = floor
        self._assumed = assumed
        self._new: dict[int, fit_search.NewDevices] = {}
        self.fits: dict[int, fit_search.Fit] = {}
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
        if self._add(devices, without):
            return True
        floor, self._floor = self._floor, _NONE
        # The devices that must stay may have to move to another GPU: they are created there.
        content = collections.Counter(dict(devices)) | collections.Counter(floor)
        if floor and self._add(model.in_order(content), without):
            return True
        self._floor = floor
        return False

    def _add(self, devices: model.Devices, without: AbstractSet[int]) -> bool:
        """Make room for devices, and keep the others that must stay where they are."""
        before = self._assumed
        # Of several profiles, the idle instance of one may be where another has to be created.
        for reuses_idle in (True, False)[: len(devices)]:
            missing = self._missing(devices, reuses_idle=reuses_idle)
            # A pod can request any number.
            if all(count <= self._gpus.maximum(each) for each, count in missing):
                items = [profile for profile, count in missing for _ in range(count)]
                tries = iter(range(len(items) * len(self._gpus.states) + _MAX_REPEATS))
                if self._create(items, without, tries):
                    return True
            if self._assumed is before:
                break  # nothing idle was claimed: another search would be the same
            self._assumed = before
        return False

    def _missing(
        self, devices: model.Devices, *, reuses_idle: bool
    ) -> list[tuple[model.Profile, int]]:
        """Return the devices to create for a pod, and claim the idle ones that serve it."""
        missing = []
        for profile, count in devices:
            reused = 0
            if reuses_idle and (has := self._schedulable.get(profile, 0)):
                claimed = self._assumed.get(profile, 0)
                reused = max(0, min(count, has - claimed - self._lost.get(profile, 0)))
                if reused:
                    self._assumed = {**self._assumed, profile: claimed + reused}
            missing.append((profile, count - reused))
        return missing

    def drain(self, indices: Iterable[int]) -> bool:
        """Destroy the idle instances of GPUs that can be lost; return whether there are any."""
        before = len(self.fits)
        for index in sorted({*indices} & self._gpus.states.keys() - self.fits.keys()):
            if spare := self._spare(index, self._losable()):
                had = collections.Counter(dict(self._gpus.states[index].idle_devices))
                content = model.in_order(had - collections.Counter(dict(spare)))
                count = sum(number for _, number in spare)
                self._change(index, fit_search.Fit(content=content, lost=spare, destroyed=count))
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

    def _change(self, index: int, fit: fit_search.Fit | None) -> None:
        """Fit devices to a GPU in another way; None: the GPU does not change."""
        for each, sign in ((self.fits.pop(index, None), -1), (fit, 1)):
            for profile, count in each.lost if each else ():
                self._lost[profile] = self._lost.get(profile, 0) + sign * count
        if fit:
            self.fits[index] = fit

    def _candidates(
        self, item: model.Profile, without: AbstractSet[int], tries: Iterator[int]
    ) -> list[tuple[tuple[int, int, int], int, fit_search.NewDevices, fit_search.Fit]]:
        """List the GPUs where a device fits: least loss first, then the fullest GPU."""
        ranked = []
        tried: set[tuple[fit_search.GpuState, fit_search.NewDevices]] = set()
        nothing, losable = self._search.nothing, self._losable()
        first = self._search.plus(nothing, item)
        for index in self._gpus.able(item):
            state, had = self._gpus.states[index], self._new.get(index, nothing)
            if index in without or (state, had) in tried or next(tries, None) is None:
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
        for profile in self._assumed.keys() | self._floor.keys():
            had = self._had.get(profile, 0)
            free = max(had, self._schedulable.get(profile, 0)) - self._assumed.get(profile, 0)
            spare = min(had - self._floor.get(profile, 0), free)
            losable[profile] = spare - self._lost.get(profile, 0)
        return losable

    def _spare(self, index: int, losable: Mapping[model.Profile, int]) -> model.Devices:
        """Return how many idle devices of each profile a GPU can lose, with its present loss."""
        idle = self._gpus.states[index].idle_devices
        if not (idle and losable):
            return idle
        lost = dict(self.fits[index].lost) if index in self.fits else {}
        spare = []
        for profile, count in idle:
            limit = losable[profile] + lost.get(profile, 0) if profile in losable else count
            if limit > 0:
                spare.append((profile, min(count, limit)))
        return idle if len(spare) == len(idle) and tuple(spare) == idle else tuple(spare)
