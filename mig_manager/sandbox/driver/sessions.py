"""Sessions of the simulated library: its handles, what they name, and its event sets."""

import dataclasses
import enum
import itertools
import threading
from typing import Any

from mig_manager.sandbox.driver import arguments, states


class HandleKind(enum.Enum):
    """The kind of object behind a handle."""

    GPU = "gpu"
    MIG_DEVICE = "mig device"
    GPU_INSTANCE = "gpu instance"
    COMPUTE_INSTANCE = "compute instance"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandleTarget:
    """The object of one handle; a serial distinguishes an instance from its successor."""

    kind: HandleKind
    gpu: int
    instance: int = 0
    compute: int = 0
    attachment: int = 0
    """The attachment of a whole GPU, on a node where a handle does not outlive a reset."""


def whole(node: states.MachineState, gpu: int) -> HandleTarget:
    """Return the target of a whole GPU."""
    attachment = node.gpus[gpu].attachments if node.options.reattaches else 0
    return HandleTarget(kind=HandleKind.GPU, gpu=gpu, attachment=attachment)


def mig_device(
    gpu: int, instance: states.GpuInstance, compute: states.ComputeInstance
) -> HandleTarget:
    """Return the target of a MIG device."""
    return HandleTarget(
        kind=HandleKind.MIG_DEVICE, gpu=gpu, instance=instance.serial, compute=compute.serial
    )


class EventSet:
    """The GPUs that an event set watches, and how much of each was reported."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes: dict[int, int] = {}
        self._xids: dict[int, int] = {}

    def watch(self, index: int, gpu: states.GpuState, *, changes: bool, xids: bool) -> None:
        """Report a GPU's changes or Xids from now on; do nothing for those already watched."""
        with self._lock:
            if changes:
                self._changes.setdefault(index, gpu.changes)
            if xids:
                self._xids.setdefault(index, len(gpu.xids))

    def take(self, node: states.MachineState) -> tuple[int, int | None] | None:
        """Return the next event as the index of its GPU, and its Xid; None for a change of MIG.

        Raises:
            Refused: GPU_IS_LOST: a watched GPU has fallen off the bus (``nvml.h``).
        """
        with self._lock:
            if any(node.gpus[index].is_lost for index in (*self._changes, *self._xids)):
                raise states.Refused(states.Code.GPU_IS_LOST)
            for index, reported in self._changes.items():
                if reported < node.gpus[index].changes:
                    self._changes[index] = reported + 1
                    return index, None
            for index, reported in self._xids.items():
                if reported < len(node.gpus[index].xids):
                    self._xids[index] = reported + 1
                    return index, node.gpus[index].xids[reported]
        return None


class Session:
    """One process's initialised library: its depth and its handles."""

    _FIRST = 0x7F00_0000_1000
    _FIRST_EVENT_SET = 0x7E00_0000_1000
    _STEP = 0x40

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._targets: dict[int, HandleTarget] = {}
        self._handles: dict[HandleTarget, int] = {}
        self._event_sets: dict[int, EventSet] = {}
        self._event_set_handles = itertools.count(self._FIRST_EVENT_SET, self._STEP)

    @property
    def is_open(self) -> bool:
        """Whether the library is initialised."""
        return self._depth > 0

    def begin(self) -> None:
        """Initialise once more."""
        with self._lock:
            self._depth += 1

    def end(self) -> None:
        """Undo one initialisation; undoing the last one voids all handles."""
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._targets.clear()
                self._handles.clear()
                self._event_sets.clear()

    def new_event_set(self) -> int:
        """Return the handle of a new event set."""
        with self._lock:
            handle = next(self._event_set_handles)
            self._event_sets[handle] = EventSet()
            return handle

    def event_set(self, argument: Any) -> EventSet:
        """Return the event set of a handle argument; INVALID_ARGUMENT: unknown or freed."""
        event_set = self._event_sets.get(arguments.address(argument))
        if event_set is None:
            raise states.Refused(states.Code.INVALID_ARGUMENT)
        return event_set

    def free_event_set(self, argument: Any) -> None:
        """Free an event set; INVALID_ARGUMENT: unknown or freed."""
        self.event_set(argument)
        with self._lock:
            self._event_sets.pop(arguments.address(argument), None)

    def handle(self, target: HandleTarget) -> int:
        """Return the handle of a target, always the same."""
        with self._lock:
            new = self._FIRST + self._STEP * len(self._handles)
            handle = self._handles.setdefault(target, new)
            self._targets[handle] = target
            return handle

    def target(self, argument: Any) -> HandleTarget:
        """Return the target of a handle argument; INVALID_ARGUMENT: not of this session."""
        target = self._targets.get(arguments.address(argument))
        if target is None:
            raise states.Refused(states.Code.INVALID_ARGUMENT)
        return target
