"""Simulated C functions: sessions with their handles, the view a function gets, its registration.

Functions register in a ``Registry`` of their module and get a view of the node followed by the
raw C arguments. Queries write to the caller's memory; changes also return the GPU's new state.
Both raise ``Refused`` for an NVML error code.
"""

import ctypes
import dataclasses
import enum
import threading
from collections.abc import Callable, Mapping
from typing import Any

from mig_manager.catalogue import hardware
from mig_manager.core import model
from mig_manager.sandbox.driver import states, transitions


def number(argument: Any) -> int:
    """Return an integer argument, given as ``int`` or as a ctypes integer."""
    return int(getattr(argument, "value", argument))


def text(argument: Any) -> str:
    """Return a ``char *`` argument.

    Raises:
        Refused: INVALID_ARGUMENT for NULL and for what is no text.
    """
    raw = argument if isinstance(argument, bytes) else getattr(argument, "value", None)
    if not isinstance(raw, bytes):
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    return raw.decode("utf-8", "replace")


def address(argument: Any) -> int:
    """Return the address that a handle argument holds; 0 for NULL."""
    if argument is None:
        return 0
    if isinstance(argument, int):
        return argument
    return ctypes.cast(argument, ctypes.c_void_p).value or 0


def put(reference: Any, kind: Any, value: Any) -> None:
    """Write one value through a pointer."""
    _pointer(reference, kind)[0] = value


def put_handle(reference: Any, handle: int) -> None:
    """Write an opaque handle through a pointer."""
    put(reference, ctypes.c_void_p, handle)


def put_all(reference: Any, kind: Any, values: list[Any]) -> None:
    """Write values to a caller's array; NVML itself does not know how long that is.

    Raises:
        Refused: INVALID_ARGUMENT, the pointer is NULL.
        BufferError: The array is too short: the real library would write past its end.
    """
    if isinstance(reference, ctypes.Array) and len(reference) < len(values):
        raise BufferError(f"NVML writes {len(values)} entries to an array of {len(reference)}")
    pointer = _pointer(reference, kind)
    for index, value in enumerate(values):
        pointer[index] = value


def put_placements(
    placements: tuple[model.Placement, ...], kind: Any, array: Any, count: Any
) -> None:
    """Write placements and their number; only the number where the caller has no array.

    Raises:
        Refused: INVALID_ARGUMENT, there is nowhere to write the number.
        BufferError: The array is too short.
    """
    if array is not None:
        values = [kind(start=place.start, size=place.size) for place in placements]
        put_all(array, kind, values)
    put(count, ctypes.c_uint, len(placements))


def put_text(buffer: Any, length: Any, value: str) -> None:
    """Write a string to a caller's buffer of a given length.

    Raises:
        Refused: INVALID_ARGUMENT for NULL, INSUFFICIENT_SIZE when it does not fit.
    """
    raw = value.encode() + b"\0"
    if buffer is None:
        raise states.Refused(states.Code.INVALID_ARGUMENT)
    if len(raw) > number(length):
        raise states.Refused(states.Code.INSUFFICIENT_SIZE)
    ctypes.memmove(buffer, raw, len(raw))


def struct(reference: Any, kind: Any) -> Any:
    """Return the caller's struct behind a pointer."""
    return _pointer(reference, kind).contents


def require_version(target: Any, version: int) -> None:
    """Refuse a struct of another version than the function knows."""
    if target.version != version:
        raise states.Refused(states.Code.ARGUMENT_VERSION_MISMATCH)


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


class Kind(enum.Enum):
    """Kind of a handle."""

    GPU = "gpu"
    MIG_DEVICE = "mig device"
    GPU_INSTANCE = "gpu instance"
    COMPUTE_INSTANCE = "compute instance"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The object of one handle; a serial distinguishes an instance from its successor."""

    kind: Kind
    gpu: int
    instance: int = 0
    compute: int = 0
    attachment: int = 0
    """Of a whole GPU on a node where a handle does not outlive a reset."""


def _attachment(node: states.NodeState, gpu: int) -> int:
    """Return a number that changes at each reset on a node where a reset voids handles."""
    return node.gpus[gpu].attachments if node.options.reattaches else 0


def whole(node: states.NodeState, gpu: int) -> Target:
    """Return the target of a GPU's handle."""
    return Target(kind=Kind.GPU, gpu=gpu, attachment=_attachment(node, gpu))


