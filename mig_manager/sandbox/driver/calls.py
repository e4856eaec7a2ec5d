"""Simulated C functions: their arguments, sessions with handles, and views of the node.

A function registers with ``function``. It receives a view of the node, then the raw C arguments:
numbers, handles, arrays and strings as ctypes passes them. Queries write to the caller's memory;
changes also return the GPU's new state. Both raise ``Refused`` for an NVML error code, which
docstrings name; for a NULL pointer that is INVALID_ARGUMENT. Where the real library would write
past a buffer or take a struct for a pointer, and crash the process later, the simulation raises
at once.
"""

import ctypes
import dataclasses
import enum
import itertools
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mig_manager.catalogue import hardware
from mig_manager.sandbox.driver import states, transitions

_Body = TypeVar("_Body", bound=Callable[..., Any])


class HandleKind(enum.Enum):
    """The kind of object behind a handle."""

    GPU = "gpu"
    MIG_DEVICE = "mig device"
    GPU_INSTANCE = "gpu instance"
    COMPUTE_INSTANCE = "compute instance"


GPU = frozenset({HandleKind.GPU})
DEVICE = frozenset({HandleKind.GPU, HandleKind.MIG_DEVICE})
GPU_INSTANCE = frozenset({HandleKind.GPU_INSTANCE})
COMPUTE_INSTANCE = frozenset({HandleKind.COMPUTE_INSTANCE})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One C function."""

    body: Callable[..., Any]
    takes: frozenset[HandleKind]
    """Kinds of handle that its first argument may be; empty: the first argument is no handle."""
    latency: str | Callable[..., str]
    """Field of ``Latency`` for the time of a call; may depend on its view and arguments."""
    is_change: bool
    needs_session: bool


FUNCTIONS: dict[str, Function] = {}


def function(
    *names: str,
    takes: frozenset[HandleKind] = frozenset(),
    latency: str | Callable[..., str] = "query_s",
    is_change: bool = False,
    needs_session: bool = True,
) -> Callable[[_Body], _Body]:
    """Register a C function under its names; see ``Function``."""

    def register(body: _Body) -> _Body:
        registered = Function(
            body=body,
            takes=takes,
            latency=latency,
            is_change=is_change,
            needs_session=needs_session,
        )
        FUNCTIONS.update(dict.fromkeys(names, registered))
        return body

    return register


def change(
    name: str, takes: frozenset[HandleKind], latency: str | Callable[..., str]
) -> Callable[[_Body], _Body]:
    """Register a change of a GPU, which returns the GPU's new state."""
    return function(name, takes=takes, latency=latency, is_change=True)


def numbers(
    takes: frozenset[HandleKind], values: "Mapping[str, Callable[[DeviceView], int]]"
) -> None:
    """Register queries by C name that write one unsigned number."""

    def register(name: str, value: "Callable[[DeviceView], int]") -> None:
        @function(name, takes=takes)
        def _query(view: DeviceView, reference: Any) -> None:
            put(reference, ctypes.c_uint, value(view))

    for name, value in values.items():
        register(name, value)


# -- arguments --------------------------------------------------------------------------------


def number(argument: Any) -> int:
    """Return an integer argument, given as ``int`` or as a ctypes integer."""
    return int(getattr(argument, "value", argument))


def text(argument: Any) -> str:
    """Return a ``char *`` argument."""
    raw = argument if isinstance(argument, bytes) else getattr(argument, "value", None)
    if not isinstance(raw, bytes):
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    return raw.decode("utf-8", "replace")


def put(reference: Any, kind: Any, value: Any) -> None:
    """Write one value through a pointer."""
    _pointer(reference, kind)[0] = value


def put_all(reference: Any, kind: Any, values: list[Any]) -> None:
    """Write values to a caller's array, whose length NVML does not know.

    Raises:
        Refused: INVALID_ARGUMENT, the pointer is NULL.
        BufferError: The array is too short: the real library would write past its end.
    """
    if isinstance(reference, ctypes.Array) and len(reference) < len(values):
        raise BufferError(f"NVML writes {len(values)} entries to an array of {len(reference)}")
    pointer = _pointer(reference, kind)
    for index, value in enumerate(values):
        pointer[index] = value


def put_text(buffer: Any, length: Any, value: str) -> None:
    """Write a string to a caller's buffer; INSUFFICIENT_SIZE when it does not fit."""
    raw = value.encode() + b"\0"
    if buffer is None:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    if len(raw) > number(length):
        raise states.Refused(states.Code.INSUFFICIENT_SIZE)
    ctypes.memmove(buffer, raw, len(raw))


def struct(reference: Any, kind: Any) -> Any:
    """Return the caller's struct behind a pointer."""
    return _pointer(reference, kind).contents


def fill(target: Any, **fields: Any) -> None:
    """Set fields of a struct."""
    for name, value in fields.items():
        setattr(target, name, value)


