"""The state that a change requests of each GPU that it can include, on one node."""

import collections
from collections.abc import Iterable, Iterator, Mapping

from mig_manager.core import model
from mig_manager.core.partitioning.nodes import node_index
from mig_manager.core.partitioning.search import fit_search, trial_change
from mig_manager.core.planner import placement


class DesiredStates:
    """Derives the desired states of GPUs from the nodes of a decision."""

    def __init__(self, index: node_index.NodeIndex, reserved: Mapping[model.Profile, int]) -> None:
        self._index = index
        self._reserved = reserved

    def present(self, position: int) -> dict[str, model.DesiredGpu]:
        """Return the current state of the GPUs, by UUID; fixed instances have placements.

        GPUs that need recovery from a fault stay as they are: a reboot may be what they need.
        """
        faulty = {
            gpu.uuid: _desired_gpu(
                gpu, [(gi.profile, gi.placement) for gi in gpu.gpu_instances], ()
            )
            for gpu in self._index.nodes[position].gpus
            if gpu.needs_recovery and all(gi.compute_instances for gi in gpu.gpu_instances)
        }
        return faulty | {
            gpu.uuid: _desired_gpu(
                gpu, state.fixed, model.in_order(collections.Counter(p for p, _ in state.idle))
            )
            for gpu, state in self._states(position)
        }

    def with_change(
        self, position: int, change: trial_change.TrialChange
    ) -> dict[str, model.DesiredGpu]:
        """Return all GPUs as a change leaves them: a reboot destroys what a layout omits."""
        return self.present(position) | {
            gpu.uuid: _desired_gpu(gpu, state.fixed, change.fits[gpu.index].content)
            for gpu, state in self._states(position)
            if gpu.index in change.fits
        }

    def with_base(
        self, position: int, base: Mapping[str, model.DesiredGpu]
    ) -> dict[str, model.DesiredGpu]:
        """Return all GPUs with as much of their base layout as fits beside fixed instances."""
        desired = self.present(position)
        for gpu, state in self._states(position):
            goal = base.get(gpu.uuid)
            if goal is None or goal.mode is not model.MigMode.ENABLED:
                continue
            if not state.fixed:
                desired[gpu.uuid] = goal
                continue
            capacity = placement.Capacity(gpu.profiles or ())
            rest = collections.Counter(goal.counts)
            rest.subtract(profile for profile, _ in state.fixed)
            content: collections.Counter[model.Profile] = collections.Counter()
            for profile, count in model.in_order(rest):
                for _ in range(count if profile.spans else 0):
                    if capacity.fits(content + collections.Counter([profile]), pinned=state.fixed):
                        content[profile] += 1
            desired[gpu.uuid] = _desired_gpu(gpu, state.fixed, model.in_order(content))
        return desired

    def keeps_reserved(self, position: int, desired: Mapping[str, model.DesiredGpu]) -> bool:
        """Return whether a node with these states of GPUs, by UUID, keeps reserved devices."""
        before = self._index.facts[position].devices
        after = collections.Counter(
            device.profile
            for gpu in self._index.nodes[position].gpus
            if gpu.uuid not in desired
            for device in gpu.devices
        )
        for goal in desired.values():
            after.update(goal.counts)
        return all(
            after[profile] >= min(count, before.get(profile, 0))
            for profile, count in self._reserved.items()
        )

    def _states(self, position: int) -> Iterator[tuple[model.Gpu, fit_search.GpuState]]:
        """Yield the GPUs that a change can include."""
        states = self._index.states(position)
        for gpu in self._index.nodes[position].gpus:
            if gpu.index in states:
                yield gpu, states[gpu.index]


def _desired_gpu(
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