def mig_device(gpu: int, instance: states.GpuInstance, compute: states.ComputeInstance) -> Target:
    """Return the target of a MIG device handle."""
    return Target(kind=Kind.MIG_DEVICE, gpu=gpu, instance=instance.serial, compute=compute.serial)


class EventSet:
    """The GPUs that one event set watches, and the last reported change of each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reported: dict[int, int] = {}

    def watch(self, gpu: int, changes: int) -> None:
        """Report a GPU's changes from now on, unless it is watched already."""
        with self._lock:
            self._reported.setdefault(gpu, changes)

    def take(self, node: states.NodeState) -> int | None:
        """Return the index of a GPU with an unreported change, and count that as reported.

        Raises:
            Refused: GPU_IS_LOST: a watched GPU has fallen off the bus (``nvml.h``).
        """
        with self._lock:
            for gpu, reported in self._reported.items():
                if node.gpus[gpu].is_lost:
                    raise states.Refused(states.Code.GPU_IS_LOST)
                if reported < node.gpus[gpu].changes:
                    self._reported[gpu] = reported + 1
                    return gpu
        return None


class Session:
    """One process's initialised library: its depth and its handles."""

    _FIRST = 0x7F00_0000_1000
    _FIRST_EVENT_SET = 0x7E00_0000_1000
    _STEP = 0x40

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._targets: dict[int, Target] = {}
        self._handles: dict[Target, int] = {}
        self._event_sets: dict[int, EventSet] = {}
        self._next_event_set = self._FIRST_EVENT_SET
        self._pause = threading.Event()

    @property
    def is_open(self) -> bool:
        """Whether the library is initialised."""
        return self._depth > 0

    def begin(self) -> None:
        """Initialise once more."""
        with self._lock:
            self._depth += 1

    def end(self) -> None:
        """Undo one initialisation; the last one voids all handles."""
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._targets.clear()
                self._handles.clear()
                self._event_sets.clear()

    def pause(self, seconds: float) -> None:
        """Wait without a lock, so that other calls continue."""
        self._pause.wait(seconds)

    def new_event_set(self) -> int:
        """Return the handle of a new event set."""
        with self._lock:
            handle = self._next_event_set
            self._next_event_set += self._STEP
            self._event_sets[handle] = EventSet()
            return handle

    def event_set(self, argument: Any) -> EventSet:
        """Return the event set of a handle argument.

        Raises:
            Refused: INVALID_ARGUMENT for an unknown or freed handle.
        """
        found = self._event_sets.get(address(argument))
        if found is None:
            raise states.Refused(states.Code.INVALID_ARGUMENT)
        return found

    def free_event_set(self, argument: Any) -> None:
        """Free an event set.

        Raises:
            Refused: INVALID_ARGUMENT, as ``event_set``.
        """
        self.event_set(argument)
        with self._lock:
            self._event_sets.pop(address(argument), None)

    def handle(self, target: Target) -> int:
        """Return the handle for a target; the same each time."""
        with self._lock:
            known = self._handles.get(target)
            if known is not None:
                return known
            handle = self._FIRST + self._STEP * len(self._handles)
            self._handles[target] = handle
            self._targets[handle] = target
            return handle

    def target(self, argument: Any) -> Target:
        """Return the target of a handle argument.

        Raises:
            Refused: INVALID_ARGUMENT for a handle of no or another session.
        """
        target = self._targets.get(address(argument))
        if target is None:
            raise states.Refused(states.Code.INVALID_ARGUMENT)
        return target


@dataclasses.dataclass(slots=True, kw_only=True)
class View:
    """The node as a function sees it; made for each call, where a frozen class is slow."""

    session: Session
    node: states.NodeState
    boards: tuple[states.Board, ...]
    read: Callable[[], states.NodeState]
    """Reads the node again, for calls that take long."""

    def put_handle(self, reference: Any, target: Target) -> None:
        """Write a handle for the caller."""
        put_handle(reference, self.session.handle(target))


