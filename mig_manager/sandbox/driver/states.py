"""What the simulated driver knows: GPUs, instances, clients, faults, and the knobs to turn.

Everything here is a frozen value, so that a change is a new value and a reader never sees half
of one.
"""

import dataclasses
import enum
import fnmatch
from collections.abc import Mapping
from typing import Any

from mig_manager.core import model


class Code(enum.IntEnum):
    """The ``nvmlReturn_t`` values that the simulation gives (``nvml.h``)."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    IN_USE = 19
    INSUFFICIENT_RESOURCES = 23
    ARGUMENT_VERSION_MISMATCH = 25
    UNKNOWN = 999


class Refused(Exception):  # noqa: N818 - an answer of the driver, caught at the C boundary
    """The driver answers with a code other than success; nothing has changed."""

    def __init__(self, code: int) -> None:
        super().__init__(repr(code))
        self.code = code


class ClientKind(enum.Enum):
    """What a client does with its device."""

    COMPUTE = "compute"
    """Holds memory and channels; NVML lists it as a running process."""
    MONITOR = "monitor"
    """Holds an open handle only, as DCGM and the device plugin do; NVML does not list it."""
    PERSISTENCE_DAEMON = "persistence daemon"
    """``nvidia-persistenced``: as a monitor, but lets go for ``nvidia-smi --gpu-reset``."""
    PERSISTENCE_MODE = "persistence mode"
    """The kernel module itself, which is no process; ``nvidia-smi -pm 0`` ends it."""


class Virtualization(enum.Enum):
    """How the node sees its GPUs; the values are those of ``nvmlGpuVirtualizationMode_t``."""

    NONE = 0
    PASSTHROUGH = 1
    """A VM with whole GPUs: an Ampere GPU cannot be reset from inside."""
    VGPU = 2
    """A vGPU guest: MIG cannot be configured at all."""


class MigEvents(enum.Enum):
    """When the driver tells of ``nvmlEventMigConfigChange``."""

    ALWAYS = "always"
    WHILE_ON = "while on"
    """An old driver: only for GPUs whose MIG mode is on."""
    NEVER = "never"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A process that holds a GPU or an instance."""

    client_id: int
    pid: int
    name: str
    kind: ClientKind
    gpu_uuid: str
    gpu_instance_id: int | None = None
    """None: it holds the whole GPU."""
    compute_instance_id: int | None = None
    """None: it holds the whole GPU, or a GPU instance regardless of compute instances."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that goes wrong on purpose.

    Calls are counted over all processes that share the state. With neither code, hang nor crash
    a fault only counts.
    """

    function: str
    """C function name or glob, such as ``nvmlDeviceCreateGpuInstance*`` or ``*``."""
    gpu: int | None = None
    """NVML index; None matches calls on any GPU and calls on none."""
    first: int = 1
    """The first matching call that it strikes, from 1."""
    count: int | None = 1
    """How many calls in a row it strikes; None: every one from ``first`` on."""
    code: int | None = None
    """What the call returns without having done anything; None: it does its work."""
    hang_s: float = 0.0
    """Seconds that the call blocks first, holding what the driver would hold."""
    crashes: bool = False
    """Whether the process dies in the call, as in a bug of the vendor library."""
    loses_gpu: bool = False
    """Whether the GPU of the call falls off the bus in it."""

    def strikes(self, nth: int) -> bool:
        """Tell whether the nth matching call, from 1, is struck."""
        return nth >= self.first and (self.count is None or nth < self.first + self.count)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Seconds that calls take; all zero unless asked for."""

    init_s: float = 0.0
    query_s: float = 0.0
    create_gpu_instance_s: float = 0.0
    destroy_gpu_instance_s: float = 0.0
    create_compute_instance_s: float = 0.0
    destroy_compute_instance_s: float = 0.0
    mode_with_reset_s: float = 0.0
    """Switching MIG mode on Ampere, which resets the GPU."""
    mode_without_reset_s: float = 0.0
    """Switching MIG mode on Hopper and newer."""


REALISTIC = Latency(
    init_s=0.01,
    create_gpu_instance_s=0.12,
    destroy_gpu_instance_s=0.25,
    create_compute_instance_s=0.04,
    destroy_compute_instance_s=0.04,
    mode_with_reset_s=4.5,
    mode_without_reset_s=1.5,
)
"""A model of the orders of magnitude seen in the field, not a measurement of one board."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The knobs of a simulated node."""

    latency: Latency = dataclasses.field(default_factory=Latency)
    seed: str = ""
    """Tells nodes apart: UUIDs follow from seed, product and index."""
    swapped_gpus: tuple[int, ...] = ()
    """NVML indices of boards whose halves are numbered the other way round; about half of the
    captured seven-slice boards are, so code must never take id order for placement order."""
    serialise_all_gpus: bool = False
    """Whether changes on one GPU wait for those on another; the real driver overlaps them."""
    permitted: bool = True
    """False: the caller is neither root nor has the ``mig/config`` capability."""
    virtualization: Virtualization = Virtualization.NONE
    resets_itself: bool = True
    """False: the driver cannot reset an Ampere GPU as part of a switch of MIG mode, as where
    ``nvidia_drm`` is loaded (mig-parted#181); ``nvidia-smi --gpu-reset`` can."""
    linked_gpus: tuple[tuple[int, ...], ...] = ()
    """NVML indices of GPUs that are only reset together: NVLink without Fabric Manager."""
    reattaches: bool = False
    """Whether a reset and a switch of MIG mode detach the GPU: handles are void then, and its
    minor number is another one. ``nvml.h`` reserves that right to the driver."""
    tells_profiles_while_mig_off: bool = True
    """False plays R535 and older (``NVML_FI_DEV_IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE``)."""
    mig_events: MigEvents = MigEvents.ALWAYS
    profile_enum_count: int = 18
    """``NVML_GPU_INSTANCE_PROFILE_COUNT`` of the driver; enums from here on are invalid."""
    absent_functions: tuple[str, ...] = ()
    """C functions that this driver's library does not export."""
    driver_version: str = "580.95.05"
    faults: tuple[Fault, ...] = ()
    """Faults in place from the start."""
    logs_calls: bool = False
    """Whether every call is appended to a log beside the state file."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComputeInstance:
    """A live compute instance."""

    instance_id: int
    serial: int
    """Unique over the life of the node; tells a handle that its instance is another one."""
    profile_id: int
    placement: model.Placement
    """In compute slices of the GPU instance."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuInstance:
    """A live GPU instance."""

    instance_id: int
    serial: int
    profile_id: int
    placement: model.Placement
    compute_instances: tuple[ComputeInstance, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """What can change of one GPU."""

    is_lost: bool = False
    """Whether it has fallen off the bus: ``nvmlDeviceGetCount`` still counts it, and every call
    about it answers GPU_IS_LOST (``nvml.h``)."""

    is_enabled: bool = False
    is_pending: bool = False
    """MIG mode after the next reset."""
    instances: tuple[GpuInstance, ...] = ()
    attachments: int = 0
    """How often it was reset or switched."""
    changes: int = 0
    """How often any of this has changed: two changes that undo each other are two events."""

    def replaced(self, old: GpuInstance, *new: GpuInstance) -> "GpuState":
        """Return the GPU with one instance exchanged for others, or for none."""
        kept = tuple(instance for instance in self.instances if instance is not old)
        ordered = sorted((*kept, *new), key=lambda instance: instance.instance_id)
        return dataclasses.replace(self, instances=tuple(ordered))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArmedFault:
    """A fault with its counters."""

    fault: Fault
    seen: int = 0
    """Matching calls so far."""
    fired: int = 0
    """Calls struck so far."""

    def matches(self, function: str, gpu: int | None) -> bool:
        """Tell whether a call is one that this fault counts."""
        is_gpu = self.fault.gpu is None or self.fault.gpu == gpu
        return is_gpu and fnmatch.fnmatchcase(function, self.fault.function)

    def counted(self, function: str, gpu: int | None) -> "ArmedFault":
        """Return the fault after a call."""
        if not self.matches(function, gpu):
            return self
        seen = self.seen + 1
        fired = self.fired + self.fault.strikes(seen)
        return dataclasses.replace(self, seen=seen, fired=fired)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """All that the processes of a simulated node share."""

    spec: str
    options: Options
    gpus: tuple[GpuState, ...]
    clients: tuple[Client, ...] = ()
    faults: tuple[ArmedFault, ...] = ()
    next_serial: int = 1
    boots: int = 0

    def with_gpu(self, index: int, gpu: GpuState) -> "NodeState":
        """Return the node with one GPU changed and a serial used up."""
        counted = dataclasses.replace(gpu, changes=self.gpus[index].changes + 1)
        gpus = (*self.gpus[:index], counted, *self.gpus[index + 1 :])
        return dataclasses.replace(self, gpus=gpus, next_serial=self.next_serial + 1)

    def minor(self, index: int) -> int:
        """Return the N of the ``/dev/nvidiaN`` of a GPU."""
        if not self.options.reattaches:
            return index
        return index + len(self.gpus) * self.gpus[index].attachments

    def clients_of(self, gpu_uuid: str) -> tuple[Client, ...]:
        """Return the clients of one GPU and of its instances."""
        return tuple(client for client in self.clients if client.gpu_uuid == gpu_uuid)


def encode(value: Any) -> Any:
    """Return frozen values as what ``json.dumps`` takes."""
    if isinstance(value, model.Placement):
        return [value.start, value.size]
    if dataclasses.is_dataclass(value):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else value


def decode(raw: Mapping[str, Any]) -> NodeState:
    """Return the node that ``encode`` wrote."""
    return NodeState(
        **{
            **raw,
            "options": _options(raw["options"]),
            "gpus": tuple(_gpu(each) for each in raw["gpus"]),
            "clients": tuple(_client(each) for each in raw["clients"]),
            "faults": tuple(_armed(each) for each in raw["faults"]),
        }
    )


def _options(raw: Mapping[str, Any]) -> Options:
    return Options(
        **{
            **raw,
            "latency": Latency(**raw["latency"]),
            "swapped_gpus": tuple(raw["swapped_gpus"]),
            "linked_gpus": tuple(tuple(each) for each in raw.get("linked_gpus", ())),
            "virtualization": Virtualization(raw["virtualization"]),
            # A file from before events were simulated has no such knob.
            "mig_events": MigEvents(raw.get("mig_events", MigEvents.ALWAYS)),
            "absent_functions": tuple(raw["absent_functions"]),
            "faults": tuple(Fault(**each) for each in raw["faults"]),
        }
    )


def _gpu(raw: Mapping[str, Any]) -> GpuState:
    instances = tuple(_gpu_instance(each) for each in raw["instances"])
    return GpuState(**{**raw, "instances": instances})


def _gpu_instance(raw: Mapping[str, Any]) -> GpuInstance:
    computes = tuple(_compute_instance(each) for each in raw["compute_instances"])
    placement = model.Placement(*raw["placement"])
    return GpuInstance(**{**raw, "placement": placement, "compute_instances": computes})


def _compute_instance(raw: Mapping[str, Any]) -> ComputeInstance:
    return ComputeInstance(**{**raw, "placement": model.Placement(*raw["placement"])})


def _client(raw: Mapping[str, Any]) -> Client:
    return Client(**{**raw, "kind": ClientKind(raw["kind"])})


def _armed(raw: Mapping[str, Any]) -> ArmedFault:
    return ArmedFault(**{**raw, "fault": Fault(**raw["fault"])})
