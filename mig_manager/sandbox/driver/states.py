"""The state of a simulated node as frozen values: GPUs, instances, clients, options.

MIG UUIDs since R470 are a pure function of GPU, GPU instance and graphics engine, as in the open
kernel modules (``gpu_uuid.c``). A new instance in an old slot has the old UUID.
"""

import dataclasses
import enum
import functools
import hashlib
import uuid

from mig_manager.catalogue import hardware, product_table
from mig_manager.core import model


class Code(enum.IntEnum):
    """The ``nvmlReturn_t`` values that the simulation returns (``nvml.h``)."""

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
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


class Refused(Exception):  # noqa: N818 - an answer of the driver, caught at the C boundary
    """The driver returned an error code and changed nothing."""

    def __init__(self, code: int) -> None:
        super().__init__(repr(code))
        self.code = code


class ClientKind(enum.Enum):
    """How a client uses its device."""

    COMPUTE = "compute"  # holds memory and channels; NVML lists it as a running process
    MONITOR = "monitor"
    """Holds an open handle only, as DCGM and the device plugin do; NVML does not list it."""
    PERSISTENCE_DAEMON = "persistence daemon"
    """``nvidia-persistenced``: as a monitor, but releases it for ``nvidia-smi --gpu-reset``."""
    PERSISTENCE_MODE = "persistence mode"
    """The kernel module itself, which is no process; ``nvidia-smi -pm 0`` ends it."""


class MigEvents(enum.Enum):
    """When the driver reports ``nvmlEventMigConfigChange``."""

    ALWAYS = "always"
    WHILE_ON = "while on"  # an old driver: only for GPUs whose MIG mode is on
    NEVER = "never"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A process that uses a GPU or an instance."""

    client_id: int
    pid: int
    name: str
    kind: ClientKind
    gpu_uuid: str
    gpu_instance_id: int | None = None  # None: it uses the whole GPU
    compute_instance_id: int | None = None
    """None: it uses the whole GPU, or a GPU instance regardless of compute instances."""
    is_process: bool = False
    """Whether ``pid`` is a process of this machine, with whose end it ends."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Durations of calls, in seconds."""

    init_s: float = 0.0
    query_s: float = 0.0
    create_gpu_instance_s: float = 0.0
    destroy_gpu_instance_s: float = 0.0
    create_compute_instance_s: float = 0.0
    destroy_compute_instance_s: float = 0.0
    mode_with_reset_s: float = 0.0  # switching MIG mode on Ampere, which resets the GPU
    mode_without_reset_s: float = 0.0  # switching MIG mode on Hopper and newer


REALISTIC = Latency(
    init_s=0.01,
    create_gpu_instance_s=0.12,
    destroy_gpu_instance_s=0.25,
    create_compute_instance_s=0.04,
    destroy_compute_instance_s=0.04,
    mode_with_reset_s=4.5,
    mode_without_reset_s=1.5,
)
"""Orders of magnitude from the field, not a measurement of one board."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a simulated node differs from others."""

    latency: Latency = dataclasses.field(default_factory=Latency)
    seed: str = ""  # distinguishes nodes: UUIDs follow from seed, product and index
    swapped_gpus: tuple[int, ...] = ()
    """NVML indices of boards whose halves are numbered in reverse. About half of the captured
    seven-slice boards are, so code must never take id order for placement order."""
    serialise_all_gpus: bool = False
    """Whether changes on one GPU wait for those on another; the real driver overlaps them."""
    permitted: bool = True
    """False: the caller is neither root nor has the ``mig/config`` capability."""
    virtualization: model.Virtualization = model.Virtualization.NONE
    resets_itself: bool = True
    """False: the driver cannot reset an Ampere GPU in a MIG mode change, but
    ``nvidia-smi --gpu-reset`` can."""
    linked_gpus: tuple[tuple[int, ...], ...] = ()
    """NVML indices of GPUs that can only be reset together: NVLink without Fabric Manager."""
    reattaches: bool = False
    """Whether a reset or a MIG mode change detaches the GPU, which voids its handles and changes
    its minor number. ``nvml.h`` reserves that right to the driver."""
    reports_profiles_while_mig_off: bool = True
    """False: as in R535 and older (``NVML_FI_DEV_IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE``)."""
    mig_events: MigEvents = MigEvents.ALWAYS
    reports_recovery_action: bool = True
    """False: a driver older than ``NVML_FI_DEV_GET_GPU_RECOVERY_ACTION``."""
    profile_enum_count: int = 18
    """``NVML_GPU_INSTANCE_PROFILE_COUNT`` of the driver; enums from here on are invalid."""
    absent_functions: tuple[str, ...] = ()
    """C functions that this driver's library does not export."""
    fabric_state: int = 0  # ``nvmlGpuFabricState_t`` of every GPU; 0: no NVSwitch
    driver_version: str = "580.95.05"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComputeInstance:
    """A live compute instance."""

    instance_id: int
    serial: int  # unique over the life of the node; distinguishes an instance from its successor
    profile_id: int
    placement: model.Placement  # in compute slices of the GPU instance


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
    """The variable state of one GPU."""

    is_lost: bool = False
    """Whether it has fallen off the bus: ``nvmlDeviceGetCount`` still counts it, and every call
    about it answers GPU_IS_LOST (``nvml.h``)."""

    is_enabled: bool = False
    is_pending: bool = False
    instances: tuple[GpuInstance, ...] = ()
    attachments: int = 0  # the number of its resets and MIG mode changes
    changes: int = 0  # the number of all changes: two changes that undo each other are two events
    recovery_action: int = 0  # ``nvmlDeviceGpuRecoveryAction_t``; a fault sets it
    xids: tuple[int, ...] = ()  # critical errors since the boot, oldest first

    def replace_instance(self, old: GpuInstance | None, *new: GpuInstance) -> "GpuState":
        """Return the GPU without the old instance, if any, and with the new ones."""
        kept = (instance for instance in self.instances if instance is not old)
        ordered = sorted((*kept, *new), key=lambda instance: instance.instance_id)
        return dataclasses.replace(self, instances=tuple(ordered))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MachineState:
    """The state that the processes of a simulated node share."""

    spec: str
    options: Options
    gpus: tuple[GpuState, ...]
    clients: tuple[Client, ...] = ()
    next_serial: int = 1
    boots: int = 0

    def with_gpu(self, index: int, gpu: GpuState) -> "MachineState":
        """Return the node with a changed GPU and the next serial."""
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


