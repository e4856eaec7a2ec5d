"""Judge evictions by the requested layout: only users of devices that it destroys may go.

The planner is not asked: every state that a GPU can have with the layout is looked at.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from mig_manager.sandbox.driver import states
from tests.rigs.node import samples, simulated_rig
from tests.rigs.planner import oracle
from tests.soak import layouts


class Eviction(NamedTuple):
    """A granted eviction, and the node at that moment."""

    pod: str
    layout: str | None  # the name of the layout that the agent serves; None: it serves none
    devices: frozenset[str]  # of the pod
    in_use: frozenset[str]  # the devices of all pods that do not end
    machine: states.MachineState

    def is_justified(self, layout: layouts.Layout) -> bool:
        """Return whether a layout destroys a device of the pod."""
        boards = states.boards_of(self.machine)
        return any(
            choice is not None
            and self.devices & _devices_to_destroy(board, gpu, choice.devices, self.in_use)
            for board, gpu, choice in zip(boards, self.machine.gpus, layout, strict=False)
        )


def _devices_to_destroy(
    board: states.Board,
    gpu: states.GpuState,
    desired: Mapping[str, int] | None,
    in_use: Collection[str],
) -> set[str | None]:
    """Return the devices that a layout destroys on a GPU.

    Where several ways end equally few devices in use, any of them may be taken.
    """
    observed = simulated_rig.driver_gpu(board, gpu)
    if gpu.is_enabled is not (desired is not None):
        return {board.uuid, *observed.mig_uuids}
    if desired is None:
        return set()
    devices = {samples.profile(name): count for name, count in desired.items()}
    ways = [oracle.destroyed_uuids(observed, goal) for goal in oracle.goals(observed, devices)]
    losses = [len(set(in_use).intersection(way)) for way in ways]
    fewest = min(losses, default=0)
    return {uuid for way, lost in zip(ways, losses, strict=True) if lost == fewest for uuid in way}