def _pointer(reference: Any, kind: Any) -> Any:
    if reference is None:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    if isinstance(reference, ctypes.Structure):
        raise TypeError("a struct is passed by value: the real library would crash; use byref()")
    return ctypes.cast(reference, ctypes.POINTER(kind))


def _address(argument: Any) -> int:
    """Return the address in a handle argument; 0 for NULL."""
    if argument is None or isinstance(argument, int):
        return argument or 0
    return ctypes.cast(argument, ctypes.c_void_p).value or 0


# -- sessions ---------------------------------------------------------------------------------


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
        event_set = self._event_sets.get(_address(argument))
        if event_set is None:
            raise states.Refused(states.Code.INVALID_ARGUMENT)
        return event_set

    def free_event_set(self, argument: Any) -> None:
        """Free an event set; INVALID_ARGUMENT: unknown or freed."""
        self.event_set(argument)
        with self._lock:
            self._event_sets.pop(_address(argument), None)

    def handle(self, target: HandleTarget) -> int:
        """Return the handle of a target, always the same."""
        with self._lock:
            new = self._FIRST + self._STEP * len(self._handles)
            handle = self._handles.setdefault(target, new)
            self._targets[handle] = target
            return handle

    def target(self, argument: Any) -> HandleTarget:
        """Return the target of a handle argument; INVALID_ARGUMENT: not of this session."""
        target = self._targets.get(_address(argument))
        if target is None:
            raise states.Refused(states.Code.INVALID_ARGUMENT)
        return target


# -- views ------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, kw_only=True)
class DriverView:
    """The node as a function sees it; made in every call, where a frozen class is slow."""

    session: Session
    node: states.MachineState
    boards: tuple[states.Board, ...]
    read: Callable[[], states.MachineState]  # reads the node again, for long calls

    def put_handle(self, reference: Any, target: HandleTarget) -> None:
        """Write a handle for the caller."""
        put(reference, ctypes.c_void_p, self.session.handle(target))


@dataclasses.dataclass(slots=True, kw_only=True)
class DeviceView(DriverView):
    """A view of the device or instance behind the first argument."""

    target: HandleTarget

    @property
    def board(self) -> states.Board:
        """The constant properties of its GPU."""
        return self.boards[self.target.gpu]

    @property
    def gpu(self) -> states.GpuState:
        """The state of its GPU."""
        return self.node.gpus[self.target.gpu]

    @property
    def now(self) -> transitions.Situation:
        """The situation of its GPU."""
        return transitions.Situation(
            board=self.board,
            gpu=self.gpu,
            clients=self.node.clients_of(self.board.uuid),
            options=self.node.options,
            serial=self.node.next_serial,
        )

    @property
    def is_gpu(self) -> bool:
        """Whether it is a whole GPU."""
        return self.target.kind is HandleKind.GPU

    @property
    def instance(self) -> states.GpuInstance:
        """Its GPU instance; Refused (INVALID_ARGUMENT) if it was destroyed."""
        for instance in self.gpu.instances:
            if instance.serial == self.target.instance:
                return instance
        raise states.Refused(states.Code.INVALID_ARGUMENT)

    @property
    def compute(self) -> states.ComputeInstance:
        """Its compute instance; Refused (INVALID_ARGUMENT) if it was destroyed."""
        for compute in self.instance.compute_instances:
            if compute.serial == self.target.compute:
                return compute
        raise states.Refused(states.Code.INVALID_ARGUMENT)

    @property
    def parent(self) -> hardware.GpuProfile:
        """The profile of its GPU instance."""
        return self.board.row(self.instance.profile_id)

    @property
    def whole(self) -> HandleTarget:
        """Its GPU as a target."""
        return whole(self.node, self.target.gpu)

    def target_of(self, instance: states.GpuInstance) -> HandleTarget:
        """Return the target of a GPU instance of this GPU."""
        return HandleTarget(
            kind=HandleKind.GPU_INSTANCE, gpu=self.target.gpu, instance=instance.serial
        )

    def target_within(self, compute: states.ComputeInstance) -> HandleTarget:
        """Return the target of a compute instance of this GPU instance."""
        return dataclasses.replace(
            self.target_of(self.instance), kind=HandleKind.COMPUTE_INSTANCE, compute=compute.serial
        )

    def check(self) -> None:
        """Raise ``Refused`` for the handle of a lost GPU or of a destroyed instance."""
        if self.gpu.is_lost:
            raise states.Refused(states.Code.GPU_IS_LOST)
        match self.target.kind:
            case HandleKind.GPU:
                if self.target != self.whole:
                    raise states.Refused(states.Code.INVALID_ARGUMENT)
            case HandleKind.GPU_INSTANCE:
                _ = self.instance
            case HandleKind.MIG_DEVICE | HandleKind.COMPUTE_INSTANCE:
                _ = self.compute