_NAMESPACE = bytes.fromhex("c816c9a3522456bf9d9aac7ea703fb5b")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The constant properties of one simulated GPU."""

    index: int
    product: product_table.Product
    uuid: str
    pci_bus: int
    is_swapped: bool
    serial_number: int  # the 64-bit device identity burnt into a GPU; its UUIDs follow from it

    @property
    def pci_address(self) -> str:
        """Domain:bus:device.function in NVML's spelling."""
        return f"00000000:{self.pci_bus:02X}:00.0"

    def row(self, profile_id: int) -> product_table.GpuProfile:
        """Return the profile of a driver's id; INVALID_ARGUMENT: this GPU does not have it."""
        for row in self.product.profiles:
            if row.profile_id == profile_id:
                return row
        raise Refused(Code.INVALID_ARGUMENT)

    def mig_uuid(self, instance: GpuInstance, compute: ComputeInstance) -> str:
        """Return the UUID of a MIG device."""
        engine = physical_engine(self.product, instance.placement, compute.placement)
        suffix = b"\x0bSMC"
        suffix += instance.instance_id.to_bytes(4, "little") + engine.to_bytes(4, "little")
        return f"MIG-{_uuid(_chip(self.product), self.serial_number, suffix)}"


def _chip(product: product_table.Product) -> int:
    return (product.pci_device_ids[0] >> 16) & 0xFFFF


@functools.lru_cache(maxsize=1024)
def _uuid(chip: int, serial_number: int, suffix: bytes = b"") -> uuid.UUID:
    text = b"NVIDIA GPU\x02" + chip.to_bytes(2, "little")
    text += b"\x08" + serial_number.to_bytes(8, "little") + suffix
    digest = hashlib.sha1(_NAMESPACE + text, usedforsecurity=False).digest()
    return uuid.UUID(bytes=digest[:16], version=5)


def physical_engine(
    product: product_table.Product, instance: model.Placement, compute: model.Placement
) -> int:
    """Return the graphics engine of a compute instance, unique within a GPU.

    Inferred: engines follow the compute slices, which begin with the memory slices.
    """
    per_engine = 3 if product.grid is product_table.Grid.TWELVE_SLICE else 1
    return instance.start // per_engine + compute.start


def first_boot(spec: str, options: Options) -> MachineState:
    """Return a node after its first boot; UsageError if the spec is malformed."""
    return MachineState(
        spec=spec, options=options, gpus=tuple(GpuState() for _ in hardware.parse_node(spec))
    )


def boards_of(node: MachineState) -> tuple[Board, ...]:
    """Return the constant properties of a node's GPUs, ascending by index."""
    return _boards(node.spec, node.options.seed, node.options.swapped_gpus)


@functools.lru_cache(maxsize=8)
def _boards(spec: str, seed: str, swapped_gpus: tuple[int, ...]) -> tuple[Board, ...]:
    boards = []
    for index, product in enumerate(hardware.parse_node(spec)):
        digest = hashlib.sha256(f"{seed}/{index}/{product.key}".encode()).digest()
        serial_number = int.from_bytes(digest[:8], "little")
        board = Board(
            index=index,
            product=product,
            uuid=f"GPU-{_uuid(_chip(product), serial_number)}",
            pci_bus=7 + 8 * index,
            is_swapped=index in swapped_gpus,
            serial_number=serial_number,
        )
        boards.append(board)
    return tuple(boards)