@dataclasses.dataclass(slots=True, kw_only=True)
class DeviceView(View):
    """A view of the device or instance that the first argument is a handle of."""

    target: Target

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
        """Its GPU as the driver sees it."""
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
        return self.target.kind is Kind.GPU

    @property
    def instance(self) -> states.GpuInstance:
        """Its GPU instance.

        Raises:
            Refused: INVALID_ARGUMENT, it was destroyed.
        """
        for instance in self.gpu.instances:
            if instance.serial == self.target.instance:
                return instance
        raise states.Refused(states.Code.INVALID_ARGUMENT)

    @property
    def compute(self) -> states.ComputeInstance:
        """Its compute instance.

        Raises:
            Refused: INVALID_ARGUMENT, it was destroyed.
        """
        for compute in self.instance.compute_instances:
            if compute.serial == self.target.compute:
                return compute
        raise states.Refused(states.Code.INVALID_ARGUMENT)

    @property
    def parent(self) -> hardware.GpuProfile:
        """The profile of its GPU instance."""
        return self.board.row(self.instance.profile_id)

    @property
    def whole(self) -> Target:
        """Its GPU as a target."""
        return whole(self.node, self.target.gpu)

    def target_of(self, instance: states.GpuInstance) -> Target:
        """Return the target of a GPU instance of this GPU."""
        return Target(kind=Kind.GPU_INSTANCE, gpu=self.target.gpu, instance=instance.serial)

    def target_within(self, compute: states.ComputeInstance) -> Target:
        """Return the target of a compute instance of this GPU instance."""
        return Target(
            kind=Kind.COMPUTE_INSTANCE,
            gpu=self.target.gpu,
            instance=self.instance.serial,
            compute=compute.serial,
        )

    def row(self, profile_id: Any) -> hardware.GpuProfile:
        """Return the GPU's profile with this id, or raise ``Refused``."""
        return self.board.row(number(profile_id))

    def check(self) -> None:
        """Raise ``Refused`` for the handle of a lost GPU or of something destroyed."""
        if self.gpu.is_lost:
            raise states.Refused(states.Code.GPU_IS_LOST)
        match self.target.kind:
            case Kind.GPU:
                if self.target.attachment != _attachment(self.node, self.target.gpu):
                    raise states.Refused(states.Code.INVALID_ARGUMENT)
            case Kind.GPU_INSTANCE:
                _ = self.instance
            case Kind.MIG_DEVICE | Kind.COMPUTE_INSTANCE:
                _ = self.compute


Body = Callable[..., Any]
Price = Callable[..., float]
"""The seconds of a call, given its view and arguments."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One C function."""

    body: Body
    takes: frozenset[Kind]
    """Kinds of handle its first argument may be; empty: the first argument is no handle."""
    price: Price
    is_change: bool = False
    needs_session: bool = True


def _query_price(view: View, *_: Any) -> float:
    return view.node.options.latency.query_s


class Registry:
    """The C functions of one module."""

    def __init__(self) -> None:
        self._functions: dict[str, Function] = {}

    @property
    def functions(self) -> Mapping[str, Function]:
        """All functions by C name."""
        return self._functions

    def system(
        self, *names: str, price: Price = _query_price, needs_session: bool = True
    ) -> Callable[[Body], Body]:
        """Register a function whose first argument is no handle, under its C names."""
        return self._register(
            names,
            lambda body: Function(
                body=body, takes=frozenset(), price=price, needs_session=needs_session
            ),
        )

    def query(self, *names: str, takes: frozenset[Kind]) -> Callable[[Body], Body]:
        """Register a query of a device or an instance under its C names."""
        return self._register(
            names, lambda body: Function(body=body, takes=takes, price=_query_price)
        )

    def change(self, name: str, *, takes: Kind, price: Price) -> Callable[[Body], Body]:
        """Register a change of a GPU, which returns the GPU's new state."""
        return self._register(
            (name,),
            lambda body: Function(
                body=body, takes=frozenset({takes}), price=price, is_change=True
            ),
        )

    def _register(
        self, names: tuple[str, ...], build: Callable[[Body], Function]
    ) -> Callable[[Body], Body]:
        def register(body: Body) -> Body:
            self._functions.update(dict.fromkeys(names, build(body)))
            return body

        return register
